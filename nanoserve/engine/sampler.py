"""From logits to one token per sequence: greedy or random, restricted, biased and penalised, with log-probabilities.

Everything a row of logits needs depends on its own request alone, never on its neighbours in the batch: in particular
chance is a hash of (request seed, index of the output token), so a seeded request repeats itself in any company, on any
device, as far as its logits do. Batches of another size, or other chunks, may round them otherwise; a draw that lies
within that of the border between two tokens then takes the other one (1 of 32,000 tokens, fp32, temperature 0.9).
The order of operations is vLLM's: bias, min_tokens, penalties, grammar, temperature, min_p, top_k, top_p.
All in fp32.

``prepare`` is host work on numpy arrays that hold the parameters of every table row; ``__call__`` is device work that
never waits for the device: ``nanoserve.ops.sample`` on CUDA, ``sample_reference`` elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from nanoserve.engine.sequence import Sequence
from nanoserve.sampling_params import SamplingParams

CHUNK = 128  # the vocabulary is searched in two levels: which chunk, then where in it
MAX_TOPK = 256  # beyond it a full sort is faster than torch.topk

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MASK64 = 2**64 - 1


class Logprobs(NamedTuple):
    """Log-softmax of the model's own logits. chosen: ``[B]`` fp32; top_ids: ``[B, k]`` int64, top_values: fp32."""

    chosen: torch.Tensor
    top_ids: torch.Tensor
    top_values: torch.Tensor


@dataclass(slots=True)
class SamplerOutput:
    """token_ids: ``[B]`` int64 on the device; -1 where the processed logits have a NaN, a +inf, or nothing but -inf.

    logprobs: None unless a request of the batch asked; k is the largest number asked for.
    """

    token_ids: torch.Tensor
    logprobs: Logprobs | None


@dataclass(slots=True)
class SamplingPlan:
    """One step's inputs of the sampler, on its device. Row ``i`` belongs to the i-th sequence that samples.

    params: ``[5, B]`` fp32: 1 / temperature (0: greedy), top_p (1: off), min_p (0: off), top_k (vocab_size: off), and
        the row's uniform random number in (0, 1). None: the whole batch is greedy.
    search_width, any_min_p: for the reference, which leaves out what no row asks for. search_width: how many of the
        most likely tokens decide every row's top_k and top_p; 0: no row has either.
    additions: (flat index, value) into the ``[B, vocab_size]`` logits: bias, and -inf for tokens that may not end it.
    penalties: (flat index, divisor, subtrahend), each ``[N]``, an index at most once.
    mask: rows ``[R]`` int64 that follow a grammar, and ``[R, ceil(vocab_size / 32)]`` int32: a bit per allowed token.
    num_logprobs: -1: none.
    """

    params: torch.Tensor | None
    search_width: int = 0
    any_min_p: bool = False
    additions: tuple[torch.Tensor, torch.Tensor] | None = None
    penalties: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    mask: tuple[torch.Tensor, torch.Tensor] | None = None
    num_logprobs: int = -1

    @property
    def edits_logits(self) -> bool:
        return self.additions is not None or self.penalties is not None or self.mask is not None

    @property
    def is_plain(self) -> bool:
        """No edits, no logprobs: ``params`` alone say how to sample, which is what a captured sampler can do."""
        return not self.edits_logits and self.num_logprobs < 0


# Rows of the two parameter tables: fp32 ones go to the device, integers decide on the host what a step needs.
INV_TEMPERATURE, TOP_P, MIN_P, TOP_K, UNIFORM = range(5)
RANDOM, SEARCH_WIDTH, NUM_LOGPROBS, MIN_TOKENS, HAS_BIAS, HAS_PENALTY, HAS_GRAMMAR = range(7)


class _Columns(NamedTuple):
    """The tables' columns of the rows of a batch. rows: their bytes; floats: ``[5, B]``, of which the last is free."""

    rows: bytes
    floats: np.ndarray
    ints: np.ndarray
    largest: list[int]
    seeds: np.ndarray
    any_min_p: bool


