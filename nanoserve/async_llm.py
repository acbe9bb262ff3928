"""``AsyncLLM``: an engine in a process of its own, for programs that live on an event loop. The server uses it too.

    async with AsyncLLM(model="tiny") as llm:
        async for delta in llm.generate("import json", SamplingParams(max_tokens=32)):
            print(delta.text, end="")

The engine steps without waiting for anybody here: what a step brings comes as one message, is decoded once and handed
to the streams that wait. A reader who is slower than the engine gets several deltas of a request merged into one.
It needs the extra ``nanoserve[serve]``, and, like everything that starts processes with ``spawn``, a script needs
``if __name__ == "__main__":`` around its start.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import logging
import multiprocessing
import shutil
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable
from collections.abc import Sequence as Seq
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Literal

import zmq

from nanoserve.config import EngineConfig
from nanoserve.contracts.errors import NanoserveError, RequestError
from nanoserve.contracts.observer import EngineInfo
from nanoserve.outputs import CompletionOutput, EngineStats, RequestMetrics, RequestOutput
from nanoserve.registry import Registry
from nanoserve.sampling_params import MAX_LOGPROBS, SamplingParams
from nanoserve.server import engine_process
from nanoserve.server.messages import (
    Abort,
    Add,
    Close,
    Command,
    Completion,
    Failed,
    NewRequest,
    Refusal,
    Report,
    Score,
    Started,
    Step,
    TokenLogprobs,
    decode_news,
    encode,
)
from nanoserve.server.metrics import ServingMetrics
from nanoserve.tokenizer import Tokenizer

log = logging.getLogger("nanoserve.server")

Prompt = str | list[int]
State = Literal["new", "starting", "ready", "dead", "closed"]

MESSAGES_PER_TURN = 256  # read at once, so that a fast engine cannot keep the event loop from everything else
LONG_TEXT = 4096  # characters from which a text is tokenized in a thread: the tokenizer releases the interpreter lock
CLOSE_TIMEOUT = 5.0  # seconds that the engine process gets to give its memory back


class EngineDeadError(NanoserveError, RuntimeError):
    """The engine process is not there: not started yet, starting again, ended, or closed."""


class AsyncLLM:
    """A model served by a process of its own. Use it as an asynchronous context manager, or ``start`` and ``close``.

    Keywords are those of :class:`nanoserve.LLM`. restart: when the engine process dies, start it once more; what was
    in flight fails with EngineDeadError all the same. One event loop may use an AsyncLLM.

    state: new, starting, ready, dead (the process has ended and will not be started again), closed.
    """

    def __init__(self, model: str = "tiny", *, restart: bool = False, **options: Any) -> None:
        registry = Registry.discover()
        config = EngineConfig.from_kwargs(model=model, more_paths=registry.config_paths_for, **options)
        self._configure(config, restart, None)

    @classmethod
    def from_config(cls, config: EngineConfig, *, restart: bool = False, log_level: int | None = None) -> AsyncLLM:
        """From a ready configuration. log_level: the engine process logs JSON lines to standard error from there on."""
        llm = cls.__new__(cls)
        llm._configure(config, restart, log_level)
        return llm

    def _configure(self, config: EngineConfig, restart: bool, log_level: int | None) -> None:
        self.config = config
        self.state: State = "new"
        self.tokenizer: Tokenizer | None = None
        self.metrics = ServingMetrics()
        self.num_sequences = 0  # unfinished, aborted ones included until the engine has confirmed
        self._restarts_left = int(restart)
        self._log_level = log_level
        self._engine: _Engine | None = None
        self._started: Started | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._ids = itertools.count()
        self._requests: dict[str, _Request] = {}
        self._scores: dict[str, asyncio.Future[list[TokenLogprobs]]] = {}

    # ---------------------------------------------------------------- life

    async def start(self) -> None:
        """Start the engine process and wait until it can serve.

        Raises ConfigError, PluginError or ModelLoadError as ``LLM`` does, EngineDeadError if the process ends instead.
        """
        if self.state != "new":
            raise EngineDeadError(f"an AsyncLLM starts once; this one is {self.state}")
        await self._start_engine()

    async def _start_engine(self) -> None:
        self.state = "starting"
        imports = asyncio.create_task(asyncio.to_thread(_import_tokenizers))
        self._engine = engine = _Engine(self.config, self._log_level, self._on_news, self._on_exit)
        try:
            started = await engine.started
            await imports
            if started.tokenizer is not None and self.tokenizer is None:
                self.tokenizer = await asyncio.to_thread(Tokenizer, started.tokenizer)
        except BaseException:
            imports.cancel()
            if self._engine is engine:
                self.state = "dead"
                engine.kill()
            raise
        if self._engine is not engine:
            raise EngineDeadError("the AsyncLLM was closed while it started")
        self._started = started
        if engine.alive:
            self.state = "ready"

    async def close(self) -> None:
        """End the engine process and give everything back; unfinished requests fail. Idempotent."""
        engine, self._engine = self._engine, None
        self.state = "closed"
        if self._restarting is not None:
            self._restarting.cancel()
        self._fail_all(EngineDeadError("the AsyncLLM is closed"))
        if engine is not None:
            self._closing = asyncio.create_task(engine.close())
        if self._closing is not None:  # whoever closes waits for the end, also if another began
            await asyncio.shield(self._closing)

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def info(self) -> EngineInfo:
        """The composition that serves. Raises EngineDeadError before the first start has succeeded."""
        return self._about.info

    @property
    def has_started(self) -> bool:
        """Whether an engine has been there, so that ``info`` is known."""
        return self._started is not None

    @property
    def vocab_size(self) -> int:
        return self._about.vocab_size

    @property
    def _about(self) -> Started:
        if self._started is None:
            raise EngineDeadError("the engine has not started yet")
        return self._started

    @property
    def engine_pid(self) -> int | None:
        """The engine's process, None if there is none."""
        return None if self._engine is None else self._engine.pid

    def stats(self) -> EngineStats:
        """Counters since start-up, over restarts, and gauges of the last step."""
        return self.metrics.stats()

    # ---------------------------------------------------------------- requests

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, stream: bool = True, text: str | None = None
    ) -> Stream:
        """Queue a request. ``async for`` over the result gives deltas, as ``LLM.stream`` does, or with stream=False one
        whole result.

        prompt: text or token ids. text: what the ids were made from, for ``RequestOutput.prompt``. Leaving the loop,
        cancelling it, or forgetting the stream aborts the request. Refusals (RequestError, CapacityError) and the death
        of the engine (EngineDeadError) are raised where the stream is awaited.
        """
        return self.generate_many([prompt], [_checked(params)], stream=stream, texts=[text])

    def generate_many(
        self,
        prompts: Seq[Prompt],
        params: Seq[SamplingParams],
        *,
        stream: bool = True,
        texts: Seq[str | None] | None = None,
    ) -> Stream:
        """Several requests in one stream, told apart by ``Stream.request_ids``; they are aborted together."""
        engine = self._ready()
        tokenized = [self._tokenize(prompt, None if texts is None else texts[i]) for i, prompt in enumerate(prompts)]
        if len(params) != len(prompts):
            raise RequestError(f"{len(params)} SamplingParams for {len(prompts)} prompts; give one for each")
        inbox = _Inbox()
        now = time.perf_counter()
        for i, ((prompt, ids), own) in enumerate(zip(tokenized, params, strict=True)):
            where = f"prompt {i}: " if len(prompts) > 1 else ""
            inbox.requests.append(_Request(str(next(self._ids)), where, prompt, ids, own, inbox, now))
        try:
            engine.send(Add([NewRequest(r.id, r.prompt_token_ids, r.params, stream) for r in inbox.requests]))
        except (OverflowError, UnicodeEncodeError) as error:  # what MessagePack cannot hold
            raise RequestError(f"SamplingParams: more than 64 bits, or not valid Unicode: {error}") from None
        for request in inbox.requests:
            self._requests[request.id] = request
            self.num_sequences += request.params.n
        return Stream(self, inbox)

    async def score(self, prompt: Prompt, num_top: int = 0) -> list[TokenLogprobs]:
        """Log-probabilities of a prompt's own tokens but the first: one ``{token_id: logprob}`` each.

        The token itself is in it, with the ``num_top`` most likely ones. Cancelling gives it up.
        """
        engine = self._ready()
        if type(num_top) is not int or not 0 <= num_top <= MAX_LOGPROBS:
            raise RequestError(f"num_top must be an integer in 0 … {MAX_LOGPROBS}, not {num_top!r}")
        request_id = str(next(self._ids))
        future = self._scores[request_id] = asyncio.get_running_loop().create_future()
        self.num_sequences += 1
        try:
            engine.send(Score(request_id, self._tokenize(prompt, None)[1], num_top))
            return await future
        finally:
            if self._scores.pop(request_id, None) is not None:
                self.num_sequences -= 1
            if not future.done() or future.cancelled():
                self._abort([request_id])

    async def encode(self, text: str) -> list[int]:
        """Token ids of a text; a long one does not hold up the event loop."""
        tokenizer = self._with_tokenizer()
        return tokenizer.encode(text) if len(text) < LONG_TEXT else await asyncio.to_thread(tokenizer.encode, text)

    async def render_chat(self, messages: list[dict[str, Any]], **template_kwargs: Any) -> list[int]:
        """Token ids of a conversation in the chat template, with the generation prompt."""
        tokenizer = self._with_tokenizer("messages")
        if sum(len(str(message.get("content"))) for message in messages if isinstance(message, dict)) < LONG_TEXT:
            return tokenizer.render_chat(messages, **template_kwargs)
        return await asyncio.to_thread(tokenizer.render_chat, messages, **template_kwargs)

    # ---------------------------------------------------------------- inside

    def _ready(self) -> _Engine:
        if self._engine is None or self.state != "ready":
            raise EngineDeadError(f"the engine is not ready: {self.state}")
        return self._engine

    def _with_tokenizer(self, what: str = "prompt") -> Tokenizer:
        self._ready()
        if self.tokenizer is None:
            raise RequestError(f"{what}: this model has no tokenizer; give a prompt of token ids")
        return self.tokenizer

    def _tokenize(self, prompt: Prompt, text: str | None) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self._with_tokenizer().encode(prompt)
        if not isinstance(prompt, list) or not all(type(token) is int and 0 <= token < 2**63 for token in prompt):
            raise RequestError("prompt must be a string or a list of token ids, which are integers >= 0")
        return text, prompt

    def _abort(self, request_ids: list[str]) -> None:
        if self._engine is not None and self.state == "ready":
            with contextlib.suppress(EngineDeadError):  # then there is nothing left to abort
                self._engine.send(Abort(request_ids))

    def _on_news(self, engine: _Engine, step: Step) -> None:
        if engine is not self._engine:
            return
        metrics, requests = self.metrics, self._requests
        metrics.step(step)
        for refusal in step.refusals:
            self._on_refusal(refusal)
        for scores in step.scores:
            if (future := self._scores.get(scores.request_id)) is not None and not future.done():
                future.set_result(scores.logprobs)
        for report in step.reports:
            request = requests.get(report.request_id)
            if request is not None:
                metrics.report(request, report, step.time)
                if report.finished:
                    self._forget(request)
                request.inbox.put(request, report)

    def _on_refusal(self, refusal: Refusal) -> None:
        error = engine_process.error_named(refusal.kind, refusal.message)
        if (future := self._scores.get(refusal.request_id)) is not None and not future.done():
            future.set_exception(error)
        request = self._requests.get(refusal.request_id)
        if request is not None:
            for one in request.inbox.requests:
                self._forget(one)
            request.inbox.fail(type(error)(f"{request.where}{error}"))

    def _forget(self, request: _Request) -> None:
        del self._requests[request.id]
        self.num_sequences -= request.params.n

    def _fail_all(self, error: NanoserveError) -> None:
        requests, self._requests = self._requests, {}
        self.num_sequences = 0
        for request in requests.values():
            self.metrics.failed(request)
            request.inbox.fail(error)
        scores, self._scores = self._scores, {}
        for future in scores.values():
            if not future.done():
                future.set_exception(error)

    def _on_exit(self, engine: _Engine, code: int | None) -> None:
        if engine is not self._engine:
            return
        was_ready = self.state == "ready"
        fields = {"exit_code": code, "in_flight": len(self._requests)}
        log.error("the engine process has ended", extra={"fields": fields})
        self.metrics.engine_ended()
        self.state = "dead"
        self._fail_all(EngineDeadError(f"the engine process has ended with exit code {code}"))
        if was_ready and self._restarts_left:
            self._restarts_left -= 1
            self.state = "starting"
            self._restarting = asyncio.get_running_loop().create_task(self._restart())

    async def _restart(self) -> None:
        try:
            await self._start_engine()
        except NanoserveError as error:
            log.error("the engine could not be started again: %s", error)
        else:
            log.warning("the engine serves again", extra={"fields": {"pid": self.engine_pid}})


