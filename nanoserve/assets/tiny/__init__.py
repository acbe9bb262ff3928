"""The embedded checkpoint: a small Qwen3 that writes Python. README.md is its model card, train.py its recipe."""
