"""A connection's HTTP, below the application: what uvicorn leaves without a limit."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from nanoserve.server.protocol import ApiError

KEEP_ALIVE = 75  # seconds; longer than clients keep idle connections, so that they close them and not we under them
MAX_HEAD_BYTES = 64 << 10  # of a request's headers
HEAD_TIMEOUT = 10.0  # seconds from a connection's beginning, or a request's first byte, until its headers are there
GRACE = 1.0  # seconds to tell clients that they are cut off before their connections are closed


def http_protocol(max_head_bytes: int = MAX_HEAD_BYTES, head_timeout: float = HEAD_TIMEOUT) -> Any:
    """uvicorn's HTTP protocol, with limits for what comes before the application is asked.

    More than ``max_head_bytes`` of headers, trailers or a chunk's extensions are refused with 431. A connection whose
    headers are not there after ``head_timeout`` seconds is closed; so is one that owes the rest of a body that nobody
    reads. A wish to upgrade to another protocol is ignored. Without httptools it is h11's protocol as it is.
    """
    try:
        import httptools
        from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
    except ImportError:
        return "h11"

    class Protocol(HttpToolsProtocol):
        _unparsed = 0  # bytes since the parser last finished headers, a message or a part of a body
        _in_body = False
        _refused = False
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._start_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._refused:
                return
            self._unset_keepalive_if_required()
            self._unparsed += len(data)
            malformed = False
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if self._upgrades():
                    self._unparsed = 0
                    self.data_received(self._head_without_upgrade() + data[upgrade.args[0] :])
                    return
            except httptools.HttpParserError:
                malformed = True
            if self._unparsed > max_head_bytes:
                self._refuse(ApiError(431, f"the headers are larger than the {max_head_bytes} bytes allowed"))
            elif malformed:
                self._refuse(ApiError(400, "this is not a valid HTTP/1.1 request"))
            elif self.cycle is None or self.cycle.response_complete:
                if self._unparsed or self._in_body:
                    self._start_timer()
                elif self.timeout_keep_alive_task is None:
                    self.timeout_keep_alive_task = self.loop.call_later(KEEP_ALIVE, self.timeout_keep_alive_handler)

        def on_headers_complete(self) -> None:
            self._unparsed = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            if self._unparsed > max_head_bytes:
                raise ValueError
            if not self._upgrades():
                self._unparsed, self._in_body = 0, True
                self._stop_timer()
                super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._unparsed = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            if not self._upgrades():
                self._unparsed, self._in_body = 0, False
                self._stop_timer()
                super().on_message_complete()

        def _upgrades(self) -> bool:
            return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

        def _head_without_upgrade(self) -> bytes:
            version = self.parser.get_http_version().encode()
            lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
            lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
            return b"\r\n".join([*lines, b"", b""])

        def _refuse(self, error: ApiError) -> None:
            """Answer, unless an answer has begun, and close."""
            self._refused = True
            self._stop_timer()
            self.logger.warning("%d: %s", error.status, error.message)
            if self.cycle is not None and not self.cycle.response_complete:
                begun = self.cycle.response_started or bool(self.pipeline)
                self.cycle.disconnected = True
                self.cycle.message_event.set()
                if begun:
                    self.transport.close()
                    return
            body = msgspec.json.encode(error.body)
            lines = [name + b": " + value for name, value in self.server_state.default_headers]
            lines += [b"content-type: application/json", b"content-length: %d" % len(body), b"connection: close"]
            self.transport.write(STATUS_LINE[error.status] + b"\r\n".join([*lines, b"", body]))
            # Closed at once, with bytes unread, the connection would be reset under the client before it reads why.
            self.transport.write_eof()
            self.loop.call_later(GRACE, self.transport.close)

        def _start_timer(self) -> None:
            if self._timer is None:
                self._timer = self.loop.call_later(head_timeout, self.transport.close)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return Protocol
