"""Matrix products of 33 to 256 tokens on Hopper, in Gluon: what a decode step of a large batch does beside attention.

None of a layer's products lasts longer than a few microseconds, so a good part of each is the way in and out:

* What a program can hold of its rows of W is on its way to shared memory (TMA) before it waits for the kernel ahead
  of it (programmatic dependent launch). Then only x is missing, and the next kernel is being launched already. From 65
  tokens on programs are so many that they start late: then W comes first only as far as x is not kept waiting by it.
* x is operand A of wgmma and W operand B, so that a program may own few rows of W. x is read once per column of tiles.
  From 65 tokens on what passes through shared memory is the limit, so that tiles are larger, and gate and up are one.
* Where N / 64 programs are few, a cluster of ``split`` programs shares a tile, each with a part of K. Their partial
  sums pass through global memory, that is the L2, on either side of a cluster barrier; then each program finishes its
  share of the rows. (Triton 3.6 cannot convert layouts through distributed shared memory.)

SwiGLU's gate and the residual add happen to the sums before they are stored. So does an RMSNorm between two of these
products: the first stores its result a second time, times the norm's weight, and sums of squares per tile; the second
divides its sums by what these say x should have been divided by.

A launch costs the host several times what cuBLAS's does, two TMA descriptors included: worth it in CUDA graphs. Figures
and what failed: NOTES.md.

For compute capability 9.0 alone: compiling for another one aborts the process.
"""

# mypy: disable-error-code="assignment, var-annotated"

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

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

# A name and the shape of a cluster's barriers changed between Triton 3.6 and 3.9.
RENAMED = "async_load" in tma.__all__
tma_load = tma.async_load if RENAMED else tma.async_copy_global_to_shared
_members = vars(gl.shared_memory_descriptor)
reinterpret = _members["reinterpret" if "reinterpret" in _members else "_reinterpret"]

PANEL = gl.constexpr(64)  # columns of a 128-byte swizzled panel of 16-bit elements


@gluon.jit
def _load_x(tiles, ready, buffers, chunk: gl.constexpr, row, first_k):
    at = [row, first_k + chunk * buffers.shape[2]]
    tma_load(tiles, at, ready.index(chunk % ready.shape[0]), buffers.index(chunk % buffers.shape[0]))


@gluon.jit
def _load_w(tiles, ready, buffers, chunk: gl.constexpr, row, first_k, PARTS: gl.constexpr, PART_ROWS: gl.constexpr):
    stage: gl.constexpr = chunk % buffers.shape[0]
    column = first_k + chunk * buffers.shape[2]
    if PARTS == 1:
        tma_load(tiles, [row, column], ready.index(stage), buffers.index(stage))
    else:  # a tile's layout is a sequence of panels, and each part has its rows in each of them
        ROWS: gl.constexpr = buffers.shape[1] // PARTS
        PANELS: gl.constexpr = buffers.shape[2] // PANEL
        panels = reinterpret(buffers.index(stage), buffers.dtype, [PANELS * PARTS * ROWS, PANEL], buffers.layout)
        for panel in gl.static_range(PANELS):
            for part in gl.static_range(PARTS):
                at = [row + part * PART_ROWS, column + panel * PANEL]
                tma_load(tiles, at, ready.index(stage), panels.slice((panel * PARTS + part) * ROWS, ROWS))


