"""Fused operations other than attention, each with its torch reference. Plugins may import them."""
