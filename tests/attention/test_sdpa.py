from nanoserve.testing import AttentionBackendSuite


class TestSDPA(AttentionBackendSuite):
    backend = "sdpa"
