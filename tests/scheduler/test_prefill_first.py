from nanoserve.testing.scheduler import SchedulerSuite


class TestPrefillFirst(SchedulerSuite):
    scheduler = "prefill_first"
