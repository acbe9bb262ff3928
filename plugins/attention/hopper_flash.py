"""Attention backend ``hopper_flash``: FlashAttention-3 (Shah et al., 2024) over the paged cache, in Gluon.

For compute capability 9.0 alone. A program has four partitions: two warps that move tiles into shared-memory rings
with TMA, one Q and K, the other V, and two warpgroups that consume them with wgmma. Each warpgroup is 64 query rows
wide: one of two query heads that share a KV head, or, where the GQA ratio is odd, one half of 128 tokens. They take
turns at the tensor cores, so that one's softmax overlaps with the other's products. Programs are persistent and their
work is dealt on the host: while a tile is finished and stored, the next one's queries and keys are on their way.

A page smaller than a tile is no obstacle: the producer places one box per page and 64 columns, exactly where the
swizzled layout of the whole tile expects it. Short prompts go to ``triton_flash``'s kernel, which starts faster. INT8
pages are first unpacked, at memory speed, into a dense scratch that all query heads then read. TMA cannot mask stale
rows, whose weight is 0: they must be finite.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nanoserve.contracts.attention import AttentionBackend, AttentionContext, AttentionSpec, PrefillMetadata
from nanoserve.contracts.capabilities import Capabilities
from nanoserve.contracts.errors import ConfigError
from nanoserve.contracts.kvcache import LayerCache
from nanoserve.hookspecs import hookimpl
from nanoserve_plugins._launch import MANY, Descriptors, Launcher
from nanoserve_plugins.attention._kernels import qk_scale
from nanoserve_plugins.attention._prefill import (
    deal,
    fresh_rows,
    num_multiprocessors,
    query_tiles,
    section_tokens,
    table_offsets,
    tile_records,
    to_device,
)
from nanoserve_plugins.attention.triton_flash import SHORT, FlashPlan, TritonFlashBackend, TritonFlashConfig

# Two names that changed between Triton 3.6 and 3.9.
tma_load = tma.async_load if "async_load" in tma.__all__ else tma.async_copy_global_to_shared
_members = vars(gl.shared_memory_descriptor)
reinterpret = _members["reinterpret" if "reinterpret" in _members else "_reinterpret"]

ROWS = gl.constexpr(64)  # query rows of a warpgroup: what one wgmma takes
PANEL = gl.constexpr(64)  # columns of a 128-byte swizzled panel of 16-bit elements


@dataclass(frozen=True)
class HopperFlashConfig:
    """scratch_tokens: INT8 context that is unpacked at a time (a whole sequence always fits)."""

    scratch_tokens: int = 32768


# -- the work of a persistent program ---------------------------------------------------------------------------------
# A ring is (tiles, barriers that say "full", barriers that say "free").


@gluon.jit
def _num_rounds(records, rounds):
    """Work items of this program: ``rounds``, or one less."""
    last = gl.load(records + ((gl.program_id(0) + 1) * rounds - 1) * 4 + 2)
    return gl.where(last == 0, rounds - 1, rounds)


@gluon.jit
def _work(records, rounds, round_, HEADS: gl.constexpr):
    """(source of the keys, first query row, number of rows, position of the first, query head) of a work item."""
    record = records + (gl.program_id(0) * rounds + round_) * 4
    packed = gl.load(record + 2)
    return gl.load(record), gl.load(record + 1), packed & 255, gl.load(record + 3), (packed >> 8) * HEADS


# -- producers: one warp moves Q and K, another V ---------------------------------------------------------------------


@gluon.jit
def _produce(
    LOADS_Q: gl.constexpr,
    q_tiles,
    kv_tiles,
    records,
    rounds,
    table,
    q_ring,
    kv_ring,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    HEAD_ROWS: gl.constexpr,
    BOX: gl.constexpr,
):
    q_buffers, q_ready, q_empty = q_ring
    buffers, ready, empty = kv_ring
    STAGES: gl.constexpr = buffers.shape[0]
    BLOCK_N: gl.constexpr = buffers.shape[1]
    HEAD_DIM: gl.constexpr = buffers.shape[2]
    Q_STAGES: gl.constexpr = q_buffers.shape[0] // 2
    count = 0
    for round_ in range(_num_rounds(records, rounds)):
        source, row, num_rows, position, head = _work(records, rounds, round_, HEADS)
        if LOADS_Q:
            stage = round_ % Q_STAGES
            mbarrier.wait(q_empty.index(stage), (round_ // Q_STAGES & 1) ^ 1)
            mbarrier.expect(q_ready.index(stage), 2 * ROWS * HEAD_DIM * 2)
            for w in gl.static_range(2):
                at = [row, (head + w) * HEAD_DIM] if HEADS == 2 else [row + w * ROWS, head * HEAD_DIM]
                tma_load(q_tiles, at, q_ready.index(stage), q_buffers.index(stage * 2 + w))
        kv_head = head // GROUP
        for tile in range(gl.cdiv(position + num_rows, BLOCK_N)):
            stage = count % STAGES
            free = (count // STAGES & 1) ^ 1
            if PAGE == 0:
                at_row = source + tile * BLOCK_N + kv_head * HEAD_ROWS
                column = kv_head * HEAD_DIM if HEAD_ROWS == 0 else 0
                mbarrier.wait(empty.index(stage), free)
                mbarrier.expect(ready.index(stage), BLOCK_N * HEAD_DIM * 2)
                tma_load(kv_tiles, [at_row, column], ready.index(stage), buffers.index(stage))
            else:
                # Page ids are asked for before the wait and have arrived after it.
                rows = ()
                for i in gl.static_range(BLOCK_N // BOX):
                    key = tile * BLOCK_N + i * BOX
                    page = gl.load(table + source + key // PAGE)
                    rows = rows + ((page * KV_HEADS + kv_head) * PAGE + key % PAGE,)  # type: ignore[assignment]
                mbarrier.wait(empty.index(stage), free)
                mbarrier.expect(ready.index(stage), BLOCK_N * HEAD_DIM * 2)
                _load_pages(kv_tiles, rows, ready.index(stage), buffers.index(stage), BOX)
            count += 1


@gluon.jit
def _load_pages(tiles, rows, barrier, buffer, BOX: gl.constexpr):
    """A tile of boxes of BOX keys. The tile's layout is a sequence of 64-column panels, each of 128-byte rows."""
    BLOCK_N: gl.constexpr = buffer.shape[0]
    HEAD_DIM: gl.constexpr = buffer.shape[1]
    if BOX == BLOCK_N:
        tma_load(tiles, [rows[0], 0], barrier, buffer)
    else:
        layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
        panels = reinterpret(buffer, buffer.dtype, [HEAD_DIM // PANEL * BLOCK_N, PANEL], layout)
        for i in gl.static_range(BLOCK_N // BOX):
            for j in gl.static_range(HEAD_DIM // PANEL):
                tma_load(tiles, [rows[i], j * PANEL], barrier, panels.slice(j * BLOCK_N + i * BOX, BOX))


# -- consumers --------------------------------------------------------------------------------------------------------


@gluon.jit
def _consume(
    W: gl.constexpr,
    out,
    records,
    rounds,
    q_ring,
    k_ring,
    v_ring,
    turn,
    scale,
    HEADS: gl.constexpr,
    NUM_HEADS: gl.constexpr,
):
    """Warpgroup W's half of every work item of this program."""
    q_buffers, q_ready, q_empty = q_ring
    k_buffers, k_ready, k_empty = k_ring
    v_buffers, v_ready, v_empty = v_ring
    dtype: gl.constexpr = q_buffers.dtype
    STAGES: gl.constexpr = k_buffers.shape[0]
    BLOCK_N: gl.constexpr = k_buffers.shape[1]
    HEAD_DIM: gl.constexpr = k_buffers.shape[2]
    Q_STAGES: gl.constexpr = q_buffers.shape[0] // 2
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    out_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    row_id = gl.arange(0, ROWS, gl.SliceLayout(1, score_layout))
    out_row = gl.arange(0, ROWS, gl.SliceLayout(1, out_layout))
    dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, out_layout))
    count = 0
    for round_ in range(_num_rounds(records, rounds)):
        _, row, num_rows, position, head = _work(records, rounds, round_, HEADS)
        num_keys = position + num_rows
        num_tiles = gl.cdiv(num_keys, BLOCK_N)
        if HEADS == 2:
            head += W
        else:
            row += ROWS * W
            num_rows -= ROWS * W
            position += ROWS * W
        visible = position + row_id
        unmasked = gl.minimum((position + 1) // BLOCK_N, num_tiles)

        q_stage = round_ % Q_STAGES
        q = q_buffers.index(q_stage * 2 + W)
        mbarrier.wait(q_ready.index(q_stage), round_ // Q_STAGES & 1)
        # The first tile holds key 0, which every row sees: from then on the maximum is finite.
        stage = count % STAGES
        nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, score_layout)
        mbarrier.wait(turn.index(W), (count & 1) ^ (1 - W))
        mbarrier.wait(k_ready.index(stage), count // STAGES & 1)
        score = warpgroup_mma(q, k_buffers.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.arrive(turn.index(1 - W), count=1)
        score = warpgroup_mma_wait(0, [score])
        mbarrier.arrive(k_empty.index(stage), count=1)
        key = gl.arange(0, BLOCK_N, gl.SliceLayout(0, score_layout))
        score = gl.where(key[None, :] <= visible[:, None], score, float("-inf"))
        maximum = gl.max(score, 1)
        weight = gl.exp2(score * scale - (maximum * scale)[:, None])
        p = gl.convert_layout(weight.to(dtype), p_layout)
        state = (p, gl.zeros([ROWS, HEAD_DIM], gl.float32, acc_layout), maximum, gl.sum(weight, 1))

        for _ in range(1, unmasked):
            state = _step(q, k_ring, v_ring, turn, W, count, state, scale, visible, False, BLOCK_N)
            count += 1
        # The last tile is often at most half visible; then half of it is all that is computed.
        first_masked = gl.maximum(unmasked, 1)
        half = gl.where((num_tiles > first_masked) & (num_tiles * BLOCK_N - num_keys >= BLOCK_N // 2), 1, 0)
        for tile in range(first_masked, num_tiles - half):
            limit = visible - tile * BLOCK_N
            state = _step(q, k_ring, v_ring, turn, W, count, state, scale, limit, True, BLOCK_N)
            count += 1
        if half > 0:
            limit = visible - (num_tiles - 1) * BLOCK_N
            short = _step(q, k_ring, v_ring, turn, W, count, state, scale, limit, True, BLOCK_N // 2)
            count += 1
            acc = _last_product(short[0], short[1], v_ring, count, BLOCK_N // 2)
            total = short[3]
        else:
            acc = _last_product(state[0], state[1], v_ring, count, BLOCK_N)
            total = state[3]
        mbarrier.arrive(v_empty.index(count % STAGES), count=1)
        count += 1

        # Through the tile's own Q buffer, which nothing reads any more, to rows of 16-byte stores.
        share = gl.convert_layout(1.0 / total, gl.SliceLayout(1, acc_layout))
        q.store((acc * share[:, None]).to(dtype))
        result = q.load(out_layout)
        fence_async_shared()
        mbarrier.arrive(q_empty.index(q_stage), count=1)
        first = out + (row.to(gl.int64) * NUM_HEADS + head) * HEAD_DIM
        target = first + out_row[:, None] * (NUM_HEADS * HEAD_DIM) + dim[None, :]
        gl.store(target, result, mask=(out_row < num_rows)[:, None])


@gluon.jit
def _step(
    q,
    k_ring,
    v_ring,
    turn,
    W: gl.constexpr,
    count,
    state,
    scale,
    limit,
    MASKED: gl.constexpr,
    KEYS: gl.constexpr,
):
    """Scores of the next tile and the last tile's p·V, both in flight; then the softmax of the scores.

    state: (p, acc, maximum, total) of the tiles so far, of which p is not yet in acc. count: tiles before p's. limit:
    last key of the next tile that a row sees, if MASKED. KEYS: keys of it that any row sees, all or half of it.
    """
    p, acc, maximum, total = state
    k_buffers, k_ready, k_empty = k_ring
    v_buffers, v_ready, v_empty = v_ring
    STAGES: gl.constexpr = k_buffers.shape[0]
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    score_rows: gl.constexpr = gl.SliceLayout(1, score_layout)
    last, next_ = count % STAGES, (count + 1) % STAGES
    nothing = gl.zeros([ROWS, KEYS], gl.float32, score_layout)
    mbarrier.wait(turn.index(W), (count + 1 & 1) ^ (1 - W))
    mbarrier.wait(k_ready.index(next_), (count + 1) // STAGES & 1)
    keys = k_buffers.index(next_).slice(0, KEYS).permute((1, 0))
    score = warpgroup_mma(q, keys, nothing, use_acc=False, is_async=True)
    mbarrier.wait(v_ready.index(last), count // STAGES & 1)
    acc = warpgroup_mma(p, v_buffers.index(last), acc, is_async=True)
    mbarrier.arrive(turn.index(1 - W), count=1)
    score = warpgroup_mma_wait(1, [score])
    mbarrier.arrive(k_empty.index(next_), count=1)
    if MASKED:
        key = gl.arange(0, KEYS, gl.SliceLayout(0, score_layout))
        score = gl.where(key[None, :] <= gl.convert_layout(limit, score_rows)[:, None], score, float("-inf"))
    rows: gl.constexpr = maximum.type.layout
    new_maximum = gl.maximum(maximum, gl.convert_layout(gl.max(score, 1), rows))
    decay = gl.exp2((maximum - new_maximum) * scale)
    weight = gl.exp2(score * scale - gl.convert_layout(new_maximum * scale, score_rows)[:, None])
    total = total * decay + gl.convert_layout(gl.sum(weight, 1), rows)
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(v_empty.index(last), count=1)
    acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout))[:, None]
    return gl.convert_layout(weight.to(p.dtype), p.type.layout), acc, new_maximum, total


@gluon.jit
def _last_product(p, acc, v_ring, count, KEYS: gl.constexpr):
    v_buffers, v_ready, _ = v_ring
    STAGES: gl.constexpr = v_buffers.shape[0]
    stage = count % STAGES
    mbarrier.wait(v_ready.index(stage), count // STAGES & 1)
    acc = warpgroup_mma(p, v_buffers.index(stage).slice(0, KEYS), acc, is_async=True)
    return warpgroup_mma_wait(0, [acc])


# -- kernel -----------------------------------------------------------------------------------------------------------


@gluon.jit
def _ring(dtype: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr, SIZE: gl.constexpr, DIM: gl.constexpr):
    """STAGES × BUFFERS tiles ``[SIZE, DIM]``; both consumers must free a stage."""
    tiles = gl.allocate_shared_memory(dtype, [STAGES * BUFFERS, SIZE, DIM], gl.NVMMASharedLayout(128, 16, rank=2))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    return tiles, ready, empty


@gluon.jit(do_not_specialize=["rounds"])
def flash_kernel(
    q_tiles,  # descriptor of [ROWS, HEAD_DIM] boxes over [tokens, heads · HEAD_DIM]
    k_tiles,  # of [BOX, …] boxes over the rows of the cache, or, PAGE 0, of dense keys
    v_tiles,
    out,
    records,  # int32 [programs, rounds, 4] of _prefill.deal
    rounds,
    block_table,
    scale,  # softmax scale × log2 e
    HEADS: gl.constexpr,  # query heads of a work item: 2, or 1 with twice the tokens
    GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE: gl.constexpr,  # tokens per cache block, 0 when K and V are dense
    HEAD_ROWS: gl.constexpr,  # rows between heads of head-major K and V, 0 when heads lie side by side
    BOX: gl.constexpr,  # keys that one TMA box brings
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    NUM_HEADS: gl.constexpr = KV_HEADS * GROUP
    q_ring = _ring(q_tiles.dtype, 2, 2, ROWS, HEAD_DIM)
    k_ring = _ring(q_tiles.dtype, STAGES, 1, BLOCK_N, HEAD_DIM)
    v_ring = _ring(q_tiles.dtype, STAGES, 1, BLOCK_N, HEAD_DIM)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(turn.index(0), count=1)
    mbarrier.init(turn.index(1), count=1)
    # fmt: off
    gl.warp_specialize(
        [
            (_consume, (0, out, records, rounds, q_ring, k_ring, v_ring, turn, scale, HEADS, NUM_HEADS)),
            (_consume, (1, out, records, rounds, q_ring, k_ring, v_ring, turn, scale, HEADS, NUM_HEADS)),
            (_produce, (True, q_tiles, k_tiles, records, rounds, block_table, q_ring, k_ring,
                        HEADS, GROUP, KV_HEADS, PAGE, HEAD_ROWS, BOX)),
            (_produce, (False, q_tiles, v_tiles, records, rounds, block_table, q_ring, v_ring,
                        HEADS, GROUP, KV_HEADS, PAGE, HEAD_ROWS, BOX)),
        ],
        [4, 1, 1],
        [240 if BOX == BLOCK_N else 232, 24 if BOX == BLOCK_N else 40, 24 if BOX == BLOCK_N else 40],
    )
    # fmt: on


# -- pages of another dtype -------------------------------------------------------------------------------------------


@triton.jit
def unpack_kernel(
    k_cache,  # [blocks, kv_heads, PAGE, HEAD_DIM]
    v_cache,
    k_scale,
    v_scale,
    scratch,  # [2, kv_heads, HEAD_ROWS, HEAD_DIM]: K, then V, in the compute dtype
    records,
    block_table,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    QUANTIZED: tl.constexpr,
):
    """One tile of TOKENS cached tokens of one KV head's K or V, as ``gather`` would return them."""
    record = records + tl.program_id(0) // (2 * KV_HEADS) * 4
    head = tl.program_id(0) % (2 * KV_HEADS)
    source, row, num_rows, position = tl.load(record), tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)
    token = tl.arange(0, TOKENS)
    live = token < num_rows
    page = tl.load(block_table + source + (position + token) // PAGE, mask=live, other=0).to(tl.int64)
    cache_row = (page * KV_HEADS + head % KV_HEADS) * PAGE + (position + token) % PAGE
    dim = tl.arange(0, HEAD_DIM)
    element = cache_row[:, None] * HEAD_DIM + dim[None, :]
    cache = k_cache if head < KV_HEADS else v_cache
    x = tl.load(cache + element, mask=live[:, None], other=0)
    if QUANTIZED:
        scales = k_scale if head < KV_HEADS else v_scale
        x = x.to(tl.float32) * tl.load(scales + cache_row, mask=live, other=0.0).to(tl.float32)[:, None]
    target = (head.to(tl.int64) * HEAD_ROWS + row + token)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(scratch + target, x.to(scratch.dtype.element_ty), mask=live[:, None])


BLOCK_N = 128  # keys of a tile
UNPACK_TOKENS, UNPACK_WARPS = 64, 4


# -- backend ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Group:
    """Sequences that one launch serves: dealt work, and records of the context to unpack before, or None."""

    records: torch.Tensor
    unpack: torch.Tensor | None = None


@dataclass(slots=True)
class HopperPlan:
    """dense: K and V are the step's own, as a quantised cache holds them. descriptors: of the step's tensors, which
    layers share in CUDA graphs."""

    groups: list[Group]
    dense: bool
    descriptors: Descriptors = field(default_factory=lambda: Descriptors(3))


class HopperFlashBackend(AttentionBackend):
    """capability: kernels are chosen for this GPU (default: the device's)."""

    def __init__(
        self, context: AttentionContext, options: HopperFlashConfig, capability: tuple[int, int] | None = None
    ) -> None:
        super().__init__(context, options)
        if options.scratch_tokens < 1:
            raise ConfigError(f"attention.scratch_tokens must be at least 1, not {options.scratch_tokens}")
        self.group = context.num_q_heads // context.num_kv_heads
        self.heads = 2 if self.group % 2 == 0 else 1
        self.tokens = 2 * ROWS.value // self.heads
        self.section = section_tokens(context)
        self.few_tokens = TritonFlashBackend(context, TritonFlashConfig(), capability)
        self.num_programs = num_multiprocessors(context.device)
        self.flash, self.unpack = Launcher(flash_kernel), Launcher(unpack_kernel)
        self.descriptors = Descriptors(MANY)
        self.scratch_tokens = max(options.scratch_tokens, context.max_model_len)
        self.scratch = self._new_scratch() if context.kv.name == "int8" else None

    def _new_scratch(self) -> torch.Tensor:
        """K and V ``[2, kv_heads, scratch_tokens, head_dim]`` in the compute dtype; finite, as TMA tiles must be."""
        context = self.context
        size = (2, context.num_kv_heads, self.scratch_tokens, context.head_dim)
        return torch.zeros(size, dtype=context.dtype, device=context.device)

    def plan_prefill(self, meta: PrefillMetadata) -> HopperPlan | FlashPlan:
        if meta.max_seqlen_k <= SHORT:
            return self.few_tokens.plan_prefill(meta)
        return self.plan(meta)

    def plan(self, meta: PrefillMetadata) -> HopperPlan:
        direct = self.context.kv.layers[0].k.dtype == self.context.dtype
        if meta.has_prefix and not direct:
            if self.scratch is None:  # an unquantised cache whose dtype is not the compute dtype
                self.scratch = self._new_scratch()
            return HopperPlan(self._unpacked_groups(meta), False)
        # Pages even for a fresh prompt: in packed K and V a tile's stale rows would be the next sequence's, and its NaN
        # this one's. At page 256 they cost nothing, at page 16 at most 4 %.
        records = query_tiles(meta, self.tokens, self.section, None if direct else fresh_rows(meta))
        return HopperPlan([Group(self._dealt(records))], dense=not direct)

    def _dealt(self, records: np.ndarray) -> torch.Tensor:
        work = deal(records, self.context.num_q_heads // self.heads, self.num_programs)
        return to_device(work, self.context.device)

    def _unpacked_groups(self, meta: PrefillMetadata) -> list[Group]:
        """Runs of sequences whose contexts fit the scratch together."""
        starts_q, starts_k = np.array(meta.cu_seqlens_q_cpu), np.array(meta.cu_seqlens_k_cpu)
        offsets, groups, first = table_offsets(meta), [], 0
        while first < meta.num_seqs:
            last = max(first + 1, int(np.searchsorted(starts_k, starts_k[first] + self.scratch_tokens, "right")) - 1)
            some, queries = slice(first, last), np.diff(starts_q)[first:last]
            contexts, key_rows = np.diff(starts_k)[some], starts_k[some] - starts_k[first]
            start = np.zeros_like(key_rows)
            unpack = tile_records(contexts, offsets[some], key_rows, start, UNPACK_TOKENS, self.section)
            records = tile_records(queries, key_rows, starts_q[some], contexts - queries, self.tokens, self.section)
            groups.append(Group(self._dealt(records), to_device(unpack, self.context.device)))
            first = last
        return groups

    def prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LayerCache,
        meta: PrefillMetadata,
        out: torch.Tensor,
    ) -> None:
        plan, context = meta.plan, self.context
        if isinstance(plan, FlashPlan):
            self.few_tokens.prefill(q, k, v, layer, meta, out)
            return
        queries = plan.descriptors.get(head_descriptor, q, ROWS.value)
        for group in plan.groups:
            if plan.dense:
                page, head_rows, box = 0, 0, BLOCK_N
                keys, values = (plan.descriptors.get(head_descriptor, x, box) for x in (k, v))
            elif group.unpack is not None and self.scratch is not None:
                self._unpack(layer, meta, group.unpack, self.scratch)
                page, head_rows, box = 0, self.scratch_tokens, BLOCK_N
                keys, values = (self.descriptors.get(row_descriptor, x, box) for x in self.scratch)
            else:
                page, head_rows = context.block_size, 0
                box = min(BLOCK_N, page & -page)
                keys, values = (self.descriptors.get(row_descriptor, x, box) for x in (layer.k, layer.v))
            rounds = group.records.shape[1]
            self.flash(
                group.records.shape[0],
                (queries, keys, values, out, group.records, rounds, meta.block_table, qk_scale(context)),
                (page, head_rows),
                lambda page=page, head_rows=head_rows, box=box: {
                    "HEADS": self.heads,
                    "GROUP": self.group,
                    "KV_HEADS": context.num_kv_heads,
                    "HEAD_DIM": context.head_dim,
                    "PAGE": page,
                    "HEAD_ROWS": head_rows,
                    "BOX": box,
                    "BLOCK_N": BLOCK_N,
                    "STAGES": 2 if context.head_dim > 64 else 4,
                    "num_warps": 4,
                },
            )

    def _unpack(self, layer: LayerCache, meta: PrefillMetadata, records: torch.Tensor, scratch: torch.Tensor) -> None:
        context = self.context
        self.unpack(
            records.shape[0] * 2 * context.num_kv_heads,
            (layer.k, layer.v, layer.k_scale, layer.v_scale, scratch, records, meta.block_table),
            None,
            lambda: {
                "KV_HEADS": context.num_kv_heads,
                "PAGE": context.block_size,
                "HEAD_DIM": context.head_dim,
                "HEAD_ROWS": self.scratch_tokens,
                "TOKENS": UNPACK_TOKENS,
                "QUANTIZED": layer.k_scale is not None,
                "num_warps": UNPACK_WARPS,
            },
        )


SWIZZLED = gl.NVMMASharedLayout(128, 16, rank=2)


def head_descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """Boxes of ``rows`` tokens of one head of x ``[tokens, heads, head_dim]``, whose heads lie side by side."""
    if x.stride(1) != x.shape[2]:
        x = x.contiguous()
    return TensorDescriptor(x, [x.shape[0], x.shape[1] * x.shape[2]], [x.stride(0), 1], [rows, x.shape[2]], SWIZZLED)


def row_descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """Boxes of ``rows`` keys of x ``[…, head_dim]``, contiguous: whole tiles where a page holds them, else panels."""
    head_dim = x.shape[-1]
    width = head_dim if rows == BLOCK_N else PANEL.value
    return TensorDescriptor(x, [x.numel() // head_dim, head_dim], [head_dim, 1], [rows, width], SWIZZLED)


@hookimpl
def nanoserve_attention(register) -> None:
    register(
        AttentionSpec(
            name="hopper_flash",
            summary="warp-specialised FlashAttention for Hopper (TMA, wgmma), in Gluon",
            capabilities=Capabilities(
                phases=frozenset({"prefill"}),
                kv_formats=frozenset({"bf16", "int8"}),
                dtypes=frozenset({"float16", "bfloat16"}),
                head_dims=frozenset({64, 128}),
                max_gqa_ratio=8,
                devices=frozenset({"cuda"}),
                min_compute_capability=(9, 0),
                max_compute_capability=(9, 0),
                block_size_multiple_of=16,
                needs_finite_cache=True,
                requires=("triton",),
            ),
            config=HopperFlashConfig,
            factory=HopperFlashBackend,
        )
    )
