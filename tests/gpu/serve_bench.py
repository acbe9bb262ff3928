"""The same requests offline and through the server, on a GPU: throughput of many streams, and what HTTP adds to TTFT.

python tests/gpu/serve_bench.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from nanoserve import LLM, SamplingParams  # noqa: E402
from tests.benchmarks.bench_server import load  # noqa: E402

PORT, STREAMS, TOKENS, REPEATS = 8123, 256, 400, 3
MODEL = ["model=qwen3_0_6b", "model.load_format=dummy", "engine.graph_capture=start"]
PROMPT = list(range(300, 332))  # as bench_server sends


def show(what: str, seconds: list[float], one_token: list[float]) -> None:
    rate = STREAMS * TOKENS / statistics.median(seconds)
    print(f"{what}: {rate:,.0f} output tok/s, one token in {1e3 * statistics.median(one_token):.2f} ms", flush=True)


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
        load("127.0.0.1", PORT, STREAMS, 16)
        seconds = [load("127.0.0.1", PORT, STREAMS, TOKENS)[0] for _ in range(REPEATS)]
        show("served", seconds, [load("127.0.0.1", PORT, 1, 1)[0] for _ in range(40)][10:])
    finally:
        server.terminate()
        server.wait()


def offline() -> None:
    with LLM("qwen3_0_6b", load_format="dummy", graph_capture="start") as llm:

        def timed(prompts: list[list[int]], max_tokens: int) -> float:
            start = time.perf_counter()
            llm.generate(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
            return time.perf_counter() - start

        timed([PROMPT] * STREAMS, 16)
        seconds = [timed([PROMPT] * STREAMS, TOKENS) for _ in range(REPEATS)]
        show("offline", seconds, [timed([PROMPT], 1) for _ in range(40)][10:])


if __name__ == "__main__":
    served()
    offline()
