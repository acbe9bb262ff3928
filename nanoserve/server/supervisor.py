"""The engine's process, seen from the one that started it: its start, the two sockets to it, and its end."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import multiprocessing
import shutil
import tempfile
from collections.abc import Callable
from multiprocessing.process import BaseProcess

import zmq

from nanoserve.config import EngineConfig
from nanoserve.contracts.errors import NanoserveError
from nanoserve.server import engine_process
from nanoserve.server.messages import Ack, Close, Command, Failed, Started, Step, decode_news, encode

MESSAGES_PER_TURN = 256  # read at once, so that a fast engine cannot keep the event loop from everything else
CLOSE_TIMEOUT = 5.0  # seconds that the engine process gets to give its memory back


class EngineDeadError(NanoserveError, RuntimeError):
    """The engine process is not there: not started yet, starting again, ended, or closed."""


class EngineProcess:
    """The engine process and the two sockets to it.

    started: what the engine said when it was built, or why it could not be. on_news: called with what each step
    brought. on_exit: called with the exit code once the process has ended and everything of it is gone.
    """

    def __init__(
        self,
        config: EngineConfig,
        log_level: int | None,
        on_news: Callable[[EngineProcess, Step], None],
        on_exit: Callable[[EngineProcess, int | None], None],
    ) -> None:
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
                if news.has_reports:
                    self._loop.call_soon(self._acknowledge)  # after the readers who have just been woken
            elif not self.started.done():
                if isinstance(news, Failed):
                    self.started.set_exception(engine_process.error_named(news.kind, news.message))
                else:
                    self.started.set_result(news)
        self._loop.call_soon(self._read)

    def _acknowledge(self) -> None:
        if not self._commands.closed:
            with contextlib.suppress(EngineDeadError):
                self.send(Ack())

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
            where = "before it was ready; its standard error may say why"
            self.started.set_exception(EngineDeadError(f"the engine process has ended with exit code {code}, {where}"))
        self._on_exit(self, code)
