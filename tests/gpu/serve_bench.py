"""The same requests offline and through the server, on a GPU: throughput of 256 streams, and what HTTP adds to TTFT.

256 requests at once end in batches that shrink, and begin with a burst that the HTTP side takes some 0.2 s to accept; a
longer run keeps 256 streams going, the next request being sent when one ends.

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
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from nanoserve import LLM, SamplingParams  # noqa: E402
from tests.benchmarks.bench_server import load, requests  # noqa: E402

PORT, STREAMS, TOKENS, REPEATS = 8123, 256, 400, 2
Requests = list[tuple[list[int], int]]  # prompt, output tokens
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "graph_capture": "start",
    "max_num_seqs": STREAMS,
    "enable_prefix_caching": False,
}


def nano_vllm(num: int) -> Requests:
    """Prompts and outputs of 100–1024 tokens, as ``bench=nano_vllm`` draws them."""
    rng = random.Random(0)
    prompts = [[rng.randrange(10000) for _ in range(rng.randint(100, 1024))] for _ in range(num)]
    return [(prompt, rng.randint(100, 1024)) for prompt in prompts]


PLAIN: dict[str, Any] = {"temperature": 0.6, "top_k": -1, "top_p": 1.0}
RESTRICTED: dict[str, Any] = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}  # what Qwen3 recommends

WORKLOADS: dict[str, tuple[Requests, dict[str, Any]]] = {
    "prompts of 32, outputs of 400, any token": (requests(STREAMS, TOKENS, 32), PLAIN),
    "prompts of 32, outputs of 400": (requests(STREAMS, TOKENS, 32), RESTRICTED),
    "prompts of 512, outputs of 400": (requests(STREAMS, TOKENS, 512), RESTRICTED),
    "prompts and outputs of 100–1024": (nano_vllm(STREAMS), RESTRICTED),
    "prompts and outputs of 100–1024, any token": (nano_vllm(STREAMS), PLAIN),
    f"{3 * STREAMS} prompts and outputs of 100–1024, {STREAMS} at a time": (nano_vllm(3 * STREAMS), RESTRICTED),
}


def rates(what: str, timed: Callable[..., float]) -> dict[str, float]:
    """The best rate for each workload, in output tokens per second. timed: seconds of these requests, all at once."""
    best = {}
    for name, (wanted, sampling) in WORKLOADS.items():
        timed([(prompt, 16) for prompt, _ in wanted[:STREAMS]], **sampling)
        total = sum(num_tokens for _, num_tokens in wanted)
        measured = sorted(total / timed(wanted, **sampling) for _ in range(REPEATS if len(wanted) == STREAMS else 1))
        best[name] = measured[-1]
        print(f"{what}, {name}: {', '.join(f'{rate:,.0f}' for rate in measured)} output tok/s", flush=True)
    one = [timed(requests(1, 1), **RESTRICTED) for _ in range(40)][10:]
    print(f"{what}, alone: one token in {1e3 * statistics.median(one):.2f} ms", flush=True)
    return best


def served() -> dict[str, float]:
    start = time.perf_counter()
    server = subprocess.Popen(
        [sys.executable, "-m", "nanoserve", "task=serve", f"port={PORT}", "log_level=warning", "model=qwen3_0_6b"]
        + [f"engine.{key}={value}" for key, value in OPTIONS.items()]
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
        return rates("served", lambda wanted, **sampling: load("127.0.0.1", PORT, wanted, STREAMS, **sampling)[0])
    finally:
        server.terminate()
        server.wait()


def offline() -> dict[str, float]:
    with LLM("qwen3_0_6b", **OPTIONS) as llm:

        def timed(wanted: Requests, **sampling: Any) -> float:
            prompts = [prompt for prompt, _ in wanted]
            params = [SamplingParams(max_tokens=num_tokens, ignore_eos=True, **sampling) for _, num_tokens in wanted]
            start = time.perf_counter()
            llm.generate(prompts, params)
            return time.perf_counter() - start

        return rates("offline", timed)


if __name__ == "__main__":
    by_server, by_engine = served(), offline()
    for name, rate in by_server.items():
        print(f"{name}: served at {rate / by_engine[name]:.2f} of offline")
