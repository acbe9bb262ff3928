"""The field's serving metrics, computed from a timeline of what a client saw. Pure Python, no clock of its own.

Times are seconds of one clock, the client's: a token exists when it has been handed over, and a request arrives when
the workload says so, not when a busy engine gets round to it (else a slow engine would hide its own queue, known as
coordinated omission). Requests that were aborted or failed are counted, and stay out of every latency and rate.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

QUANTILES = (50, 90, 95, 99)


@dataclass
class RequestTimeline:
    """What happened to one request.

    arrival: seconds. deliveries: (time, number of tokens) of each hand-over, in order. scheduled: begin of the first
    step that worked on it. finished: when its end was reported. finish_reason: stop, length, abort, error; None if the
    run ended before the request did. num_cached_tokens: prompt tokens found in the prefix cache.
    """

    request_id: str
    arrival: float
    prompt_len: int
    deliveries: list[tuple[float, int]] = field(default_factory=list)
    scheduled: float | None = None
    finished: float | None = None
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    @property
    def completed(self) -> bool:
        """Ended by itself: by its length limit, a stop string or EOS."""
        return self.finish_reason in ("stop", "length")

    @property
    def output_len(self) -> int:
        return sum(count for _, count in self.deliveries)

    @property
    def ttft(self) -> float | None:
        """Time to first token: arrival to the first hand-over, so queueing and prefill."""
        return self.deliveries[0][0] - self.arrival if self.deliveries else None

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first: (last hand-over − first) / (tokens − 1). Undefined for one token."""
        if self.output_len < 2:
            return None
        return (self.deliveries[-1][0] - self.deliveries[0][0]) / (self.output_len - 1)

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: gaps between hand-overs. Tokens handed over together have no gap between them."""
        times = [time for time, _ in self.deliveries]
        return [later - earlier for earlier, later in zip(times, times[1:], strict=False)]

    @property
    def e2e(self) -> float | None:
        """End-to-end latency: arrival to the report of the end."""
        return None if self.finished is None else self.finished - self.arrival

    @property
    def queue(self) -> float | None:
        """Arrival to the begin of the first step that works on the request."""
        return None if self.scheduled is None else self.scheduled - self.arrival

    @property
    def prefill(self) -> float | None:
        """Begin of its first step to its first token; chunks of one prompt and the steps between them included."""
        if self.scheduled is None or not self.deliveries:
            return None
        return self.deliveries[0][0] - self.scheduled

    @property
    def decode(self) -> float | None:
        """First token to the report of the end."""
        return None if self.finished is None or not self.deliveries else self.finished - self.deliveries[0][0]

    def as_row(self) -> dict[str, float | int | str | None]:
        """The request in a record's ``requests``; times in the unit of the timeline."""
        return {
            "arrival": self.arrival,
            "prompt_len": self.prompt_len,
            "output_len": self.output_len,
            "ttft": self.ttft,
            "tpot": self.tpot,
            "e2e": self.e2e,
            "queue": self.queue,
            "cached": self.num_cached_tokens,
            "preemptions": self.num_preemptions,
            "finish_reason": self.finish_reason,
        }


@dataclass(frozen=True)
class Objectives:
    """Service level objectives, upper bounds in seconds; None bounds nothing."""

    ttft: float | None = None
    tpot: float | None = None

    def met_by(self, request: RequestTimeline) -> bool:
        """Completed, and within both bounds. A request of one token has no TPOT that could be too long."""

        def within(value: float | None, bound: float | None) -> bool:
            return value is None or bound is None or value <= bound

        return request.completed and within(request.ttft, self.ttft) and within(request.tpot, self.tpot)


def percentile(values: Iterable[float], q: float) -> float | None:
    """The q-th percentile (0 … 100), linear between the two nearest ranks as in NumPy; None of no values.

    Of n values, a percentile above 100 (1 − 1/n) or so is little more than the maximum: look at the count beside it.
    """
    ordered = sorted(values)
    if not ordered:
        return None
    rank = (len(ordered) - 1) * q / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def summarise(requests: Sequence[RequestTimeline], objectives: Objectives) -> dict[str, float | None]:
    """Every figure of one run by its name; None where it is undefined. Latencies in ms, rates per second.

    The run lasts from the first arrival to the last end. *QPS*: completed requests per second. *output tok/s*: their
    output tokens per second; *total tok/s* counts their prompts too, cached or not. *goodput req/s*: requests per
    second that met both objectives (DistServe); *goodput share*: those of all that arrived, failed ones included.
    """
    done = [request for request in requests if request.completed]
    ends = [request.finished for request in requests if request.finished is not None]
    duration = max(ends) - min(request.arrival for request in requests) if ends else 0.0
    num_output = sum(request.output_len for request in done)
    num_prompt = sum(request.prompt_len for request in done)
    num_good = sum(objectives.met_by(request) for request in requests)

    def per_second(count: int) -> float | None:
        return count / duration if duration > 0 else None

    figures: dict[str, float | None] = {
        "requests": len(requests),
        "completed": len(done),
        "aborted": sum(request.finish_reason == "abort" for request in requests),
        "failed": sum(request.finish_reason in ("error", None) for request in requests),
        "duration s": duration,
        "QPS": per_second(len(done)),
        "output tok/s": per_second(num_output),
        "total tok/s": per_second(num_prompt + num_output),
        "goodput req/s": per_second(num_good),
        "goodput share": num_good / len(requests) if requests else None,
        "prefix hit rate": sum(r.num_cached_tokens for r in done) / num_prompt if num_prompt else None,
        "preemptions": sum(request.num_preemptions for request in requests),
    }
    samples: dict[str, Sequence[float | None]] = {
        "TTFT": [request.ttft for request in done],
        "TPOT": [request.tpot for request in done],
        "ITL": [gap for request in done for gap in request.itl],
        "E2E": [request.e2e for request in done],
        "queue": [request.queue for request in done],
        "prefill": [request.prefill for request in done],
        "decode": [request.decode for request in done],
    }
    for name, defined in samples.items():
        values = [1e3 * value for value in defined if value is not None]
        figures[f"{name} count"] = len(values)
        figures[f"{name} mean ms"] = statistics.fmean(values) if values else None
        for q in QUANTILES:
            figures[f"{name} p{q} ms"] = percentile(values, q)
    return figures


def better(name: str) -> Literal["higher", "lower"] | None:
    """Which direction of a figure is good; None for one that is neither (a count of requests, a name)."""
    last = name.rpartition(".")[2]  # of ``against.ppl``
    if name.endswith(("tok/s", "req/s", "tok/round")) or name.startswith("batch at ") or last in _HIGHER:
        return "higher"
    if name.endswith((" ms", " rounds", "idle share", "idle share, timed")) or last in _LOWER:
        return "lower"
    return None


_HIGHER = frozenset(
    ("QPS", "goodput share", "prefix hit rate", "share of roofline", "top1_agreement", "attention_cosine", "parses",
     "brackets", "cloze", "blocks", "tokens")
)  # fmt: skip
_LOWER = frozenset(
    ("preemptions", "failed", "aborted", "duration s", "steps", "ppl", "delta_ppl", "kl", "rounds", "peak blocks",
     "recomputed tokens", "passed over max", "bytes per token")
)  # fmt: skip
