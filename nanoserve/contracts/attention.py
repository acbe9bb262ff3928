"""Contract: an attention backend computes prefill and/or decode attention over a paged KV cache.

A step packs its query tokens as ``[decode tokens | prefill tokens]``. Each phase gets its own metadata, which carries
device tensors **and** their host twins, so that no backend ever reads a scalar back from the device. K and V of the
step have been stored in the cache before a backend is called, those of earlier tokens before it plans.

All index tensors are int32 on the compute device. ``block_table[i, j]`` is the block that holds tokens
``j * block_size …`` of sequence ``i``; entries past the sequence's last block are unspecified but always a valid id.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nanoserve.contracts.capabilities import Capabilities
from nanoserve.contracts.kvcache import KVCacheFormat, LayerCache


@dataclass(slots=True)
class PrefillMetadata:
    """``num_tokens`` query tokens of ``num_seqs`` sequences, packed in order; queries are the last of each context.

    Device: cu_seqlens_q, cu_seqlens_k ``[num_seqs + 1]``; context_lens ``[num_seqs]`` (keys, this chunk included);
    block_table ``[num_seqs, max_blocks]``; slot_mapping ``[num_tokens]`` (slots of the new tokens);
    seq_ids ``[num_tokens]`` (row of the sequence); query_positions ``[num_tokens]`` (absolute position).
    Host twins: cu_seqlens_q_cpu, cu_seqlens_k_cpu (tuples), max_seqlen_q, max_seqlen_k, has_prefix (some context is
    longer than its queries, so fresh K/V are not enough).
    plan: what the backend's ``plan_prefill`` returned for this step.
    """

    num_seqs: int
    num_tokens: int
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    context_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    seq_ids: torch.Tensor
    query_positions: torch.Tensor
    cu_seqlens_q_cpu: tuple[int, ...]
    cu_seqlens_k_cpu: tuple[int, ...]
    max_seqlen_q: int
    max_seqlen_k: int
    has_prefix: bool
    plan: Any = None


@dataclass(slots=True)
class DecodeMetadata:
    """One query token for each of ``num_seqs`` sequences.

    Device: context_lens ``[num_seqs]`` (keys, the query's own included; a padding row has 0 and its output is
    ignored); block_table ``[num_seqs, max_blocks]``; slot_mapping ``[num_seqs]``.
    Host twins: context_lens_cpu (tuple) and max_context_len. Inside a CUDA graph both are upper bounds fixed at
    capture: a backend that declares ``cuda_graph`` may use them for sizes, never for which tokens to read.
    plan: what the backend's ``plan_decode`` returned for this step.
    """

    num_seqs: int
    context_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    context_lens_cpu: tuple[int, ...]
    max_context_len: int
    plan: Any = None


@dataclass(frozen=True)
class AttentionContext:
    """What a backend learns once, when it is built. Heads are those of this rank; ``scale`` multiplies q·k.

    max_num_seqs, max_num_batched_tokens, max_model_len bound every later call: scratch buffers that a CUDA graph
    reads are allocated from them, once, in ``__init__``.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    dtype: torch.dtype
    device: torch.device
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    kv: KVCacheFormat


class AttentionBackend:
    """Base class. Implement the phases that the spec's capabilities declare.

    ``plan_*`` runs once per step before the first layer, ``prefill`` / ``decode`` once per layer. None may synchronise
    with the device. ``out`` holds garbage (possibly NaN) and must be written completely (padding rows excepted); the
    methods return nothing.
    Results are safe to read in stream order.
    """

    #: What messages call it, as ``attention=NAME of DISTRIBUTION VERSION``; the registry sets it.
    plugin: str = ""

    def __init__(self, context: AttentionContext, options: Any) -> None:
        self.context = context
        self.options = options

    def plan_prefill(self, meta: PrefillMetadata) -> Any:
        """Derive per-step data shared by all layers (tile lists, masks); stored in ``meta.plan``."""
        return None

    def plan_decode(self, meta: DecodeMetadata) -> Any:
        """As ``plan_prefill``. For a ``cuda_graph`` backend it is captured too: device work on fixed buffers only."""
        return None

    def prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LayerCache,
        meta: PrefillMetadata,
        out: torch.Tensor,
    ) -> None:
        """Causal attention of the step's prefill tokens over their whole context.

        q, out: ``[num_tokens, q_heads, head_dim]``; k, v: ``[num_tokens, kv_heads, head_dim]``, the same values that
        are in the cache already (for a quantised format: as the cache holds them), useful when ``not meta.has_prefix``.
        q, k, v have a contiguous last dimension and may be strided otherwise. Query ``i`` of a sequence sees the keys
        at positions ``<= context_len - num_queries + i``.
        """
        raise NotImplementedError

    def decode(self, q: torch.Tensor, layer: LayerCache, meta: DecodeMetadata, out: torch.Tensor) -> None:
        """Attention of one token per sequence. q, out: ``[num_seqs, q_heads, head_dim]``."""
        raise NotImplementedError


@dataclass(frozen=True)
class AttentionSpec:
    """Registers an attention backend.

    config: dataclass of its options (every field has a default). factory: ``(context, options) -> AttentionBackend``;
    heavy imports belong inside it.
    """

    name: str
    summary: str
    capabilities: Capabilities
    config: type
    factory: Callable[[AttentionContext, Any], AttentionBackend]
