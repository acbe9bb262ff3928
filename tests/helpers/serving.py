"""A server in a process of its own, as a person starts it, and what tests ask it over real sockets."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

PLUGIN = '''
import time
from dataclasses import dataclass

from nanoserve.contracts.scheduling import SchedulerSpec
from nanoserve.hookspecs import hookimpl
from nanoserve_plugins.scheduler.decode_first import DecodeFirst, DecodeFirstOptions


@dataclass(frozen=True)
class Options(DecodeFirstOptions):
    delay: float = 0.0


class Slow(DecodeFirst):
    """Sleeps before every step; raises once a sequence that begins with 7, 7, 7 has three output tokens."""

    def schedule(self):
        time.sleep(self.options.delay)
        for seq in self.running:
            if seq.token_ids[:3] == [7, 7, 7] and len(seq.token_ids) - seq.num_prompt_tokens >= 3:
                raise RuntimeError("provoked by the test")
        return super().schedule()


@hookimpl
def nanoserve_scheduler(register):
    register(SchedulerSpec("slow", "decode_first that waits", Options, Slow))
'''


class Server:
    """``nanoserve task=serve`` with the given arguments. ``url`` is known once it is ready."""

    def __init__(self, folder: Path, *arguments: str, env: dict[str, str] | None = None, wait: bool = True) -> None:
        (folder / "slow_scheduler.py").write_text(PLUGIN)
        info = folder / "slow_scheduler-1.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-scheduler\nVersion: 1\n")
        (info / "entry_points.txt").write_text("[nanoserve]\nscheduler.slow = slow_scheduler\n")
        root = str(Path(__file__).parents[2])
        environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{root}", "OMP_NUM_THREADS": "1", **(env or {})}
        command = [sys.executable, "-m", "nanoserve", "task=serve", "port=0", "engine.device=cpu", *arguments]
        self.process = subprocess.Popen(command, env=environment, cwd=folder, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._ready = threading.Event()
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if wait:
            self.wait_ready()
        self.headers = {"authorization": f"Bearer {env['NANOSERVE_API_KEY']}"} if env else {}
        self.http = httpx.Client(base_url=self.url, timeout=30, headers=self.headers)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"ready at (http://\S+)", line):
                self.url = found[1]
                self._ready.set()
        self._ready.set()

    def wait_ready(self, timeout: float = 60) -> None:
        assert self._ready.wait(timeout) and self.url, "".join(self.lines)

    @property
    def log(self) -> list[dict[str, Any]]:
        """The lines of the log so far."""
        return [json.loads(line) for line in self.lines if line.startswith("{")]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next(int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())

    def post(self, path: str, /, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def complete(self, **body: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", **body)
        assert response.status_code == 200, response.text
        return response.json()

    def chat(self, content: Any, **body: Any) -> dict[str, Any]:
        response = self.post("/v1/chat/completions", messages=[{"role": "user", "content": content}], **body)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path: str, /, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream that ends well."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            data = sse(response)
        assert data[-1] == "[DONE]"
        return [json.loads(line) for line in data[:-1]]

    @contextlib.contextmanager
    def raw_stream(self, **body: Any) -> Iterator[socket.socket]:
        """A connection that has asked for a stream of /v1/completions."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            connection.sendall(self.raw_request(**{"stream": True, **body}))
            yield connection

    def raw_request(self, **body: Any) -> bytes:
        data = json.dumps(body).encode()
        headers = {"host": "test", "content-type": "application/json", "content-length": str(len(data)), **self.headers}
        head = "POST /v1/completions HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in headers.items())
        return head.encode() + b"\r\n" + data

    def stats(self) -> dict[str, Any]:
        return self.http.get("/stats").json()

    def wait_idle(self, timeout: float = 5) -> dict[str, Any]:
        """Stats once nothing runs, with all blocks free; fails if that takes too long."""
        deadline = time.monotonic() + timeout
        while True:
            stats = self.stats()
            if stats["running"] == stats["waiting"] == 0 and stats["num_free_blocks"] == stats["num_blocks"]:
                return stats
            assert time.monotonic() < deadline, stats
            time.sleep(0.01)

    def wait_for(self, key: str, value: Any, timeout: float = 10) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        while (stats := self.stats())[key] != value:
            assert time.monotonic() < deadline, stats
            time.sleep(0.01)
        return stats

    def wait_for_log(self, key: str, value: Any, timeout: float = 10) -> dict[str, Any]:
        """The first line of the log with this field; it is written after the answer has been sent."""
        deadline = time.monotonic() + timeout
        while not (found := [entry for entry in self.log if entry.get(key) == value]):
            assert time.monotonic() < deadline, self.lines
            time.sleep(0.01)
        return found[0]

    def stop(self) -> int:
        """Ask it to end, and make it end; its exit code."""
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self._reader.join()
        return code


def sse(response: httpx.Response) -> list[str]:
    """The data of all events."""
    return [line.removeprefix("data: ") for line in response.iter_lines() if line]


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice of a stream, of either endpoint."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices)


def finish_reasons(events: list[dict[str, Any]]) -> dict[int, str]:
    """Per choice; each must end exactly once."""
    ends = [(c["index"], c["finish_reason"]) for e in events for c in e["choices"] if c["finish_reason"]]
    assert len(dict(ends)) == len(ends)
    return dict(ends)