class Stream(AsyncIterator[RequestOutput]):
    """What one call asked for, as it comes. Closed, cancelled or forgotten, it aborts what has not ended.

    request_ids: in the order of the prompts; ``RequestOutput.request_id`` is one of them.
    """

    def __init__(self, llm: AsyncLLM, inbox: _Inbox) -> None:
        self._llm: AsyncLLM | None = llm
        self._inbox = inbox
        self._merged: deque[tuple[_Request, Report]] = deque()
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
        llm, self._llm = self._llm, None
        if llm is None:
            return
        self._inbox.close()
        if unfinished := [request.id for request in self._inbox.requests if request.id in llm._requests]:
            llm._abort(unfinished)

    async def aclose(self) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class _Request:
    """A request in flight, on this side."""

    __slots__ = (
        "id", "where", "prompt", "prompt_token_ids", "params", "inbox", "metrics", "last_time", "num_output_tokens",
    )  # fmt: skip

    def __init__(
        self, id: str, where: str, prompt: str | None, ids: list[int], params: SamplingParams, inbox: _Inbox, now: float
    ) -> None:
        self.id = id
        self.where = where  # what its refusal begins with
        self.prompt = prompt
        self.prompt_token_ids = ids
        self.params = params
        self.inbox = inbox
        self.metrics = RequestMetrics(arrival_time=now)
        self.last_time: float | None = None  # of the step that brought the last token
        self.num_output_tokens = 0

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


