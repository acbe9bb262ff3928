"""KV-cache format ``fp8``: e4m3 with one fp16 scale per token and KV head, quantised when it is written.

A head vector of 128 elements takes 130 bytes instead of 256 in bf16. e4m3 (Micikevicius et al., "FP8 Formats for Deep
Learning", 2022) has 3 bits of mantissa: an error of at most 1/16 of each element, where INT8 has one step of the
vector's largest. Plain torch on every device; conversions are torch's own, so no GPU is too old.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanoserve.contracts.capabilities import Capabilities
from nanoserve.contracts.kvcache import KVCacheFormat, KVCacheShape, KVCacheSpec, LayerCache
from nanoserve.hookspecs import hookimpl

NANOSERVE_CONTRACT = 2

LARGEST = 448.0  # of e4m3
#: The smallest normal fp16. Smaller scales would be imprecise, and with this one e4m3 reaches down to 1.2e-7.
LEAST_SCALE = 2.0**-14


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x ``[..., head_dim]`` → e4m3 of the same shape and fp16 scales ``[...]``, max|x| / 448.

    A vector that an fp16 scale cannot express (a NaN, an Inf, magnitudes above 2.9e7) gets the scale NaN and comes back
    as NaN: visible, and confined to its own token and head.
    """
    x = x.float()
    scale = (x.abs().amax(-1) / LARGEST).clamp_min(LEAST_SCALE).half()
    scale.masked_fill_(~scale.isfinite(), torch.nan)
    # Rounding the scale moves the largest element by 2^-11 of itself, and e4m3 rounds up to 464 down to 448.
    return (x / scale.float().unsqueeze(-1)).to(torch.float8_e4m3fn), scale


def dequantize(data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """data e4m3 ``[..., head_dim]`` × scale fp16 ``[...]``, multiplied in fp32, rounded once to ``dtype``."""
    return (data.float() * scale.float().unsqueeze(-1)).to(dtype)


@dataclass(frozen=True)
class FP8Options:
    """No options."""


class FP8KVCache(KVCacheFormat):
    """Data ``[num_blocks, kv_heads, block_size, head_dim]`` e4m3, scales the same without the last axis, fp16."""

    name = "fp8"
    exact = False

    def __init__(self, options: FP8Options, shape: KVCacheShape) -> None:
        super().__init__(shape)

    def bytes_per_block(self) -> int:
        shape = self.shape
        return 2 * shape.num_layers * shape.num_kv_heads * shape.block_size * (shape.head_dim + 2)

    def allocate(self, num_blocks: int) -> None:
        shape = self.shape
        vectors = (num_blocks, shape.num_kv_heads, shape.block_size)

        def data() -> torch.Tensor:
            bits = torch.zeros(*vectors, shape.head_dim, dtype=torch.uint8, device=shape.device)
            return bits.view(torch.float8_e4m3fn)

        def scale() -> torch.Tensor:
            return torch.zeros(vectors, dtype=torch.float16, device=shape.device)

        self.layers = [LayerCache(self.name, data(), data(), scale(), scale()) for _ in range(shape.num_layers)]

    def store(self, layer: LayerCache, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        if not len(slot_mapping):
            return
        slots = slot_mapping.long()
        # To find out which tokens to skip would wait for the device. So each of them repeats the write of a token that
        # is kept (or, if there is none, what is in slot 0 already): the same bytes to the same place.
        skipped = slots < 0
        none_kept = skipped.all()
        first_kept = skipped.int().argmin().view(1)
        keep = slots.index_select(0, first_kept).clamp_min(0)
        rows, kept_rows = self._rows(torch.where(skipped, keep, slots)), self._rows(keep)
        for x, data, scales in ((k, layer.k, layer.k_scale), (v, layer.v, layer.v_scale)):
            new_data, new_scales = quantize(x)
            for cache, new in ((_bits(data), new_data.view(torch.uint8)), (_flat(scales), new_scales)):
                stored = cache.index_select(0, kept_rows).unsqueeze(0)
                repeated = torch.where(none_kept, stored, new.index_select(0, first_kept))
                chosen = torch.where(skipped.view(-1, *(1,) * (new.dim() - 1)), repeated, new)
                cache.index_copy_(0, rows, chosen.flatten(0, 1))

    def gather(self, layer: LayerCache, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self.shape
        rows = self._rows(slots.long().reshape(-1))

        def dense(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
            picked = _bits(data).index_select(0, rows).view(torch.float8_e4m3fn)
            values = dequantize(picked, _flat(scales).index_select(0, rows), shape.dtype)
            return values.view(*slots.shape, shape.num_kv_heads, shape.head_dim)

        return dense(layer.k, layer.k_scale), dense(layer.v, layer.v_scale)

    def _rows(self, slots: torch.Tensor) -> torch.Tensor:
        """slots int64 ``[tokens]`` → the rows of their head vectors in a flat cache, int64 ``[tokens * kv_heads]``."""
        size, heads = self.shape.block_size, self.shape.num_kv_heads
        first = slots // size * (heads * size) + slots % size
        return (first.unsqueeze(1) + torch.arange(heads, device=slots.device) * size).view(-1)


def _bits(data: torch.Tensor) -> torch.Tensor:
    """e4m3 ``[num_blocks, kv_heads, block_size, head_dim]`` as rows of bytes, which torch can index."""
    return data.view(torch.uint8).view(-1, data.shape[-1])


def _flat(scales: torch.Tensor) -> torch.Tensor:
    return scales.view(-1)


@hookimpl
def nanoserve_kvcache(register) -> None:
    register(
        KVCacheSpec(
            name=FP8KVCache.name,
            summary="e4m3 with an fp16 scale per token and KV head; about half the bytes of bf16",
            capabilities=Capabilities(dtypes=frozenset({"float32", "float16", "bfloat16"}), cuda_graph=True),
            config=FP8Options,
            factory=FP8KVCache,
        )
    )


@hookimpl
def nanoserve_config_paths() -> list[str]:
    return ["pkg://nanoserve_fp8.conf"]
