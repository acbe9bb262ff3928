"""Decode backend ``hopper_decode``: ``paged_v2_split`` written in Gluon for compute capability 9.0, bf16/fp16 and INT8.

Every warp walks tiles of 16 tokens on its own: no shared memory, no barrier before its end. A 16-byte load from the
cache already **is** a fragment of ``mma.m16n8k16``, because each lane may hold whatever elements of head_dim it likes,
as long as q (for K) and the output (for V) are permuted alike. K and Vᵀ are the left operands, Sᵀ = K qᵀ and
Oᵀ += Vᵀ Pᵀ, so that the query heads of a group fill 8 columns instead of 16 rows, and a tile is reloaded as soon as it
is used. INT8 values become fp16 by byte permutes; the bias that leaves in K is part of the accumulator's start.

The warps of a program take turns at the tiles of one work item (``WorkList``) and add up at its end, while the first
tile of the next item is on its way. The first tile of all is loaded before the kernel before has ended, which is where
the newest token of a context comes from and nothing else that is read here, except q. So K and V of all other tokens,
and the block table, must have been written before ``plan_decode``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language import debug_barrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanoserve.contracts.attention import AttentionBackend, AttentionContext, AttentionSpec, DecodeMetadata
from nanoserve.contracts.capabilities import Capabilities
from nanoserve.contracts.kvcache import LayerCache
from nanoserve.hookspecs import hookimpl
from nanoserve.ops.linear import MIN_WGMMA_TOKENS
from nanoserve_plugins.attention._kernels import GPU, ITEM, SHARE, WorkList, even_programs, qk_scale


@dataclass(frozen=True)
class HopperDecodeConfig:
    """num_splits: most pieces that a lone context is cut into; None: as many as fill the GPU."""

    num_splits: int | None = None

    def __post_init__(self) -> None:
        if self.num_splits is not None and self.num_splits < 1:
            raise ValueError(f"num_splits must be at least 1, not {self.num_splits}")


#: Up to how many sequences the next kernel may start beside this one. For more it is a product that wants most of the
#: shared memory, and this kernel would read K and V through what is left of the L1 cache.
EARLY_SEQS = MIN_WGMMA_TOKENS - 1


class HopperDecodeBackend(AttentionBackend):
    def __init__(self, context: AttentionContext, options: HopperDecodeConfig) -> None:
        super().__init__(context, options)
        gpu = GPU.of(context.device)
        if gpu is None:
            raise ValueError("hopper_decode cannot be interpreted; paged_v2_split is its portable twin")
        self.qk_scale = qk_scale(context)
        self.quantized = context.kv.name == "int8"
        # 8 warps of a multiprocessor keep 8 KiB each in flight; INT8 has half of that and needs all that fit, but for
        # one program while another kernel is to start beside it and merge.
        self.num_warps, per_multiprocessor = (2, {True: 8, False: 5}) if self.quantized else (4, {True: 2, False: 2})
        # No limit for 16 bits, lest a third program fit: where the kernel before drains, some multiprocessors would
        # get three and others one.
        self.max_registers = {True: 128, False: 168} if self.quantized else {True: None, False: None}
        self.programs = {
            fused_merge: options.num_splits or max(1, n * gpu.multiprocessors // context.num_kv_heads)
            for fused_merge, n in per_multiprocessor.items()
        }
        self.work = WorkList(context, context.head_dim, max(self.programs.values()))

    def launch(self, num_seqs: int) -> tuple[int, int, bool]:
        """Warps per program, programs per KV head, and whether these merge what they have cut: with more pieces, a
        second kernel is better."""
        fused_merge = num_seqs >= 8
        return self.num_warps, even_programs(self.programs[fused_merge], num_seqs), fused_merge

    def plan_decode(self, meta: DecodeMetadata) -> tuple[int, int, bool]:
        plan = num_warps, programs, _ = self.launch(meta.num_seqs)
        self.work.plan(meta, programs, 16 * num_warps)
        return plan

    def decode(self, q: torch.Tensor, layer: LayerCache, meta: DecodeMetadata, out: torch.Tensor) -> None:
        context, work = self.context, self.work
        num_warps, programs, fused_merge = meta.plan
        hopper_decode_kernel[(context.num_kv_heads, programs)](
            q,
            layer.k.view(torch.int32),
            layer.v.view(torch.int32),
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
            D=context.head_dim,
            BLOCK_SIZE=context.block_size,
            QUANTIZED=self.quantized,
            FUSED_MERGE=fused_merge,
            EARLY=meta.num_seqs <= EARLY_SEQS,
            num_warps=num_warps,
            maxnreg=self.max_registers[fused_merge],
            launch_pdl=True,
        )
        if not fused_merge:
            work.merge(out, meta.num_seqs, programs, pdl=True)


# -- which lane holds what --------------------------------------------------------------------------------------------
# Shapes are [warp, token or head, element or word]. In the fragments of mma.m16n8k16, lane 4·g + c holds row g (and
# g + 8) of A, column g of B, and of the product index k the values 8·b1 + 2·c + b0.


@gluon.constexpr_function
def _bits(axis, first, end):
    """Bases of the powers of two in [first, end) along an axis."""
    bases = []
    while first < end:
        bases.append([first if axis == i else 0 for i in range(3)])
        first *= 2
    return bases


@gluon.constexpr_function
def _row_layout(warps, rows, width, run):
    """K (and q): lane (g, c) holds ``run`` neighbours of row g, and c moves on by that much: c runs over d, not g."""
    return gl.DistributedLinearLayout(
        _bits(2, 1, run) + _bits(2, 4 * run, width) + _bits(1, 8, rows),
        _bits(2, run, 4 * run) + _bits(1, 1, 8),
        _bits(0, 1, warps),
        [],
        [warps, rows, width],
    )


@gluon.constexpr_function
def _value_layout(warps, width, run):
    """V: lane (g, c) holds ``run`` neighbours of tokens 2c, 2c + 1, 2c + 8, 2c + 9, and g moves on along d."""
    return gl.DistributedLinearLayout(
        _bits(2, 1, run) + _bits(2, 8 * run, width) + [[0, 1, 0], [0, 8, 0]],
        _bits(1, 2, 8) + _bits(2, run, 8 * run),
        _bits(0, 1, warps),
        [],
        [warps, 16, width],
    )


@gluon.constexpr_function
def _each_layout(warps):
    """``[warps, 8]``: every thread holds all warps of one column."""
    return gl.DistributedLinearLayout(
        [[1 << i, 0] for i in range(warps.bit_length() - 1)],
        [[0, 1], [0, 2], [0, 4], [0, 0], [0, 0]],
        [[0, 0]] * (warps.bit_length() - 1),
        [],
        [warps, 8],
    )


@gluon.constexpr_function
def _out_layout(warps, d):
    """``[8, d]``: a thread holds 4 neighbours along d, a warp a whole row (or two)."""
    columns = [[0, 1 << i] for i in range(2, d.bit_length() - 1)]
    heads = [[1, 0], [2, 0], [4, 0]]
    lane = (columns + heads)[:5]
    heads = heads[5 - len(columns) :]
    bits = warps.bit_length() - 1
    warp = (heads + [[0, 0]] * 3)[:bits]
    return gl.DistributedLinearLayout([[0, 1], [0, 2]] + heads[bits:], lane, warp, [], [8, d])


@gluon.constexpr_function
def _sum_layout(warps, d, x):
    """``[warps, d, 8]``, d in the order of ``_value_fragment``: a thread has all warps' values of ``_out_layout``."""
    run = d // x // 8  # d is (x, g, e) with 8 g and ``run`` e; its row is (x, e, g)

    def row(dim):
        return dim // (8 * run) * (8 * run) + dim % run * 8 + dim // run % 8

    columns = [[0, row(1 << i), 0] for i in range(2, d.bit_length() - 1)]
    heads = [[0, 0, 1], [0, 0, 2], [0, 0, 4]]
    lane = (columns + heads)[:5]
    heads = heads[5 - len(columns) :]
    bits = warps.bit_length() - 1
    warp = (heads + [[0, 0, 0]] * 3)[:bits]
    each = [[1 << i, 0, 0] for i in range(bits)]
    return gl.DistributedLinearLayout(
        [[0, row(1), 0], [0, row(2), 0]] + heads[bits:] + each, lane, warp, [], [warps, d, 8]
    )


