"""Decode backend ``hopper_decode``: ``paged_v2_split`` written in Gluon for compute capability 9.0, bf16/fp16 and INT8.

Every warp walks tiles of 16 tokens on its own: no shared memory, no barrier before its end. A 16-byte load from the
cache already **is** a fragment of ``mma``, because each lane may hold whatever elements of head_dim it likes, as long
as q (for K) and the output (for V) are permuted alike. K and Vᵀ are the left operands, Sᵀ = K qᵀ and Oᵀ += Vᵀ Pᵀ, so
that the query heads of a group fill 8 columns instead of 16 rows, and a tile is reloaded as soon as it is used.

INT8: K is multiplied as it lies, by integers. A head of q is two columns, the upper and the lower byte of 16-bit
integers with a scale of their own, which is closer than bf16. V becomes fp16 by byte permutes, 1152 too large; what
that adds to the sums of a tile is one more product, and where they start from. Two tiles make a step, for a step costs
as much as a tile.

The warps of a program take turns at the steps of one work item (``WorkList``) and add up at its end, while the first
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
        # 8 warps of a multiprocessor keep 8 KiB each in flight: two tiles of INT8, one of 16 bits.
        self.num_warps, per_multiprocessor = (1, 8) if self.quantized else (4, 2)
        self.tokens_per_warp = 32 if self.quantized else 16
        # 255 is no limit, but without one the compiler makes do with 168 for 16 bits. Then a third program fits, and
        # where the kernel before drains some multiprocessors get three and others one.
        self.max_registers = {True: 255, False: 255 if self.quantized else None}
        self.programs = options.num_splits or max(1, per_multiprocessor * gpu.multiprocessors // context.num_kv_heads)
        self.work = WorkList(context, context.head_dim, self.programs)

    def launch(self, num_seqs: int) -> tuple[int, int, bool]:
        """Warps per program, programs per KV head, and whether these merge what they have cut: with more pieces, a
        second kernel is better."""
        fused_merge = num_seqs >= 8
        return self.num_warps, even_programs(self.programs, num_seqs), fused_merge

    def plan_decode(self, meta: DecodeMetadata) -> tuple[int, int, bool]:
        plan = num_warps, programs, _ = self.launch(meta.num_seqs)
        self.work.plan(meta, programs, self.tokens_per_warp * num_warps)
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
            TOKENS_PER_WARP=self.tokens_per_warp,
            EARLY=meta.num_seqs <= EARLY_SEQS,
            num_warps=num_warps,
            maxnreg=self.max_registers[fused_merge],
            launch_pdl=True,
        )
        if not fused_merge:
            work.merge(out, meta.num_seqs, programs, pdl=True)


# -- which lane holds what --------------------------------------------------------------------------------------------
# Shapes are [warp, token or head, element or word]. Lane 4·g + c holds row g (and g + 8) of a left operand, column g of
# a right one and columns 2·c, 2·c + 1 of a product. Of the product index k it holds 8·b1 + 2·c + b0 where elements have
# 16 bits (mma.m16n8k16), 16·b2 + 4·c + b1b0 where they have 8 (mma.m16n8k32).
# Column n of P V belongs to head n // 2 + 4 · (n % 2), so that a lane holds heads c and c + 4 of a group, and of up to
# 4 heads nothing twice.


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
def _value_layout(warps, tokens, width, run):
    """V: lane (g, c) holds ``run`` neighbours of tokens 2c, 2c + 1, 2c + 8, 2c + 9, …, and g moves on along d."""
    return gl.DistributedLinearLayout(
        _bits(2, 1, run) + _bits(2, 8 * run, width) + [[0, 1, 0]] + _bits(1, 8, tokens),
        _bits(1, 2, 8) + _bits(2, run, 8 * run),
        _bits(0, 1, warps),
        [],
        [warps, tokens, width],
    )


@gluon.constexpr_function
def _score_layout(warps, tokens, heads):
    """``[warps, tokens, heads]``: lane (g, c) holds tokens g, g + 8, … of heads c (and c + 4)."""
    return gl.DistributedLinearLayout(
        _bits(1, 8, tokens) + _bits(2, 4, heads),
        _bits(2, 1, 4) + _bits(1, 1, 8),
        _bits(0, 1, warps),
        [],
        [warps, tokens, heads],
    )


@gluon.constexpr_function
def _tile_layout(warps, tiles):
    """``[warps, tiles]``, the same in all lanes of a warp."""
    bits = range(tiles.bit_length() - 1)
    rows = [[1 << i, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout([[0, 1 << i] for i in bits], [[0, 0]] * 5, rows, [], [warps, tiles])


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
    block = gl.minimum(first, end - 1).to(gl.uint32) // BLOCK_SIZE
    return gl.load(block_table + seq.to(gl.int64) * table_stride + block.to(gl.int32))


@gluon.jit
def _tile_row(first, page, end, kv_head, BLOCK_SIZE: gl.constexpr, KV_HEADS: gl.constexpr):
    """First row in the cache of the tiles that begin at ``first``, and how many of its rows are live, which past the
    end is none: ``[warps, tiles]``. There are fewer than 2^31 rows: more would be over 100 GB a layer."""
    in_block = gl.minimum(first, end - 1).to(gl.uint32) // 16 * 16 % BLOCK_SIZE
    return (page * KV_HEADS + kv_head) * BLOCK_SIZE + in_block.to(gl.int32), end - first


@gluon.jit
def _per_token(x, L: gl.constexpr):
    """``[warps, tiles]`` → ``[warps, 16 tiles]`` in layout L."""
    W: gl.constexpr = x.shape[0]
    TILES: gl.constexpr = x.shape[1]
    tiles = gl.reshape(gl.full([W, 16 * TILES], 0, x.dtype, L), [W, TILES, 16])
    x = gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(2, tiles.type.layout)), 2) + tiles
    return gl.convert_layout(gl.reshape(x, [W, 16 * TILES]), L)


@gluon.jit
def _load_tile(cache, row, live, L: gl.constexpr, WIDTH: gl.constexpr, DEFINED: gl.constexpr):
    """Words ``[warps, 16 tiles, WIDTH]`` of K or V, which are read once: they need not push other data out of the L2.

    Rows that are not live hold whatever was there, and tiles without a live row whatever the registers did; or,
    DEFINED, copies of a live row.
    """
    TOKENS: gl.constexpr = gl.SliceLayout(2, L)
    token = gl.expand_dims(gl.arange(0, 16 * row.shape[1], gl.SliceLayout(0, TOKENS)) % 16, 0)
    live = _per_token(live, TOKENS)
    if DEFINED:
        token = gl.minimum(token, gl.maximum(live - 1, 0))
    base = cache + _per_token(row, TOKENS).to(gl.int64) * WIDTH
    word = gl.expand_dims(gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, L))), 0), 1)
    address = gl.expand_dims(base, 2) + (gl.expand_dims(token, 2) * WIDTH + word)
    if DEFINED:
        return gl.load(address, eviction_policy="evict_first")
    return gl.load(address, mask=gl.expand_dims(live > 0, 2), eviction_policy="evict_first")


@gluon.jit
def _load_scales(scales, row, TOKENS: gl.constexpr):
    """fp32 ``[warps, 16 tiles]``."""
    token = gl.expand_dims(gl.arange(0, 16 * row.shape[1], gl.SliceLayout(0, TOKENS)) % 16, 0)
    return gl.load(scales + _per_token(row, TOKENS).to(gl.int64) + token).to(gl.float32)


@gluon.jit
def _load_query(
    q,
    seq,
    q_stride_token,
    q_stride_head,
    kv_head,
    qk_scale,
    W: gl.constexpr,
    D: gl.constexpr,
    GROUP: gl.constexpr,
    QUANTIZED: gl.constexpr,
    H: gl.constexpr,
    Q: gl.constexpr,
    B: gl.constexpr,
    HEADS: gl.constexpr,
):
    """One token's heads as right operand, 0 past GROUP, and what their products with K are to be multiplied by.

    16 bits: ``[W, D, 8]``. INT8: ``[W, D, 2 H]``, for each head the upper and the lower byte of 16-bit integers.
    """
    N: gl.constexpr = 2 * H if QUANTIZED else 8
    column = gl.expand_dims(gl.expand_dims(gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, Q))), 0), 2)
    head = column // 2 if QUANTIZED else _head_of(column)
    dim = gl.expand_dims(gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(1, Q))), 0), 1)
    warp = gl.expand_dims(gl.expand_dims(gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, Q))), 1), 2)
    q_group = q + seq.to(gl.int64) * q_stride_token + kv_head * GROUP * q_stride_head
    query = gl.load(q_group + head * q_stride_head + (dim + 0 * warp), mask=head + 0 * (dim + warp) < GROUP, other=0.0)
    if QUANTIZED:
        query = query.to(gl.float32)
        # as integers, of which NaN is the largest: then it is the scale
        peak = gl.max(query.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 2).to(gl.float32, bitcast=True)
        # 1.5 · 2^23: the sum's last bits are the number, rounded
        rounded = query * gl.expand_dims(32512.0 / gl.maximum(peak, 1e-30), 2) + 12582912.0
        number = rounded.to(gl.int32, bitcast=True) - 0x4B400000
        upper = (number + 128) >> 8
        query = gl.where(column % 2 == 0, upper, number - upper * 256).to(gl.int8)
        scale = gl.max(gl.reshape(peak, [W, H, 2]), 2) * (qk_scale / 32512.0)
        scale = gl.convert_layout(scale, HEADS)
    else:
        scale = gl.full([W, H], qk_scale, gl.float32, HEADS)
    query = _key_order(query, W, N, D, QUANTIZED)
    return gl.convert_layout(gl.permute(query, (0, 2, 1)), B), scale


# -- words to fragments -----------------------------------------------------------------------------------------------

UNPACK_16 = gl.constexpr("mov.b32 {$0, $1}, $2;")

#: Of tokens 2c (words $8) and 2c + 1 ($9): pairs of values as fp16, 1152 too large, for int8 ^ 0x80 under the exponent
#: byte 0x64 is the number 1152 + value. $0 to $3 are of the first token, $4 to $7 of the second.
UNPACK_8 = gl.constexpr("""{
    .reg .b32 first, second, low, high;
    xor.b32 first, $8, 0x80808080;
    xor.b32 second, $9, 0x80808080;
    prmt.b32 low, first, second, 0x5140;
    prmt.b32 high, first, second, 0x7362;
    prmt.b32 first, low, 0x64646464, 0x4140;
    prmt.b32 second, low, 0x64646464, 0x4342;
    mov.b32 {$0, $4}, first;
    mov.b32 {$1, $5}, second;
    prmt.b32 first, high, 0x64646464, 0x4140;
    prmt.b32 second, high, 0x64646464, 0x4342;
    mov.b32 {$2, $6}, first;
    mov.b32 {$3, $7}, second;
}""")
V_BIAS = gl.constexpr(1152.0)

#: Columns 2c and 2c + 1 of row g in, rows 2c and 2c + 1 of column g out.
TRANSPOSE = """{
    .reg .b32 pair;
    cvt.rn.%sx2.f32 pair, $3, $2;
    movmatrix.sync.aligned.m8n8.trans.b16 pair, pair;
    mov.b32 {$0, $1}, pair;
}"""
TRANSPOSE_FP16, TRANSPOSE_BF16 = gl.constexpr(TRANSPOSE % "f16"), gl.constexpr(TRANSPOSE % "bf16")


@gluon.jit
def _halves(words, dtype: gl.constexpr):
    """``[…]`` → ``[…, b0]``; pairs stay in the register they were loaded into."""
    low, high = gl.inline_asm_elementwise(
        UNPACK_16, "=h,=h,r", [words], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    return gl.join(low, high).to(dtype, bitcast=True)


@gluon.jit
def _bytes(words):
    """``[…]`` → int8 ``[…, b1, b0]``; they stay in their register, too."""
    even = gl.join(words.to(gl.int8), (words >> 16).to(gl.int8))
    return gl.join(even, gl.join((words >> 8).to(gl.int8), (words >> 24).to(gl.int8)))


@gluon.jit
def _key_order(x, W: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, QUANTIZED: gl.constexpr):
    """Elements of K or q, ``D`` in all in the last dimensions, in the order in which they are multiplied.

    A lane's 16 bytes along d are (u, c, s, b2, b1, b0) for INT8 and (u, c, s, b1, b0) else; the product index must be
    (u, s, b2, c, b1, b0) and (u, s, b1, c, b0).
    """
    if QUANTIZED:
        x = gl.permute(gl.reshape(x, [W, ROWS, D // 64, 4, 2, 2, 4]), (0, 1, 2, 4, 5, 3, 6))
    else:
        x = gl.permute(gl.reshape(x, [W, ROWS, D // 32, 4, 2, 2, 2]), (0, 1, 2, 4, 5, 3, 6))
    return gl.reshape(x, [W, ROWS, D])


@gluon.jit
def _scores(
    k,
    query,
    scale,
    k_scale,
    W: gl.constexpr,
    T: gl.constexpr,
    D: gl.constexpr,
    H: gl.constexpr,
    QUANTIZED: gl.constexpr,
    MMA: gl.constexpr,
    S: gl.constexpr,
):
    """K ``[W, T, words]`` and the query's heads → fp32 ``[W, T, H]``."""
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 4 if QUANTIZED else 2)
    if QUANTIZED:
        k = gl.convert_layout(_key_order(_bytes(k), W, T, D, True), A)
        product = mma_v2(k, query, gl.zeros([W, T, 2 * H], gl.int32, MMA))
        upper, lower = gl.split(gl.reshape(product, [W, T, H, 2]))
        score = (upper * 256 + lower).to(gl.float32)
        scale = gl.expand_dims(scale, 1) * gl.expand_dims(k_scale, 2)
    else:
        k = gl.convert_layout(_key_order(_halves(k, query.dtype), W, T, D, False), A)
        score = mma_v2(k, query, gl.zeros([W, T, 8], gl.float32, MMA))
        score = gl.reshape(score, [W, T, 4, 2])
        if H == 4:
            score, _ = gl.split(score)
        else:
            score = gl.reshape(gl.permute(score, (0, 1, 3, 2)), [W, T, 8])
        scale = gl.expand_dims(scale, 1)
    return gl.convert_layout(score, S) * scale