class _Inbox:
    """Where the reports of one call's requests wait for their reader, who may be gone (``closed``)."""

    __slots__ = ("requests", "items", "closed", "_num_ended", "_error", "_waiter")

    def __init__(self) -> None:
        self.requests: list[_Request] = []
        self.items: list[tuple[_Request, Report]] = []
        self.closed = False
        self._num_ended = 0
        self._error: NanoserveError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, request: _Request, report: Report) -> None:
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


def _merge(items: Iterable[tuple[_Request, Report]]) -> list[tuple[_Request, Report]]:
    """One report per request, as if the steps had been one."""
    merged: dict[str, tuple[_Request, Report]] = {}
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


class _Engine:
    """The engine process and the two sockets to it."""

    def __init__(self, config: EngineConfig, log_level: int | None, on_news: Any, on_exit: Any) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self._on_news = on_news
        self._on_exit = on_exit
        self._folder = tempfile.mkdtemp(prefix="nanoserve-")
        self._context = zmq.Context()
        addresses = [f"ipc://{self._folder}/{name}" for name in ("commands", "news")]
        # A socket each way: on one, a send could swallow the edge by which the event loop learns of a message.
        self._commands, self._news = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        for socket, address in zip((self._commands, self._news), addresses, strict=True):
            socket.set_hwm(0)
            socket.bind(address)
        self.started: asyncio.Future[Started] = loop.create_future()
        self.started.add_done_callback(lambda future: future.cancelled() or future.exception())  # may go unread
        spawn = multiprocessing.get_context("spawn")
        self._process: BaseProcess = spawn.Process(
            target=engine_process.run, args=(config, *addresses, log_level), name="nanoserve-engine"
        )
        self._process.start()
        atexit.register(self.kill)  # before multiprocessing's own handler, which would wait for it
        self._gone = asyncio.Event()
        self._fd = int(self._news.getsockopt(zmq.FD))
        loop.add_reader(self._fd, self._read)
        loop.add_reader(self._process.sentinel, self._ended)
        loop.call_soon(self._read)  # what came before the reader was there

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self._gone.is_set()

    def send(self, command: Command) -> None:
        try:
            self._commands.send(encode(command), zmq.NOBLOCK)
        except zmq.Again:
            raise EngineDeadError("the engine process is gone") from None

    def kill(self) -> None:
        if self._process.is_alive():
            self._process.kill()

    async def close(self) -> None:
        if self.alive:
            try:
                self.send(Close())
                await asyncio.wait_for(self._gone.wait(), CLOSE_TIMEOUT)
            except (EngineDeadError, TimeoutError):
                self.kill()
                await self._gone.wait()

    def _read(self) -> None:
        for _ in range(MESSAGES_PER_TURN):
            if self._news.closed:
                return
            try:
                message = self._news.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            news = decode_news(message)
            if isinstance(news, Step):
                self._on_news(self, news)
            elif not self.started.done():
                if isinstance(news, Failed):
                    self.started.set_exception(engine_process.error_named(news.kind, news.message))
                else:
                    self.started.set_result(news)
        self._loop.call_soon(self._read)

    def _ended(self) -> None:
        self._loop.remove_reader(self._process.sentinel)
        self._read()
        self._process.join()
        self._loop.remove_reader(self._fd)
        self._context.destroy(linger=0)
        atexit.unregister(self.kill)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._gone.set()
        code = self._process.exitcode
        if not self.started.done():
            self.started.set_exception(EngineDeadError(f"the engine process has ended with exit code {code}"))
        self._on_exit(self, code)


def _checked(params: SamplingParams | None) -> SamplingParams:
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise RequestError(f"params must be SamplingParams, not {type(params).__name__}")
    return params


def _import_tokenizers() -> None:
    """While the engine loads weights, import what is slow to import."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401