# -- loads ------------------------------------------------------------------------------------------------------------


@gluon.jit
def _position(first, page, last, L: gl.constexpr, BLOCK_SIZE: gl.constexpr, KV_HEADS: gl.constexpr, kv_head):
    """Of the tiles that start at tokens ``first`` ``[warps]`` in blocks ``page``: the block's first row (int64) and
    each token's row in it, both broadcastable to ``[warps, 16]`` in layout L.

    Tokens past ``last`` read its row again: no stale row is ever touched, and nothing needs a mask.
    """
    first = gl.convert_layout(first, gl.SliceLayout(1, L))
    page = gl.convert_layout(page, gl.SliceLayout(1, L))
    block_row = (page.to(gl.int64) * KV_HEADS + kv_head) * BLOCK_SIZE
    token = gl.expand_dims(first, 1) + gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, L)), 0)
    in_block = gl.minimum(token, last) - gl.expand_dims(gl.minimum(first, last) // BLOCK_SIZE * BLOCK_SIZE, 1)
    return gl.expand_dims(block_row, 1), in_block


@gluon.jit
def _load_tile(
    cache,
    first,
    page,
    last,
    kv_head,
    L: gl.constexpr,
    WIDTH: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    KV_HEADS: gl.constexpr,
):
    """Words ``[warps, 16, WIDTH]`` of K or V, which are read once: they need not push other data out of the L2."""
    block_row, in_block = _position(first, page, last, gl.SliceLayout(2, L), BLOCK_SIZE, KV_HEADS, kv_head)
    word = gl.expand_dims(gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, L))), 0), 1)
    address = cache + gl.expand_dims(block_row * WIDTH, 2) + (gl.expand_dims(in_block, 2) * WIDTH + word)
    return gl.load(address, eviction_policy="evict_first")


