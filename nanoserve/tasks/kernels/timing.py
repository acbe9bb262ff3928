"""Timing of short kernels, all candidates in turn, medians: CUDA graphs on a GPU, the clock on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

Call = Callable[[], object]


class Timer(Protocol):
    def replay(self) -> None:
        """Run all calls once more and remember how long they took."""

    def microseconds(self) -> float:
        """Median time of one call over the replays so far."""
        ...


class GraphTimer:
    """One CUDA graph of several calls, usually one per layer on data of its own, so that nothing is found in the L2."""

    def __init__(self, calls: Sequence[Call], prepare: Call = lambda: None) -> None:
        """prepare: work of a step that its calls share; captured once, before them."""
        self.num_calls = len(calls)
        self.kept = prepare, tuple(calls)  # a graph reads their tensors, and does not own them
        prepare()
        for call in calls:
            call()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            prepare()
            for call in calls:
                call()
        self.graph.replay()  # the first replay of a graph uploads it
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def replay(self) -> None:
        start, end = _event(), _event()
        start.record()
        self.graph.replay()
        end.record()
        self.events.append((start, end))

    def microseconds(self) -> float:
        """Synchronises."""
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in self.events) * 1e3 / self.num_calls


class ClockTimer:
    """The same calls on a CPU: wall time."""

    def __init__(self, calls: Sequence[Call], prepare: Call = lambda: None) -> None:
        self.calls = [prepare, *calls]
        self.seconds: list[float] = []

    def replay(self) -> None:
        start = time.perf_counter()
        for call in self.calls:
            call()
        self.seconds.append(time.perf_counter() - start)

    def microseconds(self) -> float:
        return statistics.median(self.seconds) * 1e6 / (len(self.calls) - 1)


def interleaved(timers: Mapping[str, Timer], rounds: int = 9) -> dict[str, float]:
    """Microseconds of a call per candidate. Every round replays each once: clocks and heat are the same for all."""
    for _ in range(rounds):
        for timer in timers.values():
            timer.replay()
    return {name: timer.microseconds() for name, timer in timers.items()}


def once(call: Call, device: torch.device) -> float:
    """Microseconds of one call, launch included; synchronises."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e6 * (time.perf_counter() - start)


def copy_bandwidth(device: str | torch.device = "cuda", gigabytes: float = 4.0, rounds: int = 9) -> float:
    """TB/s of a copy within the device's memory, bytes read plus bytes written.

    Not in a graph, where a copy is slower.
    """
    source = torch.empty(int(gigabytes * 2**30), dtype=torch.uint8, device=device).random_(0, 255)
    target = torch.empty_like(source)
    return 2 * source.numel() / _median(lambda: target.copy_(source), source.device, rounds) / 1e6


def matmul_rate(device: str | torch.device = "cuda", dtype: torch.dtype = torch.bfloat16, size: int = 8192) -> float:
    """TFLOP/s of a square matrix product."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / _median(lambda: torch.mm(a, b), a.device, 9) / 1e6


def _median(call: Call, device: torch.device, rounds: int) -> float:
    """Microseconds of plain calls, one after the other."""
    call()
    if device.type != "cuda":
        return statistics.median(once(call, device) for _ in range(rounds))
    events = []
    for _ in range(rounds):
        start, end = _event(), _event()
        start.record()
        call()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize(device)
    return 1e3 * statistics.median(start.elapsed_time(end) for start, end in events)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
