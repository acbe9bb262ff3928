"""Building blocks of the Triton decode kernels: reading the paged cache, attending to tokens, splitting a batch.

Caches are in the built-in layout, contiguous: K and V ``[num_blocks, kv_heads, block_size, head_dim]``, scales
``[num_blocks, kv_heads, block_size]`` fp16. Seen as rows of ``head_dim``, a token is row
``(block * kv_heads + kv_head) * block_size + position % block_size``, in 64 bits, as pools exceed 2^31 elements.

Softmax runs in base 2 (``qk_scale`` = scale · log2 e) and online (Milakov and Gimelshein, 2018). Partial results of a
split context are merged by their log-sum-exp (FlashDecoding, Dao et al., 2023).

INT8 scales are folded algebraically: ``score[t] = k_scale[t] · (k_int8[t] · q)`` and ``p[t] · v_scale[t]`` multiplies
``v_int8[t]``, so the dots run on integers that fp16 holds exactly. Probabilities are shifted to at most 2^8, which the
normaliser takes out again: ``p · v_scale`` would else fall among the subnormals of fp16. With 16-bit models q and
``p · v_scale`` are fp16 then: |q| and |V| must stay below 65504 and 32496. (``hopper_decode`` has q as integers.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanoserve.contracts.attention import AttentionContext, DecodeMetadata

LOG2_E = 1.4426950408889634

ITEM = tl.constexpr(8)
SHARE = tl.constexpr(8)


def qk_scale(context: AttentionContext) -> float:
    return context.scale * LOG2_E


@dataclass(frozen=True)
class GPU:
    """multiprocessors: their number. capability: (major, minor)."""

    multiprocessors: int
    capability: tuple[int, int]

    @classmethod
    def of(cls, device: torch.device) -> GPU | None:
        """None on the CPU, where kernels are interpreted."""
        if device.type != "cuda":
            return None
        properties = torch.cuda.get_device_properties(device)
        return cls(properties.multi_processor_count, (properties.major, properties.minor))

    @property
    def pdl(self) -> bool:
        """Programmatic dependent launch: a kernel starts while the one before it drains, and waits on the device."""
        return self.capability >= (9, 0)


# -- reading the cache ------------------------------------------------------------------------------------------------


@triton.jit
def cache_rows(block, token, kv_head, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Rows of tokens (positions in their sequence) that lie in ``block`` (int32, same shape)."""
    return (block.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_SIZE + token % BLOCK_SIZE


INT8X4_TO_FP16X4 = tl.constexpr("""{
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


@triton.jit
def unpack_int8(words, dtype: tl.constexpr, ASM: tl.constexpr):
    """int32 words of four int8 each → four tensors of ``dtype``, lowest byte first.

    ASM (fp16 only): byte ^ 0x80 under the exponent byte 0x64 is the fp16 number 1024 + 128 + value, so 1152 is
    subtracted: 1.25 instructions a value where a conversion takes two to four.
    """
    if ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            INT8X4_TO_FP16X4, "=h,=h,=h,=h,r", [words], dtype=(tl.float16,) * 4, is_pure=True, pack=1
        )
    else:
        a, b = ((words << 24) >> 24).to(dtype), ((words << 16) >> 24).to(dtype)
        c, d = ((words << 8) >> 24).to(dtype), (words >> 24).to(dtype)
    return a, b, c, d


# -- one KV head, its query heads, a range of tokens ------------------------------------------------------------------


@triton.jit
def attend_group(
    q,
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
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
):
    """Attend to tokens ``start … end - 1``, at least one, in tiles of N on the tensor cores.

    q points at the group's first query head. M (at least 16) and D are GROUP and HEAD_DIM padded to powers of two.
    Returns acc ``[M, D]``, the running maximum and the normaliser ``[M]`` (base 2), all fp32.

    Block ids are carried from tile to tile: a load of them inside the loop would halve the pipeliner's K/V buffers.
    """
    dtype: tl.constexpr = tl.float16 if QUANTIZED and q.dtype.element_ty != tl.float32 else q.dtype.element_ty
    head = tl.arange(0, M)
    dim = tl.arange(0, D)
    q_tile = tl.load(
        q + head[:, None] * q_stride_head + dim[None, :],
        mask=(head < GROUP)[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    ).to(dtype)
    maximum = tl.full([M], float("-inf"), tl.float32)
    normaliser = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    token = start + tl.arange(0, N)
    block = tl.load(block_row + token // BLOCK_SIZE, mask=token < end, other=0)
    for _ in range(start, end, N):
        live = token < end
        row = cache_rows(block, token, kv_head, KV_HEADS, BLOCK_SIZE)
        token += N
        block = tl.load(block_row + token // BLOCK_SIZE, mask=token < end, other=0)
        k = tl.load(
            k_cache + row[None, :] * HEAD_DIM + dim[:, None], mask=live[None, :] & (dim < HEAD_DIM)[:, None], other=0
        )
        score = tl.dot(q_tile, k.to(dtype), input_precision="ieee") * qk_scale
        if QUANTIZED:
            score *= tl.load(k_scale + row, mask=live, other=0.0).to(tl.float32)[None, :]
        score = tl.where(live[None, :], score, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(score, 1) - (8.0 if QUANTIZED else 0.0))
        correction = tl.exp2(maximum - new_maximum)
        p = tl.exp2(score - new_maximum[:, None])
        maximum = new_maximum
        normaliser = normaliser * correction + tl.sum(p, 1)
        v = tl.load(
            v_cache + row[:, None] * HEAD_DIM + dim[None, :], mask=live[:, None] & (dim < HEAD_DIM)[None, :], other=0
        )
        if QUANTIZED:
            p *= tl.load(v_scale + row, mask=live, other=0.0).to(tl.float32)[None, :]
        acc = tl.dot(p.to(dtype), v.to(dtype), acc * correction[:, None], input_precision="ieee")
    return acc, maximum, normaliser


@triton.jit
def _load_words(cache, row, word, WORDS: tl.constexpr, W: tl.constexpr):
    """int32 ``[rows, W]``; words past the row's end are 0."""
    offset = row[:, None] * WORDS + word[None, :]
    if W == WORDS:
        return tl.load(cache + offset)
    return tl.load(cache + offset, mask=(word < WORDS)[None, :], other=0)


@triton.jit
def attend_group_words(
    q,
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
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ASM: tl.constexpr,
    M: tl.constexpr,
    W: tl.constexpr,
    N: tl.constexpr,
):
    """``attend_group`` for INT8 caches given as int32 words ``[…, head_dim / 4]``; meant for one warp.

    What limits INT8 is not bytes but instructions. So values stay packed until they are used, the next tile is loaded
    into registers as soon as this one is consumed, and tokens are the rows of both products (``K qᵀ``, ``Vᵀ pᵀ``),
    which pads the query heads to M = 8 instead of 16. Dimension 4·i + j sits in byte j of word i: four products of a
    quarter each. M pads GROUP (at least 8), W pads head_dim / 4 (at least 16). Returns as ``attend_group``, D = 4·W.
    """
    dtype: tl.constexpr = tl.float32 if q.dtype.element_ty == tl.float32 else tl.float16
    WORDS: tl.constexpr = HEAD_DIM // 4
    head = tl.arange(0, M)
    word = tl.arange(0, W)
    q_words = q + head[None, :] * q_stride_head + 4 * word[:, None]
    q_mask = (head < GROUP)[None, :] & (word < WORDS)[:, None]
    q0 = tl.load(q_words, mask=q_mask, other=0.0).to(dtype)
    q1 = tl.load(q_words + 1, mask=q_mask, other=0.0).to(dtype)
    q2 = tl.load(q_words + 2, mask=q_mask, other=0.0).to(dtype)
    q3 = tl.load(q_words + 3, mask=q_mask, other=0.0).to(dtype)
    maximum = tl.full([M], float("-inf"), tl.float32)
    normaliser = tl.zeros([N, M], tl.float32)
    acc0 = tl.zeros([W, M], tl.float32)
    acc1 = tl.zeros([W, M], tl.float32)
    acc2 = tl.zeros([W, M], tl.float32)
    acc3 = tl.zeros([W, M], tl.float32)

    # Tokens past the end read the last one's row again: no stale row is ever touched, and nothing needs a mask.
    token = start + tl.arange(0, N)
    block = tl.load(block_row + tl.minimum(token, end - 1) // BLOCK_SIZE)
    row = cache_rows(block, tl.minimum(token, end - 1), kv_head, KV_HEADS, BLOCK_SIZE)
    block = tl.load(block_row + tl.minimum(token + N, end - 1) // BLOCK_SIZE)
    k = _load_words(k_cache, row, word, WORDS, W)
    ks = tl.load(k_scale + row)
    v = _load_words(v_cache, row, word, WORDS, W)
    vs = tl.load(v_scale + row)
    for _ in range(start, end, N):
        k0, k1, k2, k3 = unpack_int8(k, dtype, ASM)
        score = tl.dot(k0, q0, input_precision="ieee")
        score = tl.dot(k1, q1, score, input_precision="ieee")
        score = tl.dot(k2, q2, score, input_precision="ieee")
        score = tl.dot(k3, q3, score, input_precision="ieee")
        score = tl.where((token < end)[:, None], score * (ks.to(tl.float32) * qk_scale)[:, None], float("-inf"))
        token += N
        row = cache_rows(block, tl.minimum(token, end - 1), kv_head, KV_HEADS, BLOCK_SIZE)
        block = tl.load(block_row + tl.minimum(token + N, end - 1) // BLOCK_SIZE)
        k = _load_words(k_cache, row, word, WORDS, W)
        ks = tl.load(k_scale + row)
        new_maximum = tl.maximum(maximum, tl.max(score, 0) - 8.0)
        correction = tl.exp2(maximum - new_maximum)[None, :]
        p = tl.exp2(score - new_maximum[None, :])
        maximum = new_maximum
        normaliser = normaliser * correction + p
        p = (p * vs.to(tl.float32)[:, None]).to(dtype)
        v0, v1, v2, v3 = unpack_int8(v, dtype, ASM)
        acc0 = tl.dot(tl.trans(v0), p, acc0 * correction, input_precision="ieee")
        acc1 = tl.dot(tl.trans(v1), p, acc1 * correction, input_precision="ieee")
        acc2 = tl.dot(tl.trans(v2), p, acc2 * correction, input_precision="ieee")
        acc3 = tl.dot(tl.trans(v3), p, acc3 * correction, input_precision="ieee")
        v = _load_words(v_cache, row, word, WORDS, W)
        vs = tl.load(v_scale + row)
    acc = tl.join(tl.join(acc0, acc1), tl.join(acc2, acc3))  # [word, head, low bit of the byte, high bit]
    acc = tl.reshape(tl.permute(acc, (1, 0, 3, 2)), [M, 4 * W])
    return acc, maximum, tl.sum(normaliser, 0)


@triton.jit
def store_heads(out, out_stride_head, values, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Write the real part of values ``[M, D]`` to the group's rows; out points at its first query head."""
    head = tl.arange(0, values.shape[0])
    dim = tl.arange(0, values.shape[1])
    tl.store(
        out + head[:, None] * out_stride_head + dim[None, :],
        values.to(out.dtype.element_ty),
        mask=(head < GROUP)[:, None] & (dim < HEAD_DIM)[None, :],
    )


# -- splitting a batch evenly -----------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["batch", "programs"])
def _plan(
    context_lens,
    items,
    shares,
    splits,
    batch,
    programs,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """See ``WorkList``. One program; BLOCK is batch padded to a power of two."""
    seq = tl.arange(0, BLOCK)
    context_len = tl.load(context_lens + seq, mask=seq < batch, other=0)
    steps = tl.cdiv(context_len, STEP)
    live = steps > 0
    num_live = tl.maximum(tl.sum(live.to(tl.int32), 0), 1)
    total, longest = tl.sum(steps, 0), tl.max(steps, 0)
    chunk = tl.maximum(tl.cdiv(total, programs), 1)
    # Contexts of about the same length: as many pieces of each, or as many whole ones in a share. Either number is 1.
    each, group = tl.maximum(programs // num_live, 1), tl.cdiv(num_live, programs)
    alike = tl.cdiv(longest, each) * group <= chunk + chunk // 32
    before = tl.cumsum(steps, 0) - steps
    # A sequence begins in the share ``opening``, which others have opened unless ``offset`` is 0; its first piece is so
    # much shorter than ``length``.
    offset = tl.where(alike, (tl.cumsum(live.to(tl.int32), 0) - 1) % group, before % chunk)
    whole = tl.where(group > 1, longest + group, tl.maximum(tl.cdiv(steps, each), 1))
    length = tl.where(alike, whole, chunk)
    pieces = tl.where(live, tl.cdiv(offset + steps, length), 0)
    first = tl.cumsum(pieces, 0) - pieces
    opening = tl.where(alike, first // group, before // chunk)
    used = tl.where(alike, tl.cdiv(tl.sum(pieces, 0), group), tl.cdiv(total, chunk))
    for start in range(0, programs, BLOCK):
        tl.store(shares + (start + seq) * SHARE + 7, 0, mask=start + seq < programs)
    tl.debug_barrier()
    tl.store(splits + 2 * seq, first, mask=seq < batch)
    tl.store(splits + 2 * seq + 1, pieces, mask=seq < batch)
    for piece in range(tl.max(pieces, 0)):
        begin = tl.maximum(piece * length - offset, 0)
        end = tl.minimum((piece + 1) * length - offset, steps)
        mine = piece < pieces
        opens = mine & ((offset == 0) | (piece > 0))
        item = items + (first + piece) * ITEM
        share = shares + (opening + piece) * SHARE
        tl.store(item, seq, mask=mine)
        tl.store(item + 1, begin * STEP, mask=mine)
        tl.store(item + 2, tl.minimum(end * STEP, context_len), mask=mine)
        tl.store(item + 3, first, mask=mine)
        tl.store(item + 4, pieces, mask=mine)
        tl.store(share, first + piece, mask=opens)
        tl.store(share - SHARE + 1, first + piece, mask=opens & (opening + piece > 0))
        tl.store(share + 2, seq, mask=opens)
        tl.store(share + 3, begin * STEP, mask=opens)
        tl.store(share + 4, tl.minimum(end * STEP, context_len), mask=opens)
        tl.store(share + 5, first, mask=opens)
        tl.store(share + 6, pieces, mask=opens)
        tl.atomic_add(share + 7, end - begin, mask=mine, sem="relaxed")
    tl.store(shares + (used - 1) * SHARE + 1, tl.sum(pieces, 0), mask=used > 0)
    for start in range(used, programs, BLOCK):
        idle = shares + (start + seq) * SHARE
        tl.store(idle, 0, mask=start + seq < programs)
        tl.store(idle + 1, 0, mask=start + seq < programs)


@triton.jit
def _equal_pieces(context_len, chunk, STEP: tl.constexpr):
    """Pieces of contexts cut evenly into pieces of at most ``chunk`` steps, and the steps of each but the last."""
    steps = tl.cdiv(context_len, STEP)
    length = tl.maximum(tl.cdiv(steps, tl.maximum(tl.cdiv(steps, chunk), 1)), 1)
    return tl.cdiv(steps, length), length


@triton.jit(do_not_specialize=["batch", "programs"])
def _plan_pieces(
    context_lens, items, splits, batch, programs, STEP: tl.constexpr, BLOCK: tl.constexpr, OTHERS: tl.constexpr
):
    """See ``WorkList.plan_pieces``. One program; BLOCK is batch padded to a power of two."""
    seq = tl.arange(0, BLOCK)
    context_len = tl.load(context_lens + seq, mask=seq < batch, other=0)
    chunk = tl.maximum(tl.cdiv(tl.sum(tl.cdiv(context_len, STEP), 0), programs), 1)
    pieces, length = _equal_pieces(context_len, chunk, STEP)
    first = tl.zeros([BLOCK], tl.int32)
    for start in range(0, batch, OTHERS):
        other = start + tl.arange(0, OTHERS)
        other_len = tl.load(context_lens + other, mask=other < batch, other=0)
        other_pieces, other_length = _equal_pieces(other_len, chunk, STEP)
        longer = other_length[None, :] > length[:, None]
        longer |= (other_length[None, :] == length[:, None]) & (other[None, :] < seq[:, None])
        first += tl.sum(tl.where(longer, other_pieces[None, :], 0), 1)
    tl.store(splits + 2 * seq, first, mask=seq < batch)
    tl.store(splits + 2 * seq + 1, pieces, mask=seq < batch)
    for piece in range(tl.max(pieces, 0)):
        mine = piece < pieces
        item = items + (first + piece) * ITEM
        tl.store(item, seq, mask=mine)
        tl.store(item + 1, piece * length * STEP, mask=mine)
        tl.store(item + 2, tl.minimum((piece + 1) * length * STEP, context_len), mask=mine)
        tl.store(item + 3, first, mask=mine)
        tl.store(item + 4, pieces, mask=mine)
    for start in range(tl.sum(pieces, 0), programs + batch, BLOCK):
        idle = items + (start + seq) * ITEM
        tl.store(idle + 1, 0, mask=start + seq < programs + batch)
        tl.store(idle + 2, 0, mask=start + seq < programs + batch)


@triton.jit
def merge_pieces(partial, lse, row, pieces, row_stride, dim, D: tl.constexpr, P: tl.constexpr):
    """Σ 2^lse[i] · partial[i] / Σ 2^lse[i] over rows ``row + i · row_stride``, i < pieces → fp32 ``[dim]``.

    P: pieces at a time. dim: which of the D columns. Reads past L1 (``.cg``), which does not see what other
    multiprocessors write.
    """
    maximum = float("-inf")
    normaliser = 0.0
    acc = tl.zeros(dim.shape, tl.float32)
    for start in range(0, pieces, P):
        piece = start + tl.arange(0, P)
        live = piece < pieces
        rows = row + piece * row_stride
        weight = tl.load(lse + rows, mask=live, other=float("-inf"), cache_modifier=".cg")
        address = partial + rows.to(tl.int64)[:, None] * D + dim[None, :]
        values = tl.load(address, mask=live[:, None], other=0.0, cache_modifier=".cg")
        new_maximum = tl.maximum(maximum, tl.max(weight, 0))
        correction = tl.exp2(maximum - new_maximum)
        weight = tl.exp2(weight - new_maximum)
        maximum = new_maximum
        normaliser = normaliser * correction + tl.sum(weight, 0)
        acc = acc * correction + tl.sum(values * weight[:, None], 0)
    return acc / normaliser


@triton.jit
def _merge(
    partial,
    lse,
    splits,
    out,
    out_stride_token,
    out_stride_head,
    Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    P: tl.constexpr,
    PDL: tl.constexpr,
):
    """out ``[num_seqs, q_heads, head_dim]``; grid (q_heads, num_seqs, D / COLUMNS). Whole sequences are done."""
    q_head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    dim = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    first = tl.load(splits + 2 * seq)
    pieces = tl.load(splits + 2 * seq + 1)
    if pieces > 1:
        merged = merge_pieces(partial, lse, first * Q_HEADS + q_head, pieces, Q_HEADS, dim, D, P)
        target = out + seq * out_stride_token + q_head * out_stride_head + dim
        tl.store(target, merged.to(out.dtype.element_ty), mask=dim < HEAD_DIM)


def even_programs(programs: int, num_seqs: int) -> int:
    """``programs`` or a few less, such that a batch of equal contexts is cut between sequences or in equal parts."""
    rounds = -(-num_seqs // programs)
    even = programs // num_seqs * num_seqs if rounds == 1 else -(-num_seqs // rounds)
    return even if even >= 0.9 * programs else programs


class WorkList:
    """A decode batch cut by the device, once per step, into even shares for kernels whose grid is (kv_heads, programs).

    The contexts of a batch, in steps of some tokens, are laid end to end and cut into ``programs`` shares of equal
    length. So every program has the same work whatever the lengths are, most sequences of a large batch stay whole, and
    one CUDA graph serves all contexts. A program does the items of its share in turn; only the first and the last of
    them can be parts of a sequence. Contexts of about the same length are cut alike instead, at their ends wherever a
    share has several, if that makes no share longer by more than 1/32: items that end take time, too.

    items: int32 ``[programs + max_num_seqs + 1, ITEM]``: sequence, first token, end token, first item of the sequence,
    pieces of the sequence; the rest is padding. shares: int32 ``[programs, SHARE]``, per program its first item, the
    item after its last, the first one's five numbers, so that nobody waits for two loads in a row, and its steps.
    splits: int32 ``[max_num_seqs, 2]``, first item and pieces per sequence. partial, lse: fp32 results of items that
    are not a whole sequence, ``[items, kv_heads, group, width]`` (width: head_dim, padded) and ``[items, kv_heads,
    group]``.
    arrived: int32 ``[max_num_seqs, kv_heads]``, pieces done; whoever does the last one merges and resets it to 0.
    """

    def __init__(self, context: AttentionContext, width: int, programs: int) -> None:
        device, kv_heads, max_num_seqs = context.device, context.num_kv_heads, context.max_num_seqs
        most_items = programs + max_num_seqs + 1
        partial = (most_items, kv_heads, context.num_q_heads // kv_heads)
        self.items = torch.zeros(most_items, ITEM.value, dtype=torch.int32, device=device)
        self.shares = torch.empty(programs, SHARE.value, dtype=torch.int32, device=device)
        self.splits = torch.empty(max_num_seqs, 2, dtype=torch.int32, device=device)
        self.partial = torch.empty(*partial, width, device=device)
        self.lse = torch.empty(partial, device=device)
        self.arrived = torch.zeros(max_num_seqs, kv_heads, dtype=torch.int32, device=device)

    def plan(self, meta: DecodeMetadata, programs: int, step: int) -> None:
        """Fill the lists on the device. programs: at most those of ``__init__``; step: tokens, a power of two.

        Kernels may read the lists before ``gdc_wait``. They start after the launch that clears the counters has
        started, which, without programmatic launch, is after everything before it has ended: the plan, and the steps
        that wrote all tokens but the newest. Later kernels that trigger early cannot change that.
        """
        block = max(16, triton.next_power_of_2(meta.num_seqs))
        _plan[(1,)](
            meta.context_lens,
            self.items,
            self.shares,
            self.splits,
            meta.num_seqs,
            programs,
            STEP=step,
            BLOCK=block,
            num_warps=4 if block > 64 else 1,
        )
        self.arrived.zero_()

    def plan_pieces(self, meta: DecodeMetadata, programs: int, step: int) -> None:
        """Fill ``items`` and ``splits``, not ``shares``, for a grid of (kv_heads, programs + num_seqs), an item each.

        A context longer than a ``programs``-th of the batch is cut into the fewest equal pieces that are not; the
        longest pieces come first. Items without tokens, where start = end, are left over.
        """
        block = max(16, triton.next_power_of_2(meta.num_seqs))
        _plan_pieces[(1,)](
            meta.context_lens,
            self.items,
            self.splits,
            meta.num_seqs,
            programs,
            STEP=step,
            BLOCK=block,
            OTHERS=max(1, min(32, 16384 // block)),
            num_warps=4 if block > 64 else 1,
        )
        self.arrived.zero_()

    def merge(self, out: torch.Tensor, num_seqs: int, programs: int, pdl: bool) -> None:
        """Merge what the items left in ``partial``, as a launch of its own: better than the last item's doing it when
        contexts have many pieces, because every query head has programs."""
        q_heads, head_dim = out.shape[1:]
        width = self.partial.shape[-1]
        pieces = min(128, triton.next_power_of_2(programs // num_seqs + 2))
        columns = min(width, 4096 // pieces)
        _merge[(q_heads, num_seqs, width // columns)](
            self.partial,
            self.lse,
            self.splits,
            out,
            *out.stride()[:2],
            Q_HEADS=q_heads,
            HEAD_DIM=head_dim,
            D=width,
            COLUMNS=columns,
            P=pieces,
            PDL=pdl,
            num_warps=4,
            launch_pdl=pdl,
        )
