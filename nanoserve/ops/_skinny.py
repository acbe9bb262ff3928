"""Matrix products of few tokens (at most 64), in Gluon: what a decode step does when it does not attend.

Such a product is a read of the weights, and of a layer's four products none lasts much longer than a launch. So:

* A program owns a few rows of W (columns of the result). Its warps divide K among them, and all of a program's weights
  are in flight before it waits for the kernel ahead of it (programmatic dependent launch): they depend on nothing.
* Which elements a lane holds is chosen so that a 16-byte load is a tensor core's operand. In a block of 32 elements of
  K, lane c of four loads elements 8c … 8c + 7; that mma would expect others there does not matter, because W and x are
  permuted alike and a sum has no order. Nothing passes through shared memory but the warps' partial sums.
* RMSNorm of the input costs no pass: ``sum_k w_k g_k h_k / rms(h)``, the sum of squares being collected on the way.
  SwiGLU's gate and the residual add happen to the sums before they are stored.
"""

# mypy: disable-error-code="assignment, var-annotated"
# (tuples of tiles grow in the kernel)

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from nanoserve.ops._elementwise import supports_pdl


@gluon.jit
def _load_chunk(pointers, k, i: gl.constexpr, K: gl.constexpr, STEP: gl.constexpr):
    """Chunk i of every row; k is the position in chunk 0."""
    if (i + 1) * STEP <= K:
        return gl.load(pointers + i * STEP)
    return gl.load(pointers + i * STEP, mask=k < K - i * STEP, other=0.0)


