"""Time of a whole decode step with each setting of what may start beside what, in turns on one engine.

    python tests/gpu/step_bench.py [bf16|int8|a batch|a setting …]

Kernels that win alone can lose in a step: a product that prefetches its weights keeps most of the shared memory, and
attention that runs beside it reads K and V through what is left of the L1 cache. So this is where the limits of
``ops/linear.py``, ``kvcache/_kernels.py`` and ``hopper_decode.py`` are decided.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from typing import Any

import torch

from nanoserve import LLM, SamplingParams
from nanoserve.models import layers
from nanoserve.ops import linear
from nanoserve_plugins.attention import hopper_decode
from nanoserve_plugins.kvcache import _kernels as kv_kernels

ALWAYS = 10**9
FUSED = layers.linear_add_norm_


def apart(
    residual: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: Any, norm: torch.Tensor, eps: float
) -> linear.Norm:
    return linear.Norm(linear.linear_add_(residual, x, w, bias), norm, eps)


#: MAX_WGMMA_TOKENS, up to how many tokens the store and attention let the next kernel start early, how norms are
#: added.
SETTINGS = {
    "cuBLAS": (0, 32, 32, FUSED),
    "wgmma": (256, 32, 32, FUSED),
    "norms apart": (256, 32, 32, apart),
    "early store": (256, ALWAYS, 32, FUSED),
    "early attention": (256, 32, ALWAYS, FUSED),
}
BATCHES, CONTEXT, ROUNDS, STEPS = (16, 32, 48, 64, 128, 256), 960, 4, 6


def apply(setting: str) -> None:
    linear.MAX_WGMMA_TOKENS, kv_kernels.EARLY_TOKENS, hopper_decode.EARLY_SEQS, add = SETTINGS[setting]
    layers.linear_add_norm_ = add


def measure(llm: LLM, batch: int) -> dict[str, float]:
    """Milliseconds of a step, median of rounds. Contexts grow alike for all settings, and the more the more settings
    there are: only times of one call compare."""
    engine, graphs = llm.engine, llm.engine.runner.decode_graphs  # type: ignore[attr-defined]
    rng = random.Random(batch)
    params = SamplingParams(temperature=0.6, max_tokens=1000, ignore_eos=True)
    for i in range(batch):
        engine.add_request(f"{batch}-{i}", [rng.randrange(10000) for _ in range(CONTEXT)], params)
    while engine.scheduler.waiting or any(seq.num_output_tokens < 3 for seq in engine.scheduler.running):
        engine.step()
    captured: dict[str, dict] = {setting: {} for setting in SETTINGS}
    times: dict[str, list[float]] = {setting: [] for setting in SETTINGS}
    for _ in range(ROUNDS):
        for setting in SETTINGS:
            apply(setting)
            graphs._buckets = captured[setting]
            engine.step()  # captures
            engine.step()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(STEPS):
                engine.step()
            torch.cuda.synchronize()
            times[setting].append((time.perf_counter() - start) / STEPS * 1e3)
    for i in range(batch):
        engine.abort(f"{batch}-{i}")
    while engine.has_work:
        engine.step()
    graphs._buckets = {}
    return {setting: statistics.median(values[1:]) for setting, values in times.items()}


def main() -> None:
    asked = sys.argv[1:]
    for setting in [s for s in SETTINGS if {*asked} & {*SETTINGS} and s not in asked]:
        del SETTINGS[setting]
    batches = [int(word) for word in asked if word.isdigit()] or BATCHES
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "| ms a step |", ", ".join(SETTINGS))
    for kv in [word for word in asked if word in ("bf16", "int8")] or ["bf16", "int8"]:
        with LLM("qwen3_0_6b", load_format="dummy", kv=kv, enable_prefix_caching=False) as llm:
            for batch in batches:
                row = measure(llm, batch)
                print(f"{kv} {batch:4d}", "  ".join(f"{ms:.3f}" for ms in row.values()), flush=True)


if __name__ == "__main__":
    main()
