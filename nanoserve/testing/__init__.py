"""Conformance suites: subclass one in a test file, name your plugin, and the whole contract is tested.

    from nanoserve.testing import AttentionBackendSuite

    class TestWindow(AttentionBackendSuite):
        backend = "window"

The plugin is found as an engine finds it: through its entry point. Needs pytest and hypothesis.
"""

import pytest

for _name in ("attention", "grammar", "kvcache", "observer", "policy", "scheduler"):
    pytest.register_assert_rewrite(f"nanoserve.testing.{_name}")  # asserts that show their values

from nanoserve.testing.attention import AttentionBackendSuite  # noqa: E402
from nanoserve.testing.grammar import GrammarSuite  # noqa: E402
from nanoserve.testing.kvcache import KVCacheFormatSuite  # noqa: E402
from nanoserve.testing.observer import ObserverSuite  # noqa: E402
from nanoserve.testing.policy import PolicySuite  # noqa: E402
from nanoserve.testing.scheduler import SchedulerSuite  # noqa: E402

__all__ = [
    "AttentionBackendSuite",
    "GrammarSuite",
    "KVCacheFormatSuite",
    "ObserverSuite",
    "PolicySuite",
    "SchedulerSuite",
]
