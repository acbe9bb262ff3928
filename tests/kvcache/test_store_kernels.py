"""The Triton store kernels pass the suite of their format and equal its torch path to the bit (interpreter or GPU)."""

import pytest
import torch

from nanoserve.contracts.kvcache import LayerCache
from nanoserve.ops.rope import qk_norm_rope
from nanoserve.testing import KVCacheFormatSuite
from nanoserve.testing.kvcache import snapshot, tensors
from nanoserve_plugins.kvcache import _kernels


class KernelSuite(KVCacheFormatSuite):
    __test__ = False

    def build(self, dtype="", **kwargs):
        if dtype == "bfloat16" and self.device == "cpu":
            pytest.skip("the interpreter rounds to bfloat16 towards zero")
        kv = super().build(dtype, **kwargs)
        kv.store = _kernels.store
        kv.norm_rope_store = lambda: _kernels.norm_rope_store
        return kv

    def store_both_ways(self, dtype, k, v, slots, **kwargs):
        """Bytes that the kernel and the torch path leave in equal caches. The latter runs on the CPU, because on a GPU
        torch divides by a number with its reciprocal, which is not always IEEE's quotient."""
        kv = self.build(dtype, **kwargs)
        mine = kv.layers[0]
        theirs = LayerCache(mine.format, *(x.cpu() for x in tensors(mine)))
        _kernels.store(mine, k, v, slots)
        kv._store_torch(theirs, k.cpu(), v.cpu(), slots.cpu())
        return [x.cpu() for x in snapshot(mine)], snapshot(theirs)

    @pytest.mark.parametrize("heads", ["2 x 32", "3 x 96", "8 x 128"])
    def test_equals_the_torch_path(self, dtype, heads):
        """Slices of a fused tensor, skipped slots, magnitudes over nine decades, a tie in every vector."""
        kv_heads, head_dim = map(int, heads.split(" x "))
        kv = self.build(dtype, num_kv_heads=kv_heads, head_dim=head_dim)
        k, v = self.normal(kv, 21)
        k[0, 0, :4] = torch.tensor([127.0, 2.5, -2.5, 0.5], dtype=k.dtype)
        fused = torch.cat([k, v], 1)
        k, v = fused[:, :kv_heads], fused[:, kv_heads:]
        slots = self.some_slots(kv, 21)
        slots[::5] = -1
        mine, theirs = self.store_both_ways(dtype, k, v, slots, num_kv_heads=kv_heads, head_dim=head_dim)
        assert all(map(torch.equal, mine, theirs))

    @pytest.mark.parametrize("layout", ["q2", "q5", "q8 kv1", "q6 kv2"])
    def test_fused_equals_its_parts(self, layout):
        """Odd head counts leave a program one head; the results of both formats are those of the separate ops."""
        q_heads, kv_heads = {"q2": (2, 1), "q5": (5, 5), "q8 kv1": (8, 1), "q6 kv2": (6, 2)}[layout]
        mine, theirs = (self.build("float32", num_kv_heads=kv_heads, head_dim=96) for _ in range(2))
        generator = torch.Generator().manual_seed(0)
        qkv = torch.randn(5, (q_heads + 2 * kv_heads) * 96 + 32, generator=generator)[:, :-32].to(mine.shape.device)
        weights = (1 + 0.3 * torch.randn(2, 96, generator=generator)).to(qkv)
        cos_sin = torch.randn(32, 96, generator=generator).to(qkv)
        positions, slots = self.slots(mine, [3, 0, 31, 7, 8]), self.slots(mine, [40, 2, 3, -1, 127])
        q, k, v = _kernels.norm_rope_store(mine.layers[0], qkv, *weights, 1e-6, cos_sin, positions, slots, True)
        heads = qkv.unflatten(1, (-1, 96))
        want_q, want_k, want_v = qk_norm_rope(
            qkv.contiguous(), *weights, 1e-6, cos_sin, positions, q_heads, kv_heads, 96
        )
        torch.testing.assert_close(q, want_q, rtol=1e-5, atol=1e-5)
        _kernels.store(theirs.layers[0], k if mine.exact else want_k, heads[:, -kv_heads:], slots)
        live = slots[slots >= 0]
        for got, expected in zip(mine.gather(mine.layers[0], live), theirs.gather(theirs.layers[0], live), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0 if mine.exact else 0.05)
        assert v.shape == want_v.shape


class TestBF16Kernels(KernelSuite):
    __test__ = True
    format = "bf16"


class TestInt8Kernels(KernelSuite):
    __test__ = True
    format = "int8"

    def tolerance(self, x):
        """Half a step, plus what rounding the scale to fp16 and the result to the compute dtype adds."""
        scale = (x.float().abs().amax(-1, keepdim=True) / 127).clamp_min(1e-8)
        return scale / 2 + 127 * (scale - scale.half().float()).abs() + x.float().abs() * torch.finfo(x.dtype).eps

    def test_what_fp16_scales_cannot_express(self):
        """NaN, Inf and overflow come back as NaN and stay in their own token; a zero vector has the scale 0."""
        kv = self.build("float32", head_dim=32)
        k = torch.randn(6, 2, 32, generator=torch.Generator().manual_seed(0)).to(kv.shape.device)
        k[0, 0, 3], k[1, 1, 31], k[2, 0], k[3, 0, 0] = float("nan"), float("inf"), 0.0, 1e9
        slots = self.slots(kv, [0, 1, 2, 3, 4, 5])
        _kernels.store(kv.layers[0], k, k, slots)
        scales = kv.layers[0].k_scale[0, :, :6].T
        bad = torch.zeros(6, 2, dtype=torch.bool, device=k.device)
        bad[0, 0] = bad[1, 1] = bad[3, 0] = True
        assert torch.equal(scales.isnan(), bad)
        assert scales[2, 0] == 0 and (kv.layers[0].k[0, 0, 2] == 0).all()
