"""Decode backend ``hopper_decode``: ``paged_v2_split`` written in Gluon for compute capability 9.0, bf16/fp16 and INT8.

Every warp walks tiles of 16 tokens on its own: no shared memory, no barrier before its end. A load from the cache
already **is** a fragment of ``mma`` (of V in INT8 all but the order of its bytes), because each lane may hold whatever
elements of head_dim it likes, as long as q (for K) and the output (for V) are permuted alike. K and Vᵀ are the left
operands, Sᵀ = K qᵀ and Oᵀ += Vᵀ Pᵀ, so that the query heads of a group fill 8 columns instead of 16 rows, and a tile is
reloaded as soon as it is used.

INT8: K is multiplied as it lies, by integers. A head of q is two columns, the upper and the lower byte of 16-bit
integers with a scale of their own: off by at most 2^-16 of its largest element. V becomes fp16 by byte permutes, 1152
too large; what that adds to the sums of a step is one more product, and where they start from. A warp takes two tiles
a step, for what a step needs besides (softmax, addresses) is as much as a tile.

The warps of a program share the steps of one work item (``WorkList``) and add up at its end, while the first step of
the next item is on its way. The first step of all is loaded before the kernel before has ended, which is where
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
from nanoserve_plugins.attention._fragments import (
    V_BIAS,
    by_column,
    each_layout,
    head_of,
    key_order,
    out_layout,
    probability_fragment,
    rescaled,
    row_layout,
    score_layout,
    scores,
    sum_layout,
    tile_layout,
    value_fragment,
    value_layout,
)
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
#: Up to how many sequences of INT8 K and V are marked as read once. With Triton 3.6 that takes a tenth of a step's
#: instructions, and beyond, where the GPU is at its power limit, it costs more than it gives.
EVICT_FIRST_SEQS = 128


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
        # where the kernel before drains some multiprocessors get three and others one. That matters to programs that
        # fill the GPU; below 8 sequences what does is room for the kernel that merges.
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
            EVICTION="" if self.quantized and meta.num_seqs > EVICT_FIRST_SEQS else "evict_first",
            num_warps=num_warps,
            maxnreg=self.max_registers[fused_merge],
            launch_pdl=True,
        )
        if not fused_merge:
            work.merge(out, meta.num_seqs, programs, pdl=True)


# -- loads ------------------------------------------------------------------------------------------------------------


@gluon.jit
def _advance(items, item, stop, seq, start, end, STEP: gl.constexpr):
    """From the step at ``start`` to the next of the item, or of the next item; after the last item, past its end."""
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
def _load_tile(
    cache,
    row,
    live,
    L: gl.constexpr,
    WIDTH: gl.constexpr,
    DEFINED: gl.constexpr,
    EVICTION: gl.constexpr,
    old=None,
):
    """Words ``[warps, 16 tiles, WIDTH]`` of K or V.

    Rows that are not live hold whatever was there, and tiles without a live row are ``old``, or 0; or, DEFINED, copies
    of a live row. To be loaded into, registers that are ``old`` need not be cleared.
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
        return gl.load(address, eviction_policy=EVICTION)
    return gl.load(address, mask=gl.expand_dims(live > 0, 2), other=old, eviction_policy=EVICTION)


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
    head = column // 2 if QUANTIZED else head_of(column)
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
    query = key_order(query, W, N, D, QUANTIZED)
    return gl.convert_layout(gl.permute(query, (0, 2, 1)), B), scale


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
    EVICTION: gl.constexpr,  # of K and V, which are read once: they need not push other data out of the L2
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
    Q: gl.constexpr = row_layout(W, 2 * H, D, 16) if QUANTIZED else row_layout(W, 8, D, 8)
    K: gl.constexpr = row_layout(W, T, WORDS, 4)
    V: gl.constexpr = value_layout(W, T, WORDS, min(4, WORDS // 8))
    S: gl.constexpr = score_layout(W, T, H)
    TOKENS: gl.constexpr = gl.SliceLayout(2, S)
    HEADS: gl.constexpr = gl.SliceLayout(1, S)
    TILES: gl.constexpr = tile_layout(W, T // 16)
    COLUMNS: gl.constexpr = gl.SliceLayout(1, MMA)
    X: gl.constexpr = 1 if QUANTIZED else D // 64
    SUM: gl.constexpr = sum_layout(W, D, X)
    OUT: gl.constexpr = out_layout(W, D)
    EACH: gl.constexpr = each_layout(W)
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
    k = _load_tile(k_cache, row, live, K, WORDS, False, EVICTION)
    v = _load_tile(v_cache, row, live, V, WORDS, not QUANTIZED, EVICTION)
    ks = 0.0
    if QUANTIZED:
        ks = _load_scales(k_scale, row, TOKENS)
        vs = _load_scales(v_scale, row, TOKENS)
    gdc_wait()
    if is_last_piece & (left <= STEP):  # the newest token is in this step: again
        k = _load_tile(k_cache, row, live, K, WORDS, False, EVICTION)
        v = _load_tile(v_cache, row, live, V, WORDS, not QUANTIZED, EVICTION)
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

    # Loads are a step ahead of the products, and page ids two, also where the next step is that of another item.
    ahead, seq, start, end = _advance(items, item, stop, seq, start, end, STEP)
    page = _load_page(block_table, seq, table_stride, start + tile, end, BLOCK_SIZE)
    for _ in range(steps):
        score = scores(k, query, q_scale, ks, W, T, D, H, QUANTIZED, MMA, S)
        row, live = _tile_row(start + tile, page, end, kv_head, BLOCK_SIZE, KV_HEADS)
        k = _load_tile(k_cache, row, live, K, WORDS, False, EVICTION, k if QUANTIZED else None)
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
        p = probability_fragment(p, W, T, H, dtype, B)
        if QUANTIZED:  # what V_BIAS adds to every sum of this step, subtracted in advance
            bias = mma_v2(gl.full([W, 16, T], -V_BIAS, dtype, A), p, bias)
        acc = rescaled(acc, correction, bias, W, D, H, MMA)
        acc = mma_v2(value_fragment(v, W, T, D, dtype, QUANTIZED, A), p, acc)
        v = _load_tile(v_cache, row, live, V, WORDS, not QUANTIZED, EVICTION, v)

        left -= STEP
        if left <= 0:
            done = gl.load(items + item * ITEM)
            pieces = gl.load(items + item * ITEM + 4)
            # The warps of the program add up.
            peak = by_column(maximum, W, H, COLUMNS)
            top = gl.max(gl.convert_layout(peak, EACH), 0)
            weight = gl.exp2(peak - gl.expand_dims(gl.convert_layout(top, gl.SliceLayout(0, COLUMNS)), 0))
            total = by_column(gl.sum(normaliser, 1), W, H, COLUMNS)
            total = gl.sum(gl.convert_layout(total * weight, EACH), 0)
            result = gl.sum(gl.convert_layout(acc * gl.expand_dims(weight, 1), SUM), 0)
            result = gl.reshape(gl.permute(result, (1, 0)), [8, X, D // X // 8, 8])  # rows were (x, e, g)
            result = gl.convert_layout(gl.reshape(gl.permute(result, (0, 1, 3, 2)), [8, D]), OUT)
            result = result / gl.expand_dims(gl.convert_layout(total, gl.SliceLayout(1, OUT)), 1)
            out_head = gl.expand_dims(head_of(gl.arange(0, 8, gl.SliceLayout(1, OUT))), 1)
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
                lse_head = head_of(gl.arange(0, 8, gl.SliceLayout(0, EACH)))
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
                converts_kv=False,
                block_size_multiple_of=16,
                requires=("triton",),
            ),
            config=HopperDecodeConfig,
            factory=HopperDecodeBackend,
        )
    )
