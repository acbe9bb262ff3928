"""What a step must move and compute at least, and what the device can: so a time can be called good or bad.

The bound of a class of kernels is the larger of bytes / bandwidth and FLOPs / matrix rate (Williams et al., "Roofline",
2009). Both ceilings are measured here, by a copy and by a square product in the model's dtype.

Least work per step, of ``tokens`` tokens in all layers, of which ``samples`` get logits:

* *matrix products*: 2 · weights · tokens FLOPs; every weight read once, activations written and read once;
* *attention*: 4 · q_heads · head_dim FLOPs for each pair of a token and one that it sees; its K and V read once, q read
  and the output written. A prompt's K and V are read once per sequence;
* *sampling*: the logits read once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nanoserve.models.layers import packed
from nanoserve.ops.linear import linear

if TYPE_CHECKING:
    from nanoserve.engine.engine import Engine

#: Below this share of the nearer ceiling, neither bandwidth nor arithmetic is what limits a class of kernels.
FAR = 0.3


@dataclass(frozen=True)
class Ceilings:
    """bandwidth: bytes/s, read and written. matrix_rate: FLOP/s."""

    bandwidth: float
    matrix_rate: float


@dataclass(frozen=True)
class Work:
    """Bytes and FLOPs of a class of kernels in one step."""

    num_bytes: float
    flops: float

    def seconds(self, device: Ceilings) -> float:
        return max(self.num_bytes / device.bandwidth, self.flops / device.matrix_rate)

    def verdict(self, seconds: float, device: Ceilings) -> str:
        """In words, for work that took ``seconds``."""
        memory = self.num_bytes / device.bandwidth >= self.flops / device.matrix_rate
        share = self.seconds(device) / seconds
        ceiling = "memory bandwidth" if memory else "matrix rate"
        if share > 1.05:  # what repeats of the test differ by
            return f"at the {ceiling} ({share:.0%} of its test: a cache helps, or something disturbed the test)"
        if share < FAR:
            return f"neither: {share:.0%} of the {ceiling}"
        return f"{'memory' if memory else 'compute'}-bound: {share:.0%} of the {ceiling}"


def least_work(engine: Engine, contexts: list[int], new: list[int]) -> dict[str, Work]:
    """By class of kernels, for a step in which sequence i has ``contexts[i]`` tokens, ``new[i]`` of them new."""
    runner: Any = engine.runner
    config, kv = runner.model.config, runner.kv
    size = kv.shape.dtype.itemsize
    hidden, layers, inner = config.hidden_size, config.num_hidden_layers, config.intermediate_size
    q = config.num_attention_heads * config.head_dim
    k_and_v = 2 * config.num_key_value_heads * config.head_dim
    tokens, samples = sum(new), len(new)
    body = layers * hidden * (2 * q + k_and_v + 3 * inner)
    head = config.vocab_size * hidden
    activations = layers * (3 * hidden + 2 * q + k_and_v + 3 * inner) * tokens + (hidden + config.vocab_size) * samples
    pairs = sum(n * (c - n) + n * (n + 1) // 2 for c, n in zip(contexts, new, strict=True))
    kv_bytes = kv.bytes_per_block() / kv.shape.block_size * sum(contexts)
    return {
        "matrix products": Work((body + head + activations) * size, 2 * (body * tokens + head * samples)),
        "attention": Work(kv_bytes + 2 * layers * q * tokens * size, 4 * layers * q * pairs),
        "sampling": Work(config.vocab_size * samples * size, 0),
    }


@torch.inference_mode()
def measure(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """A copy of 512 MiB and a product of 8192³ on a GPU, of 64 MiB and 1024³ on a CPU; the best of several."""
    on_gpu = device.type == "cuda"
    source = torch.ones(1 << (29 if on_gpu else 26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    n = 8192 if on_gpu else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    weight = packed(b)  # as the model's own are
    copy = _seconds(lambda: target.copy_(source), on_gpu)
    product = _seconds(lambda: linear(a, weight), on_gpu)
    return Ceilings(2 * source.nbytes / copy, 2 * n**3 / product)


def _seconds(call: Callable[[], object], on_gpu: bool, repeat: int = 10) -> float:
    times = []
    for _ in range(repeat):
        if on_gpu:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return min(times)
