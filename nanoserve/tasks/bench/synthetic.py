"""Engine calls timed as they are, beside what the hardware allows: bench kinds *throughput* and *latency*.

Definitions. *Output tok/s*: generated tokens over the wall time from the first request's arrival to the last token.
*TTFT*: wall time of a call that generates one token per prompt. *TPOT*: time of a step in which the whole batch decodes
together, which is each sequence's time per output token. Every engine call is warmed up first (compilation, graph
capture); medians over ``repeat``.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from nanoserve.contracts.errors import ConfigError
from nanoserve.tasks.bench.record import Measured

if TYPE_CHECKING:
    from nanoserve.llm import LLM

#: bf16 matrix rate that the prefill part of the roofline assumes, FLOP/s (an H200 at 8192³, measured).
MATRIX_FLOPS = 700e12
#: Output tokens of kind latency: the first and the last steps of a batch are not timed.
MIN_OUTPUT = 8


@dataclass(frozen=True)
class Throughput:
    """All requests at once. Lengths are uniform in inclusive ranges; token ids uniform in 0 … max_token_id."""

    kind: Literal["throughput"]
    num_requests: int
    input_len: tuple[int, int]
    output_len: tuple[int, int]
    max_token_id: int
    temperature: float
    seed: int = 0
    repeat: int = 1

    def __post_init__(self) -> None:
        for key in ("num_requests", "repeat"):
            _require(getattr(self, key) >= 1, key, "at least 1", getattr(self, key))
        for key in ("input_len", "output_len"):
            low, high = getattr(self, key)
            _require(1 <= low <= high, key, "a range [low, high] of at least 1", [low, high])
        _require(self.max_token_id >= 0, "max_token_id", "at least 0", self.max_token_id)
        _require(0 <= self.temperature < math.inf, "temperature", "at least 0 and finite", self.temperature)

    def draw(self, round_: int = 0) -> tuple[list[list[int]], list[int]]:
        """Prompts and output lengths. Later rounds have the same lengths and shifted ids: no prefix is met again."""
        rng, num_ids = random.Random(self.seed), self.max_token_id + 1
        prompts = [
            [(rng.randint(0, self.max_token_id) + round_) % num_ids for _ in range(rng.randint(*self.input_len))]
            for _ in range(self.num_requests)
        ]
        return prompts, [rng.randint(*self.output_len) for _ in range(self.num_requests)]


@dataclass(frozen=True)
class Latency:
    """batches: sequences that decode together around ``context`` tokens. prompts: (batch, length) pairs for TTFT."""

    kind: Literal["latency"]
    batches: list[int]
    context: int
    output_len: int
    prompts: list[tuple[int, int]]
    repeat: int = 1

    def __post_init__(self) -> None:
        for key in ("context", "repeat"):
            _require(getattr(self, key) >= 1, key, "at least 1", getattr(self, key))
        _require(self.output_len >= MIN_OUTPUT, "output_len", f"at least {MIN_OUTPUT}", self.output_len)
        _require(all(n >= 1 for n in self.batches), "batches", "a list of numbers of at least 1", self.batches)
        _require(
            all(n >= 1 for pair in self.prompts for n in pair), "prompts", "[batch, tokens] of at least 1", self.prompts
        )
        _require(bool(self.batches or self.prompts), "batches", "numbers, since there are no prompts", self.batches)


def _require(legal: bool, key: str, rule: str, value: Any) -> None:
    if not legal:
        raise ValueError(f"{key} must be {rule}, not {value!r}")  # config.build names the group


def throughput(llm: LLM, workload: Throughput) -> Measured:
    from nanoserve.sampling_params import SamplingParams

    require_fit(llm, "input_len", workload.input_len[1] + workload.output_len[1])
    if workload.max_token_id >= llm.engine.vocab_size:
        raise ConfigError(
            f"bench.max_token_id is {workload.max_token_id}, the vocabulary has {llm.engine.vocab_size}: "
            "lower it, or measure another model (model=qwen3_0_6b model.load_format=dummy)"
        )
    prompts, output_lens = workload.draw()
    params = [SamplingParams(temperature=workload.temperature, ignore_eos=True, max_tokens=n) for n in output_lens]
    warm_up(llm, prompts)
    num_output = sum(output_lens)
    seconds = []
    for round_ in range(workload.repeat):
        prompts, _ = workload.draw(round_ + 1)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, progress=sys.stderr.isatty())
        seconds.append(time.perf_counter() - start)
        if (delivered := sum(len(o.token_ids) for o in outputs)) != num_output:
            raise RuntimeError(f"{delivered} output tokens instead of {num_output}: the figures would be wrong")
    rate = num_output / statistics.median(seconds)
    figures: dict[str, Any] = {
        "output tok/s": round(rate),
        "runs": [round(num_output / s) for s in seconds],
        "input tokens": sum(map(len, prompts)),
        "output tokens": num_output,
        "preemptions": llm.stats().preemptions,
    }
    bandwidth = copy_bandwidth(llm)
    if bandwidth is not None:
        ideal = roofline_seconds(llm, prompts, output_lens, bandwidth)
        figures |= {
            "copy TB/s": round(bandwidth / 1e12, 2),
            "roofline tok/s": round(num_output / ideal),
            "share of roofline": round(rate / (num_output / ideal), 3),
        }
    return Measured(
        "throughput",
        list(figures),
        [list(figures.values())],
        figures=figures,
        record={"figures": figures, "runs": [{"output tok/s": num_output / s} for s in seconds]},
    )


def latency(llm: LLM, workload: Latency) -> Measured:
    from nanoserve.sampling_params import SamplingParams

    rng = random.Random(0)

    def batch(count: int, length: int) -> list[list[int]]:
        top = min(10000, llm.engine.vocab_size - 1)
        return [[rng.randint(0, top) for _ in range(length)] for _ in range(count)]

    # The first prompts decode while the last are still being read. Let them not end before a window of output_len steps
    # does, in the middle of which the mean context is the one asked for.
    budget = llm.config.engine.max_num_batched_tokens
    early = {n: n / max(1, budget - n // 2) for n in workload.batches}  # steps for each token of a prompt
    prompt_lens = {n: int((workload.context - workload.output_len / 2) / (1 + e / 2)) for n, e in early.items()}
    lengths = {n: workload.output_len + round(early[n] * prompt_len) for n, prompt_len in prompt_lens.items()}
    for _, length in workload.prompts:
        require_fit(llm, "prompts", length + 1)
    for count, length in lengths.items():
        require_fit(llm, "context", prompt_lens[count] + length)
    limit = llm.config.engine.max_num_seqs
    for key, counts in (("batches", workload.batches), ("prompts", [count for count, _ in workload.prompts])):
        if (most := max(counts, default=0)) > limit:
            raise ConfigError(f"bench.{key}: {most} sequences exceed engine.max_num_seqs={limit}; raise it")
    blocks = llm.engine.blocks
    for count, prompt_len in prompt_lens.items():
        if prompt_len < 1:
            raise ConfigError(
                f"bench.context={workload.context} is too short for {count} sequences to decode around it for "
                f"bench.output_len={workload.output_len} steps; raise it, or lower the other"
            )
    # Of prompts that a step has no room for, those before are finished and gone when the last are read.
    at_once = [("prompts", min(count, budget // length + 1), length, "it") for count, length in workload.prompts]
    at_once += [("batches", count, workload.context, "it or bench.context") for count in workload.batches]
    for key, count, length, what in at_once:
        if (needed := count * -(-length // blocks.block_size)) > blocks.num_blocks:
            raise ConfigError(
                f"bench.{key}: {count} sequences of {length} tokens take {needed} blocks, and there are "
                f"{blocks.num_blocks}; lower {what}, or raise engine.num_kv_blocks"
            )
    report = Measured("latency", ["measure", "batch", "tokens", "median ms", "min ms", "prefill tok/s"])
    one = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1)
    for count, length in workload.prompts:
        times = []
        for round_ in range(workload.repeat + 1):
            prompts = batch(count, length)
            start = time.perf_counter()
            llm.generate(prompts, one)
            if round_:
                times.append(1e3 * (time.perf_counter() - start))
        median = statistics.median(times)
        rate = round(count * length / median * 1e3)
        report.rows.append(["TTFT", count, length, round(median, 2), round(min(times), 2), rate])
        report.figures[f"TTFT {count}x{length} ms"] = round(median, 2)
    for count, length in lengths.items():
        params = SamplingParams(temperature=0.6, seed=1, ignore_eos=True, max_tokens=length)
        times = [tpot(llm, batch(count, prompt_lens[count]), params) for _ in range(workload.repeat + 1)][1:]
        median = statistics.median(times)
        report.rows.append(["TPOT", count, workload.context, round(median, 3), round(min(times), 3), ""])
        report.figures[f"TPOT b{count} ms"] = round(median, 3)
    report.record["figures"] = report.figures
    return report


def tpot(llm: LLM, prompts: list[list[int]], params: Any) -> float:
    """Milliseconds per decode step while all of ``prompts`` decode together: median over those steps."""
    engine = llm.engine
    for i, prompt in enumerate(prompts):
        engine.add_request(f"bench-{i}", prompt, params)
    while engine.scheduler.waiting:
        engine.step()
    times = []
    engine.step()  # the first decode step of this batch may capture a graph
    last = time.perf_counter()
    while len(engine.scheduler.running) == len(prompts):
        engine.step()
        now = time.perf_counter()
        times.append(1e3 * (now - last))
        last = now
    while engine.has_work:
        engine.step()
    if not times[2:-2]:
        raise ConfigError(
            f"bench.batches: {len(prompts)} sequences hardly ever decode together, for want of KV blocks or because "
            "the scheduler forbids it; lower it, or raise engine.num_kv_blocks"
        )
    return statistics.median(times[2:-2])


def require_fit(llm: LLM, key: str, num_tokens: int) -> None:
    """ConfigError if the engine serves no sequence of so many tokens, prompt and output."""
    if num_tokens > llm.engine.capacity:
        raise ConfigError(
            f"bench.{key}: {num_tokens} tokens, prompt and output, exceed the longest sequence "
            f"of {llm.engine.capacity}; lower it"
        )


def warm_up(llm: LLM, prompts: Sequence[list[int]]) -> None:
    """Compile kernels and capture every graph."""
    from nanoserve.sampling_params import SamplingParams

    llm.engine.runner.capture()  # type: ignore[attr-defined]
    llm.generate(list(prompts[: min(64, len(prompts))]), SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=2))


def copy_bandwidth(llm: LLM) -> float | None:
    """Bytes per second of a device-to-device copy (read + write), the ceiling of decoding; None on a CPU."""
    import torch

    device = torch.device("cuda") if torch.cuda.is_available() else None
    if device is None or llm.engine.runner.device.type != "cuda":  # type: ignore[attr-defined]
        return None
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(10):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return 2 * source.nbytes / statistics.median(times)


def roofline_seconds(llm: LLM, prompts: list[list[int]], output_lens: list[int], bandwidth: float) -> float:
    """Time no engine can beat: every KV byte a token attends to read once, the weights once per step, prefill FLOPs."""
    runner = llm.engine.runner
    config, kv = runner.model.config, runner.kv  # type: ignore[attr-defined]
    bytes_per_token = kv.bytes_per_block() / kv.shape.block_size
    contexts = sum(n * len(p) + n * (n + 1) // 2 for p, n in zip(prompts, output_lens, strict=True))
    width = config.head_dim * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)
    per_layer = config.hidden_size * (width + 3 * config.intermediate_size)
    body = config.num_hidden_layers * per_layer
    head = config.vocab_size * config.hidden_size
    itemsize = kv.shape.dtype.itemsize
    decode = (contexts * bytes_per_token + max(output_lens) * (body + head) * itemsize) / bandwidth
    attention = sum(2 * config.num_attention_heads * config.head_dim * len(p) ** 2 for p in prompts)
    flops = 2 * body * sum(map(len, prompts)) + config.num_hidden_layers * attention
    return decode + flops / MATRIX_FLOPS
