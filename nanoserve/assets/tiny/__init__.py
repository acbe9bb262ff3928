"""The embedded checkpoint: a small Qwen3 that writes Python. See README.md (the model card) and train.py (the recipe)."""
