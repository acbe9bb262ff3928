"""Which lane holds what in ``hopper_decode``: layouts, and what turns loaded words into fragments of ``mma`` in place.

W warps, T tokens of a warp's step, H heads of a group, rounded up to 4 or 8, and D elements of a head. Shapes are
[warp, token or head, element or word]. Lane 4·g + c holds row g (and g + 8) of a left operand, column g of
a right one and columns 2·c, 2·c + 1 of a product. Of the product index k it holds 8·b1 + 2·c + b0 where elements have
16 bits (mma.m16n8k16), 16·b2 + 4·c + b1b0 where they have 8 (mma.m16n8k32).
Column n of P V belongs to head n // 2 + 4 · (n % 2), so that a lane holds heads c and c + 4 of a group, and of up to
4 heads nothing twice.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2


@gluon.constexpr_function
def _bits(axis, first, end):
    """Bases of the powers of two in [first, end) along an axis."""
    bases = []
    while first < end:
        bases.append([first if axis == i else 0 for i in range(3)])
        first *= 2
    return bases


@gluon.constexpr_function
def row_layout(warps, rows, width, run):
    """K (and q): lane (g, c) holds ``run`` neighbours of row g, and c moves on by that much: c runs over d, not g."""
    return gl.DistributedLinearLayout(
        _bits(2, 1, run) + _bits(2, 4 * run, width) + _bits(1, 8, rows),
        _bits(2, run, 4 * run) + _bits(1, 1, 8),
        _bits(0, 1, warps),
        [],
        [warps, rows, width],
    )


@gluon.constexpr_function
def value_layout(warps, tokens, width, run):
    """V: lane (g, c) holds ``run`` neighbours of tokens 2c, 2c + 1, 2c + 8, 2c + 9, …, and g moves on along d."""
    return gl.DistributedLinearLayout(
        _bits(2, 1, run) + _bits(2, 8 * run, width) + [[0, 1, 0]] + _bits(1, 8, tokens),
        _bits(1, 2, 8) + _bits(2, run, 8 * run),
        _bits(0, 1, warps),
        [],
        [warps, tokens, width],
    )


@gluon.constexpr_function
def score_layout(warps, tokens, heads):
    """``[warps, tokens, heads]``: lane (g, c) holds tokens g, g + 8, … of heads c (and c + 4)."""
    return gl.DistributedLinearLayout(
        _bits(1, 8, tokens) + _bits(2, 4, heads),
        _bits(2, 1, 4) + _bits(1, 1, 8),
        _bits(0, 1, warps),
        [],
        [warps, tokens, heads],
    )


@gluon.constexpr_function
def tile_layout(warps, tiles):
    """``[warps, tiles]``, the same in all lanes of a warp."""
    bits = range(tiles.bit_length() - 1)
    rows = [[1 << i, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout([[0, 1 << i] for i in bits], [[0, 0]] * 5, rows, [], [warps, tiles])


@gluon.constexpr_function
def each_layout(warps):
    """``[warps, 8]``: every thread holds all warps of one column."""
    return gl.DistributedLinearLayout(
        [[1 << i, 0] for i in range(warps.bit_length() - 1)],
        [[0, 1], [0, 2], [0, 4], [0, 0], [0, 0]],
        [[0, 0]] * (warps.bit_length() - 1),
        [],
        [warps, 8],
    )


@gluon.constexpr_function
def out_layout(warps, d):
    """``[8, d]``: a thread holds 4 neighbours along d, a warp whole rows."""
    columns = [[0, 1 << i] for i in range(2, d.bit_length() - 1)]
    heads = [[1, 0], [2, 0], [4, 0]]
    lane = (columns + heads)[:5]
    heads = heads[5 - len(columns) :]
    bits = warps.bit_length() - 1
    warp = (heads + [[0, 0]] * 3)[:bits]
    return gl.DistributedLinearLayout([[0, 1], [0, 2]] + heads[bits:], lane, warp, [], [8, d])


@gluon.constexpr_function
def sum_layout(warps, d, x):
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
def key_order(x, W: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, QUANTIZED: gl.constexpr):
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
def scores(
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
        k = gl.convert_layout(key_order(_bytes(k), W, T, D, True), A)
        product = mma_v2(k, query, gl.zeros([W, T, 2 * H], gl.int32, MMA))
        upper, lower = gl.split(gl.reshape(product, [W, T, H, 2]))
        score = (upper * 256 + lower).to(gl.float32)
        scale = gl.expand_dims(scale, 1) * gl.expand_dims(k_scale, 2)
    else:
        k = gl.convert_layout(key_order(_halves(k, query.dtype), W, T, D, False), A)
        score = mma_v2(k, query, gl.zeros([W, T, 8], gl.float32, MMA))
        score = gl.reshape(score, [W, T, 4, 2])
        if H == 4:
            score, _ = gl.split(score)
        else:
            score = gl.reshape(gl.permute(score, (0, 1, 3, 2)), [W, T, 8])
        scale = gl.expand_dims(scale, 1)
    return gl.convert_layout(score, S) * scale


@gluon.jit
def probability_fragment(p, W: gl.constexpr, T: gl.constexpr, H: gl.constexpr, dtype: gl.constexpr, B: gl.constexpr):
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
def value_fragment(
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
def head_of(column):
    return column // 2 + column % 2 * 4


@gluon.jit
def by_column(x, W: gl.constexpr, H: gl.constexpr, L: gl.constexpr):
    """``[W, H]`` by head → ``[W, 8]`` by column of P V; the columns of no head get another's."""
    if H == 4:
        x = gl.reshape(gl.join(x, x), [W, 8])
    else:
        x = gl.reshape(gl.permute(gl.reshape(x, [W, 2, 4]), (0, 2, 1)), [W, 8])
    return gl.convert_layout(x, L)


@gluon.jit
def rescaled(acc, factor, bias, W: gl.constexpr, D: gl.constexpr, H: gl.constexpr, MMA: gl.constexpr):
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
