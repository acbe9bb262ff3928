"""``task=serve``: what the command line refuses before anything slow begins, and connections without an engine."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from nanoserve.cli import main
from nanoserve.server.connection import http_protocol


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["port=70000"], "port must be between 0 and 65535"),
        (["max_queue=-1"], "max_queue must be at least 0"),
        (["request_timeout=0"], "request_timeout must be above 0"),
        (["cors_origins=[https://example.org/]"], "scheme://host[:port]"),
        (["host=256.1.1.1"], "cannot listen on"),
        (["sampling.n=2"], "sampling.n"),
        (["ports=1"], "ports"),
        (["-m", "port=1,2"], "cannot be part of a sweep"),
    ],
)
def test_a_wrong_option_is_refused_by_name(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["task=serve", *arguments]) != 0
    assert message in capsys.readouterr().err


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["task=serve", f"port={taken.getsockname()[1]}"]) == 2
    assert "Address already in use" in capsys.readouterr().err


# --- connections ------------------------------------------------------------------------------------------------------


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the body; /unread without having read it."""
    body, more = b"", scope["path"] != "/unread"
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        more = message["more_body"]
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    uvicorn = pytest.importorskip("uvicorn")
    pytest.importorskip("httptools")
    config = uvicorn.Config(
        echo, http=http_protocol(head_timeout=1.5), log_config=None, access_log=False, lifespan="off", ws="none"
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        yield sock.getsockname()
        server.should_exit = True
        thread.join()


def ask(address: tuple[str, int], *parts: bytes) -> bytes:
    """All that comes until the server closes the connection."""
    with socket.create_connection(address, timeout=30) as connection:
        for part in parts:
            connection.sendall(part)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def receive_until(connection: socket.socket, end: bytes) -> bytes:
    data = b""
    while not data.endswith(end):
        data += (part := connection.recv(65536))
        assert part, data
    return data


HEAD = b"POST / HTTP/1.1\r\nhost: test\r\n"
CHUNK = b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"


@pytest.mark.parametrize("before", [HEAD, HEAD + CHUNK], ids=["headers", "trailers"])
@pytest.mark.parametrize("lines", [1, 50])
def test_large_headers_are_refused(address: tuple[str, int], before: bytes, lines: int) -> None:
    header = b"x-filler: " + b"a" * (400_000 // lines) + b"\r\n"
    answer = ask(address, before, *[header] * lines, b"\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ") and b"connection: close" in head
    assert "65536 bytes" in json.loads(body)["error"]["message"]


def test_headers_and_bodies_within_the_limits(address: tuple[str, int]) -> None:
    body = b"a" * 300_000
    head = HEAD + b"x-filler: " + b"a" * 60_000 + b"\r\nconnection: close\r\ncontent-length: 300000\r\n\r\n"
    answer = ask(address, head + body)
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"\r\n\r\n" + body)
    assert ask(address, b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400 ")


def test_who_stops_in_the_middle_loses_the_connection(address: tuple[str, int]) -> None:
    """Before its first request, in its headers, in those of the second, or in a body that nobody reads."""
    unread = b"POST /unread HTTP/1.1\r\nhost: test\r\ncontent-length: 9\r\n\r\n"
    cases = [  # what is sent and answered; what is sent, and the connection closed
        (b"", b""),
        (b"", HEAD),
        (HEAD + b"content-length: 1\r\n\r\na", HEAD),
        (unread, b"a"),
    ]
    with contextlib.ExitStack() as stack:
        connections = []
        for whole, half in cases:
            connection = stack.enter_context(socket.create_connection(address, timeout=30))
            connection.sendall(whole)
            assert not whole or b" 200 " in receive_until(connection, b"\r\n\r\n" + whole.partition(b"\r\n\r\n")[2])
            connection.sendall(half)
            connections.append(connection)
        for connection in connections:
            assert connection.recv(65536) == b""


def test_an_upgrade_is_ignored(address: tuple[str, int]) -> None:
    """As curl asks for HTTP/2; the body, in two parts, is read."""
    head = HEAD + b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQ\r\n"
    with socket.create_connection(address, timeout=30) as connection:
        for _ in range(2):
            connection.sendall(head + b"content-length: 6\r\n\r\nabc")
            connection.sendall(b"def")
            assert receive_until(connection, b"abcdef").startswith(b"HTTP/1.1 200 ")
