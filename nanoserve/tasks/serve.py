"""``task=serve``: the HTTP server. SIGTERM or Ctrl-C lets requests in flight end, a second one stops at once."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import re
import socket
import sys
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from nanoserve.contracts.errors import ConfigError

if TYPE_CHECKING:
    from nanoserve.tasks import Job

API_KEY = "NANOSERVE_API_KEY"


@dataclass(frozen=True)
class Options:
    """The keys of ``conf/task/serve.yaml``."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    max_queue: int = 1024
    request_timeout: float = 600.0
    drain_timeout: float = 30.0
    max_body_mib: float = 8.0
    restart: bool = False
    cors_origins: list[str] | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_prompts: bool = False

    def __post_init__(self) -> None:
        rules = {
            "port": (0 <= self.port < 65536, "between 0 and 65535"),
            "max_queue": (self.max_queue >= 0, "at least 0"),
            "request_timeout": (self.request_timeout > 0, "above 0"),
            "drain_timeout": (self.drain_timeout >= 0, "at least 0"),
            "max_body_mib": (self.max_body_mib > 0, "above 0"),
            "served_model_name": (self.served_model_name is None or _is_text(self.served_model_name), "text, or null"),
        }
        for key, (legal, rule) in rules.items():
            if not legal:
                raise ConfigError(f"{key} must be {rule}, not {getattr(self, key)!r}")
        for origin in self.cors_origins or ():
            if not re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+", str(origin)):
                raise ConfigError(f'cors_origins must be "*" or scheme://host[:port] without a path, not {origin!r}')


def _is_text(name: str) -> bool:
    """Whether JSON can say it: bytes of a command line that are not UTF-8 become lone surrogates."""
    return bool(name) and name.isprintable()


def run(job: Job) -> dict[str, Any]:
    if job.folder is not None:
        raise ConfigError("task=serve runs until it is stopped, so it cannot be part of a sweep")
    for key, value, only in (("n", job.sampling.n, 1), ("logprobs", job.sampling.logprobs, None),
                             ("structured", job.sampling.structured, None)):  # fmt: skip
        if value != only:
            raise ConfigError(f"sampling.{key}: with task=serve a request asks for it itself")
    try:
        import fastapi  # noqa: F401
        import uvicorn
        import zmq  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"task=serve needs {error.name}: pip install 'nanoserve[serve]'") from error
    from nanoserve.server.logs import json_logs

    level = logging.getLevelName(job.options.log_level.upper())
    with json_logs(level), listening(job.options.host, job.options.port) as sock:
        loop = uvicorn.Config("", log_config=None).get_loop_factory()
        with asyncio.Runner(loop_factory=loop) as runner:
            return runner.run(serve(job, sock))


@contextlib.contextmanager
def listening(host: str, port: int) -> Any:
    """The bound socket, before anything slow begins. Raises ConfigError if the address is taken or not ours."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host: cannot listen on {host!r}: {error}") from error
    with sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
        except OSError as error:
            raise ConfigError(f"port: cannot listen on {host} port {port}: {error.strerror}") from error
        yield sock


async def serve(job: Job, sock: socket.socket) -> dict[str, Any]:
    """Serve on ``sock`` until a signal comes. Raises what keeps the engine from starting."""
    import uvicorn

    from nanoserve.async_llm import AsyncLLM
    from nanoserve.server.app import Serving, build_app
    from nanoserve.server.connection import GRACE, KEEP_ALIVE, MAX_HEAD_BYTES, http_protocol

    options: Options = job.options
    level = logging.getLevelName(options.log_level.upper())
    llm = AsyncLLM.from_config(job.config, restart=options.restart, log_level=level)
    name = options.served_model_name or job.config.model.name or str(job.config.model.path)
    name = name.encode(errors="replace").decode()  # a path may be no text
    serving = Serving(llm, name, job.sampling, options.max_queue, options.log_prompts)
    app = build_app(
        serving,
        api_key=os.environ.get(API_KEY) or None,
        max_body_bytes=int(options.max_body_mib * 2**20),
        request_timeout=options.request_timeout,
        cors_origins=tuple(options.cors_origins or ()),
    )
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", ws="none", server_header=False, proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE, http=http_protocol(), h11_max_incomplete_event_size=MAX_HEAD_BYTES,
    )  # fmt: skip
    loop = asyncio.get_running_loop()

    class Server(uvicorn.Server):
        """uvicorn's, with our two signals; exit code 0 after a drain."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if self.should_exit:
                loop.call_soon_threadsafe(serving_task.cancel)
            else:
                self.should_exit = serving.draining = True
                loop.call_soon_threadsafe(loop.call_later, options.drain_timeout, end_of_drain)

    async def cut_off() -> None:
        """Fail what is in flight; who does not take the answer, or is not done asking, loses the connection."""
        await serving.shut_down()
        state, end = server.server_state, loop.time() + GRACE
        while (state.connections or state.tasks or not serving_task.done()) and loop.time() < end:
            await asyncio.sleep(0.02)
        for connection in list(state.connections):
            connection.transport.abort()
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=GRACE)

    def end_of_drain() -> None:
        ending.append(loop.create_task(cut_off()))

    ending: list[asyncio.Task[None]] = []  # the loop alone would let go of it
    server = Server(config)
    serving_task = asyncio.create_task(server.serve(sockets=[sock]))
    starting = asyncio.create_task(llm.start())
    try:
        await asyncio.wait((starting, serving_task), return_when=asyncio.FIRST_COMPLETED)
        if starting.done() and (error := starting.exception()) is not None:
            server.should_exit = True
            loop.call_later(GRACE, end_of_drain)
            await serving_task
            raise error
        if not serving_task.done():
            gc.collect()
            gc.freeze()  # what is there now stays; the collector need not look at it again
            host, port = sock.getsockname()[:2]
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            info = llm.info
            plugins = f"attention {info.attention}, kv {info.kv}, scheduler {info.scheduler}"
            print(f"[{name} is ready at {url} · {plugins}]", file=sys.stderr, flush=True)
        await serving_task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        gc.unfreeze()
        starting.cancel()
        await cut_off()
    return {"requests": llm.stats().requests_finished}
