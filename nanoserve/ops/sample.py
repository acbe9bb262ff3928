"""Sampling in two launches, straight from the logits: greedy, temperature, top_k, top_p, min_p, each row by its own.

The first reduces chunks of the vocabulary to their maximum and their sum of ``exp((x - maximum) / temperature)``. The
second, one program per row, finds the chunk in which the cumulative distribution passes the row's random number, and
the token within. Where a row is restricted it first finds how far below the maximum a logit may be, bisecting over
``(maximum - x) / temperature``, whose bits as an integer are ordered as the numbers are. The chunks' maxima bound that
from the start, so that what could stay in is mostly a list of a few tokens; if it is not, the bisection reads the whole
row at every step. Either way the result is exact. Logits are read in whatever dtype they have.

For CUDA; ``Sampler`` is the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nanoserve.ops._elementwise import supports_pdl

CHUNK, CHUNKS, CHUNK_WARPS = 256, 16, 4  # tokens of a chunk; chunks and warps of one program
TILE = 2048  # tokens that a restricted row looks at together, and of the list of those that could stay in


# Pointers into a packed buffer: a variant for each alignment would be compiled again for each batch size.
PACKED = ["settings", "maxima", "sums", "rows", "places"]


@triton.jit(do_not_specialize_on_alignment=PACKED)
def chunk_kernel(
    logits,
    settings,
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
    row = tl.program_id(0).to(tl.int64)
    chunk = (tl.num_programs(1) - 1 - tl.program_id(1)) * CHUNKS + tl.arange(0, CHUNKS)  # the L2 has the last ones
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    x = tl.load(logits + row * vocab_size + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    at = row * num_chunks + chunk
    if RANDOM:
        scale = tl.load(settings + row)
        scale = tl.where(scale > 0, scale, 1.0) * 1.4426950408889634  # exp(x) = 2 ** (x * log2(e))
        maximum = tl.max(x, 1)
        shift = tl.where(maximum > float("-inf"), maximum, 0.0)
        total = tl.sum(tl.exp2((x - shift[:, None]) * scale), 1)
        maximum = tl.where(total < float("inf"), maximum, float("inf"))
        tl.store(sums + at, total, mask=chunk < num_chunks)
    else:
        maximum = tl.max(tl.where(x < float("inf"), x, float("inf")), 1)
    tl.store(maxima + at, maximum, mask=chunk < num_chunks)


@triton.jit
def _inverse_cdf(p, target, index, BLOCK: tl.constexpr):
    """First index with p > 0 up to which p sums to more than ``target``; the last with p > 0 if rounding left none."""
    possible = p > 0
    first = tl.min(tl.where(possible & (tl.cumsum(p, 0) > target), index, BLOCK), 0)
    last = tl.max(tl.where(possible, index, 0), 0)
    return tl.minimum(first, last)


# -- restricted rows --------------------------------------------------------------------------------------------------
# A distance is (best - x) * scale >= 0, so that exp(-distance) is a token's probability but for a constant; ``bits`` of
# one are the same number as int32.


@triton.jit
def _bits(distance):
    return distance.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # -0 is 0


@triton.jit
def _mass(bits):
    return tl.exp(-bits.to(tl.float32, bitcast=True))


@triton.jit
def _load_bits(source, start, n, best, scale, TILE: tl.constexpr):
    """Of ``source[start : start + TILE]``; infinite beyond ``n``."""
    index = start + tl.arange(0, TILE)
    x = tl.load(source + index, mask=index < n, other=float("-inf")).to(tl.float32)
    return _bits((best - x) * scale)


@triton.jit
def _up_to(source, n, best, scale, pivot, MASS: tl.constexpr, TILE: tl.constexpr):
    """Number of distances up to ``pivot``, or their mass; the largest of them; the smallest beyond."""
    total = tl.zeros([TILE], tl.float32)
    last = tl.zeros([TILE], tl.int32)
    first = tl.full([TILE], 0x7F800000, tl.int32)
    for start in tl.range(0, n, TILE, num_stages=3):
        bits = _load_bits(source, start, n, best, scale, TILE)
        inside = bits <= pivot
        if MASS:
            total += tl.where(inside, _mass(bits), 0.0)
        else:
            total += tl.where(inside, 1.0, 0.0)
        last = tl.maximum(last, tl.where(inside, bits, 0))
        first = tl.minimum(first, tl.where(inside, 0x7F800000, bits))
    return tl.sum(total.to(tl.float64), 0), tl.max(last, 0), tl.min(first, 0)


@triton.jit
def _threshold(source, n, best, scale, high, target, MASS: tl.constexpr, TILE: tl.constexpr):
    """The least distance up to which ``source`` has ``target`` tokens, or so much mass; ``high`` if none below has."""
    low = tl.zeros([], tl.int32)
    while low < high:
        total, last, first = _up_to(source, n, best, scale, low + (high - low) // 2, MASS, TILE)
        high = tl.where(total >= target, last, high)
        low = tl.where(total < target, first, tl.where(total > target, low, last))
    return high


@triton.jit
def _weigh(source, n, best, scale, limit, TILE: tl.constexpr):
    """Number and mass of the distances below ``limit``, and the number of those equal to it: fp64 each."""
    count = tl.zeros([TILE], tl.float32)
    mass = tl.zeros([TILE], tl.float32)
    ties = tl.zeros([TILE], tl.float32)
    for start in tl.range(0, n, TILE, num_stages=3):
        bits = _load_bits(source, start, n, best, scale, TILE)
        count += tl.where(bits < limit, 1.0, 0.0)
        mass += tl.where(bits < limit, _mass(bits), 0.0)
        ties += tl.where(bits == limit, 1.0, 0.0)
    return tl.sum(count, 0).to(tl.float64), tl.sum(mass.to(tl.float64), 0), tl.sum(ties, 0).to(tl.float64)


@triton.jit
def _list_possible(
    row,
    maxima,
    best,
    scale,
    high,
    kept,
    kept_ids,
    chunks,
    vocab_size,
    num_chunks,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the logits and ids of all tokens up to the distance ``high`` to ``kept`` and ``kept_ids``, ``[TILE]`` each.

    Returns their number. If they are more than fit, the list is of no use.
    """
    index = tl.arange(0, BLOCK)
    wanted = _load_bits(maxima, 0, num_chunks, best, scale, BLOCK) <= high
    tl.store(chunks + tl.cumsum(wanted.to(tl.int32), 0) - 1, index, mask=wanted)
    tl.store(kept + tl.arange(0, TILE), float("-inf"))
    num_wanted = tl.sum(wanted.to(tl.int32), 0)
    tl.debug_barrier()
    count = tl.zeros([], tl.int32)
    start = tl.zeros([], tl.int32)
    while (start < num_wanted) & (count <= TILE):
        slot = start + tl.arange(0, TILE // CHUNK)
        chunk = tl.load(chunks + slot, mask=slot < num_wanted, other=num_chunks)
        token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        x = tl.load(row + token, mask=token < vocab_size, other=float("-inf"))
        inside = _bits((best - x.to(tl.float32)) * scale) <= high
        in_chunk = tl.sum(inside.to(tl.int32), 1)
        at = count + (tl.cumsum(in_chunk, 0) - in_chunk)[:, None] + tl.cumsum(inside.to(tl.int32), 1) - 1
        tl.store(kept + at, x, mask=inside & (at < TILE))
        tl.store(kept_ids + at, token, mask=inside & (at < TILE))
        count += tl.sum(in_chunk, 0)
        start += TILE // CHUNK
    tl.debug_barrier()
    return count


@triton.jit
def _pick_restricted(
    row,
    maxima,
    best,
    scale,
    total,
    top_p,
    min_p,
    top_k,
    uniform,
    kept,
    kept_ids,
    chunks,
    vocab_size,
    num_chunks,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """total: the mass of the whole row, fp64."""
    most = top_k.to(tl.float64)
    high = tl.full([], 0x7F7FFFFF, tl.int32)
    if top_k <= num_chunks:  # each of the top_k best chunks has a token up to there
        high = _threshold(maxima, num_chunks, best, scale, high, most, False, BLOCK)
    if min_p > 0:
        high = tl.minimum(high, _bits(tl.maximum(0.0 - tl.log(min_p), 0.0)))
    only_top_p = (top_k >= vocab_size) & (min_p <= 0)
    if only_top_p:  # all tokens beyond have less than 1 - top_p of the mass
        high = _bits(tl.log(vocab_size / ((1.0 - top_p) * total.to(tl.float32))) + 0.01)

    count = _list_possible(
        row, maxima, best, scale, high, kept, kept_ids, chunks, vocab_size, num_chunks, CHUNK, BLOCK, TILE
    )
    listed = count <= TILE
    source = tl.where(listed, kept, row)
    n = tl.where(listed, TILE, vocab_size)

    if top_k < vocab_size:
        high = _threshold(source, n, best, scale, high, most, False, TILE)
    less, mass, ties = _weigh(source, n, best, scale, high, TILE)
    ties = tl.minimum(ties, most - less)
    if top_p < 1:
        needed = top_p.to(tl.float64) * tl.where(only_top_p, total, mass + ties * _mass(high).to(tl.float64))
        limit = _threshold(source, n, best, scale, high, needed, True, TILE)
        less, mass, equal = _weigh(source, n, best, scale, limit, TILE)
        ties = tl.where(limit == high, ties, equal)
        high = limit
        each = _mass(high).to(tl.float64)
        missing = needed - mass
        fewest = tl.floor(missing.to(tl.float32) / tl.where(each > 0, each, 1.0).to(tl.float32)).to(tl.float64)
        fewest = tl.where((fewest - 1) * each >= missing, fewest - 1, fewest)
        fewest = tl.where(fewest * each < missing, fewest + 1, fewest)
        ties = tl.minimum(ties, tl.maximum(fewest, 1.0))

    each = _mass(high).to(tl.float64)
    target = uniform.to(tl.float64) * (mass + ties * each)
    passed = target * 0
    start = tl.zeros([], tl.int32)
    at = start  # the tile in which the target is passed, with the mass and the ties before it
    before = passed
    left = ties
    while (start < n) & (passed <= target):
        bits = _load_bits(source, start, n, best, scale, TILE)
        equal = tl.minimum(tl.sum((bits == high).to(tl.int32), 0).to(tl.float64), ties)
        here = tl.sum(tl.where(bits < high, _mass(bits), 0.0).to(tl.float64), 0) + equal * each
        at = tl.where(here > 0, start, at)
        before = tl.where(here > 0, passed, before)
        left = tl.where(here > 0, ties, left)
        passed += here
        ties -= equal
        start += TILE
    bits = _load_bits(source, at, n, best, scale, TILE)
    tie = bits == high
    inside = (bits < high) | (tie & (tl.cumsum(tie.to(tl.int32), 0) <= left.to(tl.int32)))
    p = tl.where(inside, _mass(bits), 0.0).to(tl.float64)
    token = at + _inverse_cdf(p, target - before, tl.arange(0, TILE), TILE)
    if listed:
        token = tl.load(kept_ids + token)
    return token


# -- all rows ---------------------------------------------------------------------------------------------------------


@triton.jit
def _pick_greedy(row, best, chunk, vocab_size, CHUNK: tl.constexpr):
    within = tl.arange(0, CHUNK)
    token = chunk * CHUNK + within
    x = tl.load(row + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    return chunk * CHUNK + tl.min(tl.where(x == best, within, CHUNK), 0)


@triton.jit
def _pick_random(row, maximum, share, mass, scale, target, vocab_size, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """maximum, share, mass: of every chunk, ``share`` being its factor of the sum that makes its mass."""
    index = tl.arange(0, BLOCK)
    chunk = _inverse_cdf(mass, target, index, BLOCK)
    chosen = index == chunk
    rest = (target - tl.sum(tl.where(index < chunk, mass, 0.0), 0)) / tl.sum(tl.where(chosen, share, 0.0), 0)
    peak = tl.max(tl.where(chosen, maximum, float("-inf")), 0)
    within = tl.arange(0, CHUNK)
    token = chunk * CHUNK + within
    x = tl.load(row + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    return chunk * CHUNK + _inverse_cdf(tl.exp((x - peak) * scale).to(tl.float64), rest, within, CHUNK)


@triton.jit(do_not_specialize=["settings_stride"], do_not_specialize_on_alignment=PACKED)
def pick_kernel(
    logits,
    settings,
    maxima,
    sums,
    kept,
    kept_ids,
    tokens,
    rows,
    last_tokens,
    places,
    vocab_size,
    num_chunks,
    settings_stride,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    RANDOM: tl.constexpr,
    SCATTER: tl.constexpr,
    PLACES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab_size
    maxima += row * num_chunks
    index = tl.arange(0, BLOCK)
    maximum = tl.load(maxima + index, mask=index < num_chunks, other=float("-inf"))
    best = tl.max(maximum, 0)
    valid = tl.abs(best) < float("inf")
    chunk = tl.min(tl.where(maximum == best, index, BLOCK), 0)
    if RANDOM:
        settings += row
        scale = tl.load(settings)
        if valid & (scale > 0):
            top_p = tl.load(settings + settings_stride)
            min_p = tl.load(settings + 2 * settings_stride)
            top_k = tl.load(settings + 3 * settings_stride)
            uniform = tl.load(settings + 4 * settings_stride)
            share = tl.where(maximum > float("-inf"), tl.exp((maximum - best) * scale), 0.0)
            total = tl.load(sums + row * num_chunks + index, mask=index < num_chunks, other=0.0)
            mass = total.to(tl.float64) * share.to(tl.float64)
            if (top_k < vocab_size) | (top_p < 1) | (min_p > 0):
                kept += row * TILE
                kept_ids += row * (TILE + BLOCK)
                token = _pick_restricted(
                    logits,
                    maxima,
                    best,
                    scale,
                    tl.sum(mass, 0),
                    top_p,
                    min_p,
                    top_k,
                    uniform,
                    kept,
                    kept_ids,
                    kept_ids + TILE,
                    vocab_size,
                    num_chunks,
                    CHUNK,
                    BLOCK,
                    TILE,
                )
            else:
                target = uniform.to(tl.float64) * tl.sum(mass, 0)
                token = _pick_random(logits, maximum, share, mass, scale, target, vocab_size, CHUNK, BLOCK)
        else:
            token = _pick_greedy(logits, best, chunk, vocab_size, CHUNK)
    else:
        token = _pick_greedy(logits, best, chunk, vocab_size, CHUNK)
    token = tl.where(valid, token, -1)
    if PLACES:
        tl.store(tokens + tl.load(places + row), token.to(tl.int64))
    else:
        tl.store(tokens + row, token.to(tl.int64))
    if SCATTER:
        tl.store(last_tokens + tl.load(rows + row), tl.maximum(token, 0))


def sample(
    logits: torch.Tensor,
    params: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    last_tokens: torch.Tensor | None = None,
    places: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token id per row of ``logits`` ``[B, vocab_size]`` (contiguous, any float dtype), as ``Sampler`` draws it.

    params: ``[5, B]`` fp32, as in ``SamplingPlan``, each of the five contiguous; None: every row is greedy.
    With ``rows`` ``[B]`` and ``last_tokens`` ``[num_rows]``, both int32, sets ``last_tokens[rows]`` too (0 for -1).
    Returns ``[B]`` int64, -1 where a row has a NaN, a +inf, or nothing but -inf; or ``out``, int64 on the device or
    pinned on the host, with these at ``places`` ``[B]`` int32.
    """
    batch, vocab_size = logits.shape
    tokens = torch.empty(batch, dtype=torch.int64, device=logits.device) if out is None else out
    if batch == 0:
        return tokens
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    block = triton.next_power_of_2(num_chunks)
    maxima, sums = torch.empty(2, batch, num_chunks, dtype=torch.float32, device=logits.device)
    pdl, random = supports_pdl(logits), params is not None
    kept = kept_ids = None
    if random:
        kept = logits.new_empty(batch, TILE)
        kept_ids = torch.empty(batch, TILE + block, dtype=torch.int32, device=logits.device)
    chunk_kernel[(batch, triton.cdiv(num_chunks, CHUNKS))](
        logits,
        params,
        maxima,
        sums,
        vocab_size,
        num_chunks,
        CHUNK=CHUNK,
        CHUNKS=CHUNKS,
        RANDOM=random,
        PDL=pdl,
        num_warps=CHUNK_WARPS,
        launch_pdl=pdl,
    )
    pick_kernel[(batch,)](
        logits,
        params,
        maxima,
        sums,
        kept,
        kept_ids,
        tokens,
        rows,
        last_tokens,
        places,
        vocab_size,
        num_chunks,
        params.stride(0) if params is not None else 0,
        CHUNK=CHUNK,
        BLOCK=block,
        TILE=TILE,
        RANDOM=random,
        SCATTER=last_tokens is not None,
        PLACES=places is not None,
        PDL=pdl,
        num_warps=8,
        launch_pdl=pdl,
    )
    return tokens