@gluon.jit
def _operand(tile, INDEX: gl.constexpr, MMA: gl.constexpr):
    """Registers of tile ``[warps, rows, K]`` renamed to operand 0 ``[warps, rows, K]`` or 1 ``[warps, K, rows]``.

    Element 32u + 8c + 4s + 2h + b of K, in lane c, becomes element 16(2u + s) + 8h + 2c + b, which mma expects there.
    """
    WARPS: gl.constexpr = tile.shape[0]
    ROWS: gl.constexpr = tile.shape[1]
    BLOCK_K: gl.constexpr = tile.shape[2]
    tile = gl.permute(gl.reshape(tile, [WARPS, ROWS, BLOCK_K // 32, 4, 2, 2, 2]), (0, 1, 2, 4, 5, 3, 6))
    tile = gl.reshape(tile, [WARPS, ROWS, BLOCK_K])
    if INDEX == 1:
        tile = gl.permute(tile, (0, 2, 1))
    return gl.convert_layout(tile, gl.DotOperandLayout(INDEX, MMA, 2))


@gluon.jit(do_not_specialize=["num_tokens"])
def skinny_kernel(
    x,  # [num_tokens, K]
    weight,  # [N, K]
    bias,
    norm_weight,
    out,  # [num_tokens, N], or of half the width with SWIGLU
    num_tokens,
    eps,
    N: gl.constexpr,
    K: gl.constexpr,
    ROWS: gl.constexpr,  # of W that a program owns; with SWIGLU half are gates
    TOKENS: gl.constexpr,
    WARPS: gl.constexpr,
    BLOCK_K: gl.constexpr,  # of one warp in one chunk
    AHEAD: gl.constexpr,  # chunks of W and of x that are loaded ahead
    X_AHEAD: gl.constexpr,
    W_LAYOUT: gl.constexpr,
    X_LAYOUT: gl.constexpr,
    PARTIALS: gl.constexpr,
    BIAS: gl.constexpr,
    NORM: gl.constexpr,
    SWIGLU: gl.constexpr,
    ADD: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    STEP: gl.constexpr = WARPS * BLOCK_K
    CHUNKS: gl.constexpr = (K + STEP - 1) // STEP
    OUT_ROWS: gl.constexpr = ROWS // 2 if SWIGLU else ROWS
    OUT_N: gl.constexpr = N // 2 if SWIGLU else N
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])

    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, W_LAYOUT)))[:, None, None]
    row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, W_LAYOUT)))[None, :, None]
    w_k = warp * BLOCK_K + gl.arange(0, BLOCK_K, gl.SliceLayout(0, gl.SliceLayout(1, W_LAYOUT)))[None, None, :]
    if SWIGLU:
        w_row = row // OUT_ROWS * OUT_N + gl.minimum(gl.program_id(0) * OUT_ROWS + row % OUT_ROWS, OUT_N - 1)
    else:
        w_row = gl.minimum(gl.program_id(0) * ROWS + row, N - 1)
    w_pointers = weight + (w_row * K + w_k)
    w_tiles = ()
    for i in gl.static_range(AHEAD):
        w_tiles = w_tiles + (_load_chunk(w_pointers, w_k, i, K, STEP),)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, X_LAYOUT)))[:, None, None]
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(2, X_LAYOUT)))[None, :, None]
    x_k = warp * BLOCK_K + gl.arange(0, BLOCK_K, gl.SliceLayout(0, gl.SliceLayout(1, X_LAYOUT)))[None, None, :]
    norm_tiles = ()
    if NORM:
        for i in gl.static_range(X_AHEAD):
            norm_tiles = norm_tiles + (_load_chunk(norm_weight + x_k, x_k, i, K, STEP),)

    SUMS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(0, PARTIALS)) if SWIGLU else gl.SliceLayout(0, PARTIALS)
    SQUARES: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, PARTIALS)) if SWIGLU else gl.SliceLayout(1, PARTIALS)
    out_column = gl.program_id(0) * OUT_ROWS + gl.arange(0, OUT_ROWS, gl.SliceLayout(1, SUMS))[:, None]
    out_token = gl.arange(0, TOKENS, gl.SliceLayout(0, SUMS))[None, :]
    out_pointers = out + (out_token * OUT_N + out_column)
    out_mask = (out_token < num_tokens) & (out_column < OUT_N)
    if BIAS:
        offset = gl.load(bias + out_column, mask=out_column < OUT_N, other=0.0)

    if PDL:
        tl.extra.cuda.gdc_wait()
    x_pointers = x + (gl.minimum(token, num_tokens - 1) * K + x_k)
    x_tiles = ()
    for i in gl.static_range(X_AHEAD):
        x_tiles = x_tiles + (_load_chunk(x_pointers, x_k, i, K, STEP),)
    if ADD:
        residual = gl.load(out_pointers, mask=out_mask, other=0.0).to(gl.float32)
    acc = gl.zeros([WARPS, ROWS, TOKENS], gl.float32, MMA)
    squares = gl.zeros([WARPS, TOKENS], gl.float32, gl.SliceLayout(2, X_LAYOUT))
    for i in gl.static_range(CHUNKS):
        if i + AHEAD < CHUNKS:
            w_tiles = w_tiles + (_load_chunk(w_pointers, w_k, i + AHEAD, K, STEP),)
        if i + X_AHEAD < CHUNKS:
            x_tiles = x_tiles + (_load_chunk(x_pointers, x_k, i + X_AHEAD, K, STEP),)
            if NORM:
                norm_tiles = norm_tiles + (_load_chunk(norm_weight + x_k, x_k, i + X_AHEAD, K, STEP),)
        x_tile = x_tiles[i]
        if NORM:
            h = x_tile.to(gl.float32)
            squares += gl.sum(h * h, 2)
            x_tile = (h * norm_tiles[i].to(gl.float32)).to(x.dtype.element_ty)
        acc = mma_v2(_operand(w_tiles[i], 0, MMA), _operand(x_tile, 1, MMA), acc)

    if SWIGLU:
        acc = gl.permute(gl.reshape(acc, [WARPS, 2, OUT_ROWS, TOKENS]), (0, 2, 3, 1))
    y = gl.sum(gl.convert_layout(acc, PARTIALS), 0)
    if NORM:
        inverse = gl.rsqrt(gl.sum(gl.convert_layout(squares, SQUARES), 0) / K + eps)
        inverse = gl.convert_layout(inverse, gl.SliceLayout(0, SUMS))[None, :]
    if SWIGLU:
        gate, up = gl.split(y)
        gate, up = gl.convert_layout(gate, SUMS), gl.convert_layout(up, SUMS)
        if NORM:
            gate, up = gate * inverse, up * inverse
        y = gate / (1.0 + gl.exp(-gate)) * up
    elif NORM:
        y = y * inverse
    if BIAS:
        y += offset.to(gl.float32)
    if ADD:
        y += residual
    gl.store(out_pointers, y.to(out.dtype.element_ty), mask=out_mask)


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program does: ``rows`` of W, at least 16, with K divided among ``warps``, ``block_k`` each at a time.

    ahead: chunks (``warps * block_k``) of W in flight, x_ahead: of x. max_registers: per thread; None: no limit.
    """

    rows: int
    warps: int
    block_k: int
    ahead: int = 3
    x_ahead: int = 1
    max_registers: int | None = None


def tile_for(num_tokens: int, n: int, k: int) -> Tile | None:
    """The tile for ``num_tokens`` and W ``[n, k]``; None where cuBLAS is faster or the shape does not fit.

    Measured on an H200 inside whole steps of Qwen3-0.6B, whose largest matrix but lm_head has 2^22.6 elements.
    """
    if k % 8 or n % 8 or n * k >= 2**31:
        return None
    if num_tokens <= 8 and n > 2**16:
        return Tile(16, 2, 128, ahead=2)
    if num_tokens <= 8:
        return Tile(16, 8 if k >= 2048 and n <= 8192 else 4, 128, x_ahead=3)
    if n * k >= (2**25 if num_tokens <= 16 else 2**23):
        return None  # so large that cuBLAS comes close to the memory's bandwidth as well
    if num_tokens <= 16:
        return Tile(16, 8, 128, x_ahead=2)
    if n <= 2048:
        return Tile(16, 8, 64, ahead=6)
    return Tile(32, 8, 32, ahead=4, max_registers=128) if num_tokens <= 32 else None


@functools.cache
def fragment_layout(warps: int, rows: int, block_k: int) -> gl.DistributedLinearLayout:
    """Of ``[warps, rows, block_k]`` 16-bit elements: 8 neighbours a load, the four lanes of a row side by side."""

    def bases(axis: int, start: int, stop: int) -> list[list[int]]:
        return [
            [2**i if a == axis else 0 for a in range(3)] for i in range(start.bit_length() - 1, (stop - 1).bit_length())
        ]

    registers = bases(2, 1, 8) + bases(1, 8, rows) + bases(2, 32, block_k)
    lanes = bases(2, 8, 32) + bases(1, 1, 8)
    return gl.DistributedLinearLayout(registers, lanes, bases(0, 1, warps), [], [warps, rows, block_k])


@functools.cache
def partials_layout(warps: int, swiglu: bool) -> gl.BlockedLayout:
    """Of sums ``[warps, rows, tokens]`` or ``[warps, rows, tokens, gate or up]``: a thread has those of all warps."""
    if swiglu:
        return gl.BlockedLayout([warps, 1, 1, 2], [1, 8, 4, 1], [1, 1, warps, 1], [0, 3, 1, 2])
    return gl.BlockedLayout([warps, 1, 1], [1, 16, 2], [1, 1, warps], [0, 1, 2])


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    tile: Tile,
    *,
    bias: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    swiglu: bool = False,
    add: bool = False,
) -> torch.Tensor:
    """``out = f(norm(x) Wᵀ + b)``, or ``out += …``; x ``[tokens, in]``, W ``[out, in]``, contiguous, 16-bit.

    norm: weight and eps of an RMSNorm of x. swiglu: f is ``silu_and_mul``, and ``out`` half as wide as W is high.
    """
    num_tokens, k = x.shape
    n = weight.shape[0]
    tokens = max(8, triton.next_power_of_2(num_tokens))
    chunks = triton.cdiv(k, tile.warps * tile.block_k)
    norm_weight, eps = norm or (None, 0.0)
    pdl = supports_pdl(x)
    skinny_kernel[(triton.cdiv(n, tile.rows),)](
        x,
        weight,
        bias,
        norm_weight,
        out,
        num_tokens,
        eps,
        N=n,
        K=k,
        ROWS=tile.rows,
        TOKENS=tokens,
        WARPS=tile.warps,
        BLOCK_K=tile.block_k,
        AHEAD=min(tile.ahead, chunks),
        X_AHEAD=min(tile.x_ahead, chunks),
        W_LAYOUT=fragment_layout(tile.warps, tile.rows, tile.block_k),
        X_LAYOUT=fragment_layout(tile.warps, tokens, tile.block_k),
        PARTIALS=partials_layout(tile.warps, swiglu),
        BIAS=bias is not None,
        NORM=norm is not None,
        SWIGLU=swiglu,
        ADD=add,
        PDL=pdl,
        num_warps=tile.warps,
        launch_pdl=pdl,
        maxnreg=tile.max_registers,
    )
    return out
