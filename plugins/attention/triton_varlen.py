"""Attention backend ``triton_varlen``: the packed varlen prefill kernel without query tiles or tensor cores.

One program per (query token, query head). It finds its sequence and position through two index arrays, so one launch
covers a ragged batch and no scalar is read back; the loop ends at ``position + 1``, which is the causal mask. K and V
come from the paged cache, so prefix hits and chunks need nothing else. Best for very short prompts on small GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanoserve.contracts.attention import AttentionBackend, AttentionContext, AttentionSpec, PrefillMetadata
from nanoserve.contracts.capabilities import Capabilities
from nanoserve.contracts.errors import ConfigError
from nanoserve.contracts.kvcache import LayerCache
from nanoserve.hookspecs import hookimpl
from nanoserve_plugins.attention._kernels import qk_scale


@dataclass(frozen=True)
class TritonVarlenConfig:
    """block_n: keys that a program reads at a time, a power of two; num_warps: warps of a program."""

    block_n: int = 32
    num_warps: int = 4


@triton.jit(do_not_specialize=["table_stride"])
def varlen_kernel(
    q,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    out,
    seq_ids,
    query_positions,
    block_table,
    table_stride,
    q_token_stride,
    q_head_stride,
    scale,  # softmax scale × log2 e
    GROUP: tl.constexpr,  # query heads per KV head
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,  # tokens per cache block
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QUANTIZED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    table = block_table + tl.load(seq_ids + token).to(tl.int64) * table_stride
    context_len = tl.load(query_positions + token) + 1

    dim = tl.arange(0, BLOCK_D)
    in_head = dim < HEAD_DIM
    query = tl.load(q + token * q_token_stride + head * q_head_stride + dim, mask=in_head, other=0.0).to(tl.float32)
    maximum = -float("inf")
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, context_len, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        visible = key < context_len
        page = tl.load(table + key // PAGE, mask=visible, other=0).to(tl.int64)
        row = (page * KV_HEADS + head // GROUP) * PAGE + key % PAGE
        element = row[:, None] * HEAD_DIM + dim[None, :]
        mask = visible[:, None] & in_head[None, :]
        k = tl.load(k_cache + element, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(v_cache + element, mask=mask, other=0.0).to(tl.float32)
        score = tl.sum(k * query[None, :], 1) * scale
        if QUANTIZED:
            score *= tl.load(k_scale + row, mask=visible, other=0.0).to(tl.float32)
        score = tl.where(visible, score, -float("inf"))
        new_maximum = tl.maximum(maximum, tl.max(score, 0))
        p = tl.exp2(score - new_maximum)
        decay = tl.exp2(maximum - new_maximum)
        total = total * decay + tl.sum(p, 0)
        if QUANTIZED:
            p *= tl.load(v_scale + row, mask=visible, other=0.0).to(tl.float32)
        acc = acc * decay + tl.sum(p[:, None] * v, 0)
        maximum = new_maximum

    result = (acc / total).to(out.dtype.element_ty)
    tl.store(out + (token * tl.num_programs(1) + head) * HEAD_DIM + dim, result, mask=in_head)


class TritonVarlenBackend(AttentionBackend):
    def __init__(self, context: AttentionContext, options: TritonVarlenConfig) -> None:
        super().__init__(context, options)
        if options.block_n < 1 or options.block_n & (options.block_n - 1):
            raise ConfigError(f"attention.block_n must be a power of two, not {options.block_n}")

    def prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LayerCache,
        meta: PrefillMetadata,
        out: torch.Tensor,
    ) -> None:
        context = self.context
        varlen_kernel[(meta.num_tokens, context.num_q_heads)](
            q,
            layer.k,
            layer.v,
            layer.k_scale,
            layer.v_scale,
            out,
            meta.seq_ids,
            meta.query_positions,
            meta.block_table,
            meta.block_table.stride(0),
            q.stride(0),
            q.stride(1),
            qk_scale(context),
            GROUP=context.num_q_heads // context.num_kv_heads,
            KV_HEADS=context.num_kv_heads,
            PAGE=context.block_size,
            HEAD_DIM=context.head_dim,
            BLOCK_D=triton.next_power_of_2(context.head_dim),
            BLOCK_N=self.options.block_n,
            QUANTIZED=layer.k_scale is not None,
            num_warps=self.options.num_warps,
        )


@hookimpl
def nanoserve_attention(register) -> None:
    register(
        AttentionSpec(
            name="triton_varlen",
            summary="packed prefill, one Triton program per query token and head; no tiles, no tensor cores",
            capabilities=Capabilities(
                phases=frozenset({"prefill"}),
                kv_formats=frozenset({"bf16", "int8"}),
                dtypes=frozenset({"float32", "float16", "bfloat16"}),
                devices=frozenset({"cuda"}),
                interpretable=True,
                requires=("triton",),
            ),
            config=TritonVarlenConfig,
            factory=TritonVarlenBackend,
        )
    )
