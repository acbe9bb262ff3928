"""Timing of short kernels on a GPU: CUDA graphs, all candidates in turn, medians."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch


class GraphTimer:
    """One CUDA graph of several calls, usually one per layer on data of its own, so that nothing is found in the L2."""

    def __init__(self, calls: Sequence[Callable[[], object]], prepare: Callable[[], object] = lambda: None) -> None:
        """prepare: work of a step that its calls share; captured once, before them."""
        self.num_calls = len(calls)
        prepare()
        for call in calls:
            call()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            prepare()
            for call in calls:
                call()
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def replay(self) -> None:
        start, end = _event(), _event()
        start.record()
        self.graph.replay()
        end.record()
        self.events.append((start, end))

    def microseconds(self) -> float:
        """Median time of one call over the replays so far; synchronises."""
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in self.events) * 1e3 / self.num_calls


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def interleaved(timers: dict[str, GraphTimer], rounds: int = 9) -> dict[str, float]:
    """Microseconds of a call per candidate. Every round replays each once: clocks and heat are the same for all."""
    for timer in timers.values():
        timer.graph.replay()
    for _ in range(rounds):
        for timer in timers.values():
            timer.replay()
    return {name: timer.microseconds() for name, timer in timers.items()}


def copy_bandwidth(gigabytes: float = 4.0, rounds: int = 9) -> float:
    """TB/s of a device-to-device copy, bytes read plus bytes written. Not in a graph, where a copy is slower."""
    source = torch.empty(int(gigabytes * 2**30), dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    times = []
    for _ in range(rounds):
        start, end = _event(), _event()
        start.record()
        target.copy_(source)
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return 2 * source.numel() / statistics.median(start.elapsed_time(end) for start, end in times) / 1e9
