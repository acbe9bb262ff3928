"""Decode backend ``int8_fused``: ``paged_v1`` over the INT8 cache, dequantised in registers.

No floating copy of the cache exists, which is all that it gains: a K/V tile still serves one query head.
``paged_v2_split`` and ``hopper_decode`` are the fast readers of the INT8 cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanoserve.contracts.attention import AttentionBackend, AttentionContext, AttentionSpec, DecodeMetadata
from nanoserve.contracts.capabilities import Capabilities
from nanoserve.contracts.kvcache import LayerCache
from nanoserve.hookspecs import hookimpl
from nanoserve_plugins.attention._kernels import cache_rows, qk_scale


@dataclass(frozen=True)
class Int8FusedConfig:
    """block_n: tokens per tile, a power of two."""

    block_n: int = 32

    def __post_init__(self) -> None:
        if self.block_n < 1 or self.block_n & (self.block_n - 1):
            raise ValueError(f"block_n must be a power of two, not {self.block_n}")


class Int8FusedBackend(AttentionBackend):
    def __init__(self, context: AttentionContext, options: Int8FusedConfig) -> None:
        super().__init__(context, options)
        self.qk_scale = qk_scale(context)

    def decode(self, q: torch.Tensor, layer: LayerCache, meta: DecodeMetadata, out: torch.Tensor) -> None:
        context = self.context
        int8_fused_kernel[(context.num_q_heads, meta.num_seqs)](
            q,
            layer.k,
            layer.v,
            layer.k_scale,
            layer.v_scale,
            meta.block_table,
            meta.context_lens,
            out,
            self.qk_scale,
            meta.block_table.stride(0),
            *q.stride()[:2],
            *out.stride()[:2],
            KV_HEADS=context.num_kv_heads,
            GROUP=context.num_q_heads // context.num_kv_heads,
            HEAD_DIM=context.head_dim,
            BLOCK_SIZE=context.block_size,
            D=triton.next_power_of_2(context.head_dim),
            N=self.options.block_n,
            num_warps=4,
        )


@triton.jit(do_not_specialize=["table_stride"])
def int8_fused_kernel(
    q,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    block_table,
    context_lens,
    out,
    qk_scale,
    table_stride,
    q_stride_token,
    q_stride_head,
    out_stride_token,
    out_stride_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
):
    """q, out ``[num_seqs, q_heads, head_dim]``; grid (q_heads, num_seqs). Row i of K has scale i."""
    q_head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    kv_head = q_head // GROUP
    context_len = tl.load(context_lens + seq)
    if context_len == 0:
        return
    block_row = block_table + seq * table_stride
    dim = tl.arange(0, D)
    in_head = dim < HEAD_DIM
    query = tl.load(q + seq * q_stride_token + q_head * q_stride_head + dim, mask=in_head, other=0.0).to(tl.float32)
    maximum = float("-inf")
    normaliser = 0.0
    acc = tl.zeros([D], tl.float32)
    for start in range(0, context_len, N):
        token = start + tl.arange(0, N)
        live = token < context_len
        block = tl.load(block_row + token // BLOCK_SIZE, mask=live, other=0)
        row = cache_rows(block, token, kv_head, KV_HEADS, BLOCK_SIZE)
        offset = row[:, None] * HEAD_DIM + dim[None, :]
        mask = live[:, None] & in_head[None, :]
        k = tl.load(k_cache + offset, mask=mask, other=0).to(tl.float32)
        k *= tl.load(k_scale + row, mask=live, other=0.0).to(tl.float32)[:, None]
        score = tl.where(live, tl.sum(k * query[None, :], 1) * qk_scale, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(score, 0))
        correction = tl.exp2(maximum - new_maximum)
        p = tl.exp2(score - new_maximum)
        maximum = new_maximum
        normaliser = normaliser * correction + tl.sum(p, 0)
        v = tl.load(v_cache + offset, mask=mask, other=0).to(tl.float32)
        v *= tl.load(v_scale + row, mask=live, other=0.0).to(tl.float32)[:, None]
        acc = acc * correction + tl.sum(p[:, None] * v, 0)
    target = out + seq * out_stride_token + q_head * out_stride_head + dim
    tl.store(target, (acc / normaliser).to(out.dtype.element_ty), mask=in_head)


@hookimpl
def nanoserve_attention(register) -> None:
    register(
        AttentionSpec(
            name="int8_fused",
            summary="paged_v1 over the INT8 cache, dequantised in registers",
            capabilities=Capabilities(
                phases=frozenset({"decode"}),
                kv_formats=frozenset({"int8"}),
                dtypes=frozenset({"float32", "float16", "bfloat16"}),
                head_dims=frozenset({32, 64, 96, 128, 256}),
                devices=frozenset({"cuda"}),
                interpretable=True,
                cuda_graph=True,
                requires=("triton",),
            ),
            config=Int8FusedConfig,
            factory=Int8FusedBackend,
        )
    )
