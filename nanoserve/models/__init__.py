"""Qwen3: configuration, layers, forward pass, and the way from a checkpoint folder to weights on a device."""
