"""A format of a layout of its own: token after token, and a spare row that takes what is skipped."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from nanoserve.contracts.capabilities import Capabilities
from nanoserve.contracts.kvcache import KVCacheFormat, KVCacheSpec, LayerCache
from nanoserve.hookspecs import hookimpl
from nanoserve.registry import Registry
from nanoserve.tasks.plugins import matrix
from nanoserve.testing import AttentionBackendSuite, KVCacheFormatSuite
from nanoserve.testing.kvcache import tensors


@dataclass(frozen=True)
class Options:
    pass


class TokenMajor(KVCacheFormat):
    """K and V ``[num_blocks * block_size + 1, kv_heads, head_dim]``; the last row belongs to no slot."""

    name = "token_major"

    def __init__(self, options: Options, shape: Any) -> None:
        super().__init__(shape)

    def bytes_per_block(self) -> int:
        shape = self.shape
        vectors = 2 * shape.num_layers * shape.num_kv_heads * shape.block_size
        return vectors * shape.head_dim * shape.dtype.itemsize

    def allocate(self, num_blocks: int) -> None:
        shape = self.shape
        size = (num_blocks * shape.block_size + 1, shape.num_kv_heads, shape.head_dim)
        self.layers = [
            LayerCache(self.name, *(torch.zeros(size, dtype=shape.dtype, device=shape.device) for _ in range(2)))
            for _ in range(shape.num_layers)
        ]

    def store(self, layer: LayerCache, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        spare = layer.k.shape[0] - 1
        rows = torch.where(slot_mapping < 0, spare, slot_mapping).long()
        layer.k[rows], layer.v[rows] = k, v

    def gather(self, layer: LayerCache, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return layer.k[slots.long()], layer.v[slots.long()]

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:-1].unflatten(0, (-1, self.shape.block_size))

    def export_blocks(self, block_ids: Sequence[int]) -> dict[str, torch.Tensor]:
        index = list(block_ids)
        return {
            name: torch.stack([self._rows(getattr(layer, name))[index] for layer in self.layers]).cpu()
            for name in ("k", "v")
        }

    def import_blocks(self, block_ids: Sequence[int], payload: dict[str, torch.Tensor]) -> None:
        for name, values in payload.items():
            for i, layer in enumerate(self.layers):
                self._rows(getattr(layer, name))[list(block_ids)] = values[i].to(self.shape.device)

    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        for layer in self.layers:
            for tensor in tensors(layer):
                self._rows(tensor)[list(block_ids)] = 0


@hookimpl
def nanoserve_kvcache(register: Any) -> None:
    register(KVCacheSpec("token_major", "token after token", Capabilities(), Options, TokenMajor))


@hookimpl
def nanoserve_attention(register: Any) -> None:
    """Any backend that reads through ``gather``."""
    register(replace(Registry.discover().get("attention", "sdpa"), name="reader"))


PLUGIN = sys.modules[__name__]


class TestFormat(KVCacheFormatSuite):
    format = "token_major"
    plugins = (PLUGIN,)


class TestReader(AttentionBackendSuite):
    backend = "reader"
    plugins = (PLUGIN,)

    def declared_formats(self) -> list[str]:
        return ["token_major"]


def test_check_tries_it_too() -> None:
    results = matrix.check_all(Registry(extra=[PLUGIN]))["results"]
    assert results == {f"attention=reader kv=token_major {phase}": matrix.OK for phase in ("prefill", "decode")}
