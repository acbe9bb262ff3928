"""Conformance suites: subclass one in a test file, name your plugin, and the whole contract is tested.

    from nanoserve.testing import AttentionBackendSuite

    class TestWindow(AttentionBackendSuite):
        backend = "window"

The plugin is found as an engine finds it: through its entry point. Needs pytest and
hypothesis.
"""

from nanoserve.testing.attention import AttentionBackendSuite
from nanoserve.testing.kvcache import KVCacheFormatSuite
from nanoserve.testing.policy import PolicySuite
from nanoserve.testing.scheduler import SchedulerSuite

__all__ = ["AttentionBackendSuite", "KVCacheFormatSuite", "PolicySuite", "SchedulerSuite"]
