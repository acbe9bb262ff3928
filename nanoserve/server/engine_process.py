"""The far side: a process that owns an engine, takes commands and says after every step what it brought.

The loop never waits for anybody but the engine: commands are taken in between steps, and news are queued by ZeroMQ.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import time
from multiprocessing import parent_process
from typing import TYPE_CHECKING

import zmq

from nanoserve.contracts import errors
from nanoserve.contracts.errors import NanoserveError, RequestError
from nanoserve.outputs import RequestOutput
from nanoserve.server.logs import json_logs
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

STATS_INTERVAL = 0.05  # seconds between news when there is nothing else to say


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
        from nanoserve.engine.build import build_engine, checkpoint_folder, has_tokenizer

        engine = build_engine(config)
        folder = checkpoint_folder(config)
        tokenizer = str(folder) if folder is not None and has_tokenizer(folder) else None
    except NanoserveError as error:
        outbox.send(encode(Failed(type(error).__name__, str(error))))
        context.destroy(linger=1000)
        sys.exit(1)
    loop = EngineLoop(engine, inbox, outbox)
    gc.collect()
    gc.freeze()  # what has been built stays; the collector need not look at it again
    outbox.send(encode(started(engine, tokenizer)))
    try:
        loop.run()
    finally:
        gc.unfreeze()
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
        self._closing = False
        self._told = 0.0
        self._poller = zmq.Poller()
        self._poller.register(inbox, zmq.POLLIN)
        parent = parent_process()
        self._parent = None if parent is None else parent.sentinel
        if self._parent is not None:
            self._poller.register(self._parent, zmq.POLLIN)

    def run(self) -> None:
        engine, scorer = self._engine, self._scorer
        while True:
            self._take_commands(wait=not (engine.has_work or scorer.has_work))
            if self._closing:
                return
            reports = engine.step() if engine.has_work else []
            scores: list[Scores] = []
            if jobs := scorer.take():
                reports += engine.drain()
                scores = self._score(jobs)
            if reports or scores or self._refusals or not engine.has_work or self._is_stale():
                self._tell(reports, scores)

    def _is_stale(self) -> bool:
        return time.perf_counter() - self._told > STATS_INTERVAL

    def _take_commands(self, wait: bool) -> None:
        ready = dict(self._poller.poll(None if wait else 0))
        if self._parent in ready:
            log.error("the server is gone; the engine stops")
            os._exit(1)
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
                self._add(requests)
            case Score(request_id):
                try:
                    self._scorer.add(command)
                except RequestError as error:
                    self._refuse(request_id, error)
            case Abort(request_ids):
                for request_id in request_ids:
                    self._engine.abort(request_id)
                    self._scorer.abort(request_id)
            case Close():
                self._closing = True

    def _add(self, requests: list[NewRequest]) -> None:
        for request in requests[1:]:  # the first one is checked when it is added
            try:
                self._engine.check(request.prompt_token_ids, request.params)
            except RequestError as error:
                self._refuse(request.request_id, error)
                return
        for request in requests:
            try:
                self._engine.add_request(
                    request.request_id, request.prompt_token_ids, request.params, stream=request.stream
                )
            except RequestError as error:
                self._refuse(request.request_id, error)
                return

    def _score(self, jobs: list[Score]) -> list[Scores]:
        try:
            return self._scorer.score(jobs)
        except Exception as error:
            log.exception("scoring a prompt failed")
            for job in jobs:
                self._refuse(job.request_id, error)
            return []

    def _refuse(self, request_id: str, error: Exception) -> None:
        kind = type(error).__name__ if isinstance(error, NanoserveError) else NanoserveError.__name__
        message = str(error) if isinstance(error, NanoserveError) else f"{type(error).__name__}: {error}"
        self._refusals.append(Refusal(request_id, kind, message))

    def _tell(self, reports: list[RequestOutput], scores: list[Scores]) -> None:
        engine, blocks = self._engine, self._engine.blocks
        stats = engine.stats()
        running = blocks.num_holding
        unfinished = sum(request.unfinished for request in engine.requests.values())
        refusals, self._refusals = self._refusals, []
        waiting = max(0, unfinished - running)
        self._told = now = time.perf_counter()
        step = Step([report(o) for o in reports], refusals, scores, stats, running, waiting, now)
        self._outbox.send(encode(step))


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
