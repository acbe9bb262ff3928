"""Greedy and temperature sampling in two launches, straight from the logits. For CUDA; ``Sampler`` is the reference.

The first reduces chunks of the vocabulary to their maximum and their sum of ``exp((x - maximum) / temperature)``. The
second finds, per row, the chunk in which the cumulative distribution passes the row's random number, and the token
within. Nothing of the vocabulary's size is written, and logits are read in whatever dtype they have.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanoserve.ops._elementwise import supports_pdl

CHUNK = 1024
CHUNKS = 4  # of one program


@triton.jit
def chunk_kernel(
    logits,
    inv_temperature,
    maxima,
    sums,
    vocab_size,
    num_chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    RANDOM: tl.constexpr,
    PDL: tl.constexpr,
):
    """A chunk that holds a NaN or +inf has the maximum +inf."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    x = tl.load(logits + row * vocab_size + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    maximum = tl.max(tl.where(x < float("inf"), x, float("inf")), 1)
    at = row * num_chunks + chunk
    tl.store(maxima + at, maximum, mask=chunk < num_chunks)
    if RANDOM:
        p = tl.exp((x - maximum[:, None]) * tl.load(inv_temperature + row))
        total = tl.where(maximum > float("-inf"), tl.sum(p, 1), 0.0)
        tl.store(sums + at, total, mask=chunk < num_chunks)


@triton.jit
def _inverse_cdf(p, target, index, BLOCK: tl.constexpr):
    """First index with p > 0 up to which p sums to more than ``target``; the last with p > 0 if rounding left none."""
    possible = p > 0
    first = tl.min(tl.where(possible & (tl.cumsum(p, 0) > target), index, BLOCK), 0)
    last = tl.max(tl.where(possible, index, 0), 0)
    return tl.minimum(first, last)


@triton.jit
def pick_kernel(
    logits,
    inv_temperature,
    uniform,
    maxima,
    sums,
    tokens,
    rows,
    last_tokens,
    vocab_size,
    num_chunks,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    RANDOM: tl.constexpr,
    SCATTER: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    maximum = tl.load(maxima + row * num_chunks + index, mask=index < num_chunks, other=float("-inf"))
    best = tl.max(maximum, 0)
    chunk = tl.min(tl.where(maximum == best, index, BLOCK), 0)
    if RANDOM:
        scale = tl.load(inv_temperature + row)
        random = scale > 0
        share = tl.where(maximum > float("-inf"), tl.exp((maximum - best) * scale), 0.0)
        total = tl.load(sums + row * num_chunks + index, mask=index < num_chunks, other=0.0)
        mass = total.to(tl.float64) * share.to(tl.float64)
        target = tl.load(uniform + row).to(tl.float64) * tl.sum(mass, 0)
        chunk = tl.where(random, _inverse_cdf(mass, target, index, BLOCK), chunk)
        chosen = index == chunk
        rest = (target - tl.sum(tl.where(index < chunk, mass, 0.0), 0)) / tl.sum(tl.where(chosen, share, 0.0), 0)
        peak = tl.max(tl.where(chosen, maximum, float("-inf")), 0)
    within = tl.arange(0, CHUNK)
    token = chunk * CHUNK + within
    x = tl.load(logits + row * vocab_size + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    place = tl.min(tl.where(x == best, within, CHUNK), 0)
    if RANDOM:
        p = tl.exp((x - peak) * scale).to(tl.float64)
        place = tl.where(random, _inverse_cdf(p, rest, within, CHUNK), place)
    result = tl.where(tl.abs(best) < float("inf"), chunk * CHUNK + place, -1)
    tl.store(tokens + row, result.to(tl.int64))
    if SCATTER:
        tl.store(last_tokens + tl.load(rows + row), tl.maximum(result, 0))


def sample(
    logits: torch.Tensor,
    inv_temperature: torch.Tensor | None = None,
    uniform: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    last_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token id per row of ``logits`` ``[B, vocab_size]`` (contiguous, any float dtype), as ``Sampler`` draws it.

    inv_temperature: ``[B]`` fp32, 0 for greedy; None: every row is. uniform: ``[B]`` fp32 in (0, 1).
    With ``rows`` ``[B]`` and ``last_tokens`` ``[num_rows]``, both int32, sets ``last_tokens[rows]`` too (0 for -1).
    Returns ``[B]`` int64, -1 where a row has a NaN, a +inf, or nothing but -inf.
    """
    batch, vocab_size = logits.shape
    tokens = torch.empty(batch, dtype=torch.int64, device=logits.device)
    if batch == 0:
        return tokens
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    maxima, sums = torch.empty(2, batch, num_chunks, dtype=torch.float32, device=logits.device)
    pdl, random = supports_pdl(logits), inv_temperature is not None
    chunk_kernel[(triton.cdiv(num_chunks, CHUNKS), batch)](
        logits,
        inv_temperature,
        maxima,
        sums,
        vocab_size,
        num_chunks,
        CHUNK=CHUNK,
        CHUNKS=CHUNKS,
        RANDOM=random,
        PDL=pdl,
        num_warps=8,
        launch_pdl=pdl,
    )
    pick_kernel[(batch,)](
        logits,
        inv_temperature,
        uniform,
        maxima,
        sums,
        tokens,
        rows,
        last_tokens,
        vocab_size,
        num_chunks,
        CHUNK=CHUNK,
        BLOCK=triton.next_power_of_2(num_chunks),
        RANDOM=random,
        SCATTER=last_tokens is not None,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return tokens
