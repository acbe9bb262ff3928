"""Workloads: which requests arrive when, how long they are, and which of their prompts begin alike.

``make_workload(options)`` gives the requests of a synthetic workload or of a recorded trace, the same for the same
options. It says nothing about who serves them: ``task=bench`` sends them to the engine, ``task=simulate`` to a
scheduler without a model. Pure Python and numpy.

Two trace formats are read, told apart by their first line:

* CSV with the columns ``TIMESTAMP, ContextTokens, GeneratedTokens`` (the Azure LLM inference traces; Patel et al.,
  "Splitwise", 2024);
* JSON lines with ``timestamp`` (milliseconds), ``input_length``, ``output_length`` and ``hash_ids``, one per 512
  tokens of the prompt, equal ids meaning an equal beginning (Qin et al., "Mooncake", 2025); ours may have ``priority``.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nanoserve.contracts.errors import ConfigError

#: Tokens per entry of ``hash_ids`` in a Mooncake trace.
HASH_BLOCK = 512
_TAIL, _SEGMENT = 0, 1  # streams of token ids


@dataclass(frozen=True)
class Request:
    """One request.

    id: its number in the workload. arrival: seconds after the start. prompt_len, output_len: tokens.
    prefix: the segments that the prompt begins with, as (segment id, tokens); prompts whose first segments are equal
    begin with equal tokens. What is left of the prompt belongs to this request alone. priority: lower is more urgent.
    """

    id: int
    arrival: float
    prompt_len: int
    output_len: int
    prefix: tuple[tuple[int, int], ...] = ()
    priority: int = 0


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival. concurrency: a closed loop, in which each request is sent as soon as fewer than so
    many are unfinished; None: an open loop, in which each is sent at its ``arrival`` whatever became of the others."""

    requests: tuple[Request, ...]
    concurrency: int | None = None


@dataclass(frozen=True)
class LogNormal:
    """Long-tailed lengths: exp(normal) with the ``median`` in tokens and ``sigma`` of its logarithm, cut at ``max``."""

    median: int
    sigma: float
    max: int

    def __post_init__(self) -> None:
        _require(1 <= self.median <= self.max, "median", "between 1 and max", self.median)
        _require(self.sigma >= 0, "sigma", "at least 0", self.sigma)


@dataclass(frozen=True)
class ByTurns:
    """The lengths ``each``, one after the other and again from the first."""

    each: tuple[int, ...]

    def __post_init__(self) -> None:
        _require(bool(self.each) and min(self.each) >= 1, "each", "a list of lengths of at least 1", self.each)


#: A number of tokens; uniform in an inclusive range; log-normal; or a list, by turns.
Length = int | tuple[int, int] | LogNormal | ByTurns
Arrival = Literal["all", "poisson", "burst", "closed", "trace"]


@dataclass(frozen=True)
class WorkloadOptions:
    """A workload in words. Lengths come from ``input_len`` and ``output_len``, or from ``trace``.

    arrival: *all* at once; *poisson*, at ``rate`` requests per second; *burst*, ``burst_size`` at once every
    ``burst_size / rate`` seconds (a burst of 1 is a constant rate); *closed*, ``concurrency`` at a time; as in the
    *trace*.
    num_requests: of a trace the first so many; None is all of it.
    length_scale: multiplies the lengths of a trace; None makes the longest request just fit the model's context.
    time_scale: multiplies the times of a trace (0.1: ten times as fast).
    shared_prefix_len: tokens of a system prompt before each prompt, one of ``num_prefixes`` by turns.
    turns: messages per conversation. Every turn's prompt is the whole conversation so far and a message of
    ``input_len``, and comes ``think_time`` seconds after the turn before. The replies in it have the drawn
    ``output_len`` but stand-in ids, so that a prefix cache finds the earlier prompts, not what was generated.
    priorities: of the conversations, by turns; lower is more urgent. None: those of the trace, or 0.
    """

    num_requests: int | None = 32
    input_len: Length | None = None
    output_len: Length | None = None
    arrival: Arrival = "all"
    rate: float | None = None
    burst_size: int | None = None
    concurrency: int | None = None
    trace: str | None = None
    length_scale: float | None = None
    time_scale: float = 1.0
    shared_prefix_len: int = 0
    num_prefixes: int = 1
    turns: int = 1
    think_time: float = 0.0
    priorities: tuple[int, ...] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        traced = self.trace is not None
        _require(traced or self.arrival != "trace", "trace", "the path of a trace with arrival=trace", self.trace)
        for key, lowest in (
            ("num_requests", 1), ("burst_size", 1), ("concurrency", 1), ("num_prefixes", 1), ("turns", 1),
            ("shared_prefix_len", 0), ("think_time", 0), ("seed", 0),
        ):  # fmt: skip
            value = getattr(self, key)
            _require(value is None or value >= lowest, key, f"at least {lowest}", value)
        for key in ("rate", "length_scale", "time_scale"):
            value = getattr(self, key)
            _require(value is None or 0 < value < math.inf, key, "above 0", value)
        for key in ("input_len", "output_len"):
            value = getattr(self, key)
            rule = (
                "null with a trace, which gives it (simulate=trace leaves it so)"
                if traced
                else "a length, since there is no trace"
            )
            _require(traced == (value is None), key, rule, value)
            if isinstance(value, int):
                _require(value >= 1, key, "at least 1", value)
            elif isinstance(value, tuple):
                _require(1 <= value[0] <= value[1], key, "a range [low, high] of at least 1", value)
        for key, users in (
            ("rate", ("poisson", "burst")), ("burst_size", ("burst",)), ("concurrency", ("closed",)),
        ):  # fmt: skip
            used, value = self.arrival in users, getattr(self, key)
            _require(
                used == (value is not None), key, f"{'given' if used else 'null'} with arrival={self.arrival}", value
            )
        _require(self.priorities != (), "priorities", "null or a list of integers, [0, 1] say", [])
        _require(traced or self.num_requests is not None, "num_requests", "given without a trace", None)
        _require(traced or self.length_scale is None, "length_scale", "null without a trace", self.length_scale)
        _require(
            self.arrival == "trace" or self.time_scale == 1, "time_scale", "1 without arrival=trace", self.time_scale
        )
        _require(
            not traced or self.shared_prefix_len == 0, "shared_prefix_len", "0 with a trace", self.shared_prefix_len
        )
        _require(not traced or self.turns == 1, "turns", "1 with a trace", self.turns)
        _require(self.turns > 1 or self.think_time == 0, "think_time", "0 with one turn", self.think_time)
        _require(self.arrival != "closed" or self.think_time == 0, "think_time",
                 "0 with arrival=closed (scenario single_stream is one), which sends when another has ended",
                 self.think_time)  # fmt: skip
        _require(self.shared_prefix_len > 0 or self.num_prefixes == 1, "num_prefixes", "1 without a shared prefix",
                 self.num_prefixes)  # fmt: skip


