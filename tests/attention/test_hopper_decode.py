"""The suite runs where the kernel does, on a Hopper GPU; test_compile_decode.py compiles it everywhere."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from nanoserve.contracts.attention import AttentionContext
from nanoserve.registry import Registry
from nanoserve.testing import AttentionBackendSuite
from nanoserve.testing.attention import make_case, make_context
from nanoserve.testing.kvcache import tensors
from nanoserve_plugins.attention._kernels import GPU
from nanoserve_plugins.attention.hopper_decode import HopperDecodeBackend, HopperDecodeConfig


class TestHopperDecode(AttentionBackendSuite):
    backend = "hopper_decode"

    def test_waits_for_the_newest_token(self, kv_format: str) -> None:
        """Older tokens are loaded before the kernel that stores the newest has ended."""
        context = self.make_context(kv_format)
        backend = self.build(context)
        case = make_case(context, [1, 2, 16, 17, 64, 65, 129, 200, 0, 33])
        case.plan(backend)
        kv, (layer, *_) = context.kv, context.kv.layers
        live = [i for i, n in enumerate(case.context_lens) if n]
        slots = case.meta.slot_mapping[live]
        block, row = slots.long() // context.block_size, slots.long() % context.block_size
        for _ in range(5):
            for tensor in tensors(layer):
                tensor[block, :, row] = float("nan") if tensor.is_floating_point() else 127
            shape = (2, len(live), context.num_kv_heads, context.head_dim)
            k, v = torch.randn(shape, dtype=context.dtype, device=slots.device)
            out = torch.full_like(case.q, float("nan"))
            kv.store(layer, k, v, slots)
            backend.decode(case.q, layer, case.meta, out)
            self.assert_right(out[live], case.expected()[live])


class TestHopperDecodeInPieces(AttentionBackendSuite):
    """Most contexts are cut; up to 7 of them a second kernel merges, from 8 on the last piece."""

    backend = "hopper_decode"
    options = {"num_splits": 5}


def test_refuses_to_be_interpreted() -> None:
    context = make_context(Registry.discover().get("kvcache", "bf16"), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="paged_v2_split is its portable twin"):
        HopperDecodeBackend(context, HopperDecodeConfig())


@pytest.mark.parametrize(
    "kv_format, num_seqs, expected",
    [
        ("bf16", 1, (4, 33, False)),
        ("bf16", 256, (4, 32, True)),
        ("int8", 1, (1, 132, False)),
        ("int8", 7, (1, 126, False)),
        ("int8", 8, (1, 128, True)),
        ("int8", 300, (1, 132, True)),
    ],
)
def test_launch_on_132_multiprocessors(kv_format: str, num_seqs: int, expected: tuple[int, int, bool]) -> None:
    kv = SimpleNamespace(name=kv_format)
    cpu = torch.device("cpu")
    context = AttentionContext(16, 8, 128, 1.0, torch.bfloat16, cpu, 16, 300, 1, 1, kv)  # type: ignore[arg-type]
    with mock.patch.object(GPU, "of", return_value=GPU(132, (9, 0))):
        backend = HopperDecodeBackend(context, HopperDecodeConfig())
    assert backend.launch(num_seqs) == expected
    for count in range(1, 301):
        assert backend.launch(count)[1] <= len(backend.work.shares)