@gluon.jit
def _load_query(
    q,
    seq,
    q_stride_token,
    q_stride_head,
    kv_head,
    W: gl.constexpr,
    D: gl.constexpr,
    GROUP: gl.constexpr,
    QUANTIZED: gl.constexpr,
    Q: gl.constexpr,
    B: gl.constexpr,
):
    """The group's heads of one token as B ``[W, D, 8]``; heads past GROUP are 0."""
    head = gl.expand_dims(gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, Q))), 0), 2)
    dim = gl.expand_dims(gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(1, Q))), 0), 1)
    warp = gl.expand_dims(gl.expand_dims(gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, Q))), 1), 2)
    q_group = q + seq.to(gl.int64) * q_stride_token + kv_head * GROUP * q_stride_head
    query = gl.load(q_group + head * q_stride_head + (dim + 0 * warp), mask=head + 0 * (dim + warp) < GROUP, other=0.0)
    return _query_fragment(query, W, D, QUANTIZED, B)


@gluon.jit
def _load_scales(scales, first, page, last, kv_head, L: gl.constexpr, BLOCK_SIZE: gl.constexpr, KV_HEADS: gl.constexpr):
    """fp32 ``[warps, 16]``."""
    block_row, in_block = _position(first, page, last, L, BLOCK_SIZE, KV_HEADS, kv_head)
    return gl.load(scales + block_row + in_block).to(gl.float32)


@gluon.jit
def _advance(items, item, stop, seq, start, end, STEP: gl.constexpr):
    """From the tile at ``start`` to the next of the item, or of the next item; after the last item, past its end."""
    start += STEP
    if (start >= end) & (item + 1 < stop):
        item += 1
        seq = gl.load(items + item * ITEM)
        start = gl.load(items + item * ITEM + 1)
        end = gl.load(items + item * ITEM + 2)
    return item, seq, start, end


