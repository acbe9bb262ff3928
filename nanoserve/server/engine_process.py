"""The far side: a process that owns an engine, takes commands and says after every step what it brought.

The loop never waits for anybody but the engine: commands are taken in between steps, news are queued by ZeroMQ, and
grammars are compiled by threads. While the other side is busy with what it has been told, several steps are told
as one: that spares both sides work when they have most of it.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import parent_process
from typing import TYPE_CHECKING

import zmq

from nanoserve.contracts import errors
from nanoserve.contracts.errors import NanoserveError, RequestError
from nanoserve.outputs import CompletionOutput, Deltas, RequestMetrics, RequestOutput
from nanoserve.server.logs import json_logs
from nanoserve.server.messages import (
    Abort,
    Ack,
    Add,
    Close,
    Command,
    Completion,
    Failed,
    NewRequest,
    Refusal,
    Report,
    Score,
    Scores,
    Started,
    Step,
    Times,
    decode_command,
    encode,
)

if TYPE_CHECKING:
    from nanoserve.config import EngineConfig
    from nanoserve.engine.engine import Engine

log = logging.getLogger("nanoserve.engine")

STATS_INTERVAL = 0.05  # seconds between news when there is nothing else to say, or nobody has time to listen
MAX_UNREAD = 2  # messages with reports that the other side has not passed on yet
COMPILER_THREADS = 4  # a form that takes long to compile delays no other as long as one is idle


def run(config: EngineConfig, commands: str, news: str, log_level: int | None) -> None:
    """Entry point of the process. commands, news: ZeroMQ addresses to read from and to write to.

    log_level: log JSON lines from this level on to standard error; None leaves logging alone.
    """
    # The parent decides when this process ends; a signal to the whole group must not cut requests that it drains.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.nullcontext() if log_level is None else json_logs(log_level):
        _run(config, commands, news)


def _run(config: EngineConfig, commands: str, news: str) -> None:
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket, address in ((inbox, commands), (outbox, news)):
        socket.set_hwm(0)
        socket.connect(address)
    try:
        from nanoserve.engine.build import build_engine, checkpoint_folder
        from nanoserve.tokenizer import has_tokenizer

        engine = build_engine(config)
        folder = checkpoint_folder(config)
        tokenizer = str(folder) if folder is not None and has_tokenizer(folder) else None
    except NanoserveError as error:
        outbox.send(encode(Failed(type(error).__name__, str(error))))
        context.destroy(linger=1000)
        sys.exit(1)
    loop = EngineLoop(engine, inbox, outbox)
    if engine.grammars is not None:
        engine.grammars.build()  # it may hold the interpreter lock for longer than a stream should wait
    gc.collect()
    gc.freeze()  # what has been built stays; the collector need not look at it again
    outbox.send(encode(started(engine, tokenizer)))
    try:
        loop.run()
    finally:
        gc.unfreeze()
        loop.close()
        engine.close()
        context.destroy(linger=0)


def started(engine: Engine, tokenizer: str | None) -> Started:
    if engine.info is None:
        raise NanoserveError("an engine that is served needs its EngineInfo")
    return Started(engine.info, engine.vocab_size, tokenizer)


class EngineLoop:
    """Commands in, steps, news out, until ``Close`` comes or the parent is gone."""

    def __init__(self, engine: Engine, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes]) -> None:
        from nanoserve.server.scoring import Scorer

        self._engine = engine
        self._scorer = Scorer(engine)
        self._inbox = inbox
        self._outbox = outbox
        self._refusals: list[Refusal] = []
        self._aborted: list[RequestOutput] = []  # before the engine had them
        self._compilers = ThreadPoolExecutor(COMPILER_THREADS, "grammar")  # starts threads when there is work for them
        self._compiling: dict[Future[tuple[str, BaseException] | None], list[NewRequest]] = {}
        self._closing = False
        self._told = 0.0
        self._unread = 0
        self._poller = zmq.Poller()
        self._poller.register(inbox, zmq.POLLIN)
        self._bell, self._ring = os.pipe()  # a byte for every compilation that has ended
        self._poller.register(self._bell, zmq.POLLIN)
        parent = parent_process()
        self._parent = None if parent is None else parent.sentinel
        if self._parent is not None:
            self._poller.register(self._parent, zmq.POLLIN)

    def run(self) -> None:
        engine, scorer = self._engine, self._scorer
        while True:
            self._take_commands(
                wait=not (engine.can_step or scorer.has_work or (engine.has_reports and self._may_tell))
            )
            if self._closing:
                return
            if engine.can_step:
                engine.advance()
            scores: list[Scores] = []
            if jobs := scorer.take():
                engine.drain()
                scores = self._score(jobs)
            deltas: list[Deltas] = []
            reports, self._aborted = self._aborted, []
            if self._may_tell:
                deltas, more = engine.report_columns()
                reports += more
            if deltas or reports or scores or self._refusals or not engine.can_step or self._is_stale:
                self._tell(deltas, reports, scores)

    def close(self) -> None:
        self._compilers.shutdown(wait=False, cancel_futures=True)

    @property
    def _may_tell(self) -> bool:
        return self._unread < MAX_UNREAD or self._is_stale

    @property
    def _is_stale(self) -> bool:
        return time.perf_counter() - self._told > STATS_INTERVAL

    def _take_commands(self, wait: bool) -> None:
        ready = dict(self._poller.poll(None if wait else 0))
        if self._parent in ready:
            log.error("the server is gone; the engine stops")
            os._exit(1)
        if self._bell in ready:
            os.read(self._bell, 4096)
            for job in [job for job in self._compiling if job.done()]:
                self._compiled(self._compiling.pop(job), job.result())
        if self._inbox not in ready:
            return
        while not self._closing:
            try:
                message = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._obey(decode_command(message))

    def _obey(self, command: Command) -> None:
        match command:
            case Add(requests):
                self._admit(requests)
            case Score(request_id):
                try:
                    self._scorer.add(command)
                except RequestError as error:
                    self._refuse(request_id, error)
            case Abort(request_ids):
                for request_id in request_ids:
                    self._engine.abort(request_id)
                    self._scorer.abort(request_id)
                if self._compiling:
                    self._abort_compiling(request_ids)
            case Ack():
                self._unread -= 1
            case Close():
                self._closing = True

    def _admit(self, requests: list[NewRequest]) -> None:
        """Add the requests, once their grammars are compiled."""
        if (grammars := self._engine.grammars) is not None:
            forms = [request.params.structured for request in requests]
            if any(form is not None and grammars.find(form) is None for form in forms):
                job = self._compilers.submit(self._compile, requests)
                self._compiling[job] = requests
                job.add_done_callback(lambda _: os.write(self._ring, b"."))
                return
        self._add(requests)

    def _compile(self, requests: list[NewRequest]) -> tuple[str, BaseException] | None:
        """On another thread: put the grammars where the engine finds them. The first request that has none, and why."""
        assert self._engine.grammars is not None
        for request in list(requests):
            if request.params.structured is not None:
                try:
                    self._engine.grammars.compile(request.params.structured)
                except BaseException as error:  # a panic of a library in Rust is no Exception
                    return request.request_id, error
        return None

    def _compiled(self, requests: list[NewRequest], refused: tuple[str, BaseException] | None) -> None:
        if refused is None:
            self._add(requests)
        else:
            self._refuse(*refused)

    def _abort_compiling(self, request_ids: Iterable[str]) -> None:
        wanted = set(request_ids)
        for requests in self._compiling.values():
            for request in [request for request in requests if request.request_id in wanted]:
                requests.remove(request)
                ends = [CompletionOutput(index, finish_reason="abort") for index in range(request.params.n)]
                now = RequestMetrics(time.perf_counter())
                self._aborted.append(
                    RequestOutput(request.request_id, None, request.prompt_token_ids, ends, True, 0, now)
                )

    def _add(self, requests: list[NewRequest]) -> None:
        """Add all of them, or refuse one and keep none."""
        engine = self._engine
        added: list[str] = []
        request = None
        try:
            for request in requests:
                engine.check_priority(request.priority)
                if request is not requests[0]:  # which is checked when it is added
                    engine.check(request.prompt_token_ids, request.params)
            for request in requests:
                engine.add_request(
                    request.request_id, request.prompt_token_ids, request.params,
                    stream=request.stream, priority=request.priority,
                )  # fmt: skip
                added.append(request.request_id)
        except Exception as error:  # a refusal, or a plugin's bug
            assert request is not None
            for request_id in added:
                engine.abort(request_id)
            self._refuse(request.request_id, error)

    def _score(self, jobs: list[Score]) -> list[Scores]:
        try:
            return self._scorer.score(jobs)
        except Exception as error:
            log.exception("scoring a prompt failed")
            for job in jobs:
                self._refuse(job.request_id, error)
            return []

    def _refuse(self, request_id: str, error: BaseException) -> None:
        if not isinstance(error, RequestError):
            log.error("a request was not accepted: %s", error, exc_info=error)
        kind = type(error).__name__ if isinstance(error, NanoserveError) else NanoserveError.__name__
        message = str(error) if isinstance(error, NanoserveError) else f"{type(error).__name__}: {error}"
        self._refusals.append(Refusal(request_id, kind, message))

    def _tell(self, deltas: list[Deltas], reports: list[RequestOutput], scores: list[Scores]) -> None:
        engine = self._engine
        running = engine.blocks.num_holding
        compiling = sum([request.params.n for requests in self._compiling.values() for request in requests])
        refusals, self._refusals = self._refusals, []
        waiting = max(0, engine.num_unfinished - running) + compiling
        self._told = now = time.perf_counter()
        step = Step(deltas, [report(o) for o in reports], refusals, scores, engine.stats(), running, waiting, now)
        self._outbox.send(encode(step))
        self._unread += step.has_reports


def report(output: RequestOutput) -> Report:
    metrics = output.metrics
    return Report(
        output.request_id,
        output.finished,
        output.num_cached_tokens,
        [
            Completion(
                c.index,
                c.text,
                c.token_ids,
                c.logprobs,
                c.cumulative_logprob,
                c.finish_reason,
                c.stop_reason,
                c.error,
            )
            for c in output.outputs
        ],
        Times(metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time, metrics.num_preemptions),
    )


def error_named(kind: str, message: str) -> NanoserveError:
    """An error that was told by its class's name."""
    found = vars(errors).get(kind)
    if isinstance(found, type) and issubclass(found, NanoserveError):
        return found(message)
    return NanoserveError(message)
