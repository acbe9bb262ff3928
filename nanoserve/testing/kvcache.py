"""Conformance suite of KV-cache formats. It sees storage only through the contract: whole tensors and ``gather``."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from nanoserve.contracts.capabilities import Requirements
from nanoserve.contracts.kvcache import KVCacheFormat, KVCacheShape, KVCacheSpec, LayerCache
from nanoserve.ops.rope import qk_norm_rope
from nanoserve.registry import Registry
from nanoserve.testing.plugins import compute_capability, default_device, discover


def tensors(layer: LayerCache) -> list[torch.Tensor]:
    """The tensors a layer consists of."""
    return [tensor for tensor in (layer.k, layer.v, layer.k_scale, layer.v_scale) if tensor is not None]


def snapshot(layer: LayerCache) -> list[torch.Tensor]:
    """A copy of a layer's bytes; comparable with torch.equal even where they are NaN."""
    return [tensor.view(torch.uint8).clone() for tensor in tensors(layer)]


def huge_layer(layer: LayerCache, had: int, num_blocks: int) -> LayerCache:
    """As ``layer``, which has ``had`` blocks, with ``num_blocks`` uninitialised ones, of which the CPU commits only
    what is touched.

    Skips the test where not even the address space is to be had, or where the first axis is not that of blocks.
    """

    def grown(tensor: torch.Tensor) -> torch.Tensor:
        rows, rest = divmod(tensor.shape[0], had)
        if rest or not rows:
            pytest.skip(f"{layer.format} does not lay out its tensors block after block")
        return torch.empty(num_blocks * rows, *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)

    try:
        return LayerCache(layer.format, *map(grown, tensors(layer)))
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        pytest.skip(f"no room for a pool past 2^31 elements: {error}")


