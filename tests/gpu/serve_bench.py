"""The same requests offline and through the server, on a GPU: throughput of many streams, and what HTTP adds to TTFT.

python tests/gpu/serve_bench.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from nanoserve import LLM, SamplingParams  # noqa: E402
from tests.benchmarks.bench_server import load  # noqa: E402

PORT, STREAMS, TOKENS, REPEATS = 8123, 256, 400, 3
LENGTHS = (32, 512)  # of the prompts, as bench_server sends them
MODEL = ["model=qwen3_0_6b", "model.load_format=dummy", "engine.graph_capture=start"]


def show(what: str, timed: Callable[[int, int, int], float]) -> None:
    """timed: seconds of so many streams of so many tokens after prompts of so many."""
    for length in LENGTHS:
        timed(STREAMS, 16, length)
        rate = STREAMS * TOKENS / statistics.median(timed(STREAMS, TOKENS, length) for _ in range(REPEATS))
        print(f"{what}, {STREAMS} streams after {length} tokens: {rate:,.0f} output tok/s", flush=True)
    one = [timed(1, 1, LENGTHS[0]) for _ in range(40)][10:]
    print(f"{what}, alone: one token in {1e3 * statistics.median(one):.2f} ms", flush=True)


def served() -> None:
    start = time.perf_counter()
    server = subprocess.Popen(
        [sys.executable, "-m", "nanoserve", "task=serve", f"port={PORT}", "log_level=warning", *MODEL]
    )
    try:
        while True:
            try:
                if urllib.request.urlopen(f"http://127.0.0.1:{PORT}/ready", timeout=2).status == 200:
                    break
            except OSError:
                time.sleep(0.1)
            if server.poll() is not None:
                raise SystemExit("the server ended while it started")
        print(f"ready after {time.perf_counter() - start:.1f} s", flush=True)
        show("served", lambda streams, tokens, length: load("127.0.0.1", PORT, streams, tokens, length)[0])
    finally:
        server.terminate()
        server.wait()


def offline() -> None:
    with LLM("qwen3_0_6b", load_format="dummy", graph_capture="start") as llm:

        def timed(streams: int, tokens: int, length: int) -> float:
            prompts, params = (
                [list(range(300, 300 + length))] * streams,
                SamplingParams(max_tokens=tokens, ignore_eos=True),
            )
            start = time.perf_counter()
            llm.generate(prompts, params)
            return time.perf_counter() - start

        show("offline", timed)


if __name__ == "__main__":
    served()
    offline()
