import torch

from nanoserve.testing import AttentionBackendSuite
from nanoserve.testing.attention import make_case, make_context


class TestInt8Fused(AttentionBackendSuite):
    backend = "int8_fused"

    def test_error_bars_of_the_specification(self) -> None:
        """Spec E at context 511 and unit normal data: cosine >= 0.99995, error <= 0.003, against what was stored."""
        context = self.make_context("int8", head_dim=128, block_size=64)
        exact = make_context(
            self.registry.get("kvcache", "bf16"),
            head_dim=128,
            block_size=64,
            dtype=context.dtype,
            device=context.device,
        )
        out = make_case(context, [511, 511]).run(self.build(context)).double()
        expected = make_case(exact, [511, 511]).expected()
        assert torch.nn.functional.cosine_similarity(out.flatten(), expected.flatten(), 0) >= 0.99995
        assert (out - expected).abs().max() <= 0.003