class KVCacheFormatSuite:
    """Subclass with ``format = "NAME"``; a format that is not exact also says how far off it may be.

    plugins: modules with hooks that no entry point announces. options: the format's options, other than the defaults.
    """

    format: str
    plugins: tuple[Any, ...] = ()
    options: dict[str, Any] = {}

    def tolerance(self, x: torch.Tensor) -> torch.Tensor:
        """Largest allowed |recovered - x| per element; x ``[..., head_dim]`` in the compute dtype."""
        return torch.zeros_like(x, dtype=torch.float32)

    # -- builders -----------------------------------------------------------------------------------------------------

    @property
    def registry(self) -> Registry:
        return discover(self.plugins)

    @property
    def spec(self) -> KVCacheSpec:
        return self.registry.get("kvcache", self.format)

    @property
    def device(self) -> str:
        return default_device(self.spec.capabilities)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        capabilities = self.spec.capabilities
        dtypes, head_dims = capabilities.dtypes, capabilities.head_dims
        values: dict[str, list[Any]] = {
            "dtype": [d for d in ("float32", "float16", "bfloat16") if dtypes is None or d in dtypes],
            "head_dim": [d for d in (32, 64, 96, 128) if head_dims is None or d in head_dims],
            "block_size": [size for size in (1, 16, 64, 256) if size % capabilities.block_size_multiple_of == 0],
        }
        for name in metafunc.fixturenames:
            if name in values:
                metafunc.parametrize(name, values[name])

    def build(
        self,
        dtype: str = "",
        *,
        num_layers: int = 1,
        num_kv_heads: int = 2,
        head_dim: int = 0,
        block_size: int = 0,
        num_blocks: int = 8,
    ) -> KVCacheFormat:
        """An allocated cache; what is left out is the first value that the format supports."""
        capabilities = self.spec.capabilities
        dtype = dtype or ("float32" if capabilities.dtypes is None else max(capabilities.dtypes))
        head_dim = head_dim or (64 if capabilities.head_dims is None else min(capabilities.head_dims))
        block_size = block_size or max(16, capabilities.block_size_multiple_of)
        need = Requirements(
            num_q_heads=num_kv_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=self.device,
            compute_capability=compute_capability(self.device),
            block_size=block_size,
            kv_format=self.format,
        )
        reasons = capabilities.refusals(need)
        if reasons:
            pytest.skip(f"{self.format} {'; '.join(reasons)}")
        device = torch.device(self.device)
        shape = KVCacheShape(num_layers, num_kv_heads, head_dim, block_size, getattr(torch, dtype), device)
        kv = self.spec.factory(self.registry.make_options("kvcache", self.spec, self.options), shape)
        kv.allocate(num_blocks)
        return kv

    def normal(self, kv: KVCacheFormat, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """k, v ``[tokens, kv_heads, head_dim]``, token t of magnitude 10^(t % 5 - 2)."""
        shape = kv.shape
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(2, tokens, shape.num_kv_heads, shape.head_dim, generator=generator)
        x *= (10.0 ** (torch.arange(tokens) % 5 - 2))[:, None, None]
        k, v = x.to(shape.dtype).to(shape.device)
        return k, v

    def slots(self, kv: KVCacheFormat, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=kv.shape.device)

    def all_slots(self, kv: KVCacheFormat, num_blocks: int = 8) -> torch.Tensor:
        """``[num_blocks, block_size]``"""
        return self.slots(kv, list(range(num_blocks * kv.shape.block_size))).view(num_blocks, -1)

    def everything(self, kv: KVCacheFormat, layer: LayerCache) -> list[torch.Tensor]:
        """Bytes of K and V ``[8, block_size, kv_heads, n]`` of all slots, as ``gather`` gives them: comparable with
        torch.equal even where they are NaN."""
        return [x.view(torch.uint8) for x in kv.gather(layer, self.all_slots(kv))]

    def some_slots(self, kv: KVCacheFormat, tokens: int, num_blocks: int = 8, seed: int = 0) -> torch.Tensor:
        pool = range(num_blocks * kv.shape.block_size)
        return self.slots(kv, random.Random(seed).sample(pool, tokens))

    def assert_recovered(
        self, kv: KVCacheFormat, layer: LayerCache, slots: torch.Tensor, *stored: torch.Tensor
    ) -> None:
        for name, x, recovered in zip("kv", stored, kv.gather(layer, slots), strict=True):
            assert recovered.dtype == x.dtype and recovered.shape == x.shape
            excess = (recovered.float() - x.float()).abs() - self.tolerance(x)
            assert (excess <= 0).all(), f"{name} is off by {float(excess.max()):.3g} more than the format allows"

    # -- store and gather ---------------------------------------------------------------------------------------------

    def test_round_trip(self, dtype: str, head_dim: int) -> None:
        for num_kv_heads in (1, 2, 8):
            kv = self.build(dtype, head_dim=head_dim, num_kv_heads=num_kv_heads)
            k, v = self.normal(kv, 40)
            slots = self.some_slots(kv, 40)
            kv.store(kv.layers[0], k, v, slots)
            self.assert_recovered(kv, kv.layers[0], slots, k, v)

    def test_block_sizes_and_shapes_of_slots(self, block_size: int) -> None:
        """Slots are int32 or int64 and of any shape; the result is ``[*S, kv_heads, head_dim]``."""
        kv = self.build(block_size=block_size, num_blocks=24)
        k, v = self.normal(kv, 24)
        slots = self.some_slots(kv, 24, num_blocks=24)
        kv.store(kv.layers[0], k, v, slots.long())
        for shape in ((24,), (4, 6), (2, 3, 4)):
            head = (*shape, kv.shape.num_kv_heads, kv.shape.head_dim)
            self.assert_recovered(kv, kv.layers[0], slots.view(shape), k.view(head), v.view(head))
        self.assert_recovered(kv, kv.layers[0], slots[3], k[3], v[3])

    def test_other_slots_and_layers_keep_their_bytes(self) -> None:
        kv = self.build(num_layers=3)
        for layer in kv.layers:
            kv.store(layer, *self.normal(kv, 128), self.slots(kv, list(range(128))))
        chosen = self.some_slots(kv, 50)
        rest = self.slots(kv, sorted(set(range(128)) - set(chosen.tolist())))
        neighbours = [snapshot(kv.layers[0]), snapshot(kv.layers[2])]
        before = [x.clone() for x in kv.gather(kv.layers[1], rest)]
        k, v = self.normal(kv, 50, seed=1)
        kv.store(kv.layers[1], k, v, chosen)
        self.assert_recovered(kv, kv.layers[1], chosen, k, v)
        assert all(map(torch.equal, before, kv.gather(kv.layers[1], rest)))
        assert all(map(torch.equal, neighbours[0], snapshot(kv.layers[0])))
        assert all(map(torch.equal, neighbours[1], snapshot(kv.layers[2])))

    def test_negative_slots_are_skipped(self) -> None:
        """C50: padding has slot -1; -1 is neither the last slot of the last block nor the one before the first."""
        kv, twin = self.build(), self.build()
        for cache in (kv, twin):
            cache.store(cache.layers[0], *self.normal(cache, 128), self.slots(cache, list(range(128))))
        k, v = self.normal(kv, 6, seed=1)
        kv.store(kv.layers[0], k, v, self.slots(kv, [-1, 7, -1, 127, -kv.shape.block_size, 0]))
        twin.store(twin.layers[0], k[[1, 3, 5]], v[[1, 3, 5]], self.slots(twin, [7, 127, 0]))
        for _ in range(2):
            for name, got, expected in zip(
                "kv", self.everything(kv, kv.layers[0]), self.everything(twin, twin.layers[0]), strict=True
            ):
                wrong = (got != expected).flatten(2).any(2).flatten().nonzero().flatten().tolist()
                assert not wrong, f"{name} of slots {wrong} changed with tokens whose slot is negative"
            kv.store(kv.layers[0], k, v, self.slots(kv, [-1] * 6))
        kv.store(kv.layers[0], k[:0], v[:0], self.slots(kv, []))

    def test_strided_inputs(self) -> None:
        """k and v may be slices of the projection's fused output."""
        kv, twin = self.build(), self.build()
        k, v = self.normal(kv, 20)
        slots = self.some_slots(kv, 20)
        _, strided_k, strided_v = torch.cat([k, k, v], 1).chunk(3, dim=1)
        kv.store(kv.layers[0], strided_k, strided_v, slots)
        twin.store(twin.layers[0], k, v, slots)
        assert all(map(torch.equal, snapshot(kv.layers[0]), snapshot(twin.layers[0])))

    def test_a_used_slot_is_as_good_as_a_new_one(self) -> None:
        """C18: nothing of a slot's former token, its scale least of all, outlives it."""
        kv, twin = self.build(), self.build()
        slots = self.some_slots(kv, 30)
        k, v = self.normal(kv, 30)
        kv.store(kv.layers[0], 1000 * v, k.flip(0), slots)
        for cache in (kv, twin):
            cache.store(cache.layers[0], k, v, slots)
        for one, other in zip(kv.gather(kv.layers[0], slots), twin.gather(twin.layers[0], slots), strict=True):
            assert torch.equal(one, other)

    def test_gather_returns_fresh_tensors(self) -> None:
        kv = self.build()
        slots = self.some_slots(kv, 10)
        kv.store(kv.layers[0], *self.normal(kv, 10), slots)
        before = snapshot(kv.layers[0])
        for tensor in kv.gather(kv.layers[0], slots):
            tensor.zero_()
        assert all(map(torch.equal, before, snapshot(kv.layers[0])))

    # -- awkward values -----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("value", [0.0, 1e-30])
    def test_zero_and_tiny_vectors(self, dtype: str, value: float) -> None:
        """C16: no 0/0. (1e-30 is 0 in fp16.)"""
        kv = self.build(dtype)
        k, v = self.normal(kv, 4)
        k[1], v[2] = value, value
        slots = self.slots(kv, [3, 1, 0, 2])
        kv.store(kv.layers[0], k, v, slots)
        self.assert_recovered(kv, kv.layers[0], slots, k, v)
        recovered_k, recovered_v = kv.gather(kv.layers[0], slots)
        for recovered in (recovered_k[1], recovered_v[2]):
            assert recovered.isfinite().all() and (recovered.abs() <= value).all()

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    def test_bad_values_stay_in_their_row(self, dtype: str, value: float) -> None:
        """C16: a NaN or Inf shows in its own token and head, and nowhere else."""
        kv = self.build(dtype)
        k, v = self.normal(kv, 6)
        k[1, 0, 5], v[4, 1, 0] = value, value
        slots = self.slots(kv, [9, 8, 7, 10, 11, 6])
        kv.store(kv.layers[0], k, v, slots)
        good = torch.ones(6, kv.shape.num_kv_heads, dtype=torch.bool, device=kv.shape.device)
        good[1, 0] = False
        for x, recovered, bad in zip((k, v), kv.gather(kv.layers[0], slots), ((1, 0), (4, 1)), strict=True):
            good.fill_(True)[bad] = False
            assert not recovered[bad].isfinite().all()
            assert ((recovered[good].float() - x[good].float()).abs() <= self.tolerance(x[good])).all()

    def test_offsets_are_64_bit(self) -> None:
        """C22: block ids whose element offset passes 2^31, written and read."""
        kv = self.build("float16", num_kv_heads=8, head_dim=128, block_size=256, num_blocks=1)
        layer = kv.layers[0]
        first = 2**31 // layer.k.numel() + 1
        layer = huge_layer(layer, 1, first + 2)
        k, v = self.normal(kv, 3)
        slots = self.slots(kv, [first * 256, (first + 1) * 256 + 17, (first + 2) * 256 - 1])
        kv.store(layer, k, v, slots)
        self.assert_recovered(kv, layer, slots, k, v)

    # -- ownership ----------------------------------------------------------------------------------------------------

    def test_bytes_per_block_is_what_is_allocated(self, dtype: str, block_size: int) -> None:
        kv = self.build(dtype, num_layers=3, block_size=block_size, num_blocks=5)
        assert len(kv.layers) == 3
        allocated = sum(t.numel() * t.itemsize for layer in kv.layers for t in tensors(layer))
        beside = allocated - 5 * kv.bytes_per_block()
        assert 0 <= beside <= kv.bytes_per_block(), (
            f"5 blocks of {kv.bytes_per_block()} bytes are {allocated} bytes of tensors; at most a block may be beside"
        )

    def test_starts_as_zeros_under_its_name(self) -> None:
        kv = self.build()
        for x in kv.gather(kv.layers[0], self.slots(kv, list(range(128)))):
            assert (x == 0).all()
        assert kv.name == self.format and all(layer.format == self.format for layer in kv.layers)

    def test_exact_means_exact(self) -> None:
        kv = self.build()
        k, v = self.normal(kv, 20)
        slots = self.some_slots(kv, 20)
        kv.store(kv.layers[0], k, v, slots)
        assert kv.exact == all(map(torch.equal, (k, v), kv.gather(kv.layers[0], slots)))

    def test_export_and_import(self) -> None:
        """Blocks move to other ids of another cache, bit for bit, and nothing else of it changes."""
        kv, other = self.build(num_layers=2), self.build(num_layers=2)
        everywhere = self.slots(kv, list(range(128)))
        for i, layer in enumerate(kv.layers):
            kv.store(layer, *self.normal(kv, 128, seed=i), everywhere)
            other.store(other.layers[i], *self.normal(kv, 128, seed=9), everywhere)
        source, target = [5, 0, 7], [1, 6, 2]
        before = [self.everything(other, layer) for layer in other.layers]
        payload = kv.export_blocks(source)
        assert all(x.device.type == "cpu" and x.shape[:2] == (2, 3) for x in payload.values())
        other.import_blocks(target, payload)
        untouched = [0, 3, 4, 5, 7]
        for i in range(2):
            for was, mine, theirs in zip(
                before[i], self.everything(kv, kv.layers[i]), self.everything(other, other.layers[i]), strict=True
            ):
                assert torch.equal(theirs[target], mine[source])
                assert torch.equal(theirs[untouched], was[untouched])

    def test_clearing_blocks(self) -> None:
        kv = self.build(num_layers=2)
        for layer in kv.layers:
            kv.store(layer, *self.normal(kv, 128), self.slots(kv, list(range(128))))
        before = [self.everything(kv, layer) for layer in kv.layers]
        kv.clear_blocks([5, 0])
        others = [1, 2, 3, 4, 6, 7]
        for was, layer in zip(before, kv.layers, strict=True):
            for old, new in zip(was, self.everything(kv, layer), strict=True):
                assert not new[[0, 5]].any() and torch.equal(new[others], old[others])

    def test_close_drops_every_tensor(self) -> None:
        kv = self.build()
        kv.close()
        assert kv.layers == []

    # -- optional and GPU ---------------------------------------------------------------------------------------------

    def test_fused_norm_rope_store(self, dtype: str) -> None:
        """The fusion is qk_norm_rope, then store; the k and v it returns are what the cache holds. It does the same
        where nobody needs these."""
        kv, twin, other = self.build(dtype), self.build(dtype), self.build(dtype)
        fused = kv.norm_rope_store()
        if fused is None:
            pytest.skip("does not offer it")
        shape, tokens, num_q_heads, eps = kv.shape, 12, 4, 1e-6
        generator = torch.Generator().manual_seed(0)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator).to(shape.device)

        width = (num_q_heads + 2 * shape.num_kv_heads) * shape.head_dim
        qkv = normal(tokens, width).to(shape.dtype)
        q_weight, k_weight = (1 + 0.3 * normal(shape.head_dim).to(shape.dtype) for _ in range(2))
        angles = normal(64, shape.head_dim // 2)
        cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
        positions = self.slots(kv, [5, 6, 7, 8, 0, 1, 2, 40, 63, 0, 0, 0])
        slots = self.slots(kv, [21, 22, 23, 24, 0, 1, 2, 127, 64, -1, -1, 3])
        live = (slots >= 0).nonzero().view(-1)

        sizes = (num_q_heads, shape.num_kv_heads, shape.head_dim)
        expected_q, k, v = qk_norm_rope(qkv, q_weight, k_weight, eps, cos_sin, positions, *sizes)
        twin.store(twin.layers[0], k, v, slots)
        step = qkv, q_weight, k_weight, eps, cos_sin, positions, slots
        got_q, *got = fused(kv.layers[0], *step, True)
        assert torch.equal(fused(other.layers[0], *step, False)[0], got_q)
        assert all(map(torch.equal, self.everything(kv, kv.layers[0]), self.everything(other, other.layers[0])))

        rounding = 4 * torch.finfo(shape.dtype).eps
        torch.testing.assert_close(got_q, expected_q, rtol=rounding, atol=rounding)
        stored = kv.gather(kv.layers[0], slots[live])
        for x, mine, theirs, returned in zip(
            (k, v), stored, twin.gather(twin.layers[0], slots[live]), got, strict=True
        ):
            assert torch.equal(returned[live], mine)
            # One rounding apart in x can be a whole step apart once quantised.
            allowed = 2 * self.tolerance(x[live]) + rounding * (1 + theirs.float().abs())
            assert ((mine.float() - theirs.float()).abs() <= allowed).all()
        nowhere = self.slots(kv, sorted(set(range(128)) - set(slots.tolist())))
        assert all((x == 0).all() for x in kv.gather(kv.layers[0], nowhere))

    def test_never_synchronises(self) -> None:
        if self.device != "cuda":
            pytest.skip("needs a CUDA device")
        kv = self.build("bfloat16")
        k, v = self.normal(kv, 20)
        slots = self.some_slots(kv, 20)
        slots[3] = -1
        valid = slots.clamp_min(0)
        mode = torch.cuda.get_sync_debug_mode()
        for debug in ("default", "error"):  # the first round compiles kernels
            torch.cuda.set_sync_debug_mode(debug)
            try:
                kv.store(kv.layers[0], k, v, slots)
                kv.gather(kv.layers[0], valid)
            finally:
                torch.cuda.set_sync_debug_mode(mode)

    def test_store_can_be_captured_if_declared(self) -> None:
        if self.device != "cuda" or not self.spec.capabilities.cuda_graph:
            pytest.skip("needs a CUDA device" if self.device != "cuda" else "does not declare cuda_graph")
        eager, captured = self.build(), self.build()
        k, v = self.normal(eager, 6)
        slots = self.slots(eager, [5, -1, 40, 41, -1, 7])
        captured.store(captured.layers[0], k, v, torch.full_like(slots, -1))  # kernels compile
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        target = torch.full_like(slots, -1)
        with torch.cuda.graph(graph):
            captured.store(captured.layers[0], k, v, target)
        for values in (slots, slots.flip(0)):
            target.copy_(values)
            graph.replay()
            eager.store(eager.layers[0], k, v, values)
            for a, b in zip(
                self.everything(captured, captured.layers[0]), self.everything(eager, eager.layers[0]), strict=True
            ):
                assert torch.equal(a, b)
