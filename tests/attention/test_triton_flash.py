from nanoserve.testing import AttentionBackendSuite


class TestTritonFlash(AttentionBackendSuite):
    backend = "triton_flash"