@gluon.jit
def _load_page(block_table, seq, table_stride, first, end, BLOCK_SIZE: gl.constexpr):
    """The blocks in which tiles begin. Past the end: the last one."""
    return gl.load(block_table + seq.to(gl.int64) * table_stride + gl.minimum(first, end - 1) // BLOCK_SIZE)


# -- words to fragments -----------------------------------------------------------------------------------------------

UNPACK_16 = gl.constexpr("mov.b32 {$0, $1}, $2;")

#: int8 ^ 0x80 under the exponent byte 0x64 is the fp16 number 1152 + value: three instructions for four values.
UNPACK_8_BIASED = gl.constexpr("""{
    .reg .b32 biased, low, high;
    xor.b32 biased, $4, 0x80808080;
    prmt.b32 low, biased, 0x64646464, 0x4140;
    prmt.b32 high, biased, 0x64646464, 0x4342;
    mov.b32 {$0, $1}, low;
    mov.b32 {$2, $3}, high;
}""")

UNPACK_8 = gl.constexpr("""{
    .reg .b32 biased, low, high, bias;
    xor.b32 biased, $4, 0x80808080;
    mov.b32 bias, 0x64806480;
    prmt.b32 low, biased, 0x64646464, 0x4140;
    prmt.b32 high, biased, 0x64646464, 0x4342;
    sub.f16x2 low, low, bias;
    sub.f16x2 high, high, bias;
    mov.b32 {$0, $1}, low;
    mov.b32 {$2, $3}, high;
}""")


@gluon.jit
def _unpack_16(words, dtype: gl.constexpr):
    """``[…]`` → ``[…, b0]``; pairs stay in the register they were loaded into."""
    low, high = gl.inline_asm_elementwise(
        UNPACK_16, "=h,=h,r", [words], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    return gl.join(low, high).to(dtype, bitcast=True)


@gluon.jit
def _unpack_8(words, ASM: gl.constexpr):
    """``[…]`` → fp16 ``[…, b0, b1]``, byte 2·b1 + b0."""
    a, b, c, d = gl.inline_asm_elementwise(ASM, "=h,=h,=h,=h,r", [words], dtype=(gl.float16,) * 4, is_pure=True, pack=1)
    return gl.join(gl.join(a, b), gl.join(c, d))


@gluon.jit
def _query_fragment(q, W: gl.constexpr, D: gl.constexpr, QUANTIZED: gl.constexpr, LAYOUT: gl.constexpr):
    """q ``[W, 8, D]`` → B ``[W, D, 8]``, D in the order of ``_key_fragment``."""
    if QUANTIZED:
        bits = gl.reshape(q.to(gl.float16), [W, 8, D // 64, 4, 4, 2, 2])
    else:
        bits = gl.reshape(q, [W, 8, D // 32, 4, 2, 2, 2])
    q = gl.reshape(gl.permute(bits, (0, 1, 2, 4, 5, 3, 6)), [W, 8, D])
    return gl.convert_layout(gl.permute(q, (0, 2, 1)), LAYOUT)


@gluon.jit
def _key_fragment(
    words, W: gl.constexpr, D: gl.constexpr, dtype: gl.constexpr, QUANTIZED: gl.constexpr, LAYOUT: gl.constexpr
):
    """K ``[W, 16, words]`` → A ``[W, 16, D]``; INT8 values come out 1152 too large.

    A lane's run along d is (u, c, …, b1, b0), and the product index must be (u, …, b1, c, b0).
    """
    if QUANTIZED:
        k = gl.reshape(_unpack_8(words, UNPACK_8_BIASED), [W, 16, D // 64, 4, 4, 2, 2])
        k = gl.permute(k, (0, 1, 2, 4, 6, 3, 5))
    else:
        k = gl.permute(gl.reshape(_unpack_16(words, dtype), [W, 16, D // 32, 4, 2, 2, 2]), (0, 1, 2, 4, 5, 3, 6))
    return gl.convert_layout(gl.reshape(k, [W, 16, D]), LAYOUT)


@gluon.jit
def _value_fragment(
    words, W: gl.constexpr, D: gl.constexpr, dtype: gl.constexpr, QUANTIZED: gl.constexpr, LAYOUT: gl.constexpr
):
    """V ``[W, 16, words]`` → A ``[W, D, 16]``; d is (x, g, e) and becomes row (x, e, g)."""
    if QUANTIZED:
        v = gl.reshape(_unpack_8(words, UNPACK_8), [W, 16, 8, D // 32, 2, 2])
        v = gl.permute(v, (0, 3, 5, 4, 2, 1))
    else:
        v = gl.permute(gl.reshape(_unpack_16(words, dtype), [W, 16, D // 64, 8, 8]), (0, 2, 4, 3, 1))
    return gl.convert_layout(gl.reshape(v, [W, D, 16]), LAYOUT)


# -- the kernel -------------------------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["table_stride"])
def hopper_decode_kernel(
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
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    QUANTIZED: gl.constexpr,
    FUSED_MERGE: gl.constexpr,
    EARLY: gl.constexpr,
):
    """q, out ``[num_seqs, q_heads, D]``; caches as int32 words; grid (kv_heads, programs); scratch: ``WorkList``."""
    W: gl.constexpr = gl.num_warps()
    STEP: gl.constexpr = 16 * W
    WORDS: gl.constexpr = D // 4 if QUANTIZED else D // 2
    dtype: gl.constexpr = gl.float16 if QUANTIZED else q.dtype.element_ty
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    Q: gl.constexpr = _row_layout(W, 8, D, 16 if QUANTIZED else 8)
    K: gl.constexpr = _row_layout(W, 16, WORDS, 4)
    V: gl.constexpr = _value_layout(W, WORDS, min(4, WORDS // 8))
    X: gl.constexpr = 1 if QUANTIZED else D // 64
    SUM: gl.constexpr = _sum_layout(W, D, X)
    OUT: gl.constexpr = _out_layout(W, D)
    EACH: gl.constexpr = _each_layout(W)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 4], [128 // D, D // 4], [W, 1], [1, 0])
    TOKENS: gl.constexpr = gl.SliceLayout(2, MMA)
    WARPS: gl.constexpr = gl.SliceLayout(1, TOKENS)

    kv_head = gl.program_id(0)
    program = gl.program_id(1)
    if EARLY:
        gdc_launch_dependents()
    share = shares + program * SHARE
    item = gl.load(share)
    stop = gl.load(share + 1)
    seq = gl.load(share + 2)
    start = gl.load(share + 3)
    end = gl.load(share + 4)
    is_last_piece = gl.load(share + 5) + gl.load(share + 6) == item + 1
    steps = gl.load(share + 7)
    if item == stop:  # idle: it leaves, which makes room for the next kernel's programs
        if program == 0:  # but for this one, so that the launch does not end before the one ahead of it
            gdc_wait()
        return

    # Older than the kernel before: the plan (see ``WorkList.plan``), the block table, all tokens but the newest.
    warp = 16 * gl.arange(0, W, WARPS)
    token = gl.expand_dims(warp, 1) + gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, TOKENS)), 0)
    left = end - start
    first, last = start + warp, end - 1
    page = _load_page(block_table, seq, table_stride, first, end, BLOCK_SIZE)
    k = _load_tile(k_cache, first, page, last, kv_head, K, WORDS, BLOCK_SIZE, KV_HEADS)
    v = _load_tile(v_cache, first, page, last, kv_head, V, WORDS, BLOCK_SIZE, KV_HEADS)
    if QUANTIZED:
        ks = _load_scales(k_scale, first, page, last, kv_head, TOKENS, BLOCK_SIZE, KV_HEADS)
        vs = _load_scales(v_scale, first, page, last, kv_head, TOKENS, BLOCK_SIZE, KV_HEADS)
    gdc_wait()
    if is_last_piece & (left <= STEP):  # the newest token is in this tile: again
        k = _load_tile(k_cache, first, page, last, kv_head, K, WORDS, BLOCK_SIZE, KV_HEADS)
        v = _load_tile(v_cache, first, page, last, kv_head, V, WORDS, BLOCK_SIZE, KV_HEADS)
        if QUANTIZED:
            ks = _load_scales(k_scale, first, page, last, kv_head, TOKENS, BLOCK_SIZE, KV_HEADS)
            vs = _load_scales(v_scale, first, page, last, kv_head, TOKENS, BLOCK_SIZE, KV_HEADS)
    query = _load_query(q, seq, q_stride_token, q_stride_head, kv_head, W, D, GROUP, QUANTIZED, Q, B)
    bias = gl.zeros([W, 16, 8], gl.float32, MMA)
    if QUANTIZED:  # what the bias of K adds to every score, subtracted in advance: -1152 · Σ q
        bias = mma_v2(gl.full([W, 16, D], -1152.0, dtype, A), query, bias)
    # Finite, because a warp may have no token; probabilities of INT8 are shifted to at most 2^8 (see _kernels).
    maximum = gl.full([W, 8], -1e30, gl.float32, gl.SliceLayout(1, MMA))
    normaliser = gl.zeros([W, 16, 8], gl.float32, MMA)
    acc = gl.zeros([W, D, 8], gl.float32, MMA)

    # Loads are a tile ahead of the products, and page ids two, also where the next tile is that of another item.
    ahead, seq, start, end = _advance(items, item, stop, seq, start, end, STEP)
    page = _load_page(block_table, seq, table_stride, start + warp, end, BLOCK_SIZE)
    for _ in range(steps):
        score = mma_v2(_key_fragment(k, W, D, dtype, QUANTIZED, A), query, bias)
        first, last, this_page = start + warp, end - 1, page
        k = _load_tile(k_cache, first, this_page, last, kv_head, K, WORDS, BLOCK_SIZE, KV_HEADS)
        ahead, seq, start, end = _advance(items, ahead, stop, seq, start, end, STEP)
        page = _load_page(block_table, seq, table_stride, start + warp, end, BLOCK_SIZE)
        if QUANTIZED:
            score *= gl.expand_dims(ks * qk_scale, 2)
            ks = _load_scales(k_scale, first, this_page, last, kv_head, TOKENS, BLOCK_SIZE, KV_HEADS)
        else:
            score *= qk_scale
        score = gl.where(gl.expand_dims(token < left, 2), score, float("-inf"))
        new_maximum = gl.maximum(maximum, gl.max(score, 1) - (8.0 if QUANTIZED else 0.0))
        correction = gl.expand_dims(gl.exp2(maximum - new_maximum), 1)
        p = gl.exp2(score - gl.expand_dims(new_maximum, 1))
        maximum = new_maximum
        normaliser = normaliser * correction + p
        if QUANTIZED:
            p *= gl.expand_dims(vs, 2)
            vs = _load_scales(v_scale, first, this_page, last, kv_head, TOKENS, BLOCK_SIZE, KV_HEADS)
        p = gl.convert_layout(p.to(dtype), B)
        acc = mma_v2(_value_fragment(v, W, D, dtype, QUANTIZED, A), p, acc * correction)
        v = _load_tile(v_cache, first, this_page, last, kv_head, V, WORDS, BLOCK_SIZE, KV_HEADS)

        left -= STEP
        if left <= 0:
            done = gl.load(items + item * ITEM)
            pieces = gl.load(items + item * ITEM + 4)
            # The warps of the program add up.
            top = gl.max(gl.convert_layout(maximum, EACH), 0)
            weight = gl.exp2(
                maximum - gl.expand_dims(gl.convert_layout(top, gl.SliceLayout(0, gl.SliceLayout(1, MMA))), 0)
            )
            total = gl.sum(gl.convert_layout(gl.sum(normaliser, 1) * weight, EACH), 0)
            result = gl.sum(gl.convert_layout(acc * gl.expand_dims(weight, 1), SUM), 0)
            result = gl.reshape(gl.permute(result, (1, 0)), [8, X, D // X // 8, 8])  # rows were (x, e, g)
            result = gl.convert_layout(gl.reshape(gl.permute(result, (0, 1, 3, 2)), [8, D]), OUT)
            result = result / gl.expand_dims(gl.convert_layout(total, gl.SliceLayout(1, OUT)), 1)
            out_head = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, OUT)), 1)
            out_dim = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, OUT)), 0)
            live = out_head + 0 * out_dim < GROUP
            out_group = out + done.to(gl.int64) * out_stride_token + kv_head * GROUP * out_stride_head
            if pieces == 1:
                gl.store(out_group + out_head * out_stride_head + out_dim, result.to(out.dtype.element_ty), mask=live)
            else:
                row = (item * KV_HEADS + kv_head) * GROUP
                gl.store(partial + row.to(gl.int64) * D + (out_head * D + out_dim), result, mask=live)
                column = gl.arange(0, 8, gl.SliceLayout(0, EACH))
                gl.store(lse + row + column, top + gl.log2(total), mask=column < GROUP)
            item += 1
            following = items + gl.minimum(item, stop - 1) * ITEM
            left = gl.load(following + 2) - gl.load(following + 1)
            query = _load_query(
                q, gl.load(following), q_stride_token, q_stride_head, kv_head, W, D, GROUP, QUANTIZED, Q, B
            )
            if QUANTIZED:
                bias = gl.zeros([W, 16, 8], gl.float32, MMA)
                bias = mma_v2(gl.full([W, 16, D], -1152.0, dtype, A), query, bias)
            maximum = gl.full([W, 8], -1e30, gl.float32, gl.SliceLayout(1, MMA))
            normaliser = gl.zeros([W, 16, 8], gl.float32, MMA)
            acc = gl.zeros([W, D, 8], gl.float32, MMA)

    if FUSED_MERGE:
        debug_barrier()  # every thread's parts are written before one of them announces them
        begin = gl.load(shares + program * SHARE)  # again: two registers less in the loop above
        stop = gl.load(shares + program * SHARE + 1)
        for item in range(begin, stop, gl.maximum(stop - 1 - begin, 1)):  # the first and the last
            seq = gl.load(items + item * ITEM)
            origin = gl.load(items + item * ITEM + 3)
            pieces = gl.load(items + item * ITEM + 4)
            if pieces > 1:
                counter = arrived + seq * KV_HEADS + kv_head
                if gl.atomic_add(counter, 1, sem="acq_rel") == pieces - 1:
                    gl.store(counter, 0)
                    out_group = out + seq.to(gl.int64) * out_stride_token + kv_head * GROUP * out_stride_head
                    for g in range(GROUP):
                        row = (origin * KV_HEADS + kv_head) * GROUP + g
                        _merge_pieces(
                            partial, lse, row, pieces, KV_HEADS * GROUP, out_group + g * out_stride_head, D, ROWS
                        )


@gluon.jit
def _merge_pieces(partial, lse, row, pieces, row_stride, out, D: gl.constexpr, L: gl.constexpr, P: gl.constexpr = 16):
    """``_kernels.merge_pieces`` in layout L, and the store."""
    dim = gl.arange(0, D, gl.SliceLayout(0, L))
    maximum = float("-inf")
    normaliser = 0.0
    acc = gl.zeros([D], gl.float32, gl.SliceLayout(0, L))
    for start in range(0, pieces, P):
        piece = start + gl.arange(0, P, gl.SliceLayout(1, L))
        rows = row + piece * row_stride
        weight = gl.load(lse + rows, mask=piece < pieces, other=float("-inf"), cache_modifier=".cg")
        address = partial + gl.expand_dims(rows.to(gl.int64), 1) * D + gl.expand_dims(dim, 0)
        live = gl.expand_dims(piece, 1) + 0 * gl.expand_dims(dim, 0) < pieces
        values = gl.load(address, mask=live, other=0.0, cache_modifier=".cg")
        new_maximum = gl.maximum(maximum, gl.max(weight, 0))
        correction = gl.exp2(maximum - new_maximum)
        weight = gl.exp2(weight - new_maximum)
        maximum = new_maximum
        normaliser = normaliser * correction + gl.sum(weight, 0)
        acc = acc * correction + gl.sum(values * gl.expand_dims(weight, 1), 0)
    gl.store(out + dim, (acc / normaliser).to(out.dtype.element_ty))


@hookimpl
def nanoserve_attention(register) -> None:
    register(
        AttentionSpec(
            name="hopper_decode",
            summary="Gluon decode for compute capability 9.0: what a lane loads is a fragment for the tensor cores",
            capabilities=Capabilities(
                phases=frozenset({"decode"}),
                kv_formats=frozenset({"bf16", "int8"}),
                dtypes=frozenset({"float16", "bfloat16"}),
                head_dims=frozenset({64, 128}),
                max_gqa_ratio=8,
                devices=frozenset({"cuda"}),
                min_compute_capability=(9, 0),
                max_compute_capability=(9, 0),
                cuda_graph=True,
                block_size_multiple_of=16,
                requires=("triton",),
            ),
            config=HopperDecodeConfig,
            factory=HopperDecodeBackend,
        )
    )