def _require(legal: bool, key: str, rule: str, value: Any) -> None:
    if not legal:
        raise ValueError(
            f"{key} must be {rule}, not {value!r}"
        )  # config.build makes a ConfigError that names the group


def make_workload(options: WorkloadOptions, max_model_len: int | None = None, prefix: str = "workload") -> Workload:
    """Draw the requests. The same options give the same workload.

    max_model_len: longest sequence that is served, prompt and output. prefix: what the keys are called in messages.
    Raises ConfigError for a trace that cannot be read and for requests that exceed ``max_model_len``.
    """
    rng = np.random.default_rng(options.seed)
    if options.trace is not None:
        requests = list(_read_trace(options, max_model_len, f"{prefix}.trace"))
    else:
        requests = _synthetic(options, rng)
    if (given := options.priorities) is not None:
        requests = [replace(r, priority=given[i // options.turns % len(given)]) for i, r in enumerate(requests)]
    requests = _arrive(requests, options, rng)
    if max_model_len is not None:
        lengths = [r.prompt_len + r.output_len for r in requests]
        if too_long := sum(n > max_model_len for n in lengths):
            key = "length_scale" if options.trace is not None else "input_len"
            raise ConfigError(
                f"{prefix}.{key}: {too_long} of {len(lengths)} requests exceed the longest sequence of {max_model_len} "
                f"tokens (prompt and output), the longest by {max(lengths) - max_model_len}; lower it"
            )
    requests.sort(key=lambda r: r.arrival)  # stable: equal arrivals keep their order
    return Workload(tuple(replace(r, id=i) for i, r in enumerate(requests)), options.concurrency)


def token_ids(request: Request, vocab_size: int, seed: int = 0) -> list[int]:
    """The prompt's token ids, uniform in ``0 … vocab_size - 1``; equal segments give equal ids.

    seed: another one gives other ids, so that a repetition of the same workload finds nothing in a prefix cache.
    """
    parts = [_ids(length, vocab_size, seed, _SEGMENT, segment) for segment, length in request.prefix]
    parts.append(_ids(request.prompt_len - sum(n for _, n in request.prefix), vocab_size, seed, _TAIL, request.id))
    return [token for part in parts for token in part]


def _ids(n: int, vocab_size: int, seed: int, stream: int, key: int) -> list[int]:
    ids: list[int] = np.random.default_rng((seed, stream, key)).integers(0, vocab_size, n).tolist()
    return ids


# --- lengths -----------------------------------------------------------------------------------------------------


def draw_lengths(length: Length, count: int, rng: np.random.Generator) -> list[int]:
    """``count`` numbers of tokens."""
    if isinstance(length, ByTurns):
        return [length.each[i % len(length.each)] for i in range(count)]
    if isinstance(length, LogNormal):
        drawn = np.exp(rng.normal(math.log(length.median), length.sigma, count))
        return [int(n) for n in np.clip(np.rint(drawn), 1, length.max)]
    low, high = (length, length) if isinstance(length, int) else length
    drawn_uniform: list[int] = rng.integers(low, high, count, endpoint=True).tolist()
    return drawn_uniform


def _synthetic(options: WorkloadOptions, rng: np.random.Generator) -> list[Request]:
    """Requests without arrival times; those of a conversation have the offset from its first one."""
    count, turns = options.num_requests, options.turns
    assert count is not None and options.input_len is not None and options.output_len is not None  # __post_init__
    inputs = draw_lengths(options.input_len, count, rng)
    outputs = draw_lengths(options.output_len, count, rng)
    requests: list[Request] = []
    history: tuple[tuple[int, int], ...] = ()
    for i, (input_len, output_len) in enumerate(zip(inputs, outputs, strict=True)):
        conversation, turn = divmod(i, turns)
        if turn == 0:
            length = options.shared_prefix_len
            history = ((conversation % options.num_prefixes, length),) if length else ()
        first_id = options.num_prefixes + 2 * i
        # A message that comes back in the next prompt is a segment; otherwise nobody shares it.
        prefix = history if turns == 1 else (*history, (first_id, input_len))
        prompt_len = sum(n for _, n in history) + input_len
        requests.append(Request(i, turn * options.think_time, prompt_len, output_len, prefix))
        history = (*prefix, (first_id + 1, output_len))
    return requests


# --- arrivals ----------------------------------------------------------------------------------------------------


def _arrive(requests: list[Request], options: WorkloadOptions, rng: np.random.Generator) -> list[Request]:
    """Set the arrival times. A conversation arrives as one, its later turns after their offsets."""
    if options.arrival == "trace":
        start = requests[0].arrival
        return [replace(r, arrival=(r.arrival - start) * options.time_scale) for r in requests]
    count = -(-len(requests) // options.turns)
    times: np.ndarray = np.zeros(count)
    if options.arrival == "poisson":
        times = np.cumsum(rng.exponential(1 / options.rate, count))  # type: ignore[operator]
        times -= times[0]
    elif options.arrival == "burst":
        times = np.arange(count) // options.burst_size * (options.burst_size / options.rate)  # type: ignore[operator]
    offsets = [0.0 if options.trace is not None else r.arrival for r in requests]
    return [
        replace(r, arrival=float(times[i // options.turns]) + offset)
        for i, (r, offset) in enumerate(zip(requests, offsets, strict=True))
    ]


# --- traces ------------------------------------------------------------------------------------------------------


def _read_trace(options: WorkloadOptions, max_model_len: int | None, key: str) -> Iterator[Request]:
    """The requests of a trace with scaled lengths, at unscaled times."""
    assert options.trace is not None
    rows = []
    try:
        with Path(options.trace).open(encoding="utf-8-sig", newline="") as lines:
            first = lines.readline()
            lines.seek(0)
            reader = _mooncake_rows(lines) if first.startswith("{") else _azure_rows(lines)
            for row in reader:
                rows.append(row)
                if len(rows) == options.num_requests:
                    break
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {options.trace}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{key}: {options.trace} is not text in UTF-8") from None
    except (KeyError, TypeError, ValueError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"{key}: {options.trace}, request {len(rows) + 1}: neither an Azure CSV (TIMESTAMP, ContextTokens, "
            f"GeneratedTokens) nor Mooncake JSON lines (timestamp, input_length, output_length): {what}"
        ) from None
    if not rows:
        raise ConfigError(f"{key}: {options.trace} holds no request")
    rows.sort(key=lambda row: row[0])
    scale, longest = options.length_scale, max(row[1] + row[2] for row in rows)
    fit = scale is None and max_model_len is not None
    if scale is None:
        scale = min(1.0, max_model_len / longest) if max_model_len is not None else 1.0
    block = max(1, round(HASH_BLOCK * scale))
    for i, (time, num_input, num_output, hash_ids, priority) in enumerate(rows):
        output_len = max(1, int(num_output * scale))
        prompt_len = max(1, int(num_input * scale))
        if fit and max_model_len is not None:  # a length that was rounded up to 1 must not push the other out
            prompt_len = max(1, min(prompt_len, max_model_len - output_len))
        prefix = tuple(
            (hash_id, min(block, prompt_len - j * block))
            for j, hash_id in enumerate(hash_ids)
            if j * block < prompt_len
        )
        yield Request(i, time, prompt_len, output_len, prefix, priority)


#: seconds, input tokens, output tokens, hash ids, priority
_Row = tuple[float, int, int, list[int], int]


def _azure_rows(lines: Any) -> Iterator[_Row]:
    start = None
    reader = csv.DictReader(lines)
    names = reader.fieldnames or ()
    if names and (lacking := {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} - {*names}):
        raise ValueError(f"its first line has no {' and no '.join(sorted(lacking))}")
    for row in reader:
        time = datetime.fromisoformat(row["TIMESTAMP"])
        start = start or time
        yield (time - start).total_seconds(), int(row["ContextTokens"]), int(row["GeneratedTokens"]), [], 0


def _mooncake_rows(lines: Any) -> Iterator[_Row]:
    for line in lines:
        if line.strip():
            row = json.loads(line)
            lengths = int(row["input_length"]), int(row["output_length"])
            yield row["timestamp"] / 1000, *lengths, row.get("hash_ids", []), int(row.get("priority", 0))
