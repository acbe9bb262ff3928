"""KV-cache format ``int8``: symmetric INT8 with one fp16 scale per token and KV head, quantised when it is written.

A head vector of 128 elements takes 130 bytes instead of 256 in bf16. Scales have the block id of their data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nanoserve.contracts.capabilities import Capabilities
from nanoserve.contracts.kvcache import KVCacheFormat, KVCacheShape, KVCacheSpec, LayerCache
from nanoserve.hookspecs import hookimpl
from nanoserve_plugins.kvcache._reference import SlotRows, read_rows, write_rows


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x ``[..., head_dim]`` → int8 of the same shape and fp16 scales ``[...]``.

    Divides by the fp32 scale and keeps it rounded to fp16. Rounds half away from zero; max |x| maps to exactly ±127,
    so nothing overflows and nothing is clamped. A zero vector gets the scale 1e-8, which is 0 in fp16: its data are 0
    as well. A vector that fp16 scales cannot express (a NaN, an Inf, magnitudes above 8.3e6) gets the scale NaN and
    comes back as NaN: visible, and confined to its own token.
    """
    x = x.float()
    scale = (x.abs().amax(-1) / 127).clamp_min(1e-8)
    ratio = x / scale.unsqueeze(-1)
    data = torch.where(ratio >= 0, ratio + 0.5, ratio - 0.5).to(torch.int8)
    stored = scale.half()
    return data, stored.masked_fill_(~stored.isfinite(), torch.nan)


def dequantize(data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """data int8 ``[..., head_dim]`` × scale fp16 ``[...]``, multiplied in fp32, rounded once to ``dtype``."""
    return (data * scale.float().unsqueeze(-1)).to(dtype)


@dataclass(frozen=True)
class Int8Config:
    """No options."""


class Int8KVCache(KVCacheFormat):
    name = "int8"
    exact = False

    def __init__(self, options: Int8Config, shape: KVCacheShape) -> None:
        super().__init__(shape)
        self._rows_written, self._rows_read = SlotRows(), SlotRows()

    def bytes_per_block(self) -> int:
        shape = self.shape
        vectors = 2 * shape.num_layers * shape.num_kv_heads * shape.block_size
        return vectors * (shape.head_dim + torch.float16.itemsize)

    def allocate(self, num_blocks: int) -> None:
        shape = self.shape
        vectors = (num_blocks, shape.num_kv_heads, shape.block_size)

        def data() -> torch.Tensor:
            return torch.zeros(*vectors, shape.head_dim, dtype=torch.int8, device=shape.device)

        def scale() -> torch.Tensor:
            return torch.zeros(vectors, dtype=torch.float16, device=shape.device)

        self.layers = [LayerCache(self.name, data(), data(), scale(), scale()) for _ in range(shape.num_layers)]

    def store(self, layer: LayerCache, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        if k.is_cuda:
            from nanoserve_plugins.kvcache import _kernels  # here, because only a GPU needs triton

            _kernels.store(layer, k, v, slot_mapping)
        else:
            self._store_torch(layer, k, v, slot_mapping)

    def norm_rope_store(self) -> Callable[..., Any] | None:
        if self.shape.device.type != "cuda":
            return None
        from nanoserve_plugins.kvcache import _kernels

        return _kernels.norm_rope_store

    def _store_torch(self, layer: LayerCache, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        kept, rows = self._rows_written.write(layer.k, slot_mapping)
        if kept is not None:
            k, v = k[kept], v[kept]
        for x, cache, scales in ((k, layer.k, layer.k_scale), (v, layer.v, layer.v_scale)):
            data, scale = quantize(x)
            write_rows(cache, rows, data)
            write_rows(scales, rows, scale)

    def gather(self, layer: LayerCache, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, dtype = self._rows_read.read(layer.k, slots), self.shape.dtype
        k = dequantize(read_rows(layer.k, rows), read_rows(layer.k_scale, rows), dtype)
        v = dequantize(read_rows(layer.v, rows), read_rows(layer.v_scale, rows), dtype)
        return k, v


@hookimpl
def nanoserve_kvcache(register) -> None:
    register(
        KVCacheSpec(
            name=Int8KVCache.name,
            summary="INT8 with an fp16 scale per token and KV head; about half the bytes of bf16",
            capabilities=Capabilities(dtypes=frozenset({"float32", "float16", "bfloat16"}), cuda_graph=True),
            config=Int8Config,
            factory=Int8KVCache,
        )
    )
