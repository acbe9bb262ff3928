"""``python -m nanoserve`` is the command ``nanoserve``."""

import sys

from nanoserve.cli import main

sys.exit(main())