@gluon.jit
def _cluster_barrier():
    """Global stores of every thread of the cluster before it are visible to all of them after it."""
    gl.inline_asm_elementwise(
        "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;",
        "=r,~{memory}",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit(do_not_specialize=["num_tokens"])
def wgmma_kernel(
    x_tiles,  # descriptor of [SPLIT * TOKENS, BLOCK_K] boxes, of which each program of a cluster takes its TOKENS
    w_tiles,  # of [ROWS, BLOCK_K] boxes
    bias,
    out,  # [num_tokens, N], or of half the width with SWIGLU
    partials,  # fp32 [clusters, SPLIT, TOKENS, ROWS]
    norm_weight,  # [N]: of the norm that follows
    weighted,  # [num_tokens, N]: out · norm_weight
    squares,  # fp32 [parts of a row, num_tokens]: Σ out², or, with NORM_PARTS, those of x before its norm's weight
    eps,
    num_tokens,
    N: gl.constexpr,
    K: gl.constexpr,
    TOKENS: gl.constexpr,
    ROWS: gl.constexpr,  # of W that a program owns; with SWIGLU as many again of up
    BLOCK_K: gl.constexpr,
    SPLIT: gl.constexpr,
    X_STAGES: gl.constexpr,
    W_STAGES: gl.constexpr,  # at least as many
    W_FIRST: gl.constexpr,  # stages of W to ask for before x
    X_LAYOUT: gl.constexpr,
    W_LAYOUT: gl.constexpr,
    BARRIER: gl.constexpr,
    MMA: gl.constexpr,
    OUT: gl.constexpr,  # of [TOKENS, ROWS], rows dealt to the cluster
    BIAS: gl.constexpr,
    SWIGLU: gl.constexpr,
    ADD: gl.constexpr,
    WEIGHTED: gl.constexpr,
    NORM_PARTS: gl.constexpr,
):
    gl.static_assert(SPLIT == 1 or not SWIGLU, "a gate is not a sum over parts of K")
    gl.static_assert(X_STAGES > 1 or K <= BLOCK_K * SPLIT, "a step is refilled after the next one's products began")
    gl.static_assert(SPLIT == 1 or NORM_PARTS == 0, "a program of a cluster has other rows in the end")
    SQUARES: gl.constexpr = gl.BlockedLayout([4, 1], [4, 8], [1, gl.num_warps()], [1, 0])
    tl.extra.cuda.gdc_launch_dependents()
    PARTS: gl.constexpr = 2 if SWIGLU else 1
    OUT_N: gl.constexpr = N // PARTS
    COLUMNS: gl.constexpr = (OUT_N + ROWS - 1) // ROWS
    CHUNKS: gl.constexpr = (K + BLOCK_K * SPLIT - 1) // (BLOCK_K * SPLIT)
    BYTES: gl.constexpr = (TOKENS + PARTS * ROWS) * BLOCK_K * 2
    w_buffers = gl.allocate_shared_memory(w_tiles.dtype, [W_STAGES, PARTS * ROWS, BLOCK_K], W_LAYOUT)
    x_buffers = gl.allocate_shared_memory(x_tiles.dtype, [X_STAGES, SPLIT * TOKENS, BLOCK_K], X_LAYOUT)
    ready = gl.allocate_shared_memory(gl.int64, [W_STAGES, BARRIER[1]], BARRIER[0])
    for i in gl.static_range(W_STAGES):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()

    column = gl.program_id(0) % COLUMNS * ROWS
    token = gl.program_id(0) // COLUMNS * TOKENS
    first_k = 0
    x_row = token
    if SPLIT > 1:
        # To Triton the cluster has one tile of x, SPLIT * TOKENS high, and one of W that all have: a program's place
        # in K is ours alone, and the rows that Triton adds are taken off again.
        rank = gl.inline_asm_elementwise(
            "mov.u32 $0, %cluster_ctarank;", "=r", [], dtype=gl.int32, is_pure=True, pack=1
        )
        first_k = rank * (CHUNKS * BLOCK_K)
        x_row = token - rank * TOKENS
    for i in gl.static_range(W_STAGES):
        mbarrier.expect(ready.index(i), BYTES)
    for i in gl.static_range(W_FIRST):
        _load_w(w_tiles, ready, w_buffers, i, column, first_k, PARTS, OUT_N)
    out_token = token + gl.arange(0, TOKENS, gl.SliceLayout(1, OUT))[:, None]
    out_column = column + gl.arange(0, ROWS, gl.SliceLayout(0, OUT))[None, :]
    out_pointers = out + (out_token * OUT_N + out_column)
    out_mask = (out_token < num_tokens) & (out_column < OUT_N)
    if BIAS:
        offset = gl.load(bias + out_column, mask=out_column < OUT_N, other=0.0)
    if WEIGHTED:
        factor = gl.load(norm_weight + out_column, mask=out_column < OUT_N, other=0.0)

    tl.extra.cuda.gdc_wait()
    for i in gl.static_range(X_STAGES):
        _load_x(x_tiles, ready, x_buffers, i, x_row, first_k)
    for i in gl.static_range(W_FIRST, W_STAGES):
        _load_w(w_tiles, ready, w_buffers, i, column, first_k, PARTS, OUT_N)
    if ADD:
        residual = gl.load(out_pointers, mask=out_mask, other=0.0).to(gl.float32)
    if NORM_PARTS > 0:
        part = gl.arange(0, triton.next_power_of_2(NORM_PARTS), gl.SliceLayout(1, SQUARES))[:, None]
        x_token = token + gl.arange(0, TOKENS, gl.SliceLayout(0, SQUARES))[None, :]
        is_part = (part < NORM_PARTS) & (x_token < num_tokens)
        sums = gl.sum(gl.load(squares + part * num_tokens + x_token, mask=is_part, other=0.0), 0)
        inverse = gl.convert_layout(gl.rsqrt(sums / K + eps), gl.SliceLayout(1, MMA))[:, None]
    acc = gl.zeros([SPLIT * TOKENS, PARTS * ROWS], gl.float32, MMA)
    for i in gl.static_range(CHUNKS):
        mbarrier.wait(ready.index(i % W_STAGES), i // W_STAGES & 1)
        w = w_buffers.index(i % W_STAGES).permute((1, 0))
        acc = warpgroup_mma(x_buffers.index(i % X_STAGES), w, acc, use_acc=i > 0, is_async=True)
        if i > 0 and i - 1 + X_STAGES < CHUNKS:  # to be refilled: what chunk i - 1 was read from
            acc = warpgroup_mma_wait(1, [acc])
            if i - 1 + W_STAGES < CHUNKS:
                mbarrier.expect(ready.index((i - 1) % W_STAGES), BYTES)
                _load_w(w_tiles, ready, w_buffers, i - 1 + W_STAGES, column, first_k, PARTS, OUT_N)
            _load_x(x_tiles, ready, x_buffers, i - 1 + X_STAGES, x_row, first_k)
    y = warpgroup_mma_wait(0, [acc])
    if NORM_PARTS > 0:
        y *= inverse
    if SWIGLU:
        gate, up = gl.split(gl.permute(gl.reshape(y, [TOKENS, 2, ROWS]), (0, 2, 1)))
        y = gate / (1.0 + gl.exp(-gate)) * up
    if SPLIT > 1:
        tile = partials + gl.program_id(0) * (SPLIT * TOKENS * ROWS)
        row = gl.arange(0, SPLIT * TOKENS, gl.SliceLayout(1, MMA))[:, None]
        gl.store(tile + (row * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, MMA))[None, :]), y)
        _cluster_barrier()
        row = gl.arange(0, TOKENS, gl.SliceLayout(1, OUT))[:, None]
        share = tile + (row * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, OUT))[None, :])
        y = gl.zeros([TOKENS, ROWS], gl.float32, OUT)
        for i in gl.static_range(SPLIT):
            y += gl.load(share + i * (TOKENS * ROWS), cache_modifier=".cg")
    else:
        y = gl.convert_layout(y, OUT)
    if BIAS:
        y += offset.to(gl.float32)
    if ADD:
        y += residual
    rounded = y.to(out.dtype.element_ty)
    gl.store(out_pointers, rounded, mask=out_mask)
    if WEIGHTED:
        y = gl.where(out_mask, rounded.to(gl.float32), 0.0)
        product = (y * factor.to(gl.float32)).to(weighted.dtype.element_ty)
        gl.store(weighted + (out_token * OUT_N + out_column), product, mask=out_mask)
        row_token = token + gl.arange(0, TOKENS, gl.SliceLayout(1, OUT))
        part = gl.program_id(0) % COLUMNS
        gl.store(squares + part * num_tokens + row_token, gl.sum(y * y, 1), mask=row_token < num_tokens)


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program does: ``tokens`` (64 or 128) × ``rows`` of W (with SwiGLU of gate and of up), ``block_k`` a step.

    x_stages, w_stages: steps of x (at least 2) and of W (at least as many) in shared memory. w_first: those of W that
    are asked for before any of x. split: programs of a cluster that share a tile's K.
    """

    tokens: int
    rows: int
    block_k: int
    x_stages: int
    w_stages: int
    w_first: int
    split: int = 1


def tile_for(num_tokens: int, n: int, k: int, swiglu: bool) -> Tile | None:
    """The tile for ``num_tokens`` and W ``[n, k]``; None where cuBLAS is faster or the shape does not fit.

    Measured on an H200 inside whole layers of Qwen3-0.6B, whose largest matrix but lm_head has 2^22.6 elements.
    """
    if k % 8 or n % 16 or k > 4096 or n * k >= 2**23:
        return None
    if n > 2048 and k > 1536 and not swiglu:  # so many steps in one part that Triton 3.9 spills
        return None
    if num_tokens <= 64:
        if swiglu:
            return Tile(64, 64, 128, 3, 5, 5)
        return Tile(64, 64, 128, 6, 6, 6, split=4) if n <= 2048 else Tile(64, 64, 128, 5, 8, 8)
    if swiglu:
        return Tile(128, 32, 64, 6, 8, 3) if num_tokens <= 128 else Tile(128, 64, 64, 6, 6, 2)
    if n <= 2048:
        return Tile(64, 64, 128, 6, 6, 3, split=2)
    if num_tokens <= 128:
        return Tile(64, 64, 128, 6, 6, 3)
    return Tile(64, 128, 64, 7, 7, 3) if num_tokens <= 192 else Tile(128, 64, 128, 4, 4, 2)


@dataclass(frozen=True, slots=True)
class Weighted:
    """An RMSNorm less its division: ``rms_norm(y) = x · rsqrt(Σ squares / width + eps)`` where x = y · weight.

    weight ``[width]``; x ``[tokens, width]`` in the dtype of the weights; squares: fp32 ``[parts, tokens]``, Σ y² over
    parts of the width.
    """

    weight: torch.Tensor
    eps: float
    x: torch.Tensor
    squares: torch.Tensor

    @classmethod
    def of(cls, y: torch.Tensor, weight: torch.Tensor, eps: float, tile: Tile) -> Weighted:
        """Empty, for a product with ``tile`` that ends in y ``[tokens, width]``."""
        parts = triton.cdiv(y.shape[1], tile.rows)
        squares = torch.empty(parts, y.shape[0], dtype=torch.float32, device=y.device)
        return cls(weight, eps, torch.empty_like(y), squares)


@functools.cache
def layouts(tile: Tile, parts: int) -> dict[str, Any]:
    """Constants of the kernel; those of a cluster say which of its programs has what."""
    bits = range(tile.split.bit_length() - 1)
    own_rows, shared = [[2**i, 0] for i in bits], [[0, 0] for _ in bits]
    warps = tile.tokens // 16
    vector = min(8, tile.tokens * tile.rows // (tile.split * warps * 32))
    lanes = tile.rows // vector
    barrier = mbarrier.MBarrierLayout([[2**i if RENAMED else 0] for i in bits])
    return {
        "X_LAYOUT": gl.NVMMASharedLayout(128, 16, rank=2, cga_layout=own_rows),
        "W_LAYOUT": gl.NVMMASharedLayout(128, 16, rank=2, cga_layout=shared),
        "BARRIER": (barrier, tile.split if RENAMED else 1),
        "MMA": gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, parts * tile.rows, 16], own_rows),
        "OUT": gl.BlockedLayout([1, vector], [32 // lanes, lanes], [warps, 1], [1, 0], own_rows),
    }


def wgmma_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    tile: Tile,
    *,
    bias: torch.Tensor | None = None,
    swiglu: bool = False,
    add: bool = False,
    weighted: Weighted | None = None,
    norm: Weighted | None = None,
) -> torch.Tensor:
    """``out = f(x Wᵀ + b)``, or ``out += …``; x ``[tokens, in]``, W ``[out, in]``, contiguous, 16-bit, 16-byte aligned.

    swiglu: f is ``silu_and_mul``, and ``out`` half as wide as W is high; without bias. weighted: filled with what
    ``out`` is to the norm that follows. norm: x is ``norm.x``; what is multiplied with Wᵀ is the norm.
    """
    num_tokens, k = x.shape
    n = weight.shape[0]
    if swiglu and bias is not None:
        raise ValueError("wgmma_linear: SwiGLU takes no bias")
    clusters = triton.cdiv(num_tokens, tile.tokens) * triton.cdiv(out.shape[1], tile.rows)
    constants = layouts(tile, 2 if swiglu else 1)
    partials = None
    if tile.split > 1:
        size = (clusters, tile.split, tile.tokens, tile.rows)
        partials = torch.empty(size, dtype=torch.float32, device=x.device)
    follows = weighted or norm
    x_box, w_box = [tile.split * tile.tokens, tile.block_k], [tile.rows, PANEL.value if swiglu else tile.block_k]
    x_tiles = TensorDescriptor(x, [num_tokens, k], [k, 1], x_box, constants["X_LAYOUT"])
    w_tiles = TensorDescriptor(weight, [n, k], [k, 1], w_box, constants["W_LAYOUT"])
    chunks = triton.cdiv(k, tile.block_k * tile.split)
    wgmma_kernel[(clusters,)](
        x_tiles,
        w_tiles,
        bias,
        out,
        partials,
        weighted.weight if weighted else None,
        weighted.x if weighted else None,
        follows.squares if follows else None,
        follows.eps if follows else 0.0,
        num_tokens,
        N=n,
        K=k,
        TOKENS=tile.tokens,
        ROWS=tile.rows,
        BLOCK_K=tile.block_k,
        SPLIT=tile.split,
        X_STAGES=min(tile.x_stages, chunks),
        W_STAGES=min(tile.w_stages, chunks),
        W_FIRST=min(tile.w_first, chunks),
        **constants,
        BIAS=bias is not None,
        SWIGLU=swiglu,
        ADD=add,
        WEIGHTED=weighted is not None,
        NORM_PARTS=norm.squares.shape[0] if norm else 0,
        num_warps=tile.tokens // 16,
        num_ctas=tile.split,
        launch_pdl=True,
    )
    return out
