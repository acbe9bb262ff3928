"""Where the outputs of requests in flight wait for their readers: one stream for each call, told as it comes.

A reader who is slower than the engine gets several deltas of a request merged into one, as if the steps had been one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from nanoserve.contracts.errors import NanoserveError
from nanoserve.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanoserve.sampling_params import SamplingParams
from nanoserve.server.messages import Report


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
        "num_cached_tokens", "news",
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
        self.num_cached_tokens = 0
        self.news: RequestOutput | None = None  # what waits for the reader

    def take_news(self) -> RequestOutput:
        news, self.news = self.news, None
        assert news is not None
        return news

    def put(self, report: Report) -> None:
        """Take in what a step brought."""
        inbox, news = self.inbox, self.news
        if inbox.closed:
            return
        inbox.num_ended += report.finished
        metrics, times = self.metrics, report.times
        metrics.first_scheduled_time = times.first_scheduled
        metrics.first_token_time = times.first_token
        metrics.finished_time = times.finished
        metrics.num_preemptions = times.num_preemptions
        self.num_cached_tokens = report.num_cached_tokens
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
        if news is None:
            self._put_new(completions, report.finished)
            return
        by_index = {completion.index: completion for completion in news.outputs}
        for new in completions:
            known = by_index.get(new.index)
            if known is None:
                news.outputs.append(new)
            else:
                _append(known, new)
        news.finished = report.finished

    def put_token(self, token_id: int, text: str) -> None:
        """Take in one token of a stream that has begun and goes on (``Deltas``)."""
        news = self.news
        if news is not None:
            completion = news.outputs[0]
            completion.token_ids.append(token_id)
            completion.text += text
        elif not self.inbox.closed:
            self._put_new([CompletionOutput(0, text, [token_id])], False)

    def _put_new(self, completions: list[CompletionOutput], finished: bool) -> None:
        self.news = RequestOutput(
            self.id, self.prompt, self.prompt_token_ids, completions, finished, self.num_cached_tokens, self.metrics
        )
        self.inbox.add(self)


class Inbox:
    """Which of one call's requests have news for their reader, who may be gone (``closed``)."""

    __slots__ = ("requests", "ready", "num_ended", "closed", "_error", "_waiter")

    def __init__(self) -> None:
        self.requests: list[RequestInFlight] = []
        self.ready: deque[RequestInFlight] = deque()
        self.num_ended = 0  # requests whose last news have come
        self.closed = False
        self._error: NanoserveError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def add(self, request: RequestInFlight) -> None:
        """``request`` has news where it had none."""
        self.ready.append(request)
        self._wake()

    def fail(self, error: NanoserveError) -> None:
        if self._error is None:
            self._error = error
        self._wake()

    def close(self) -> None:
        """Nobody reads any more; one who waits hears that there will be nothing."""
        self.closed = True
        for request in self.ready:
            request.news = None
        self.ready.clear()
        self._wake()

    @property
    def has_reader(self) -> bool:
        return self._waiter is not None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def filled(self) -> None:
        """Return when there are news, or when there will be none any more. Raises what went wrong."""
        if self._error is not None:
            raise self._error
        if self.num_ended < len(self.requests):
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
            if not self.ready and self._error is not None:
                raise self._error


class Stream(AsyncIterator[RequestOutput]):
    """What one call asked for, as it comes. Closed, cancelled or forgotten, it aborts what has not ended.

    request_ids: in the order of the prompts; ``RequestOutput.request_id`` is one of them. abort: called with some.
    """

    def __init__(self, inbox: Inbox, abort: Callable[[list[str]], None]) -> None:
        self._inbox = inbox
        self._abort: Callable[[list[str]], None] | None = abort
        self.request_ids = [request.id for request in inbox.requests]

    async def __anext__(self) -> RequestOutput:
        inbox = self._inbox
        if inbox.has_reader:
            raise RuntimeError("another task is waiting for this stream; it has one reader at a time")
        if inbox.closed:
            raise StopAsyncIteration
        if not inbox.ready:
            try:
                await inbox.filled()
            except BaseException:
                self.close()
                raise
            if not inbox.ready:
                self.close()
                raise StopAsyncIteration
        return inbox.ready.popleft().take_news()

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


def _append(known: CompletionOutput, new: CompletionOutput) -> None:
    known.text += new.text
    known.token_ids += new.token_ids
    if new.logprobs is not None:
        known.logprobs = [*(known.logprobs or ()), *new.logprobs]
    known.cumulative_logprob = new.cumulative_logprob
    known.finish_reason, known.stop_reason, known.error = new.finish_reason, new.stop_reason, new.error
