from nanoserve.testing import AttentionBackendSuite


class TestTritonVarlen(AttentionBackendSuite):
    backend = "triton_varlen"
