"""KV-cache format ``bf16``: K and V as they are, in the compute dtype unless an option says otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from nanoserve.contracts.capabilities import Capabilities
from nanoserve.contracts.kvcache import KVCacheFormat, KVCacheShape, KVCacheSpec, LayerCache
from nanoserve.hookspecs import hookimpl
from nanoserve_plugins.kvcache._reference import SlotRows, read_rows, write_rows

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class BF16Config:
    """dtype: of the storage; auto is the compute dtype."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"


class BF16KVCache(KVCacheFormat):
    name = "bf16"

    def __init__(self, options: BF16Config, shape: KVCacheShape) -> None:
        super().__init__(shape)
        self._rows_written, self._rows_read = SlotRows(), SlotRows()
        self.dtype = shape.dtype if options.dtype == "auto" else DTYPES[options.dtype]
        self.exact = torch.promote_types(self.dtype, shape.dtype) == self.dtype

    def bytes_per_block(self) -> int:
        shape = self.shape
        vectors = 2 * shape.num_layers * shape.num_kv_heads * shape.block_size
        return vectors * shape.head_dim * self.dtype.itemsize

    def allocate(self, num_blocks: int) -> None:
        shape = self.shape
        size = (num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)

        def zeros() -> torch.Tensor:
            return torch.zeros(size, dtype=self.dtype, device=shape.device)

        self.layers = [LayerCache(self.name, zeros(), zeros()) for _ in range(shape.num_layers)]

    def store(self, layer: LayerCache, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        if k.is_cuda:
            from nanoserve_plugins.kvcache import _kernels  # here, because only a GPU needs triton

            _kernels.store(layer, k, v, slot_mapping)
        else:
            self._store_torch(layer, k, v, slot_mapping)

    def norm_rope_store(self) -> Callable[..., Any] | None:
        if self.shape.device.type != "cuda" or not self.exact:
            return None
        from nanoserve_plugins.kvcache import _kernels

        return _kernels.norm_rope_store

    def _store_torch(self, layer: LayerCache, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        kept, rows = self._rows_written.write(layer.k, slot_mapping)
        if kept is not None:
            k, v = k[kept], v[kept]
        write_rows(layer.k, rows, k)
        write_rows(layer.v, rows, v)

    def gather(self, layer: LayerCache, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, dtype = self._rows_read.read(layer.k, slots), self.shape.dtype
        return read_rows(layer.k, rows).to(dtype), read_rows(layer.v, rows).to(dtype)


@hookimpl
def nanoserve_kvcache(register) -> None:
    register(
        KVCacheSpec(
            name=BF16KVCache.name,
            summary="unquantised, in the compute dtype unless dtype is set",
            capabilities=Capabilities(dtypes=frozenset(DTYPES), cuda_graph=True),
            config=BF16Config,
            factory=BF16KVCache,
        )
    )
