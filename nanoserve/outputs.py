"""What the engine hands back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's ``n`` completions.

    logprobs: one ``{token_id: logprob}`` per output token, the chosen token always in it, or None when not asked for.
    stop_reason: the stop string or stop token id that ended it (None for EOS and for other finish reasons).
    error: what went wrong when ``finish_reason == "error"``.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds of ``time.perf_counter``; None until the event has happened."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0

    @property
    def ttft(self) -> float | None:
        """Time to first token: arrival to the first sampled token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """A request's result, or a snapshot / delta of it while streaming. Shortcuts refer to ``outputs[0]``."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> list[dict[int, float]] | None:
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[0].finish_reason


@dataclass(slots=True)
class Deltas:
    """What one step brought of streams that have begun and go on, which is most of all news: a token each, in columns.

    time: of the step, in seconds of ``time.perf_counter``. request_ids: requests of one completion, each at most once.
    texts: what each token released, "" for nothing; the column is empty when no tokenizer is loaded.
    """

    time: float
    request_ids: list[str]
    token_ids: list[int]
    texts: list[str]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since start-up (monotone) and gauges of this moment.

    num_free_blocks: free plus evictable. prefix_queries / prefix_hits: prompt tokens looked up / found, once per
    request (recomputation after preemption is not counted). prompt_tokens: each admitted prompt once.
    generation_tokens: tokens delivered.
    """

    num_blocks: int
    num_free_blocks: int
    prefix_queries: int
    prefix_hits: int
    cache_evictions: int
    preemptions: int
    prompt_tokens: int
    generation_tokens: int
    steps: int
    running: int
    waiting: int
    requests_finished: int
    requests_aborted: int
