"""Packages that behave like strangers: installed with pip, without a privilege.

    pip install --no-deps ./tests/third_party/nanoserve-{window,fp8,slo}

Tests of one that is not installed are left out; ``test_strangers.py`` has one that then says so.
"""

from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore

from nanoserve.config import PLUGIN_GROUPS

PACKAGES = [folder.name for folder in sorted(Path(__file__).parent.glob("nanoserve-*"))]
MISSING = sorted(set(PACKAGES) - {distribution.name for distribution in distributions()})
collect_ignore = MISSING


@pytest.fixture(autouse=True)
def no_names_of_earlier_commands() -> Iterator[None]:
    """Hydra's store is one per process; a command's names must not meet the next one's YAML."""
    for group in PLUGIN_GROUPS:
        ConfigStore.instance().repo.pop(group, None)
    yield
