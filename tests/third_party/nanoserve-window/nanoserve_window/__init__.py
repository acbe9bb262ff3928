"""Attention backend ``window``: each token sees the last ``window`` tokens and the first ``sinks`` of its context.

Without its first tokens a model falls apart as soon as they leave the window, since much of its attention rests on
them: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023. Unlike there, tokens keep their
absolute positions, so answers equal full attention's as long as a context fits into the window.

The work of a token no longer grows with its context; its KV cache does, since the format owns that.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from nanoserve.contracts.attention import (
    AttentionBackend,
    AttentionContext,
    AttentionSpec,
    DecodeMetadata,
    PrefillMetadata,
)
from nanoserve.contracts.capabilities import Capabilities
from nanoserve.contracts.errors import ConfigError
from nanoserve.contracts.kvcache import LayerCache
from nanoserve.hookspecs import hookimpl

NANOSERVE_CONTRACT = 2


@dataclass(frozen=True)
class WindowOptions:
    """window: tokens that each token sees, itself included. sinks: first tokens of the context that it sees besides.

    kernel: *auto* is triton on a GPU over ``kv=bf16``, else torch.
    """

    window: int = 1024
    sinks: int = 4
    kernel: Literal["auto", "torch", "triton"] = "auto"

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window must be at least 1, not {self.window}")
        if self.sinks < 0:
            raise ValueError(f"sinks must be at least 0, not {self.sinks}")


def build(context: AttentionContext, options: WindowOptions) -> AttentionBackend:
    """The backend of the kernel that the options name. Raises ConfigError where that kernel cannot run."""
    kernel = options.kernel
    if kernel == "auto":
        kernel = "triton" if context.device.type == "cuda" and context.kv.name == "bf16" else "torch"
    if kernel == "torch":
        return TorchWindow(context, options)
    if context.kv.name != "bf16":
        raise ConfigError(
            f"attention.kernel=triton reads kv=bf16, not kv={context.kv.name}; use attention.kernel=torch"
        )
    if context.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError("attention.kernel=triton needs a GPU (or TRITON_INTERPRET=1); use attention.kernel=torch")
    from nanoserve_window.kernel import TritonWindow  # here, because torch's path needs no triton

    return TritonWindow(context, options)


@dataclass(slots=True)
class Keys:
    """What the queries ``start … end`` attend to. slots int64 ``[..., keys]``; mask bool, True = visible."""

    start: int
    end: int
    slots: torch.Tensor
    mask: torch.Tensor


class TorchWindow(AttentionBackend):
    """scaled_dot_product_attention over the gathered sinks and window: any KV format, any device."""

    options: WindowOptions

    def plan_prefill(self, meta: PrefillMetadata) -> list[Keys]:
        """Per sequence: slots ``[keys]``, mask ``[queries, keys]``; the keys are those that some query sees."""
        window, sinks, device = self.options.window, self.options.sinks, self.context.device
        plan = []
        for i in range(meta.num_seqs):
            start, end = meta.cu_seqlens_q_cpu[i : i + 2]
            num_keys = meta.cu_seqlens_k_cpu[i + 1] - meta.cu_seqlens_k_cpu[i]
            low = max(0, num_keys - (end - start) + 1 - window)  # first key in the window of the first query
            keys = torch.arange(low, num_keys, device=device)
            if low:
                keys = torch.cat([torch.arange(min(sinks, low), device=device), keys])
            queries = meta.query_positions[start:end, None]
            mask = (keys <= queries) & ((keys > queries - window) | (keys < sinks))
            plan.append(Keys(start, end, self._slots(meta.block_table[i], keys), mask))
        return plan

    def prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LayerCache,
        meta: PrefillMetadata,
        out: torch.Tensor,
    ) -> None:
        for keys in meta.plan:
            k, v = self.context.kv.gather(layer, keys.slots)
            group = q.shape[1] // k.shape[1]
            k, v = (x.transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))  # [q_heads, keys, head_dim]
            queries = q[keys.start : keys.end].transpose(0, 1)
            result = F.scaled_dot_product_attention(queries, k, v, attn_mask=keys.mask, scale=self.context.scale)
            out[keys.start : keys.end] = result.transpose(0, 1)

    def plan_decode(self, meta: DecodeMetadata) -> Keys:
        """slots ``[num_seqs, keys]``, mask ``[num_seqs, 1, 1, keys]``. Sizes come from the host, contents do not.

        A masked position stands for the sequence's first token, so that nothing unwritten is read.
        """
        sinks, device = self.options.sinks, self.context.device
        lengths = meta.context_lens.long().unsqueeze(1)
        recent = lengths - 1 - torch.arange(min(self.options.window, meta.max_context_len), device=device)
        first = torch.arange(min(sinks, meta.max_context_len), device=device).expand(meta.num_seqs, -1)
        positions = torch.cat([first, recent], 1)
        mask = torch.cat([first < lengths, recent >= sinks], 1)  # a sink inside the window counts once
        slots = self._slots(meta.block_table, torch.where(mask, positions, 0))
        return Keys(0, meta.num_seqs, slots, mask[:, None, None])

    def decode(self, q: torch.Tensor, layer: LayerCache, meta: DecodeMetadata, out: torch.Tensor) -> None:
        keys: Keys = meta.plan
        k, v = (
            x.transpose(1, 2) for x in self.context.kv.gather(layer, keys.slots)
        )  # [seqs, kv_heads, keys, head_dim]
        # The query heads that share a KV head are its query rows: K and V are read once for all of them.
        queries = q.unflatten(1, (k.shape[1], -1))
        result = F.scaled_dot_product_attention(queries, k, v, attn_mask=keys.mask, scale=self.context.scale)
        out.copy_(result.flatten(1, 2))

    def _slots(self, block_table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """block_table ``[..., max_blocks]``, positions int64 ``[..., keys]`` → slots int64 ``[..., keys]``."""
        size = self.context.block_size
        return block_table.gather(-1, positions // size).long() * size + positions % size


@hookimpl
def nanoserve_attention(register) -> None:
    register(
        AttentionSpec(
            name="window",
            summary="sliding window with attention sinks: a token sees the first and the last tokens of its context",
            capabilities=Capabilities(
                phases=frozenset({"prefill", "decode"}),
                dtypes=frozenset({"float32", "float16", "bfloat16"}),
                cuda_graph=True,
                full_attention=False,
            ),
            config=WindowOptions,
            factory=build,
        )
    )


@hookimpl
def nanoserve_config_paths() -> list[str]:
    return ["pkg://nanoserve_window.conf"]
