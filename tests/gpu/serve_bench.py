"""The same requests offline and through the server, on a GPU: throughput of many streams, and what HTTP adds to TTFT.

python tests/gpu/serve_bench.py
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from nanoserve import LLM, SamplingParams  # noqa: E402
from tests.benchmarks.bench_server import load, requests  # noqa: E402

PORT, STREAMS, TOKENS, REPEATS = 8123, 256, 400, 3
Requests = list[tuple[list[int], int]]  # prompt, output tokens
MODEL = ["model=qwen3_0_6b", "model.load_format=dummy", "engine.graph_capture=start"]


def nano_vllm() -> Requests:
    """256 requests, prompts and outputs of 100–1024 tokens, as ``bench=nano_vllm`` draws them."""
    rng = random.Random(0)
    prompts = [[rng.randrange(10000) for _ in range(rng.randint(100, 1024))] for _ in range(STREAMS)]
    return [(prompt, rng.randint(100, 1024)) for prompt in prompts]


WORKLOADS = {
    "prompts of 32, outputs of 400": requests(STREAMS, TOKENS, 32),
    "prompts of 512, outputs of 400": requests(STREAMS, TOKENS, 512),
    "prompts and outputs of 100–1024": nano_vllm(),
}


def show(what: str, timed: Callable[[Requests], float]) -> None:
    """timed: seconds of these requests, all at once."""
    for name, wanted in WORKLOADS.items():
        timed([(prompt, 16) for prompt, _ in wanted])
        total = sum(num_tokens for _, num_tokens in wanted)
        rates = sorted(total / timed(wanted) for _ in range(REPEATS))
        print(
            f"{what}, {len(wanted)} streams, {name}: {', '.join(f'{r:,.0f}' for r in rates)} output tok/s", flush=True
        )
    one = [timed(requests(1, 1)) for _ in range(40)][10:]
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
        show("served", lambda wanted: load("127.0.0.1", PORT, wanted)[0])
    finally:
        server.terminate()
        server.wait()


def offline() -> None:
    with LLM("qwen3_0_6b", load_format="dummy", graph_capture="start") as llm:

        def timed(wanted: Requests) -> float:
            prompts = [prompt for prompt, _ in wanted]
            params = [SamplingParams(max_tokens=num_tokens, ignore_eos=True) for _, num_tokens in wanted]
            start = time.perf_counter()
            llm.generate(prompts, params)
            return time.perf_counter() - start

        show("offline", timed)


if __name__ == "__main__":
    served()
    offline()
