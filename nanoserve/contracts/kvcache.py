"""Contract: a KV-cache format owns the K/V tensors and everything that depends on how they are stored.

Storage is paged: block ``b`` holds ``block_size`` tokens and token ``t`` of a sequence lives in **slot**
``block_table[t // block_size] * block_size + t % block_size``. Block ids and slots are all that the rest of the
engine knows. Anything a format keeps beside the data (scales, zero points) is addressed by the same block id, so that
hashing, reference counts and recycling never change with the format.

Layout of the built-in formats is head-major within a block ("HND"): ``[num_blocks, kv_heads, block_size, head_dim]``
for data and ``[num_blocks, kv_heads, block_size]`` for per-token scales: a block of one KV head is one contiguous
tile, which is what TMA and vectorised scale loads want.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nanoserve.contracts.capabilities import Capabilities


@dataclass(frozen=True)
class KVCacheShape:
    """Everything a format needs to know to size itself.

    num_kv_heads: KV heads on this rank. block_size: tokens per block. dtype: the compute dtype of K and V.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class LayerCache:
    """One layer's storage, as kernels see it.

    k, v: ``[num_blocks, kv_heads, block_size, head_dim]`` in the storage dtype (built-in formats; a format of its
    own layout may put any tensors here and name itself in ``format`` so that only kernels that know it are chosen).
    k_scale, v_scale: ``[num_blocks, kv_heads, block_size]`` fp16, or None when the format is not quantised.
    """

    format: str
    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


class KVCacheFormat(ABC):
    """One engine's KV cache in one format. Built by ``KVCacheSpec.factory(options, shape)``; ``allocate`` comes later.

    Invariant: after ``allocate(n)`` the ids ``0 … n - 1`` are valid blocks. The engine allocates one block more than
    it hands out: that scratch block takes the writes of padding rows and belongs to nobody.
    """

    #: Name under which attention kernels declare that they read this storage.
    name: str
    #: True when ``gather`` returns exactly what was stored; False for a quantised format.
    exact: bool = True
    #: What messages call it, as ``kv=NAME of DISTRIBUTION VERSION``; the registry sets it.
    plugin: str = ""

    def __init__(self, shape: KVCacheShape) -> None:
        self.shape = shape
        self.layers: list[LayerCache] = []

    @abstractmethod
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers, K and V, scales included. The engine sizes the pool with it."""

    @abstractmethod
    def allocate(self, num_blocks: int) -> None:
        """Allocate, zero-initialised, and fill ``self.layers``. Called once. Raises torch.OutOfMemoryError."""

    @abstractmethod
    def store(self, layer: LayerCache, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Write K and V of ``tokens`` new tokens, quantising if the format does.

        k, v: ``[tokens, kv_heads, head_dim]`` compute dtype, last dimension contiguous (they may be slices of a fused
        qkv tensor). slot_mapping: ``[tokens]`` int32 or int64; a slot < 0 is skipped, and no two slots >= 0 are equal.
        Every layer of a step stores with the same ``slot_mapping``, which nobody modifies meanwhile, so a format may
        remember what it derived from it. Must touch no other slot. Must not synchronise with the device. Offsets are
        64-bit: pools exceed 2^31 elements.
        """

    @abstractmethod
    def gather(self, layer: LayerCache, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Dense, dequantised K and V: the slow path that is right for every backend.

        slots: integer tensor of any shape ``S``, all valid and written; as in ``store``, nobody modifies it while the
        layers of a step ask with it. Returns two fresh tensors ``[*S, kv_heads, head_dim]`` in the compute dtype.
        """

    def norm_rope_store(self) -> Callable[..., Any] | None:
        """Optional fusion of q/k RMSNorm, rotary embedding and store as one launch; None when the format has none.

        The callable is
        ``f(layer, qkv, q_weight, k_weight, eps, cos_sin, positions, slot_mapping, needs_kv) -> (q, k, v)``: qkv
        ``[tokens, (q_heads + 2 * kv_heads) * head_dim]`` straight from the projection; cos_sin ``[max_positions,
        head_dim]`` fp32 (first half cos, second half sin); positions and slot_mapping ``[tokens]``.
        With programmatic dependent launch it may read all but qkv before the kernel ahead has ended: they were written
        before the step's first kernel began.
        Returns normalised and rotated q ``[tokens, q_heads, head_dim]`` and the k, v ``[tokens, kv_heads, head_dim]``
        a fresh prefill may attend to instead of the cache (for a quantised format: exactly what the cache holds).
        Nobody does in a step that only decodes: then ``needs_kv`` is False, and k and v may be None.
        """
        return None

    def export_blocks(self, block_ids: Sequence[int]) -> dict[str, torch.Tensor]:
        """Copy whole blocks out (offload, moving a sequence): bytes on the CPU whose first axes are [layer, block]."""
        index = torch.tensor(list(block_ids), device=self.shape.device)
        return {
            field: torch.stack([_as_bytes(getattr(layer, field)).index_select(0, index) for layer in self.layers]).cpu()
            for field in ("k", "v", "k_scale", "v_scale")
            if getattr(self.layers[0], field) is not None
        }

    def import_blocks(self, block_ids: Sequence[int], payload: dict[str, torch.Tensor]) -> None:
        """Write blocks exported by a cache of the same format and shape into ``block_ids`` of this one."""
        index = torch.tensor(list(block_ids), device=self.shape.device)
        for field, values in payload.items():
            for i, layer in enumerate(self.layers):
                _as_bytes(getattr(layer, field)).index_copy_(0, index, values[i].to(self.shape.device))

    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        """Zero whole blocks: what a sequence with numbers that are not finite leaves must not reach their next owner,
        whose kernels may read rows that it has not written yet."""
        index = torch.tensor(list(block_ids), device=self.shape.device)
        for layer in self.layers:
            for tensor in (layer.k, layer.v, layer.k_scale, layer.v_scale):
                if tensor is not None:
                    _as_bytes(tensor).index_fill_(0, index, 0)

    def close(self) -> None:
        """Drop every tensor. The cache cannot be used afterwards."""
        self.layers = []


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Blocks move as bytes: torch has no indexed copy for some storage dtypes (float8)."""
    return tensor.view(torch.uint8)


@dataclass(frozen=True)
class KVCacheSpec:
    """Registers a KV-cache format.

    config: dataclass of its options (every field has a default); one called ``dtype`` is that of the stored K and V by
    its torch name, or "auto". factory: ``(options, shape) -> KVCacheFormat``.
    """

    name: str
    summary: str
    capabilities: Capabilities
    config: type
    factory: Callable[[Any, KVCacheShape], KVCacheFormat]
