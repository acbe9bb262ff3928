"""The engine process dies: nobody hangs, everybody is told, and the server comes back if it was told to."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.helpers.serving import Server

BODY = {"prompt": "import json\n", "max_tokens": 200, "ignore_eos": True}


def stream(server: Server) -> dict[str, Any]:
    """The last event of a stream."""
    path, body = "/v1/completions", {**BODY, "stream": True}
    with httpx.stream("POST", server.url + path, json=body, timeout=20) as response:
        if response.status_code != 200:
            return json.loads(response.read())
        lines = [line for line in response.iter_lines() if line]
    return json.loads(lines[-1].removeprefix("data: "))


def wait_until(server: Server, path: str, code: int, timeout: float = 30) -> dict[str, Any]:
    deadline = time.monotonic() + timeout
    while (response := server.http.get(path)).status_code != code:
        assert time.monotonic() < deadline, response.text
        time.sleep(0.05)
    return response.json()


def test_kill_9_of_the_engine_during_50_streams(tmp_path: Path) -> None:
    server = Server(
        tmp_path, "restart=true", "engine.max_model_len=256", "scheduler=slow", "scheduler.delay=0.02", "max_queue=100"
    )
    with ThreadPoolExecutor(51) as pool:
        answers = [pool.submit(stream, server) for _ in range(50)]
        whole = pool.submit(server.post, "/v1/completions", **BODY)
        server.wait_for("running", 51)
        produced = server.stats()["generation_tokens"]
        os.kill(server.engine_pid, signal.SIGKILL)
        killed = time.monotonic()
        for answer in answers:
            assert answer.result(5)["error"]["code"] == "engine_unavailable"
        assert whole.result(5).status_code == 503
        assert time.monotonic() - killed < 5
    assert server.http.get("/ready").json() == {"status": "starting"}
    assert server.http.get("/health").status_code == 200  # it will be back
    refused = server.post("/v1/completions", **BODY)
    assert refused.status_code == 503 and refused.headers["retry-after"]
    wait_until(server, "/ready", 200)
    assert server.complete(**{**BODY, "max_tokens": 3})["usage"]["completion_tokens"] == 3
    assert server.wait_idle()["generation_tokens"] >= produced + 3  # counters go on (C51)

    os.kill(server.engine_pid, signal.SIGKILL)  # once is enough
    assert wait_until(server, "/health", 503) == {"status": "dead"}
    assert server.http.get("/ready").status_code == 503
    assert server.post("/v1/completions", **BODY).status_code == 503
    assert 'finished_reason="error",model_name="tiny"} 51.0' in server.http.get("/metrics").text
    assert server.stop() == 0


def test_the_engine_does_not_outlive_the_server(tmp_path: Path) -> None:
    server = Server(tmp_path, "engine.num_kv_blocks=16")
    pid = server.engine_pid
    server.process.kill()
    server.stop()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
