"""Requests in the engine, and what there is to say of them since somebody asked last."""

from __future__ import annotations

import time

from nanoserve.engine.detokenizer import OutputText
from nanoserve.engine.sequence import Sequence
from nanoserve.outputs import CompletionOutput, Deltas, RequestMetrics, RequestOutput
from nanoserve.sampling_params import SamplingParams


class Request:
    """A request in the engine: its ``n`` sequences and what has been said of them."""

    __slots__ = ("id", "prompt", "prompt_token_ids", "params", "stream", "sequences", "held", "metrics", "unfinished")

    def __init__(
        self, request_id: str, prompt: str | None, prompt_token_ids: list[int], params: SamplingParams, stream: bool
    ) -> None:
        self.id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.stream = stream
        self.sequences: list[Sequence] = []
        self.held: list[Sequence] = []  # siblings that wait until the first has put the prompt into the prefix cache
        self.metrics = RequestMetrics(arrival_time=time.perf_counter())
        self.unfinished = 0


class Output:
    """The output side of one sequence. ``text`` is None when no tokenizer is loaded."""

    __slots__ = (
        "request", "completion", "text", "incremental", "delta", "num_reported", "end_reported", "is_plain", "goes_on",
        "last_index",
    )  # fmt: skip

    def __init__(
        self, request: Request, index: int, text: OutputText | None, incremental: bool, max_num_tokens: int
    ) -> None:
        self.request = request
        self.completion = CompletionOutput(index)
        self.text = text
        self.incremental = incremental  # detokenise every token: somebody streams, or a stop string must be seen
        self.delta: list[str] = []
        self.num_reported = 0  # output tokens already streamed
        self.end_reported = False
        params = request.params
        # Nothing is said of its tokens but ids and text, and nothing but an id or the limit ends it.
        self.is_plain = (
            params.logprobs is None
            and params.structured is None
            and not params.stop_strings
            and not (request.stream and params.n > 1)
        )
        self.goes_on = False  # it is plain, has begun, and has nothing to report but the tokens that come now
        self.last_index = max_num_tokens - 1  # in Sequence.token_ids, of the token that ends it


class News:
    """Two kinds, because most of all news are alike: tokens of streams that have begun and go on, as columns of a step,
    and requests that have something else to say. The columns are told first.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[float, list[Request], list[int], list[str]]] = []  # as Deltas
        self._changed: dict[Request, None] = {}  # in order; an id may be in use again before its end was told

    def __bool__(self) -> bool:
        return bool(self._steps or self._changed)

    def add_step(self, requests: list[Request], token_ids: list[int], texts: list[str]) -> None:
        """A token for each of these; texts is empty without a tokenizer."""
        self._steps.append((time.perf_counter(), requests, token_ids, texts))

    def add(self, request: Request) -> None:
        self._changed[request] = None

    def take(self) -> list[RequestOutput]:
        """All of it: deltas of streams, results of requests that have ended."""
        steps, self._steps = self._steps, []
        deltas = [
            _output(request, [CompletionOutput(0, text, [token])])
            for _, requests, tokens, texts in steps
            for request, token, text in zip(requests, tokens, texts or [""] * len(tokens), strict=True)
        ]
        return deltas + self._take_changed()

    def take_columns(self) -> tuple[list[Deltas], list[RequestOutput]]:
        """All of it, the columns as they are."""
        steps, self._steps = self._steps, []
        deltas = [
            Deltas(time, [request.id for request in requests], tokens, texts) for time, requests, tokens, texts in steps
        ]
        return deltas, self._take_changed()

    def _take_changed(self) -> list[RequestOutput]:
        changed, self._changed = self._changed, {}
        reports = []
        for request in changed:
            if request.stream:
                outputs = [delta for seq in request.sequences if (delta := _delta(seq)) is not None]
            elif not request.unfinished:
                outputs = [seq.state.completion for seq in request.sequences]  # type: ignore[attr-defined]
            else:
                continue
            reports.append(_output(request, outputs, finished=not request.unfinished))
        return reports


def _output(request: Request, outputs: list[CompletionOutput], finished: bool = False) -> RequestOutput:
    return RequestOutput(
        request_id=request.id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        outputs=outputs,
        finished=finished,
        num_cached_tokens=max(request.sequences[0].num_cached_tokens, 0),
        metrics=request.metrics,
    )


def _delta(seq: Sequence) -> CompletionOutput | None:
    """What a streaming sequence has to say since the last report; None if nothing."""
    output: Output = seq.state  # type: ignore[assignment]
    done, start = output.completion, output.num_reported
    known = seq.num_output_tokens
    if output.end_reported or (known == start and done.finish_reason is None):
        return None
    delta = CompletionOutput(
        index=seq.index,
        text="".join(output.delta),
        token_ids=seq.token_ids[seq.num_prompt_tokens + start :],
        logprobs=None if done.logprobs is None else done.logprobs[start:],
        cumulative_logprob=done.cumulative_logprob,
        finish_reason=done.finish_reason,
        stop_reason=done.stop_reason,
        error=done.error,
    )
    output.delta = []
    output.num_reported = known
    output.end_reported = done.finish_reason is not None
    output.goes_on = output.is_plain and not output.end_reported
    return delta
