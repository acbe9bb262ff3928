"""The Triton path: one program per query token and head walks the sinks, then the window, of a ``bf16`` cache.

One kernel serves both phases, since a query is a position in a row of the block table. No tensor cores, and query
heads of a group read the same keys again: short rather than fast.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanoserve.contracts.attention import AttentionBackend, DecodeMetadata, PrefillMetadata
from nanoserve.contracts.kvcache import LayerCache

#: exp2 is what the hardware has.
LOG2_E = 1.4426950408889634


class TritonWindow(AttentionBackend):
    def plan_decode(self, meta: DecodeMetadata) -> tuple[torch.Tensor, torch.Tensor]:
        """Row of the block table and position of every query."""
        rows = torch.arange(meta.num_seqs, dtype=torch.int32, device=self.context.device)
        return rows, meta.context_lens - 1

    def prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LayerCache,
        meta: PrefillMetadata,
        out: torch.Tensor,
    ) -> None:
        self._launch(q, layer, meta.block_table, meta.seq_ids, meta.query_positions, out)

    def decode(self, q: torch.Tensor, layer: LayerCache, meta: DecodeMetadata, out: torch.Tensor) -> None:
        rows, positions = meta.plan
        self._launch(q, layer, meta.block_table, rows, positions, out)

    def _launch(
        self,
        q: torch.Tensor,
        layer: LayerCache,
        block_table: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        context = self.context
        window_kernel[(q.shape[0], context.num_q_heads)](
            q,
            layer.k,
            layer.v,
            block_table,
            rows,
            positions,
            out,
            context.scale * LOG2_E,
            block_table.stride(0),
            *q.stride()[:2],
            *out.stride()[:2],
            KV_HEADS=context.num_kv_heads,
            GROUP=context.num_q_heads // context.num_kv_heads,
            HEAD_DIM=context.head_dim,
            BLOCK_SIZE=context.block_size,
            WINDOW=self.options.window,
            SINKS=self.options.sinks,
            D=triton.next_power_of_2(context.head_dim),
            N=32,
        )


@triton.jit(do_not_specialize=["table_stride"])
def window_kernel(
    q,
    k_cache,
    v_cache,
    block_table,
    rows,
    positions,
    out,
    scale,
    table_stride,
    q_stride_token,
    q_stride_head,
    out_stride_token,
    out_stride_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
):
    """q, out ``[tokens, q_heads, head_dim]``; grid (tokens, q_heads). rows, positions ``[tokens]``: where a query is.

    A padding row has position -1 and is skipped. D pads head_dim to a power of two; N tokens per tile.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions + token)
    if position < 0:
        return
    table = block_table + tl.load(rows + token).to(tl.int64) * table_stride
    low = tl.maximum(position - WINDOW + 1, 0)
    num_sinks = tl.minimum(low, SINKS)
    num_keys = num_sinks + position + 1 - low

    dim = tl.arange(0, D)
    in_head = dim < HEAD_DIM
    query = tl.load(q + token * q_stride_token + head * q_stride_head + dim, mask=in_head, other=0.0).to(tl.float32)
    maximum = float("-inf")
    normaliser = 0.0
    acc = tl.zeros([D], tl.float32)
    for start in range(0, num_keys, N):
        index = start + tl.arange(0, N)  # of the keys that are seen: sinks, then window
        live = index < num_keys
        key = tl.where(index < num_sinks, index, index - num_sinks + low)
        block = tl.load(table + key // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        row = (block * KV_HEADS + head // GROUP) * BLOCK_SIZE + key % BLOCK_SIZE
        offset = row[:, None] * HEAD_DIM + dim[None, :]
        mask = live[:, None] & in_head[None, :]
        k = tl.load(k_cache + offset, mask=mask, other=0.0).to(tl.float32)
        score = tl.where(live, tl.sum(k * query[None, :], 1) * scale, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(score, 0))
        correction = tl.exp2(maximum - new_maximum)
        p = tl.exp2(score - new_maximum)
        maximum = new_maximum
        normaliser = normaliser * correction + tl.sum(p, 0)
        v = tl.load(v_cache + offset, mask=mask, other=0.0).to(tl.float32)
        acc = acc * correction + tl.sum(p[:, None] * v, 0)
    target = out + token * out_stride_token + head * out_stride_head + dim
    tl.store(target, (acc / normaliser).to(out.dtype.element_ty), mask=in_head)
