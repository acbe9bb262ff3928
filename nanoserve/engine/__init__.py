"""The loop: requests in, tokens out. Scheduler and block manager never see a tensor; runner and model never see a queue."""
