from nanoserve.testing.scheduler import SchedulerSuite


class TestDecodeFirst(SchedulerSuite):
    scheduler = "decode_first"
