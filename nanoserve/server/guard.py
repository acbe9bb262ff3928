"""What stands before every endpoint: request ids, the key, the size and time limits, disconnects, and the log.

Plain ASGI, because it has to own ``receive``: after the body it is the only way to learn that the client has gone.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from nanoserve.server.protocol import ApiError

log = logging.getLogger("nanoserve.server")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/", "/health", "/ready"})  # no key: a page without data, and what orchestrators ask
QUIET_PATHS = frozenset({"/", "/health", "/ready", "/metrics", "/stats", "/version", "/composition"})  # logged as debug
DISCARD_FACTOR = 16  # an oversize body is read to its end up to so many times the limit, so that the client hears why
INTERNAL_ERROR = "internal error; the server's log has the details"
CLIENT_CLOSED = 499  # nginx's status for the log: nobody is there to get it


@dataclass(slots=True)
class Exchange:
    """One request and its response. deadline: of the event loop's clock. send: the server's own, without what the
    application wraps around it. fields: for its line in the log."""

    id: str
    started: float
    deadline: float
    send: Send
    fields: dict[str, Any] = field(default_factory=dict)
    status: int = 0
    client_gone: bool = False

    @staticmethod
    def of(scope: Scope) -> Exchange:
        return scope["nanoserve.exchange"]


class Guard:
    """ASGI middleware. Times in seconds, sizes in bytes; api_key None: everybody may ask."""

    def __init__(self, app: App, *, api_key: str | None, max_body_bytes: int, request_timeout: float) -> None:
        self._app = app
        self._key = None if api_key is None else api_key.encode()
        self._max_body_bytes = max_body_bytes
        self._timeout = request_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        now = asyncio.get_running_loop().time()
        exchange = Exchange(request_id(headers), time.perf_counter(), now + self._timeout, send)
        scope["nanoserve.exchange"] = exchange
        id_header = (b"x-request-id", exchange.id.encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message["headers"] = [*message["headers"], id_header]
            await send(message)

        try:
            self._authenticate(scope["path"], headers)
            body = await self._read_body(exchange, headers, receive) if scope["method"] in BODY_METHODS else b""
            if not exchange.client_gone:
                await self._run(scope, exchange, body, receive, send_with_id)
        except ApiError as error:
            await respond(error, send_with_id)
        except Exception as error:  # nobody foresaw it
            if exchange.status:
                raise  # the server can only close the connection
            log.error("a request failed", exc_info=error)
            exchange.fields["error"] = type(error).__name__
            await respond(ApiError(500, INTERNAL_ERROR, code="internal_error"), send_with_id)
        finally:
            self._log(scope, exchange)

    def _authenticate(self, path: str, headers: dict[bytes, bytes]) -> None:
        if self._key is None or path in OPEN_PATHS:
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._key):
            message = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    async def _read_body(self, exchange: Exchange, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        limit = self._max_body_bytes
        too_large = ApiError(413, f"the body is larger than the {limit} bytes allowed", code="request_too_large")
        too_large.headers["connection"] = "close"
        declared = headers.get(b"content-length", b"0")
        if int(declared) > limit and (
            headers.get(b"expect", b"").lower() == b"100-continue" or int(declared) > DISCARD_FACTOR * limit
        ):
            raise too_large  # without reading a byte of it
        parts: list[bytes] = []
        size, more = 0, True
        try:
            async with asyncio.timeout_at(exchange.deadline):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        exchange.client_gone = True
                        return b""
                    part = message.get("body", b"")
                    size += len(part)
                    more = message.get("more_body", False)
                    if size <= limit:
                        parts.append(part)
                    elif not more or size > DISCARD_FACTOR * limit:
                        raise too_large
        except TimeoutError:
            raise ApiError(408, "the body did not arrive in time", headers={"connection": "close"}) from None
        return b"".join(parts)

    async def _run(self, scope: Scope, exchange: Exchange, body: bytes, receive: Receive, send: Send) -> None:
        """Run the application; it is cancelled when the client goes away."""
        message: Message | None = {"type": "http.request", "body": body, "more_body": False}
        running = asyncio.current_task()
        gone = asyncio.Event()

        async def body_then_silence() -> Message:
            nonlocal message
            if message is None:
                await gone.wait()
                return {"type": "http.disconnect"}
            first, message = message, None
            return first

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()
            if not finished and running is not None:
                exchange.client_gone = True
                running.cancel()

        finished = False
        watcher = asyncio.create_task(watch())
        try:
            await self._app(scope, body_then_silence, send)
        except asyncio.CancelledError:
            if not exchange.client_gone or running is None or running.uncancel():
                raise
        finally:
            finished = True
            watcher.cancel()

    def _log(self, scope: Scope, exchange: Exchange) -> None:
        level = logging.DEBUG if scope["path"] in QUIET_PATHS else logging.INFO
        if not log.isEnabledFor(level):
            return
        fields = {
            "request_id": exchange.id,
            "method": scope["method"],
            "path": scope["path"],
            "status": CLIENT_CLOSED if exchange.client_gone else exchange.status,
            "duration_ms": round(1e3 * (time.perf_counter() - exchange.started), 3),
            **exchange.fields,
        }
        log.log(level, "request", extra={"fields": fields})


BODY_METHODS = frozenset({"POST", "PUT", "PATCH"})
_ID = re.compile(rb"[!-~]{1,128}")


def request_id(headers: dict[bytes, bytes]) -> str:
    """The client's ``X-Request-Id`` if it is short and printable, else a new one. It need not be unique."""
    given = headers.get(b"x-request-id", b"")
    return given.decode() if _ID.fullmatch(given) else uuid.uuid4().hex


async def respond(error: ApiError, send: Send) -> None:
    """An error as a whole response."""
    body = msgspec.json.encode(error.body)
    headers = [(name.encode(), value.encode()) for name, value in error.headers.items()]
    headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
