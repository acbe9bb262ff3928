"""Where the outputs of requests in flight wait for their readers: one stream for each call, told as it comes.

A reader who is slower than the engine gets several deltas of a request merged into one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable

from nanoserve.contracts.errors import NanoserveError
from nanoserve.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanoserve.sampling_params import SamplingParams
from nanoserve.server.messages import Completion, Report


class Choice:
    """One of a request's ``n`` completions, as metrics see it. Times in seconds of ``time.perf_counter``."""

    __slots__ = ("first_time", "last_time", "num_tokens", "ended")

    def __init__(self) -> None:
        self.first_time: float | None = None  # of its first token
        self.last_time = 0.0  # of its last token so far
        self.num_tokens = 0
        self.ended = False


class RequestInFlight:
    """A request in flight, on this side."""

    __slots__ = (
        "id", "where", "prompt", "prompt_token_ids", "params", "inbox", "metrics", "ended", "choices",
    )  # fmt: skip

    def __init__(
        self, id: str, where: str, prompt: str | None, ids: list[int], params: SamplingParams, inbox: Inbox, now: float
    ) -> None:
        self.id = id
        self.where = where  # what its refusal begins with
        self.prompt = prompt
        self.prompt_token_ids = ids
        self.params = params
        self.inbox = inbox
        self.metrics = RequestMetrics(arrival_time=now)
        self.ended = False  # nothing will come any more
        self.choices = [Choice() for _ in range(params.n)]

    def output(self, report: Report) -> RequestOutput:
        metrics, times = self.metrics, report.times
        metrics.first_scheduled_time = times.first_scheduled
        metrics.first_token_time = times.first_token
        metrics.finished_time = times.finished
        metrics.num_preemptions = times.num_preemptions
        completions = [
            CompletionOutput(
                c.index,
                c.text,
                c.token_ids,
                c.logprobs,
                c.cumulative_logprob,
                c.finish_reason,  # type: ignore[arg-type]
                c.stop_reason,
                c.error,
            )
            for c in report.completions
        ]
        return RequestOutput(
            self.id, self.prompt, self.prompt_token_ids, completions, report.finished, report.num_cached_tokens, metrics
        )


class Inbox:
    """Where the reports of one call's requests wait for their reader, who may be gone (``closed``)."""

    __slots__ = ("requests", "items", "closed", "_num_ended", "_error", "_waiter")

    def __init__(self) -> None:
        self.requests: list[RequestInFlight] = []
        self.items: list[tuple[RequestInFlight, Report]] = []
        self.closed = False
        self._num_ended = 0
        self._error: NanoserveError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, request: RequestInFlight, report: Report) -> None:
        if self.closed:
            return
        self.items.append((request, report))
        if report.finished:
            self._num_ended += 1
        self._wake()

    def fail(self, error: NanoserveError) -> None:
        if self._error is None:
            self._error = error
        self._wake()

    def close(self) -> None:
        """Nobody reads any more; one who waits hears that there will be nothing."""
        self.closed = True
        self.items.clear()
        self._wake()

    @property
    def has_reader(self) -> bool:
        return self._waiter is not None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def filled(self) -> None:
        """Return when there are items, or when there will be none any more. Raises what went wrong."""
        if self._error is not None:
            raise self._error
        if self._num_ended < len(self.requests):
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
            if not self.items and self._error is not None:
                raise self._error


class Stream(AsyncIterator[RequestOutput]):
    """What one call asked for, as it comes. Closed, cancelled or forgotten, it aborts what has not ended.

    request_ids: in the order of the prompts; ``RequestOutput.request_id`` is one of them. abort: called with some.
    """

    def __init__(self, inbox: Inbox, abort: Callable[[list[str]], None]) -> None:
        self._inbox = inbox
        self._abort: Callable[[list[str]], None] | None = abort
        self._merged: deque[tuple[RequestInFlight, Report]] = deque()
        self.request_ids = [request.id for request in inbox.requests]

    async def __anext__(self) -> RequestOutput:
        inbox = self._inbox
        if inbox.has_reader:
            raise RuntimeError("another task is waiting for this stream; it has one reader at a time")
        if inbox.closed:
            raise StopAsyncIteration
        if not self._merged:
            if not inbox.items:
                try:
                    await inbox.filled()
                except BaseException:
                    self.close()
                    raise
            if not inbox.items:
                self.close()
                raise StopAsyncIteration
            self._merged.extend(inbox.items if len(inbox.items) == 1 else _merge(inbox.items))
            inbox.items.clear()
        request, report = self._merged.popleft()
        return request.output(report)

    def close(self) -> None:
        """Abort what has not ended. Idempotent."""
        abort, self._abort = self._abort, None
        if abort is None:
            return
        self._inbox.close()
        if unfinished := [request.id for request in self._inbox.requests if not request.ended]:
            abort(unfinished)

    async def aclose(self) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _merge(items: Iterable[tuple[RequestInFlight, Report]]) -> list[tuple[RequestInFlight, Report]]:
    """One report per request, as if the steps had been one."""
    merged: dict[str, tuple[RequestInFlight, Report]] = {}
    for request, report in items:
        first = merged.setdefault(request.id, (request, report))[1]
        if first is report:
            continue
        by_index = {completion.index: completion for completion in first.completions}
        for new in report.completions:
            known = by_index.get(new.index)
            if known is None:
                first.completions.append(new)
            else:
                _append(known, new)
        first.finished, first.times = report.finished, report.times
    return list(merged.values())


def _append(known: Completion, new: Completion) -> None:
    known.text += new.text
    known.token_ids += new.token_ids
    if new.logprobs is not None:
        known.logprobs = [*(known.logprobs or ()), *new.logprobs]
    known.cumulative_logprob = new.cumulative_logprob
    known.finish_reason, known.stop_reason, known.error = new.finish_reason, new.stop_reason, new.error
