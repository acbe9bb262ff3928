"""Attention backend ``sdpa``: torch's scaled_dot_product_attention over any KV format, on any device.

The slow path that is always right: keys and values that a step did not just compute come through ``kv.gather``. All
slicing is driven by the host twins of the metadata, so nothing is ever read back from the device. What can be known
before the first layer (slots, masks, groups) is planned once per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
from nanoserve.contracts.kvcache import LayerCache
from nanoserve.hookspecs import hookimpl


@dataclass(frozen=True)
class SDPAConfig:
    """max_gather_mb: size in MiB that a decode group's dense copy of K and V may reach (one sequence always fits)."""

    max_gather_mb: int = 256

    def __post_init__(self) -> None:
        if self.max_gather_mb < 1:
            raise ValueError(f"max_gather_mb must be at least 1, not {self.max_gather_mb}")


@dataclass(slots=True)
class PrefillGroup:
    """Query tokens ``start … end`` of the batch: ``num_seqs`` fresh sequences of equal length, or one with a prefix.

    With a prefix: slots int64 ``[context]``, where the keys lie; mask bool ``[queries, context]``, True = visible.
    """

    start: int
    end: int
    num_seqs: int = 1
    slots: torch.Tensor | None = None
    mask: torch.Tensor | None = None


@dataclass(slots=True)
class DecodeGroup:
    """Sequences of similar context that one call serves.

    rows: int64 ``[n]``, their rows in the batch, None when the group is the whole batch in order.
    slots: int64 ``[n, max_k]``; past the context it repeats the sequence's own first slot, so no unwritten row is read.
    mask: bool ``[n, 1, 1, max_k]``, None when all contexts are ``max_k`` long.
    bias: the mask as fp32 ``[kv_heads * n, group, max_k]`` to add to the scores, where two products replace SDPA.
    """

    rows: torch.Tensor | None
    slots: torch.Tensor
    mask: torch.Tensor | None
    bias: torch.Tensor | None = None