@gluon.jit
def _probability_fragment(p, W: gl.constexpr, T: gl.constexpr, H: gl.constexpr, dtype: gl.constexpr, B: gl.constexpr):
    """P ``[W, T, H]`` → right operand ``[W, T, 8]``; of 4 heads every other column is 0."""
    ASM: gl.constexpr = TRANSPOSE_FP16 if dtype == gl.float16 else TRANSPOSE_BF16
    if H == 4:
        low, high = p, gl.zeros_like(p)
    else:
        low, high = gl.split(gl.permute(gl.reshape(p, [W, T, 2, 4]), (0, 1, 3, 2)))
    first, second = gl.inline_asm_elementwise(
        ASM, "=h,=h,f,f", [low, high], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    p = gl.reshape(gl.join(first, second).to(dtype, bitcast=True), [W, T // 8, 8, 4, 2])  # tokens are (b1, c, b0)
    return gl.convert_layout(gl.reshape(gl.permute(p, (0, 1, 3, 4, 2)), [W, T, 8]), B)


@gluon.jit
def _value_fragment(
    words,
    W: gl.constexpr,
    T: gl.constexpr,
    D: gl.constexpr,
    dtype: gl.constexpr,
    QUANTIZED: gl.constexpr,
    A: gl.constexpr,
):
    """V ``[W, T, words]`` → A ``[W, D, T]``; d is (x, g, e) and becomes row (x, e, g). INT8: V_BIAS too large."""
    if QUANTIZED:
        first, second = gl.split(gl.permute(gl.reshape(words, [W, T // 2, 2, D // 4]), (0, 1, 3, 2)))
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            UNPACK_8,
            "=&h,=&h,=&h,=&h,=&h,=&h,=&h,=&h,r,r",
            [first, second],
            dtype=(gl.float16,) * 8,
            is_pure=True,
            pack=1,
        )
        v = gl.join(gl.join(gl.join(a, c), gl.join(b, d)), gl.join(gl.join(e, g), gl.join(f, h)))
        v = gl.permute(gl.reshape(v, [W, T // 2, 8, D // 32, 4, 2]), (0, 3, 4, 2, 1, 5))
    else:
        v = gl.permute(gl.reshape(_halves(words, dtype), [W, T, D // 64, 8, 8]), (0, 2, 4, 3, 1))
    return gl.convert_layout(gl.reshape(v, [W, D, T]), A)


@gluon.jit
def _head_of(column):
    return column // 2 + column % 2 * 4


@gluon.jit
def _columns(x, W: gl.constexpr, H: gl.constexpr, L: gl.constexpr):
    """``[W, H]`` by head → ``[W, 8]`` by column of P V; the columns of no head get another's."""
    if H == 4:
        x = gl.reshape(gl.join(x, x), [W, 8])
    else:
        x = gl.reshape(gl.permute(gl.reshape(x, [W, 2, 4]), (0, 2, 1)), [W, 8])
    return gl.convert_layout(x, L)


@gluon.jit
def _rescaled(acc, factor, bias, W: gl.constexpr, D: gl.constexpr, H: gl.constexpr, MMA: gl.constexpr):
    """``acc · factor + bias``: ``[W, D, 8]``, ``[W, H]``, and ``[W, 16, 8]`` with equal rows."""
    tiles = gl.reshape(acc, [W, D // 16, 16, 4, 2])
    even, odd = gl.split(tiles)
    even_bias, odd_bias = gl.split(gl.reshape(bias, [W, 16, 4, 2]))
    L: gl.constexpr = even.type.layout
    BIAS: gl.constexpr = gl.SliceLayout(1, L)
    FACTOR: gl.constexpr = gl.SliceLayout(1, BIAS)
    if H == 4:  # odd columns are 0 and stay so
        factor = gl.expand_dims(gl.expand_dims(gl.convert_layout(factor, FACTOR), 1), 1)
        even = even * factor + gl.expand_dims(gl.convert_layout(even_bias, BIAS), 1)
    else:
        low, high = gl.split(gl.permute(gl.reshape(factor, [W, 2, 4]), (0, 2, 1)))
        low = gl.expand_dims(gl.expand_dims(gl.convert_layout(low, FACTOR), 1), 1)
        high = gl.expand_dims(gl.expand_dims(gl.convert_layout(high, FACTOR), 1), 1)
        even = even * low + gl.expand_dims(gl.convert_layout(even_bias, BIAS), 1)
        odd = odd * high + gl.expand_dims(gl.convert_layout(odd_bias, BIAS), 1)
    return gl.convert_layout(gl.reshape(gl.join(even, gl.convert_layout(odd, L)), [W, D, 8]), MMA)


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
    TOKENS_PER_WARP: gl.constexpr,  # in a step: one or more tiles of 16
    EARLY: gl.constexpr,
):
    """q, out ``[num_seqs, q_heads, D]``; caches as int32 words; grid (kv_heads, programs); scratch: ``WorkList``."""
    W: gl.constexpr = gl.num_warps()
    T: gl.constexpr = TOKENS_PER_WARP
    STEP: gl.constexpr = T * W
    WORDS: gl.constexpr = D // 4 if QUANTIZED else D // 2
    H: gl.constexpr = 4 if GROUP <= 4 else 8
    dtype: gl.constexpr = gl.float16 if QUANTIZED else q.dtype.element_ty
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    QUERY: gl.constexpr = gl.DotOperandLayout(1, MMA, 4 if QUANTIZED else 2)
    Q: gl.constexpr = _row_layout(W, 2 * H, D, 16) if QUANTIZED else _row_layout(W, 8, D, 8)
    K: gl.constexpr = _row_layout(W, T, WORDS, 4)
    V: gl.constexpr = _value_layout(W, T, WORDS, min(4, WORDS // 8))
    S: gl.constexpr = _score_layout(W, T, H)
    TOKENS: gl.constexpr = gl.SliceLayout(2, S)
    HEADS: gl.constexpr = gl.SliceLayout(1, S)
    TILES: gl.constexpr = _tile_layout(W, T // 16)
    COLUMNS: gl.constexpr = gl.SliceLayout(1, MMA)
    X: gl.constexpr = 1 if QUANTIZED else D // 64
    SUM: gl.constexpr = _sum_layout(W, D, X)
    OUT: gl.constexpr = _out_layout(W, D)
    EACH: gl.constexpr = _each_layout(W)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 4], [128 // D, D // 4], [W, 1], [1, 0])

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
    tile = gl.expand_dims(T * gl.arange(0, W, gl.SliceLayout(1, TILES)), 1)
    tile += gl.expand_dims(16 * gl.arange(0, T // 16, gl.SliceLayout(0, TILES)), 0)
    token = gl.expand_dims(T * gl.arange(0, W, gl.SliceLayout(1, TOKENS)), 1)
    token += gl.expand_dims(gl.arange(0, T, gl.SliceLayout(0, TOKENS)), 0)
    left = end - start
    page = _load_page(block_table, seq, table_stride, start + tile, end, BLOCK_SIZE)
    row, live = _tile_row(start + tile, page, end, kv_head, BLOCK_SIZE, KV_HEADS)
    k = _load_tile(k_cache, row, live, K, WORDS, False)
    v = _load_tile(v_cache, row, live, V, WORDS, not QUANTIZED)
    ks = 0.0
    if QUANTIZED:
        ks = _load_scales(k_scale, row, TOKENS)
        vs = _load_scales(v_scale, row, TOKENS)
    gdc_wait()
    if is_last_piece & (left <= STEP):  # the newest token is in this tile: again
        k = _load_tile(k_cache, row, live, K, WORDS, False)
        v = _load_tile(v_cache, row, live, V, WORDS, not QUANTIZED)
        if QUANTIZED:
            ks = _load_scales(k_scale, row, TOKENS)
            vs = _load_scales(v_scale, row, TOKENS)
    query, q_scale = _load_query(
        q, seq, q_stride_token, q_stride_head, kv_head, qk_scale, W, D, GROUP, QUANTIZED, H, Q, QUERY, HEADS
    )
    # Finite, because a warp may have no token; probabilities of INT8 are shifted to at most 2^8 (see _kernels).
    maximum = gl.full([W, H], -1e30, gl.float32, HEADS)
    normaliser = gl.zeros([W, T, H], gl.float32, S)
    acc = gl.zeros([W, D, 8], gl.float32, MMA)

    # Loads are a tile ahead of the products, and page ids two, also where the next tile is that of another item.
    ahead, seq, start, end = _advance(items, item, stop, seq, start, end, STEP)
    page = _load_page(block_table, seq, table_stride, start + tile, end, BLOCK_SIZE)
    for _ in range(steps):
        score = _scores(k, query, q_scale, ks, W, T, D, H, QUANTIZED, MMA, S)
        row, live = _tile_row(start + tile, page, end, kv_head, BLOCK_SIZE, KV_HEADS)
        k = _load_tile(k_cache, row, live, K, WORDS, False)
        if QUANTIZED:
            ks = _load_scales(k_scale, row, TOKENS)
        ahead, seq, start, end = _advance(items, ahead, stop, seq, start, end, STEP)
        page = _load_page(block_table, seq, table_stride, start + tile, end, BLOCK_SIZE)
        is_token = gl.expand_dims(token < left, 2)
        score = gl.where(is_token, score, float("-inf"))
        new_maximum = gl.maximum(maximum, gl.max(score, 1) - (8.0 if QUANTIZED else 0.0))
        correction = gl.exp2(maximum - new_maximum)
        p = gl.exp2(score - gl.expand_dims(new_maximum, 1))
        maximum = new_maximum
        normaliser = normaliser * gl.expand_dims(correction, 1) + p
        bias = gl.zeros([W, 16, 8], gl.float32, MMA)
        if QUANTIZED:  # a scale past the end may be anything
            p = gl.where(is_token, p * gl.expand_dims(vs, 2), 0.0)
            vs = _load_scales(v_scale, row, TOKENS)
        p = _probability_fragment(p, W, T, H, dtype, B)
        if QUANTIZED:  # what V_BIAS adds to every sum of this tile, subtracted in advance
            bias = mma_v2(gl.full([W, 16, T], -V_BIAS, dtype, A), p, bias)
        acc = _rescaled(acc, correction, bias, W, D, H, MMA)
        acc = mma_v2(_value_fragment(v, W, T, D, dtype, QUANTIZED, A), p, acc)
        v = _load_tile(v_cache, row, live, V, WORDS, not QUANTIZED)

        left -= STEP
        if left <= 0:
            done = gl.load(items + item * ITEM)
            pieces = gl.load(items + item * ITEM + 4)
            # The warps of the program add up.
            peak = _columns(maximum, W, H, COLUMNS)
            top = gl.max(gl.convert_layout(peak, EACH), 0)
            weight = gl.exp2(peak - gl.expand_dims(gl.convert_layout(top, gl.SliceLayout(0, COLUMNS)), 0))
            total = _columns(gl.sum(normaliser, 1), W, H, COLUMNS)
            total = gl.sum(gl.convert_layout(total * weight, EACH), 0)
            result = gl.sum(gl.convert_layout(acc * gl.expand_dims(weight, 1), SUM), 0)
            result = gl.reshape(gl.permute(result, (1, 0)), [8, X, D // X // 8, 8])  # rows were (x, e, g)
            result = gl.convert_layout(gl.reshape(gl.permute(result, (0, 1, 3, 2)), [8, D]), OUT)
            result = result / gl.expand_dims(gl.convert_layout(total, gl.SliceLayout(1, OUT)), 1)
            out_head = gl.expand_dims(_head_of(gl.arange(0, 8, gl.SliceLayout(1, OUT))), 1)
            out_dim = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, OUT)), 0)
            is_head = out_head + 0 * out_dim < GROUP
            out_group = out + done.to(gl.int64) * out_stride_token + kv_head * GROUP * out_stride_head
            if pieces == 1:
                gl.store(
                    out_group + out_head * out_stride_head + out_dim, result.to(out.dtype.element_ty), mask=is_head
                )
            else:
                part = (item * KV_HEADS + kv_head) * GROUP
                gl.store(partial + part.to(gl.int64) * D + (out_head * D + out_dim), result, mask=is_head)
                lse_head = _head_of(gl.arange(0, 8, gl.SliceLayout(0, EACH)))
                gl.store(lse + part + lse_head, top + gl.log2(total), mask=lse_head < GROUP)
            item += 1
            following = items + gl.minimum(item, stop - 1) * ITEM
            left = gl.load(following + 2) - gl.load(following + 1)
            query, q_scale = _load_query(
                q,
                gl.load(following),
                q_stride_token,
                q_stride_head,
                kv_head,
                qk_scale,
                W,
                D,
                GROUP,
                QUANTIZED,
                H,
                Q,
                QUERY,
                HEADS,
            )
            maximum = gl.full([W, H], -1e30, gl.float32, HEADS)
            normaliser = gl.zeros([W, T, H], gl.float32, S)
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
                        piece = (origin * KV_HEADS + kv_head) * GROUP + g
                        _merge_pieces(
                            partial, lse, piece, pieces, KV_HEADS * GROUP, out_group + g * out_stride_head, D, ROWS
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
