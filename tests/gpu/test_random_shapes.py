"""200 random steps per kernel and KV format in bf16, into poisoned outputs, over poisoned caches, against float64.

A geometry needs up to a dozen kernels compiled, so with a cold cache it pays to run them in several processes.
"""

from __future__ import annotations

import random

import pytest
import torch

from nanoserve.contracts.kvcache import LayerCache
from nanoserve.testing import AttentionBackendSuite
from nanoserve.testing.attention import make_context, poison, relative_error
from nanoserve.testing.kvcache import snapshot, tensors
from nanoserve.testing.plugins import discover
from nanoserve_plugins.kvcache import _kernels

pytestmark = pytest.mark.gpu

#: query heads, KV heads, head size (64 for a backend without it), block size: what kernels are compiled for
GEOMETRIES = [(16, 8, 128, 16), (8, 1, 64, 32), (6, 2, 96, 256)]
STEPS = 200 // len(GEOMETRIES) + 1
TOLERANCE, EPS = 5e-3, 1e-6
KERNELS = {
    "decode": ["paged_v1", "paged_v2", "paged_v2_split", "int8_fused", "hopper_decode"],
    "prefill": ["triton_varlen", "triton_flash", "hopper_flash"],
}


def formats(name: str) -> list[str]:
    return {"paged_v1": ["bf16"], "int8_fused": ["int8"]}.get(name, ["bf16", "int8"])


def contexts_of(rng: random.Random, most: int) -> list[int]:
    longest = min(most, rng.choice([20, 100, 300, most]))
    return [rng.randint(1, longest) for _ in range(rng.randint(1, 8))]


def check_attention(
    suite: AttentionBackendSuite, phase: str, kv: str, geometry: tuple[int, ...], steps: int, most: int, dtype: str
) -> float:
    """The largest relative error of a step. Every other decode step has padding rows, and host lengths that are only
    bounds, as in a CUDA graph."""
    capabilities, worst = suite.spec.capabilities, 0.0
    q_heads, kv_heads, head_dim, block_size = geometry
    context = suite.make_context(
        kv,
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim if head_dim in (capabilities.head_dims or {head_dim}) else 64,
        block_size=block_size,
        num_blocks=8 * (most // block_size + 2),
        max_model_len=4096,
        dtype=getattr(torch, dtype),
    )
    backend = suite.build(context)
    for seed in range(steps):
        poison(context.kv.layers[0], 1e4 if capabilities.needs_finite_cache else float("nan"))
        rng = random.Random(seed)
        contexts = contexts_of(rng, most)
        bounds = phase == "decode" and seed % 2 and capabilities.cuda_graph
        if bounds:
            contexts.insert(rng.randint(0, len(contexts)), 0)
        fresh = rng.random() < 0.4
        lens = [(n if fresh else rng.randint(1, max(n, 1)), n) for n in contexts]
        case = suite.make_case(context, phase, lens, seed=seed).fused()
        if bounds:
            case.meta.context_lens_cpu, case.meta.max_context_len = (4096,) * len(contexts), 4096
        out, expected = case.run(backend), case.expected()
        if phase == "decode":
            live = [row for row, n in enumerate(contexts) if n]
            out, expected = out[live], expected[live]
        total, token = relative_error(out, expected)
        assert total <= TOLERANCE and token <= 3 * TOLERANCE, f"{geometry}, lengths {lens}: {total}, a token {token}"
        worst = max(worst, total)
    return worst


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: "x".join(map(str, geometry)))
@pytest.mark.parametrize(
    "phase, name, kv", [(phase, name, kv) for phase, names in KERNELS.items() for name in names for kv in formats(name)]
)
def test_attention(phase, name, kv, geometry):
    suite = AttentionBackendSuite()
    suite.backend = name
    worst = check_attention(suite, phase, kv, geometry, STEPS, 3000 if phase == "decode" else 900, "bfloat16")
    print(f"{name} {kv} {geometry}: {STEPS} steps, largest relative error {worst:.1e}")


def check_store(kv: str, steps: int, most: int, dtype: torch.dtype, device: str) -> None:
    """Store equals the torch path of the format to the bit, and the fused launch its parts in float64."""
    spec = discover(()).get("kvcache", kv)
    for i, (q_heads, kv_heads, head_dim, block_size) in enumerate(GEOMETRIES):
        context = make_context(
            spec, num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=head_dim, block_size=block_size,
            num_blocks=2 * most // block_size + 1, dtype=dtype, device=device, poison_value=7.0,
        )  # fmt: skip
        cache, layer = context.kv, context.kv.layers[0]
        for seed in range(i * steps, (i + 1) * steps):
            generator = torch.Generator(device).manual_seed(seed)
            tokens = random.Random(seed).randint(1, most)

            def normal(*size: int, generator: torch.Generator = generator) -> torch.Tensor:
                return torch.randn(size, generator=generator, device=device)

            loud = 10 ** (normal(tokens, q_heads + 2 * kv_heads, 1) / 2)  # of every token and head
            heads = (normal(tokens, q_heads + 2 * kv_heads, head_dim) * loud).to(dtype)
            k, v = heads[:, q_heads:-kv_heads], heads[:, -kv_heads:]
            slots = torch.randperm(2 * most, generator=generator, device=device)[:tokens].int()
            slots[::7] = -1
            poison(layer, 7.0)
            theirs = LayerCache(layer.format, *(x.cpu() for x in tensors(layer)))
            # On the CPU: on a GPU torch divides by a number with its reciprocal, which is not always IEEE's quotient.
            cache._store_torch(theirs, k.cpu(), v.cpu(), slots.cpu())
            _kernels.store(layer, k, v, slots)
            same = [torch.equal(x.cpu(), y) for x, y in zip(snapshot(layer), snapshot(theirs), strict=True)]
            assert all(same), (kv, tokens, heads.shape, block_size)

            weights = (1 + 0.3 * normal(2, head_dim)).to(dtype)
            angles, positions = normal(4096, head_dim // 2), slots.abs()
            cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
            poison(layer, 7.0)
            fused = _kernels.norm_rope_store(layer, heads.flatten(1), *weights, EPS, cos_sin, positions, slots, True)
            expected = rotated(heads, weights, cos_sin, positions, q_heads, kv_heads)
            rounded = TOLERANCE if cache.exact else 1e-2  # INT8 has steps of 1 / 127 of a vector's largest number
            for got, right, bar in zip(fused, expected, (TOLERANCE, rounded, rounded), strict=True):
                assert relative_error(got, right)[0] <= bar, (kv, tokens, heads.shape)
            live = slots >= 0
            for got, stored in zip(fused[1:], cache.gather(layer, slots[live]), strict=True):
                assert torch.equal(got[live], stored), (kv, tokens, heads.shape)


def rotated(heads, weights, cos_sin, positions, q_heads, kv_heads):
    """q and k after their norm and rotation, and v, in float64."""
    x = heads.double()
    cos, sin = cos_sin.double()[positions].unsqueeze(1).chunk(2, -1)
    found = []
    for part, weight in zip((x[:, :q_heads], x[:, q_heads:-kv_heads]), weights.double(), strict=True):
        part = part * (part.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight
        low, high = part.chunk(2, -1)
        found.append(torch.cat([low * cos - high * sin, high * cos + low * sin], -1))
    return [*found, x[:, -kv_heads:]]


@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_store(kv):
    check_store(kv, STEPS, 700, torch.bfloat16, "cuda")