class SDPABackend(AttentionBackend):
    def __init__(self, context: AttentionContext, options: SDPAConfig) -> None:
        super().__init__(context, options)
        bytes_per_token = 2 * context.num_kv_heads * context.head_dim * context.dtype.itemsize
        self.by_products = context.device.type == "cpu" and context.dtype == torch.float32
        self.max_gather_tokens = (options.max_gather_mb << 20) // bytes_per_token

    # -- prefill ------------------------------------------------------------------------------------------------------

    def plan_prefill(self, meta: PrefillMetadata) -> list[PrefillGroup]:
        starts_q, starts_k = meta.cu_seqlens_q_cpu, meta.cu_seqlens_k_cpu
        positions = self._positions(meta.max_seqlen_k)
        slots = self._slots(meta.block_table, positions) if meta.has_prefix else None
        groups: list[PrefillGroup] = []
        last_length = 0  # of the sequences in the last group, if they are fresh
        for i in range(meta.num_seqs):
            start, end, num_k = starts_q[i], starts_q[i + 1], starts_k[i + 1] - starts_k[i]
            if slots is not None and num_k > end - start:
                mask = positions[:num_k] <= meta.query_positions[start:end, None]
                groups.append(PrefillGroup(start, end, slots=slots[i, :num_k], mask=mask))
                last_length = 0
            elif num_k == last_length:
                groups[-1].end = end
                groups[-1].num_seqs += 1
            else:
                groups.append(PrefillGroup(start, end))
                last_length = num_k
        return groups

    def prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LayerCache,
        meta: PrefillMetadata,
        out: torch.Tensor,
    ) -> None:
        for group in meta.plan:
            tokens = slice(group.start, group.end)
            if group.slots is None:
                self._fresh(q[tokens], k[tokens], v[tokens], group.num_seqs, out[tokens])
            else:
                keys, values = self.context.kv.gather(layer, group.slots)
                self._with_prefix(q[tokens], keys, values, group.mask, out[tokens])

    def _fresh(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_seqs: int, out: torch.Tensor) -> None:
        """Sequences of equal length are a dense batch: on a GPU torch takes cuDNN's or the flash kernel."""
        q, k, v = (x.unflatten(0, (num_seqs, -1)).transpose(1, 2) for x in (q, k, v))
        result = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.context.scale, enable_gqa=True)
        out.unflatten(0, (num_seqs, -1)).copy_(result.transpose(1, 2))

    def _with_prefix(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """One sequence, its KV heads as the batch. K and V are expanded over a group's query heads without a copy,
        because with a mask torch's memory-efficient kernel refuses ``enable_gqa`` and all scores would be built."""
        num_kv_heads = self.context.num_kv_heads
        q = q.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)  # [kv_heads, group, queries, head_dim]
        k, v = (x.transpose(0, 1).unsqueeze(1).expand(-1, q.shape[1], -1, -1) for x in (k, v))
        result = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.context.scale)
        out.copy_(result.flatten(0, 1).transpose(0, 1))

    # -- decode -------------------------------------------------------------------------------------------------------

    def plan_decode(self, meta: DecodeMetadata) -> list[DecodeGroup]:
        lengths = meta.context_lens_cpu
        groups = group_by_length(lengths, self.max_gather_tokens)
        return [self._decode_group(meta, rows if len(groups) > 1 else None, lengths) for rows in groups]

    def _decode_group(self, meta: DecodeMetadata, members: Sequence[int] | None, lengths: Sequence[int]) -> DecodeGroup:
        context_lens, block_table, rows = meta.context_lens, meta.block_table, None
        if members is not None:
            rows = self._to_device(members)
            context_lens, block_table = context_lens.index_select(0, rows), block_table.index_select(0, rows)
            lengths = [lengths[row] for row in members]
        max_k = max(1, max(lengths))
        positions = self._positions(max_k)
        if min(lengths) == max_k:
            return DecodeGroup(rows, self._slots(block_table, positions), None, self._bias(None, len(lengths), max_k))
        # A padding row (context 0) attends to one slot of its own, so that its softmax is defined.
        visible = positions < context_lens.clamp_min(1).unsqueeze(1)
        slots = self._slots(block_table, torch.where(visible, positions, 0))
        return DecodeGroup(rows, slots, visible[:, None, None, :], self._bias(visible, len(lengths), max_k))

    def _bias(self, visible: torch.Tensor | None, num_seqs: int, max_k: int) -> torch.Tensor | None:
        """For fp32 on the CPU, where torch's fused kernel spends a sixth more than two plain products on one query."""
        if not self.by_products:
            return None
        bias = torch.zeros(num_seqs, max_k)
        if visible is not None:
            bias.masked_fill_(~visible, -torch.inf)
        heads = (self.context.num_kv_heads, num_seqs, self.context.num_q_heads // self.context.num_kv_heads)
        return bias[:, None].expand(*heads, max_k).flatten(0, 1)

    def decode(self, q: torch.Tensor, layer: LayerCache, meta: DecodeMetadata, out: torch.Tensor) -> None:
        num_kv_heads = self.context.num_kv_heads
        for group in meta.plan:
            keys, values = self.context.kv.gather(layer, group.slots)
            queries = q if group.rows is None else q.index_select(0, group.rows)
            # The query heads that share a KV head are its query rows: K and V are read once for all of them.
            queries = queries.unflatten(1, (num_kv_heads, -1))
            if group.bias is not None:
                queries = queries.transpose(0, 1).flatten(0, 1)  # [kv_heads * n, group, head_dim]
                keys, values = keys.movedim(2, 0).flatten(0, 1), values.movedim(2, 0).flatten(0, 1)  # as queries
                scores = torch.baddbmm(group.bias, queries, keys.transpose(1, 2), alpha=self.context.scale)
                result = torch.bmm(scores.softmax(-1), values).unflatten(0, (num_kv_heads, -1)).transpose(0, 1)
            else:
                result = F.scaled_dot_product_attention(
                    queries,
                    keys.transpose(1, 2),
                    values.transpose(1, 2),
                    attn_mask=group.mask,
                    scale=self.context.scale,
                )
            if group.rows is None:
                out.unflatten(1, (num_kv_heads, -1)).copy_(result)
            else:
                out.index_copy_(0, group.rows, result.flatten(1, 2))

    # -- index arithmetic on the device -------------------------------------------------------------------------------

    def _positions(self, num_tokens: int) -> torch.Tensor:
        return torch.arange(num_tokens, device=self.context.device)

    def _slots(self, block_table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """block_table int32 ``[n, max_blocks]``, positions int64 ``[n, k]`` or ``[k]`` → slots int64 ``[n, k]``."""
        block_size = self.context.block_size
        blocks = block_table.gather(1, (positions // block_size).expand(block_table.shape[0], -1))
        return blocks * block_size + positions % block_size

    def _to_device(self, rows: Sequence[int]) -> torch.Tensor:
        host = torch.tensor(rows)
        if self.context.device.type == "cuda":
            return host.pin_memory().to(self.context.device, non_blocking=True)
        return host


def group_by_length(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Partition rows so that padding to the longest of a group at most doubles its tokens, and ``max_tokens`` hold.

    Returns lists of row numbers; a single list is in batch order.
    """
    if max(lengths) * len(lengths) <= min(max_tokens, 2 * sum(lengths)):
        return [list(range(len(lengths)))]
    groups: list[list[int]] = []
    tokens = 0
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = lengths[row]
        padded = length * (len(groups[-1]) + 1) if groups else 0
        if not groups or padded > max_tokens or padded > 2 * (tokens + length):
            groups.append([])
            tokens = 0
        groups[-1].append(row)
        tokens += length
    return groups


@hookimpl
def nanoserve_attention(register) -> None:
    register(
        AttentionSpec(
            name="sdpa",
            summary="torch scaled_dot_product_attention over gathered K/V: every format, dtype, head size and device",
            capabilities=Capabilities(
                phases=frozenset({"prefill", "decode"}), dtypes=frozenset({"float32", "float16", "bfloat16"})
            ),
            config=SDPAConfig,
            factory=SDPABackend,
        )
    )
