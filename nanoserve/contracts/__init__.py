"""What a plugin author reads and imports. Nothing here imports anything but torch and the standard library."""

#: Version of everything a plugin sees: this package, ``nanoserve.hookspecs``, ``nanoserve.ops``, ``nanoserve.testing``.
#: A plugin's module states the one it was written for, as a plain number: ``NANOSERVE_CONTRACT = 2``.
CONTRACT_VERSION = 2
