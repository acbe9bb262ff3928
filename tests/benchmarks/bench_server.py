"""What the server can deliver: output tokens per second of many streams, and the CPU time per token of both processes.

    python tests/benchmarks/bench_server.py                           # a model that answers at once: the front's limit
    python tests/benchmarks/bench_server.py --step-ms 6               # one that takes 6 ms per step, as a GPU might
    python tests/benchmarks/bench_server.py --url http://127.0.0.1:8000    # a server that runs already

Printed, not asserted. Fewer events than tokens means that the front was behind and merged what had piled up.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from nanoserve.engine import build
from nanoserve.server import engine_process

run_engine = engine_process.run


class Step:
    """A launched step whose tokens are there already."""

    def __init__(self, sampled: list[Any], chunks: list[Any]) -> None:
        self.sampled, self.chunks = sampled, chunks

    def wait(self) -> Any:
        from nanoserve.engine.runner import SampledTokens

        return SampledTokens([300 + len(seq.token_ids) % 3000 for seq in self.sampled])


class FakeRunner:
    """Prepares every step as the real runner does, and skips the model."""

    def __init__(self, real: Any, step_seconds: float) -> None:
        self.real, self.step_seconds, self.next = real, step_seconds, 0.0

    def launch(self, schedule: Any) -> Step:
        time.sleep(max(0.0, self.next - time.perf_counter()))
        self.next = time.perf_counter() + self.step_seconds
        real = self.real
        for seq in real.builder.blocks.take_new_rows():
            real.sampler.set_row(seq.table_row, seq.params, seq.seed, seq)
        batch = real.builder.build(schedule)
        real.sampler.prepare(batch.sampled_rows_cpu, batch.sample_positions_cpu, batch.sampled)
        return Step(batch.sampled, batch.chunks)

    def synchronize(self) -> None: ...

    def close(self) -> None:
        self.real.close()


def run_fake_engine(*arguments: Any) -> None:
    """Entry point of the engine process instead of the real one."""
    build_engine = build.build_engine

    def with_fake_runner(*args: Any) -> Any:
        engine = build_engine(*args)
        engine.runner = FakeRunner(engine.runner, float(os.environ["STEP_MS"]) / 1e3)
        return engine

    build.build_engine = with_fake_runner  # type: ignore[assignment]
    run_engine(*arguments)


def requests(num: int, num_tokens: int, prompt_len: int = 32) -> list[tuple[list[int], int]]:
    """So many equal requests: prompt, number of output tokens."""
    return [(list(range(300, 300 + prompt_len)), num_tokens)] * num


def load(
    host: str, port: int, wanted: list[tuple[list[int], int]], at_once: int = 1 << 16, **sampling: float
) -> tuple[float, int, int]:
    """Seconds, output tokens and events of streams, one for each request, so many ``at_once``: the next one is sent
    when one ends. sampling: fields of their bodies, beside the server's defaults.
    """
    messages = []
    for prompt, num_tokens in wanted:
        body = json.dumps({
            "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}, **sampling,
        }).encode()  # fmt: skip
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        messages.append(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    selector = selectors.DefaultSelector()
    ends: dict[Any, bytes] = {}

    def send(message: bytes) -> None:
        connection = socket.create_connection((host, port))
        connection.sendall(message)
        selector.register(connection, selectors.EVENT_READ)
        ends[connection] = b""

    start = time.perf_counter()
    for message in messages[:at_once]:
        send(message)
    later = iter(messages[at_once:])
    events = tokens = 0
    while selector.get_map():
        for key, _ in selector.select():
            connection: Any = key.fileobj
            data = connection.recv(1 << 16)
            events += data.count(b"data: {")
            end = ends[connection] = (ends[connection] + data)[-2000:]
            if not data or b"data: [DONE]" in end:
                if b'"completion_tokens":' not in end:
                    raise SystemExit(f"a stream ended without its usage: {end!r}")
                tokens += int(end.partition(b'"completion_tokens":')[2].partition(b",")[0])
                selector.unregister(connection)
                connection.close()
                if (message := next(later, None)) is not None:
                    send(message)
    return time.perf_counter() - start, tokens, events - len(wanted)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(host: str, port: int, streams: int, tokens: int, pids: dict[str, int]) -> None:
    load(host, port, requests(streams, 16))
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    seconds, delivered, events = load(host, port, requests(streams, tokens))
    print(f"{streams} streams: {delivered / seconds:,.0f} tokens/s in {events / seconds:,.0f} events/s")
    for name, pid in pids.items():
        print(f"{name}: {1e6 * (cpu_seconds(pid) - before[name]) / delivered:.1f} us CPU per token")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--url")
    options = parser.parse_args()
    if options.url:
        host, _, port = options.url.rpartition("://")[2].rpartition(":")
        measure(host, int(port), options.streams, options.tokens, {})
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = ["task=serve", f"port={port}", "log_level=warning", f"engine.max_num_seqs={options.streams}"]
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve", *arguments], env={**os.environ, "STEP_MS": str(options.step_ms)}
    )
    try:
        while server.poll() is None:
            try:
                if urllib.request.urlopen(f"http://127.0.0.1:{port}/ready").status == 200:
                    break
            except OSError:
                time.sleep(0.2)
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        engine = next(int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())
        measure("127.0.0.1", port, options.streams, options.tokens, {"front": server.pid, "engine": engine})
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        from nanoserve.cli import main as cli

        engine_process.run = run_fake_engine
        sys.exit(cli(sys.argv[2:]))
    main()
