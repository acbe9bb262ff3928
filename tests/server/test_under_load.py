"""A slow engine with little room: queues, limits, disconnects, failing steps, and the way out."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.helpers.serving import Server, sse

DELAY = 0.03  # seconds per step
LONG = {"prompt": "import json\n", "max_tokens": 150, "ignore_eos": True}  # takes more than the time limit
SMALL = ("engine.max_num_seqs=2", "engine.max_model_len=256", "engine.num_kv_blocks=24", "engine.debug=true",
         "scheduler=slow", f"scheduler.delay={DELAY}", "max_queue=2")  # fmt: skip


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(
        tmp_path_factory.mktemp("slow"), *SMALL, "request_timeout=2", "drain_timeout=1", "max_body_mib=0.01",
        "cors_origins=[https://example.org]", env={"NANOSERVE_API_KEY": "open sesame"},
    )  # fmt: skip
    yield running
    assert running.stop() == 0


def first_bytes(connection: socket.socket) -> bytes:
    data = connection.recv(65536)
    assert b"200 OK" in data
    return data


def steps_until_idle(server: Server) -> int:
    before = server.stats()["steps"]
    return server.wait_idle()["steps"] - before


@pytest.mark.parametrize("n", [1, 2])
def test_a_client_that_leaves_a_stream_stops_its_request(slow: Server, n: int) -> None:
    """C42: within two steps nothing runs and all blocks are free, also for several choices."""
    with slow.raw_stream(**LONG, n=n) as connection:
        first_bytes(connection)
        slow.wait_for("running", n)
    assert steps_until_idle(slow) <= 2
    assert slow.complete(prompt="a", max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("wait", [0.0, 0.1], ids=["before its first token", "while it runs"])
def test_a_client_that_leaves_without_a_stream_stops_its_request(slow: Server, wait: float) -> None:
    """C42."""
    with slow.raw_stream(**LONG, stream=False):
        slow.wait_for("running", 1)
        time.sleep(wait)
    assert steps_until_idle(slow) <= 2


def test_clients_that_leave_the_queue(slow: Server) -> None:
    """C42, C10: two run, two wait; the waiting ones leave and the running ones end as if alone."""
    body = {**LONG, "max_tokens": 12, "temperature": 1.0, "seed": 3}
    alone = slow.complete(**body)["choices"]
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(slow.complete, **body) for _ in range(2)]
        slow.wait_for("running", 2)
        with slow.raw_stream(**LONG), slow.raw_stream(**LONG):
            slow.wait_for("waiting", 2)
        assert [answer.result()["choices"] for answer in answers] == [alone] * 2
    slow.wait_idle()


def test_requests_that_end_by_themselves_are_not_aborted(slow: Server) -> None:
    """C42: normal ends, streamed and not, on kept and on closed connections."""
    before = slow.stats()["requests_aborted"]
    for stream in (False, True) * 5:
        slow.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "stream": stream})
        with slow.raw_stream(prompt="a", max_tokens=1, stream=stream) as connection:
            while connection.recv(65536).find(b"[DONE]" if stream else b"usage") < 0:
                pass
    assert slow.wait_idle()["requests_aborted"] == before


def test_a_full_queue_says_when_to_come_back(slow: Server) -> None:
    """Two run, two wait, the fifth is refused with 429; what was accepted is answered."""
    body = {**LONG, "max_tokens": 8}
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(slow.complete, **body) for _ in range(4)]
        slow.wait_for("waiting", 2)
        for stream in (False, True):
            refused = slow.post("/v1/completions", **body, stream=stream)
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "rate_limit_error"
        assert all(answer.result()["usage"]["completion_tokens"] == 8 for answer in answers)
    assert slow.post("/v1/completions", **body, n=5).status_code == 400  # could never be queued
    slow.wait_idle()


def test_a_request_that_takes_too_long(slow: Server) -> None:
    """504, or an error event in a stream that has begun; the engine forgets it."""
    answer = slow.post("/v1/completions", **LONG)
    assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
    with slow.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        data = sse(response)
    assert json.loads(data[-1])["error"]["code"] == "timeout" and len(data) > 10
    assert steps_until_idle(slow) <= 2


def test_a_body_that_never_comes(slow: Server) -> None:
    with socket.create_connection(("127.0.0.1", slow.port), timeout=10) as connection:
        connection.sendall(slow.raw_request(prompt="a" * 100)[:-50])
        assert b" 408 " in connection.recv(65536)


def test_oversize_bodies(slow: Server) -> None:
    """413 although the client writes all of it before it reads, announced or in chunks; 50 MB (C43) too."""
    headers = {**slow.headers, "content-type": "application/json"}
    big = b'{"prompt": "' + b"a" * 20_000 + b'"}'
    for content in (big, iter([big[:15_000], big[15_000:]])):
        answer = slow.http.post("/v1/completions", content=content, headers=headers)
        assert answer.status_code == 413 and answer.json()["error"]["code"] == "request_too_large"
    with socket.create_connection(("127.0.0.1", slow.port), timeout=10) as connection:
        head = slow.raw_request(prompt="").partition(b"content-length")[0] + b"content-length: 50000000\r\n"
        connection.sendall(head + f"authorization: {slow.headers['authorization']}\r\n\r\n".encode() + b"{" * 1000)
        assert b" 413 " in connection.recv(65536)


def test_the_key(slow: Server) -> None:
    """Without it nothing but the page and what orchestrators ask; a web page of ours may ask for permission."""
    with httpx.Client(base_url=slow.url) as stranger:
        for headers in ({}, {"authorization": "Bearer open"}, {"authorization": "Basic open sesame"}):
            answer = stranger.post("/v1/completions", json={"prompt": "a"}, headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"
            assert stranger.get("/metrics", headers=headers).status_code == 401
        for path in ("/health", "/ready", "/"):
            assert stranger.get(path).status_code == 200
        ask = {"origin": "https://example.org", "access-control-request-method": "POST"}
        assert stranger.options("/v1/completions", headers=ask).status_code == 200
        answer = stranger.get("/health", headers=ask)
        assert answer.headers["access-control-expose-headers"] == "X-Request-Id, Retry-After"
        ask["origin"] = "https://example.com"
        assert "access-control-allow-origin" not in stranger.options("/v1/completions", headers=ask).headers


def test_a_failing_step_ends_streams_with_an_error(slow: Server) -> None:
    """C43, C48: the step fails in the middle of a stream: an error event, its blocks are free, the next is served."""
    for stream in (True, False):
        with slow.http.stream(
            "POST", "/v1/completions", json={**LONG, "prompt": [7, 7, 7], "stream": stream}
        ) as response:
            data = sse(response)
        assert response.status_code == (200 if stream else 500)
        assert "provoked by the test" in json.loads(data[-1])["error"]["message"]
        slow.wait_idle()
        assert slow.http.get("/health").status_code == 200
    assert slow.complete(prompt="a", max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2


def test_a_slow_reader_gets_everything_and_holds_nobody_up(slow: Server) -> None:
    """Deltas that pile up come merged; the text is whole."""
    body = {**LONG, "max_tokens": 30, "temperature": 0}
    whole = slow.complete(**body)["choices"][0]["text"]
    with slow.raw_stream(**body) as connection:
        time.sleep(30 * DELAY + 0.3)
        data = b""
        while b"[DONE]" not in data:
            data += connection.recv(65536)
    events = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == whole


# --- the way out: the module's server is gone after the last test -----------------------------------------------------


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    """Also under a client that has sent half of its body; the log is silent about it."""
    server = Server(tmp_path, *SMALL)
    with ThreadPoolExecutor(1) as pool, socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(server.raw_request(prompt="a" * 100)[:-50])
        answer = pool.submit(server.post, "/v1/completions", **LONG)
        server.wait_for("running", 1)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) != 0  # not the drain_timeout of 30
        assert answer.result(3).status_code == 503 and "the server is shutting down" in answer.result().text
    server.stop()
    assert [entry for entry in server.log if entry["level"] == "error"] == []


def test_a_drain_ends_under_half_a_body(tmp_path: Path) -> None:
    """Not when request_timeout, ten minutes, is over."""
    server = Server(tmp_path, *SMALL, "drain_timeout=0.1")
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(server.raw_request(prompt="a" * 100)[:-50])
        server.stats()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(15) == 0
    server.stop()
    assert [entry for entry in server.log if entry["level"] == "error"] == []


def test_a_signal_drains(slow: Server) -> None:
    """What is in flight is answered, nobody new gets in, what has not ended in time is told so; exit code 0."""
    with ThreadPoolExecutor(2) as pool:
        short = pool.submit(slow.complete, **{**LONG, "max_tokens": 8})
        long = pool.submit(slow.post, "/v1/completions", **LONG)
        slow.wait_for("running", 2)
        slow.process.send_signal(signal.SIGTERM)
        assert short.result(10)["usage"]["completion_tokens"] == 8
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{slow.url}/ready")
        assert long.result(10).status_code == 503 and "the server is shutting down" in long.result().text
    assert slow.process.wait(10) == 0
