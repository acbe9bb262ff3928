"""The format against the contract, its error bound, and what backends are told that read other bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nanoserve.contracts.capabilities import Requirements
from nanoserve.testing import AttentionBackendSuite, KVCacheFormatSuite
from nanoserve.testing.attention import NoScalarReads


class TestFP8(KVCacheFormatSuite):
    format = "fp8"

    def tolerance(self, x: torch.Tensor) -> torch.Tensor:
        """Half a unit in the last of e4m3's 3 bits, half a step of its subnormals, and a rounding to the dtype."""
        x = x.float()
        scale = (x.abs().amax(-1, keepdim=True) / 448).clamp_min(2.0**-14)
        return x.abs() * (2.0**-4 + 2 * torch.finfo(torch.bfloat16).eps) + scale * 2.0**-10

    def test_small_and_large_vectors_are_as_precise(self, dtype: str) -> None:
        """Scales below fp16's normal numbers would lose the 3 bits that e4m3 has, and 448 itself must come back."""
        kv = self.build(dtype)
        k, v = self.normal(kv, 6)
        k *= torch.tensor([1e-4, 1e-3, 1e-2, 1, 1e1, 1e2], device=k.device)[:, None, None]
        k[3, 0, 0] = 448.0
        slots = self.some_slots(kv, 6)
        kv.store(kv.layers[0], k, v, slots)
        self.assert_recovered(kv, kv.layers[0], slots, k, v)
        assert kv.gather(kv.layers[0], slots)[0][3, 0, 0] == 448.0

    def test_waits_for_no_device(self) -> None:
        """One code path on all devices, so the CPU can tell: no value decides on the host which tokens are skipped."""
        kv = self.build()
        k, v = self.normal(kv, 5)
        slots = self.slots(kv, [3, -1, 8, -1, 0])
        with NoScalarReads():
            kv.store(kv.layers[0], k, v, slots)
            kv.gather(kv.layers[0], slots.clamp_min(0))


class TestSdpaReadsIt(AttentionBackendSuite):
    """A backend that reads any format through ``gather`` reads this one."""

    backend = "sdpa"

    def declared_formats(self) -> list[str]:
        return ["fp8"]


@pytest.mark.parametrize("backend", ["paged_v1", "triton_flash", "int8_fused"])
def test_kernels_that_read_other_bytes_refuse_it(backend: str) -> None:
    suite = AttentionBackendSuite()
    suite.backend = backend
    need = Requirements(4, 2, 64, "float16", "cuda", (9, 0), 16, "fp8")
    (reason,) = suite.spec.capabilities.refusals(need)
    assert reason.startswith("cannot read KV format 'fp8' (it reads ")
    readable = min(suite.spec.capabilities.kv_formats or ())
    assert suite.spec.capabilities.refusals(replace(need, kv_format=readable)) == []
