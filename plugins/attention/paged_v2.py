"""Decode backend ``paged_v2``: one program per (sequence, KV head), whose tensor-core tiles serve the GQA group.

It beats ``paged_v1`` by reading K and V once per group instead of once per query head. A lone long context still
occupies only kv_heads programs: ``paged_v2_split`` cuts contexts into pieces and is never slower.
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
from nanoserve_plugins.attention._kernels import attend_group, qk_scale, store_heads


@dataclass(frozen=True)
class PagedV2Config:
    """block_n: tokens per tile, a power of two from 16; None: as many as make 16 KiB of K, at most 64."""

    block_n: int | None = None

    def __post_init__(self) -> None:
        if self.block_n is not None and (self.block_n < 16 or self.block_n & (self.block_n - 1)):
            raise ValueError(f"block_n must be a power of two from 16, not {self.block_n}")


class PagedV2Backend(AttentionBackend):
    def __init__(self, context: AttentionContext, options: PagedV2Config) -> None:
        super().__init__(context, options)
        self.qk_scale = qk_scale(context)
        self.head_dim_padded = triton.next_power_of_2(context.head_dim)
        self.block_n = options.block_n or min(64, 16384 // (self.head_dim_padded * context.dtype.itemsize))

    def decode(self, q: torch.Tensor, layer: LayerCache, meta: DecodeMetadata, out: torch.Tensor) -> None:
        context = self.context
        paged_v2_kernel[(context.num_kv_heads, meta.num_seqs)](
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
            QUANTIZED=layer.k_scale is not None,
            M=16,
            D=self.head_dim_padded,
            N=self.block_n,
            num_warps=4,
            num_stages=3,
        )


@triton.jit(do_not_specialize=["table_stride"])
def paged_v2_kernel(
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
    QUANTIZED: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
):
    """q, out ``[num_seqs, q_heads, head_dim]``; grid (kv_heads, num_seqs), the heads of a sequence side by side."""
    kv_head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    context_len = tl.load(context_lens + seq)
    if context_len == 0:
        return
    acc, _, normaliser = attend_group(
        q + seq * q_stride_token + kv_head * GROUP * q_stride_head,
        q_stride_head,
        k_cache,
        v_cache,
        k_scale,
        v_scale,
        block_table + seq * table_stride,
        kv_head,
        0,
        context_len,
        qk_scale,
        KV_HEADS,
        GROUP,
        HEAD_DIM,
        BLOCK_SIZE,
        QUANTIZED,
        M,
        D,
        N,
    )
    store_heads(
        out + seq * out_stride_token + kv_head * GROUP * out_stride_head,
        out_stride_head,
        acc / normaliser[:, None],
        GROUP,
        HEAD_DIM,
    )


@hookimpl
def nanoserve_attention(register) -> None:
    register(
        AttentionSpec(
            name="paged_v2",
            summary="Triton decode, one program per sequence and KV head, GQA group on the tensor cores",
            capabilities=Capabilities(
                phases=frozenset({"decode"}),
                kv_formats=frozenset({"bf16", "int8"}),
                dtypes=frozenset({"float32", "float16", "bfloat16"}),
                head_dims=frozenset({32, 64, 96, 128, 256}),
                max_gqa_ratio=16,
                devices=frozenset({"cuda"}),
                interpretable=True,
                min_compute_capability=(8, 0),
                cuda_graph=True,
                requires=("triton",),
            ),
            config=PagedV2Config,
            factory=PagedV2Backend,
        )
    )
