"""What a plugin author reads and imports. Nothing here imports anything but torch and the standard library."""
