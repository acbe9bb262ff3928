"""The loop: requests in, tokens out. The scheduler never sees a tensor, the runner never sees a queue."""
