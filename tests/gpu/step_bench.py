"""Where the time of a whole decode step goes, and what a setting is worth there: one engine, one process.

    python tests/gpu/step_bench.py [bf16|int8|a batch|a setting …]

Kernels that win alone can lose in a step: a product that prefetches its weights keeps most of the shared memory, and
attention that runs beside it reads K and V through what is left of the L1 cache. So this is where the limits of
``ops/linear.py``, ``kvcache/_kernels.py``, ``hopper_decode.py`` and the tiles of ``_wgmma.py`` are decided.

Sequences are prefilled, decode a few tokens, and stand still. Then a step of them is captured with every setting,
three times, for where its memory lies makes ±0.3 %, and replayed in random order after a pause, for a card that has
worked for a second is at its power limit. Repeated, the median of a capture stays within 0.1 %.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from nanoserve import LLM, SamplingParams
from nanoserve.engine.attention import AttentionStep, KVWriter
from nanoserve.models import layers
from nanoserve.ops import _wgmma, linear
from nanoserve.ops._wgmma import Tile
from nanoserve_plugins.attention import hopper_decode
from nanoserve_plugins.kvcache import _kernels as kv_kernels

ALWAYS = 10**9
CONTEXT, CAPTURES, ROUNDS, REPLAYS, PAUSE = 1008, 3, 6, 6, 0.06
Patch = AbstractContextManager[Any]


# -- settings ---------------------------------------------------------------------------------------------------------


def norms_apart() -> Patch:
    def add(residual: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: Any, norm: torch.Tensor, eps: float) -> Any:
        return linear.Norm(linear.linear_add_(residual, x, w, bias), norm, eps)

    return mock.patch.object(layers, "linear_add_norm_", add)


def tile(shape: tuple[int, int], instead: Tile) -> Patch:
    """``instead`` for the matrix ``[n, k]`` of that shape."""
    chosen = _wgmma.tile_for
    return mock.patch.object(
        _wgmma, "tile_for", lambda tokens, n, k, swiglu: instead if (n, k) == shape else chosen(tokens, n, k, swiglu)
    )


@contextmanager
def without(*parts: str) -> Iterator[None]:
    """A step in which attention, the products of the layers, or the store are left out; their results are anything."""
    with ExitStack() as stack:
        if "attention" in parts:
            stack.enter_context(mock.patch.object(AttentionStep, "read", lambda *args: None))
        if "store" in parts:

            def split(self: KVWriter, layer: Any, qkv: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
                shape = self.kv.shape
                sizes = [self.num_q_heads, shape.num_kv_heads, shape.num_kv_heads]
                return qkv.view(len(qkv), -1, shape.head_dim).split(sizes, 1)

            stack.enter_context(mock.patch.object(KVWriter, "write", split))
        if "products" in parts:

            def empty(norm: linear.Norm, weight: torch.Tensor, *bias: Any) -> torch.Tensor:
                return norm.residual.new_empty(len(norm.residual), len(weight))

            def same(residual: torch.Tensor, x: Any, w: Any, bias: Any, norm: torch.Tensor, eps: float) -> linear.Norm:
                return linear.Norm(residual, norm, eps)

            for name, instead in {"norm_linear": empty, "norm_swiglu": empty, "linear_add_norm_": same}.items():
                stack.enter_context(mock.patch.object(layers, name, instead))
        yield


def limits(wgmma: int = 256, early_tokens: int = 32, early_seqs: int = 32) -> Patch:
    stack = ExitStack()
    stack.enter_context(mock.patch.object(linear, "MAX_WGMMA_TOKENS", wgmma))
    stack.enter_context(mock.patch.object(kv_kernels, "EARLY_TOKENS", early_tokens))
    stack.enter_context(mock.patch.object(hopper_decode, "EARLY_SEQS", early_seqs))
    return stack


SETTINGS: dict[str, Callable[[], Patch]] = {
    "as it is": ExitStack,
    "attention": lambda: without("products", "store"),
    "products": lambda: without("attention", "store"),
    "products and store": lambda: without("attention"),
    "neither": lambda: without("attention", "products", "store"),
    "cuBLAS": lambda: limits(wgmma=0),
    "norms apart": norms_apart,
    "early store": lambda: limits(early_tokens=ALWAYS),
    "early attention": lambda: limits(early_seqs=ALWAYS),
    "gate_up w_first 3": lambda: tile((6144, 1024), Tile(128, 64, 64, 6, 6, 3)),
    "qkv 64": lambda: tile((4096, 1024), Tile(128, 64, 64, 5, 8, 3)),
}


# -- measure ----------------------------------------------------------------------------------------------------------


def measure(llm: LLM, batch: int) -> dict[str, list[float]]:
    """Milliseconds of a step, for each setting the median of every capture."""
    engine, graphs = llm.engine, llm.engine.runner.decode_graphs  # type: ignore[attr-defined]
    rng = random.Random(batch)
    params = SamplingParams(temperature=0.6, max_tokens=1000, ignore_eos=True)
    for i in range(batch):
        engine.add_request(f"{batch}-{i}", [rng.randrange(10000) for _ in range(CONTEXT)], params)
    while engine.scheduler.waiting or any(seq.num_output_tokens < 16 for seq in engine.scheduler.running):
        engine.step()
    torch.cuda.synchronize()
    bucket = graphs._buckets[graphs.size_for(batch)]
    print("mean context", bucket.ints[1, :batch].float().mean().item())
    captured: list[tuple[str, torch.cuda.CUDAGraph, list[float]]] = []
    with torch.inference_mode():
        for name in list(SETTINGS) * CAPTURES:
            with SETTINGS[name]():
                graphs._sample(bucket)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    graphs._sample(bucket)
            captured.append((name, graph, []))
    for _ in range(ROUNDS):
        for _, graph, times in random.sample(captured, len(captured)):
            time.sleep(PAUSE)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for i in range(REPLAYS + 2):
                if i == 2:
                    start.record()
                graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / REPLAYS)
    for i in range(batch):
        engine.abort(f"{batch}-{i}")
    while engine.has_work:
        engine.step()
    return {setting: [statistics.median(t) for name, _, t in captured if name == setting] for setting in SETTINGS}


def main() -> None:
    asked = sys.argv[1:]
    for setting in [s for s in SETTINGS if {*asked} & {*SETTINGS} and s not in asked]:
        del SETTINGS[setting]
    batches = [int(word) for word in asked if word.isdigit()] or (1, 8, 32, 64, 128, 256)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "| ms a step")
    for kv in [word for word in asked if word in ("bf16", "int8")] or ["bf16", "int8"]:
        with LLM("qwen3_0_6b", load_format="dummy", kv=kv, enable_prefix_caching=False) as llm:
            for batch in batches:
                for setting, times in measure(llm, batch).items():
                    row = "  ".join(f"{ms:.4f}" for ms in sorted(times))
                    print(f"{kv} {batch:4d} {setting:20} {statistics.mean(times):.4f}  of {row}", flush=True)


if __name__ == "__main__":
    main()
