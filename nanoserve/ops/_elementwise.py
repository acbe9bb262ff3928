"""Triton kernels of embeddings, norms, SwiGLU's gate and a decode step's inputs. One launch each, mathematics in fp32.

``PDL`` (programmatic dependent launch, compute capability 9.0): the next kernel may start at once, and what depends on
the kernel before is touched only after ``gdc_wait``. The interpreter and older GPUs run without. Only the embedding,
the first kernel of a model, is launched after all before it has ended.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl


def supports_pdl(x: torch.Tensor) -> bool:
    return x.is_cuda and compute_capability(x.device) >= (9, 0)


@functools.cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


# -- embeddings -------------------------------------------------------------------------------------------------------


@triton.jit
def embedding_kernel(ids, weight, out, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    row = tl.load(weight + tl.load(ids + token).to(tl.int64) * N + column, mask=column < N)
    tl.store(out + token * N + column, row.to(out.dtype.element_ty), mask=column < N)


def embedding(ids: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See ``nanoserve.ops.embedding``. Of few tokens, torch's own kernel takes three times as long.

    The first kernel of the model is launched without PDL, so that all later ones find finished what was made for the
    step before it (positions, slots, block tables, plans), even before their ``gdc_wait``.
    """
    n = weight.shape[1]
    out = torch.empty(ids.shape[0], n, dtype=dtype, device=weight.device)
    if len(ids):
        block = triton.next_power_of_2(n)
        embedding_kernel[(len(ids),)](
            ids, weight, out, N=n, BLOCK=block, PDL=supports_pdl(weight), num_warps=max(1, min(8, block // 256))
        )
    return out


# -- norms ------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    num_rows,
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    scale = tl.load(weight + column, mask=column < N, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    at = row.to(tl.int64)[:, None] * N + column[None, :]
    mask = (row < num_rows)[:, None] & (column < N)[None, :]
    h = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        h = (h + tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(residual + at, h, mask=mask)
        h = h.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(h * h, 1) / N + eps)
    tl.store(out + at, (h * inverse[:, None] * scale[None, :]).to(out.dtype.element_ty), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """The norm of ``x``, or of ``residual`` after ``x`` was added to it. All but ``weight`` ``[n]``: ``[..., n]``."""
    n = weight.shape[0]
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    num_rows = x.numel() // n
    if num_rows == 0:
        return out
    block = triton.next_power_of_2(n)
    rows = max(1, 4096 // block) if num_rows > 1024 else 1
    pdl = supports_pdl(x)
    rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x,
        residual,
        weight,
        out,
        num_rows,
        eps,
        N=n,
        BLOCK=block,
        ROWS=rows,
        ADD=residual is not None,
        PDL=pdl,
        num_warps=min(8, max(1, block * rows // 512)) if rows == 1 else 8,
        launch_pdl=pdl,
    )
    return out


# -- SwiGLU -----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_rows"])
def silu_and_mul_kernel(
    gate_up, out, num_rows, N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row64 = row.to(tl.int64)[:, None]
    mask = (row < num_rows)[:, None] & (column < N)[None, :]
    gate = tl.load(gate_up + row64 * (2 * N) + column[None, :], mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row64 * (2 * N) + N + column[None, :], mask=mask, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row64 * N + column[None, :], y.to(out.dtype.element_ty), mask=mask)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``[tokens, 2 * n]`` → ``[tokens, n]``."""
    num_rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    gate_up = gate_up.contiguous()
    out = gate_up.new_empty(num_rows, n)
    if num_rows == 0:
        return out
    rows, block = 4 if num_rows > 1024 else 1, 1024
    pdl = supports_pdl(gate_up)
    silu_and_mul_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(n, block))](
        gate_up, out, num_rows, N=n, BLOCK=block, ROWS=rows, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    return out


# -- inputs of a decode step ------------------------------------------------------------------------------------------


@triton.jit
def take_kernel(halves, turn, words, HALF: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    now = tl.load(turn)
    at = tl.arange(0, BLOCK)
    letter = tl.load(halves + now * HALF + at, cache_modifier=".cv")  # the host's memory, as it is now
    tl.debug_barrier()  # every thread knows the turn
    tl.store(words + at, letter)
    tl.store(turn, 1 - now)


def take(halves: torch.Tensor, turn: torch.Tensor, words: torch.Tensor, size: int) -> None:
    """See ``Mailbox.take``. halves: ``[2, n]`` int32, pinned; turn: ``[1]``; words: ``[n]``; n a power of two."""
    block = triton.next_power_of_2(size)
    warps = max(1, min(8, block // 256))
    take_kernel[(1,)](halves, turn, words, HALF=words.shape[0], BLOCK=block, PDL=supports_pdl(words), num_warps=warps)


@triton.jit
def decode_inputs_kernel(
    rows,
    context_lens,
    last_blocks,
    table,
    last_tokens,
    input_ids,
    positions,
    slot_mapping,
    block_table,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i = tl.program_id(0)
    context = tl.load(context_lens + i)
    live = context > 0
    row = tl.load(rows + i).to(tl.int64)
    last_block = tl.load(last_blocks + i)
    position = tl.maximum(context - 1, 0)
    last_column = position // BLOCK_SIZE
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    blocks = tl.load(table + row * WIDTH + column, mask=column < tl.where(live, last_column, 0), other=0)
    blocks = tl.where(live & (column == last_column), last_block, blocks)
    tl.store(block_table + i.to(tl.int64) * WIDTH + column, blocks, mask=column <= last_column)
    if tl.program_id(1) == 0:
        token = tl.load(last_tokens + row, mask=live, other=0)
        tl.store(input_ids + i, token)
        tl.store(positions + i, position)
        tl.store(slot_mapping + i, tl.where(live, last_block * BLOCK_SIZE + position % BLOCK_SIZE, -1))
        tl.store(table + row * WIDTH + last_column, last_block, mask=live)


def decode_inputs(
    rows: torch.Tensor,
    context_lens: torch.Tensor,
    last_blocks: torch.Tensor,
    table: torch.Tensor,
    last_tokens: torch.Tensor,
    block_size: int,
    outputs: Sequence[torch.Tensor],
) -> None:
    """See ``nanoserve.ops.decode_inputs``. outputs: the fields of a ``DecodeInputs``."""
    width = table.shape[1]
    block = min(1024, triton.next_power_of_2(width))
    pdl = supports_pdl(table)
    decode_inputs_kernel[(rows.shape[0], triton.cdiv(width, block))](
        rows,
        context_lens,
        last_blocks,
        table,
        last_tokens,
        *outputs,
        WIDTH=width,
        BLOCK_SIZE=block_size,
        BLOCK=block,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