class Sampler:
    """Samples for sequences known by their table row; ``set_row`` whenever a row gets a new owner.

    generation: counts the calls of ``set_row``.
    """

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._floats = np.zeros((4, 0), np.float32)
        self._ints = np.zeros((7, 0), np.int64)
        self._seeds = np.zeros(0, np.uint64)
        self._columns: _Columns | None = None  # those of the last batch
        self.generation = 0
        self._bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._stop_ids: dict[int, np.ndarray] = {}

    def set_row(self, row: int, params: SamplingParams, seed: int, seq: Sequence) -> None:
        """Table row ``row`` now belongs to ``seq``, which samples by ``params`` with the 64-bit ``seed``."""
        self._columns = None
        self.generation += 1
        if row >= len(self._seeds):
            more = max(64, row + 1 - len(self._seeds), len(self._seeds))
            self._floats = np.pad(self._floats, ((0, 0), (0, more)))
            self._ints = np.pad(self._ints, ((0, 0), (0, more)))
            self._seeds = np.pad(self._seeds, (0, more))
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        restricted = not params.greedy and (top_k < self.vocab_size or params.top_p < 1)
        inv_temperature = 0.0 if params.greedy else max(1 / params.temperature, 1e-30)  # fp32 must not round it to 0
        self._floats[:, row] = inv_temperature, params.top_p, params.min_p, top_k
        self._ints[RANDOM, row] = not params.greedy
        self._ints[SEARCH_WIDTH, row] = top_k if restricted else 0
        self._ints[NUM_LOGPROBS, row] = -1 if params.logprobs is None else params.logprobs
        self._ints[MIN_TOKENS, row] = params.min_tokens
        self._ints[HAS_BIAS, row] = bool(params.logit_bias)
        self._ints[HAS_PENALTY, row] = params.has_penalties
        self._ints[HAS_GRAMMAR, row] = params.structured is not None
        self._seeds[row] = _mix(seed)
        if params.logit_bias:
            ids, values = zip(*params.logit_bias.items(), strict=True)
            self._bias[row] = np.array(ids, np.int64), np.array(values, np.float32)
        if params.min_tokens:
            self._stop_ids[row] = np.array([i for i in seq.stop_ids if 0 <= i < self.vocab_size], np.int64)

    def prepare(
        self,
        rows: np.ndarray,
        positions: np.ndarray,
        seqs: ListLike[Sequence],
        upload: Callable[[np.ndarray], torch.Tensor] | None = None,
    ) -> SamplingPlan:
        """Everything the next call needs that does not depend on logits.

        rows, positions: ``[B]`` integers: table row, and 0-based index among the output tokens of the token to sample.
        seqs: the ``B`` sequences; the tokens of one with penalties or a grammar must all have arrived.
        upload: takes the ``[5, B]`` fp32 parameters to the device; default: a copy of their own.
        """
        columns = self._columns_of(rows)
        ints, largest = columns.ints, columns.largest
        params = None
        if largest[RANDOM] > 0:
            columns.floats[UNIFORM] = _uniform(columns.seeds, positions)
            params = upload(columns.floats) if upload else self._to_device(columns.floats.copy())
        additions = penalties = mask = None
        blocked = ints[MIN_TOKENS] > positions if largest[MIN_TOKENS] > 0 else np.zeros(len(rows), bool)
        if largest[HAS_GRAMMAR] > 0:
            mask = self._mask(rows, positions, seqs, np.flatnonzero(ints[HAS_GRAMMAR]), blocked)
        if largest[HAS_BIAS] > 0 or blocked.any():
            additions = self._additions(rows, np.flatnonzero(ints[HAS_BIAS]), np.flatnonzero(blocked))
        if largest[HAS_PENALTY] > 0:
            penalties = self._penalties(positions, seqs, np.flatnonzero(ints[HAS_PENALTY]))
        search_width, num_logprobs = max(0, largest[SEARCH_WIDTH]), largest[NUM_LOGPROBS]
        return SamplingPlan(params, search_width, columns.any_min_p, additions, penalties, mask, num_logprobs)

    def _columns_of(self, rows: np.ndarray) -> _Columns:
        """Batches follow each other with the same rows until a sequence starts or ends."""
        key = rows.astype(np.int32).tobytes()
        if self._columns is None or self._columns.rows != key:
            ints = self._ints.take(rows, axis=1)
            floats = np.empty((5, len(rows)), np.float32)
            self._floats.take(rows, axis=1, out=floats[:4])
            largest = ints.max(axis=1, initial=-1).tolist()
            self._columns = _Columns(key, floats, ints, largest, self._seeds[rows], bool(floats[MIN_P].any()))
        return self._columns

    def __call__(
        self,
        logits: torch.Tensor,
        plan: SamplingPlan,
        rows: torch.Tensor | None = None,
        last_tokens: torch.Tensor | None = None,
        places: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Sample one token per row of ``logits`` ``[B, vocab_size]`` (any float dtype, not modified).

        With ``rows`` int32 ``[B]`` and ``last_tokens`` int32 the tokens are written to ``last_tokens[rows]`` as well (0
        for -1), where the next step finds its inputs. With ``places`` int32 ``[B]`` and ``out`` int64, on the device or
        pinned, they are written to ``out[places]`` instead of a tensor of their own; ``token_ids`` is ``out`` then.
        """
        x = edited_logits(logits, plan) if plan.edits_logits else logits
        if logits.is_cuda:
            from nanoserve.ops.sample import sample

            token_ids = sample(x, plan.params, rows, last_tokens, places, out)
        else:
            token_ids = sample_reference(x, plan)
            if rows is not None and last_tokens is not None:
                last_tokens.index_copy_(0, rows.long(), token_ids.clamp_min(0).int())
            if places is not None and out is not None:
                token_ids = out.index_copy_(0, places.long(), token_ids)
        if plan.num_logprobs < 0:
            return SamplerOutput(token_ids, None)
        logprobs = logits.float().log_softmax(-1)
        chosen = logprobs.gather(1, token_ids.clamp_min(0)[:, None]).squeeze(1)
        top = logprobs.topk(min(plan.num_logprobs, self.vocab_size), dim=-1)
        return SamplerOutput(token_ids, Logprobs(chosen, top.indices, top.values))

    def _additions(
        self, rows: np.ndarray, biased: np.ndarray, blocked: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        flat, values = [], []
        for i in biased:
            ids, bias = self._bias[int(rows[i])]
            flat.append(i * self.vocab_size + ids)
            values.append(bias)
        for i in blocked:
            ids = self._stop_ids[int(rows[i])]
            flat.append(i * self.vocab_size + ids)
            values.append(np.full(len(ids), -np.inf, np.float32))
        return self._to_device(np.concatenate(flat)), self._to_device(np.concatenate(values))

    def _penalties(
        self, positions: np.ndarray, seqs: ListLike[Sequence], penalised: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        flat, divisors, subtrahends = [], [], []
        for i in penalised:
            seq, params = seqs[i], seqs[i].params
            _require_history(seq, positions[i])
            ids, inverse = np.unique(np.array(seq.token_ids, np.int64), return_inverse=True)
            counts = np.bincount(inverse[seq.num_prompt_tokens :], minlength=len(ids))
            flat.append(i * self.vocab_size + ids)
            divisors.append(np.full(len(ids), np.clip(params.repetition_penalty, 1e-30, 1e30), np.float32))
            subtrahends.append(
                (params.frequency_penalty * counts + params.presence_penalty * (counts > 0)).astype(np.float32)
            )
        return (
            self._to_device(np.concatenate(flat)),
            self._to_device(np.concatenate(divisors)),
            self._to_device(np.concatenate(subtrahends)),
        )

    def _mask(
        self,
        rows: np.ndarray,
        positions: np.ndarray,
        seqs: ListLike[Sequence],
        constrained: np.ndarray,
        blocked: np.ndarray,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Masks of the rows that follow a grammar. Clears ``blocked`` where min_tokens would leave no token."""
        on_gpu = self.device.type == "cuda"
        width = -(-self.vocab_size // 32)
        bits = torch.empty(len(constrained), width, dtype=torch.int32, pin_memory=on_gpu)
        for i, row_bits in zip(constrained, bits, strict=True):
            seq = seqs[i]
            _require_history(seq, positions[i])
            seq.matcher.fill_bitmask(row_bits)  # type: ignore[union-attr]
            if blocked[i]:
                others = row_bits.numpy().view(np.uint32).copy()
                ids = self._stop_ids[int(rows[i])]
                np.bitwise_and.at(others, ids // 32, ~(np.uint32(1) << (ids % 32).astype(np.uint32)))
                blocked[i] = others.any()
        return self._to_device(constrained), bits.to(self.device, non_blocking=True)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor


def _require_history(seq: Sequence, position: int) -> None:
    if seq.num_output_tokens != position:
        raise RuntimeError(f"{seq} has penalties or a grammar and samples before all its tokens have arrived")


# --------------------------------------------------------------------------------------------------------- logits


def edited_logits(logits: torch.Tensor, plan: SamplingPlan) -> torch.Tensor:
    """An fp32 copy of ``logits`` with bias, min_tokens, penalties and grammars applied."""
    x = logits.to(torch.float32, copy=True)
    flat = x.view(-1)
    if plan.additions is not None:
        flat.index_add_(0, *plan.additions)
    if plan.penalties is not None:
        index, divisor, subtrahend = plan.penalties
        values = flat.index_select(0, index)
        values = torch.where(values > 0, values / divisor, values * divisor) - subtrahend
        flat.index_copy_(0, index, values)
    if plan.mask is not None:
        rows, bits = plan.mask
        allowed = (bits[:, :, None] >> torch.arange(32, dtype=torch.int32, device=bits.device)) & 1
        forbidden = allowed.flatten(1)[:, : x.shape[1]] == 0
        x.index_copy_(0, rows, x.index_select(0, rows).masked_fill_(forbidden, -torch.inf))
    return x


def _chunked(x: torch.Tensor, fill: float) -> torch.Tensor:
    """``[B, V]`` as ``[B, chunks, CHUNK]``, the vocabulary filled up with ``fill``."""
    num_chunks = -(-x.shape[1] // CHUNK)
    missing = num_chunks * CHUNK - x.shape[1]
    return (F.pad(x, (0, missing), value=fill) if missing else x).view(-1, num_chunks, CHUNK)


def _chunk(chunks: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Chunk ``index[b]`` of every row: ``[B, CHUNK]``."""
    return chunks.gather(1, index[:, None, None].expand(-1, 1, CHUNK)).squeeze(1)


def sample_reference(x: torch.Tensor, plan: SamplingPlan) -> torch.Tensor:
    """Token ids ``[B]`` int64 for the edited logits ``x`` ``[B, V]``, on the CPU; -1 as in ``SamplerOutput``."""
    best, token_ids = x.max(-1)
    if plan.params is not None:
        token_ids = torch.where(plan.params[INV_TEMPERATURE] > 0, _sample(x, best, plan.params, plan), token_ids)
    return token_ids.masked_fill(~best.isfinite(), -1)


def _sample(x: torch.Tensor, best: torch.Tensor, params: torch.Tensor, plan: SamplingPlan) -> torch.Tensor:
    """Token ids ``[B]`` drawn by inverting each row's cumulative distribution at its random number.

    Rows with 1 / temperature = 0, and those whose ``best`` is not finite, get an arbitrary valid id.
    """
    # Subtracting the maximum before dividing by the temperature: no temperature can overflow.
    x = (x.float() - best.float()[:, None]).mul_(params[INV_TEMPERATURE, :, None])
    p = x.exp()
    if plan.any_min_p:
        p.masked_fill_(p < params[MIN_P, :, None], 0)  # the most likely token has p = 1
    if plan.search_width:
        p.masked_fill_(_outside_top(x, params, plan.search_width), 0)
    chunks = _chunked(p, 0)
    cumulative = chunks.sum(-1).cumsum(-1, dtype=torch.float64)
    target = params[UNIFORM] * cumulative[:, -1]
    chunk = (cumulative <= target[:, None]).sum(-1)
    before = F.pad(cumulative, (1, 0)).gather(1, chunk[:, None]).squeeze(1)
    inner = _chunk(chunks, chunk).cumsum(-1, dtype=torch.float64)
    # The sum of a chunk may round differently from its cumulative sum: stay below the last token with p > 0.
    rest = torch.minimum(target - before, inner[:, -1] * (1 - 2**-40))
    return chunk * CHUNK + (inner <= rest[:, None]).sum(-1)


def _outside_top(x: torch.Tensor, params: torch.Tensor, width: int) -> torch.Tensor:
    """Which scaled logits ``x`` ``[B, V]`` top_k and top_p leave out; among equal ones the lower ids stay in."""
    top_p, min_p, top_k = (params[i, :, None] for i in (TOP_P, MIN_P, TOP_K))
    distances = _smallest_distances(x, width)
    cumulative = (-distances).exp().cumsum(-1, dtype=torch.float64)
    num_min_p = torch.searchsorted(distances, -min_p.log(), right=True)
    most = num_min_p.minimum(top_k.long()).clamp(1, width)
    mass = top_p * cumulative.gather(1, most - 1)
    # The token that reaches the mass is still in. Rounding must not cut the tail of a row without top_p.
    num_top_p = torch.searchsorted(cumulative, mass) + 1
    num_kept = torch.where(top_p < 1, num_top_p.minimum(most), most)
    last = distances.gather(1, num_kept - 1)
    num_ties_kept = (num_kept - torch.searchsorted(distances, last)).int()
    ties = x == -last
    outside = (x < -last) | (ties & (ties.cumsum(-1, dtype=torch.int32) > num_ties_kept))
    return outside & ((top_p < 1) | (top_k < x.shape[1]))


def _smallest_distances(x: torch.Tensor, count: int) -> torch.Tensor:
    """``-x`` of the ``count`` largest ``x`` of each row, ascending and contiguous: the most likely comes first."""
    if count <= MAX_TOPK:
        return -x.topk(count, dim=-1).values
    distances = -x
    distances.numpy().sort(axis=-1)  # ten times as fast as torch.sort
    return distances[:, :count].contiguous()


# ----------------------------------------------------------------------------------------------------- randomness


def child_seed(seed: int, index: int) -> int:
    """Seed number ``index`` of a family: of the n completions of one request, say."""
    return _mix(_mix(seed) + (index + 1) * GOLDEN_GAMMA)


def _mix(x: int) -> int:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014) on an integer taken modulo 2**64."""
    x &= MASK64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK64
    return x ^ (x >> 31)


def _uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Uniform numbers in (0, 1), exact in fp32, each a hash of (seed uint64, position): SplitMix64's output number."""
    x = (positions + 1).astype(np.uint64)
    x *= np.uint64(GOLDEN_GAMMA)
    x += seeds
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    x >>= np.uint64(41)
    return (x + 0.5) * 2**-23
