"""Where the host is in a step: the engine's own calls, each inside a named span.

A span is a context manager made by name, so the same instrumentation serves a stopwatch, the profiler's annotations and
NVTX ranges.

=========  ==========================================================================
schedule   the scheduler decides, and the block manager grants
build      the step's description is laid out on the host and uploaded
launch     the model and the sampler are handed to the device; on a CPU they run here
wait       for the device: the only place where the host should block
commit     tokens are taken in: stop conditions, the scheduler, the prefix cache
report     what there is to say is put together
=========  ==========================================================================
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanoserve.contracts.scheduling import Schedule
    from nanoserve.engine.engine import Engine
    from nanoserve.engine.runner import InFlight, SampledTokens

Span = Callable[[str], AbstractContextManager[Any]]
ATTENTION = "attention"
PARTS = ("schedule", "build", "launch", "wait", "commit", "report")


class Stopwatch:
    """Seconds per span, each without the spans inside it: they add up to the time in the outermost ones."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._last = 0.0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._book()
        self._open.append(name)
        try:
            yield
        finally:
            self._book()
            self._open.pop()

    def lap(self) -> dict[str, float]:
        """The seconds so far; the count begins anew."""
        seconds, self.seconds = dict(self.seconds), defaultdict(float)
        return seconds

    def _book(self) -> None:
        """The time since the last border belongs to the innermost open span."""
        now = self.clock()
        if self._open:
            self.seconds[self._open[-1]] += now - self._last
        self._last = now


@contextmanager
def instrumented(engine: Engine, span: Span, *, attention: bool = False) -> Iterator[None]:
    """Put the calls of ``engine`` inside spans; on leaving, it is as before. Graphs must have been captured.

    attention: also those of the attention backends, inside ``launch``; a graph that has been captured has none.
    """
    runner: Any = engine.runner
    calls = [
        (engine, "_schedule", "schedule"),
        (engine, "_commit", "commit"),
        (engine, "report", "report"),
        (runner.builder, "build", "build"),
        (runner.sampler, "prepare", "build"),
    ]
    if runner.decode_graphs is not None:
        calls.append((runner.decode_graphs, "launch", "build"))
        calls += [(b, call, "launch") for b in runner.decode_graphs._buckets.values() for call in ("forward", "sample")]
    if attention:
        calls += [(b, call, ATTENTION) for b in runner.selector._built.values() for call in ("prefill", "decode")]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in calls]
    engine.runner = _SpannedRunner(runner, span)
    try:
        for (owner, name, call), (_, _, part) in zip(before, calls, strict=True):
            setattr(owner, name, _inside(span, part, call))
        yield
    finally:
        engine.runner = runner
        for owner, name, call in before:
            setattr(owner, name, call)


def _inside(span: Span, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def spanned(*args: Any, **kwargs: Any) -> Any:
        with span(name):
            return call(*args, **kwargs)

    return spanned


class _SpannedRunner:
    def __init__(self, runner: Any, span: Span) -> None:
        self._runner, self._span = runner, span

    def launch(self, schedule: Schedule) -> InFlight:
        with self._span("launch"):
            return _SpannedStep(self._runner.launch(schedule), self._span)

    def synchronize(self) -> None:
        self._runner.synchronize()

    def close(self) -> None:
        self._runner.close()


class _SpannedStep:
    def __init__(self, step: InFlight, span: Span) -> None:
        self.sampled, self.chunks = step.sampled, step.chunks
        self._step, self._span = step, span

    def wait(self) -> SampledTokens:
        with self._span("wait"):
            return self._step.wait()
