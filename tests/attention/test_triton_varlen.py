from nanoserve.testing import AttentionBackendSuite


class TestTritonVarlen(AttentionBackendSuite):
    """One program per token and head is much to interpret: few heads, and all keys of most contexts at once."""

    backend = "triton_varlen"
    options = {"block_n": 64}

    def make_context(self, kv_format, **kwargs):
        return super().make_context(kv_format, **({"num_q_heads": 2, "num_kv_heads": 1} | kwargs))
