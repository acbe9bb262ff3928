"""Decode backend ``paged_v2_split``: ``paged_v2`` over pieces of the batch (FlashDecoding's split-K).

The device cuts the batch once per step (``WorkList``), so one CUDA graph serves every context: a small batch into even
shares, one per program; a batch that fills the GPU in whole waves into sequences, of which only overlong ones are cut,
longest first (``PagedV2SplitBackend.launch``). A context that stays in one piece writes its output directly; of a cut
one, the piece that ends last merges all (found by a counter), or a second kernel does, where pieces are many. The
portable default: any GPU from sm_80, and the interpreter.

Floating caches: tiles of 64 tokens, four warps. INT8: one warp per program on packed words (``attend_group_words``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanoserve.contracts.attention import AttentionBackend, AttentionContext, AttentionSpec, DecodeMetadata
from nanoserve.contracts.capabilities import Capabilities
from nanoserve.contracts.kvcache import LayerCache
from nanoserve.hookspecs import hookimpl
from nanoserve_plugins.attention._kernels import (
    GPU,
    ITEM,
    SHARE,
    WorkList,
    attend_group,
    attend_group_words,
    even_programs,
    merge_pieces,
    qk_scale,
    store_heads,
)


@dataclass(frozen=True)
class PagedV2SplitConfig:
    """num_splits: most pieces that a lone context is cut into; None: as many as fill the GPU."""

    num_splits: int | None = None

    def __post_init__(self) -> None:
        if self.num_splits is not None and self.num_splits < 1:
            raise ValueError(f"num_splits must be at least 1, not {self.num_splits}")


class Launch(NamedTuple):
    """programs: per KV head. by_piece: each does one piece, and there are as many more as sequences; else a share.
    fused_merge: they merge what they have cut, else a second kernel does. max_registers: per thread; None: no limit."""

    programs: int
    by_piece: bool
    fused_merge: bool
    num_stages: int
    max_registers: int | None = None


class PagedV2SplitBackend(AttentionBackend):
    def __init__(self, context: AttentionContext, options: PagedV2SplitConfig) -> None:
        super().__init__(context, options)
        gpu = GPU.of(context.device)
        self.num_splits = options.num_splits
        self.multiprocessors = gpu.multiprocessors if gpu else 1
        self.qk_scale = qk_scale(context)
        self.pdl = gpu is not None and gpu.pdl
        self.asm = gpu is not None and context.dtype != torch.float32
        self.quantized = context.kv.name == "int8"
        if self.quantized:
            self.head_dim_padded = max(64, triton.next_power_of_2(context.head_dim))
            self.tile, self.num_warps = 16, 1
        else:
            self.head_dim_padded = triton.next_power_of_2(context.head_dim)
            self.tile, self.num_warps = min(64, 16384 // (self.head_dim_padded * context.dtype.itemsize)), 4
        self.work = WorkList(context, self.head_dim_padded, self.programs(22 if self.quantized else 4))

    def programs(self, per_multiprocessor: int) -> int:
        """Programs per KV head; ``num_splits`` overrides what fills the GPU."""
        return self.num_splits or max(1, per_multiprocessor * self.multiprocessors // self.context.num_kv_heads)

    def launch(self, num_seqs: int) -> Launch:
        """INT8: a program per piece from 16 sequences on. Else where sequences fill whole waves of 4 or 3 programs a
        multiprocessor, wasting at most a sixth; with these stages and registers as many fit (head size 128, sm_90)."""
        narrow = self.context.head_dim <= 128
        if self.quantized:
            registers = 176 if narrow else None
            if num_seqs >= 16:
                return Launch(self.programs(22 if num_seqs >= 128 else 11), True, True, 1, registers)
            return Launch(even_programs(self.programs(11), num_seqs), False, False, 1, registers)
        four = Launch(self.programs(4), True, True, num_stages=2)
        three = Launch(self.programs(3), True, True, num_stages=3, max_registers=168 if narrow else None)
        slots, best = min((triton.cdiv(num_seqs, wave.programs) * wave.programs, wave) for wave in (four, three))
        if slots <= 1.2 * num_seqs:
            return best
        return Launch(even_programs(self.programs(2), num_seqs), False, num_seqs >= 8, num_stages=3)

    def plan_decode(self, meta: DecodeMetadata) -> Launch:
        launch = self.launch(meta.num_seqs)
        (self.work.plan_pieces if launch.by_piece else self.work.plan)(meta, launch.programs, self.tile)
        return launch

    def decode(self, q: torch.Tensor, layer: LayerCache, meta: DecodeMetadata, out: torch.Tensor) -> None:
        context, work = self.context, self.work
        programs, by_piece, fused_merge, num_stages, max_registers = meta.plan
        k, v = (x.view(torch.int32) if self.quantized else x for x in (layer.k, layer.v))
        paged_v2_split_kernel[(context.num_kv_heads, programs + meta.num_seqs if by_piece else programs)](
            q,
            k,
            v,
            layer.k_scale,
            layer.v_scale,
            meta.block_table,
            work.items,
            work.shares,
            work.partial,
            work.lse,
            work.arrived,
            out,
            self.qk_scale,
            meta.block_table.stride(0),
            *q.stride()[:2],
            *out.stride()[:2],
            KV_HEADS=context.num_kv_heads,
            GROUP=context.num_q_heads // context.num_kv_heads,
            HEAD_DIM=context.head_dim,
            BLOCK_SIZE=context.block_size,
            QUANTIZED=self.quantized,
            ASM=self.asm,
            PDL=self.pdl,
            BY_PIECE=by_piece,
            FUSED_MERGE=fused_merge,
            M=8 if self.quantized and context.num_q_heads <= 8 * context.num_kv_heads else 16,
            D=self.head_dim_padded,
            N=self.tile,
            num_warps=self.num_warps,
            num_stages=num_stages,
            maxnreg=max_registers,
            launch_pdl=self.pdl,
        )
        if not fused_merge:
            work.merge(out, meta.num_seqs, programs, self.pdl)


@triton.jit(do_not_specialize=["table_stride"])
def paged_v2_split_kernel(
    q,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    block_table,
    items,
    shares,
    partial,
    lse,
    arrived,
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
    ASM: tl.constexpr,
    PDL: tl.constexpr,
    BY_PIECE: tl.constexpr,
    FUSED_MERGE: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
):
    """q, out ``[num_seqs, q_heads, head_dim]``; grid (kv_heads, programs). Scratch as ``WorkList`` describes it.

    BY_PIECE: a program does one item (``WorkList.plan_pieces``), else a share.
    QUANTIZED: the caches are int32 words. Their row of D / 4 words pads HEAD_DIM / 4 to 16 or more.
    """
    kv_head = tl.program_id(0)
    program = tl.program_id(1)
    if BY_PIECE:
        begin = program
        stop = program + 1
        record = items + program * ITEM
    else:
        begin = tl.load(shares + program * SHARE)
        stop = tl.load(shares + program * SHARE + 1)
        record = shares + program * SHARE + 2
    seq = tl.load(record)
    start = tl.load(record + 1)
    end = tl.load(record + 2)
    pieces = tl.load(record + 4)
    if PDL:
        if BY_PIECE or not FUSED_MERGE:  # the next kernel starts at once
            gdc_launch_dependents()
        gdc_wait()
    if BY_PIECE:  # noqa: SIM102 (a constant)
        if start == end:
            return
    cut = False
    for item in range(begin, stop):
        start = start // N * N  # as it is; now the compiler knows that tokens of a page stay side by side
        q_group = q + seq.to(tl.int64) * q_stride_token + kv_head * GROUP * q_stride_head
        out_group = out + seq.to(tl.int64) * out_stride_token + kv_head * GROUP * out_stride_head
        block_row = block_table + seq.to(tl.int64) * table_stride
        if QUANTIZED:
            acc, maximum, normaliser = attend_group_words(
                q_group,
                q_stride_head,
                k_cache,
                v_cache,
                k_scale,
                v_scale,
                block_row,
                kv_head,
                start,
                end,
                qk_scale,
                KV_HEADS,
                GROUP,
                HEAD_DIM,
                BLOCK_SIZE,
                ASM,
                M,
                D // 4,
                N,
            )
        else:
            acc, maximum, normaliser = attend_group(
                q_group,
                q_stride_head,
                k_cache,
                v_cache,
                k_scale,
                v_scale,
                block_row,
                kv_head,
                start,
                end,
                qk_scale,
                KV_HEADS,
                GROUP,
                HEAD_DIM,
                BLOCK_SIZE,
                False,
                M,
                D,
                N,
            )
        acc = acc / normaliser[:, None]
        if pieces == 1:
            store_heads(out_group, out_stride_head, acc, GROUP, HEAD_DIM)
        else:
            head = tl.arange(0, M)
            row = (item * KV_HEADS + kv_head) * GROUP
            store_heads(partial + row.to(tl.int64) * D, D, acc, GROUP, D)
            tl.store(lse + row + head, maximum + tl.log2(normaliser), mask=head < GROUP)
            cut = True
        if not BY_PIECE:
            seq = tl.load(items + (item + 1) * ITEM)
            start = tl.load(items + (item + 1) * ITEM + 1)
            end = tl.load(items + (item + 1) * ITEM + 2)
            pieces = tl.load(items + (item + 1) * ITEM + 4)

    if FUSED_MERGE:  # noqa: SIM102 (a constant)
        if cut:
            tl.debug_barrier()  # every thread's parts are written before one of them announces them
            for item in range(begin, stop, tl.maximum(stop - 1 - begin, 1)):  # the first and the last
                seq = tl.load(items + item * ITEM)
                first = tl.load(items + item * ITEM + 3)
                pieces = tl.load(items + item * ITEM + 4)
                if pieces > 1:
                    counter = arrived + seq * KV_HEADS + kv_head
                    if tl.atomic_add(counter, 1, sem="acq_rel") == pieces - 1:
                        tl.store(counter, 0)
                        out_group = out + seq.to(tl.int64) * out_stride_token + kv_head * GROUP * out_stride_head
                        dim = tl.arange(0, D)
                        for g in range(GROUP):
                            row = (first * KV_HEADS + kv_head) * GROUP + g
                            merged = merge_pieces(partial, lse, row, pieces, KV_HEADS * GROUP, dim, D, P=8)
                            store_heads(out_group + g * out_stride_head, 0, merged[None, :], 1, HEAD_DIM)


@hookimpl
def nanoserve_attention(register) -> None:
    register(
        AttentionSpec(
            name="paged_v2_split",
            summary="Triton decode, long contexts cut into pieces by the device: the portable default",
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
            config=PagedV2SplitConfig,
            factory=PagedV2SplitBackend,
        )
    )
