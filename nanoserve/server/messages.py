"""What the two processes say to each other: msgpack, one message per command and one per engine step.

Structs travel as arrays, and the garbage collector does not see them: they are many, and hold no cycles. Times are
seconds of ``time.perf_counter``, which processes of one machine share.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from nanoserve.contracts.observer import EngineInfo
from nanoserve.outputs import Deltas, EngineStats
from nanoserve.sampling_params import SamplingParams

#: Log-probabilities of one token: as in CompletionOutput, the chosen one always in it.
TokenLogprobs = dict[int, float]

# --- to the engine -------------------------------------------------------------------------------------------------


class NewRequest(Struct, array_like=True, gc=False):
    """stream: report every step, not only the end. priority: lower is more urgent, 0 the usual."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    stream: bool
    priority: int


class Add(Struct, array_like=True, tag=True, gc=False):
    """Run these requests, or none of them: the first one that cannot run is refused."""

    requests: list[NewRequest]


class Score(Struct, array_like=True, tag=True, gc=False):
    """Log-probabilities of a prompt's own tokens, with the ``num_top`` most likely ones at each place."""

    request_id: str
    prompt_token_ids: list[int]
    num_top: int


class Abort(Struct, array_like=True, tag=True, gc=False):
    request_ids: list[str]


class Ack(Struct, array_like=True, tag=True, gc=False):
    """The reports of a step have been passed on."""


class Close(Struct, array_like=True, tag=True, gc=False):
    """End everything and exit."""


Command = Add | Score | Abort | Ack | Close

# --- from the engine -----------------------------------------------------------------------------------------------


class Started(Struct, array_like=True, tag=True, gc=False):
    """The engine is built. tokenizer: its folder; None if there is none."""

    info: EngineInfo
    vocab_size: int
    tokenizer: str | None


class Failed(Struct, array_like=True, tag=True, gc=False):
    """The engine could not be built. kind: name of a class of nanoserve.contracts.errors."""

    kind: str
    message: str


class Completion(Struct, array_like=True, gc=False):
    """CompletionOutput, as news or whole."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    cumulative_logprob: float | None
    finish_reason: str | None
    stop_reason: str | int | None
    error: str | None


class Times(Struct, array_like=True, gc=False):
    """Of RequestMetrics."""

    first_scheduled: float | None
    first_token: float | None
    finished: float | None
    num_preemptions: int


class Report(Struct, array_like=True, gc=False):
    """What a step brought for one request."""

    request_id: str
    finished: bool
    num_cached_tokens: int
    completions: list[Completion]
    times: Times


class Refusal(Struct, array_like=True, gc=False):
    """A request that was not accepted, or a score that failed. kind: name of a class of nanoserve.contracts.errors."""

    request_id: str
    kind: str
    message: str


class Scores(Struct, array_like=True, gc=False):
    """logprobs[i] belongs to prompt token i + 1: nothing predicts the first."""

    request_id: str
    logprobs: list[TokenLogprobs]


class Step(Struct, array_like=True, tag=True, gc=False):
    """Everything that steps brought since the last message.

    deltas: in the order of the steps; a request's reports come after them. running: sequences that hold KV blocks;
    waiting: all other unfinished ones.
    """

    deltas: list[Deltas]
    reports: list[Report]
    refusals: list[Refusal]
    scores: list[Scores]
    stats: EngineStats
    running: int
    waiting: int
    time: float

    @property
    def has_reports(self) -> bool:
        """Whether it is one of those whose ``Ack`` the engine waits for."""
        return bool(self.deltas or self.reports)


News = Step | Started | Failed

encoder = msgspec.msgpack.Encoder()
encode = encoder.encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_news = msgspec.msgpack.Decoder(News).decode
