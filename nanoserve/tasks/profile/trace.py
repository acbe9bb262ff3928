"""A Chrome trace of ``torch.profiler``, read for what the steps inside it did. Pure Python over its events.

On a GPU *device time* is that of kernels, copies and fills; on a CPU that of PyTorch's operations, each without those
it calls, and what is left of a step is the interpreter's. *Busy* is the union of the device's intervals, so work that
overlaps counts once. *Idle share* is 1 - busy / span, from the beginning of the first marked step to the end of the
last; warm-up and graph capture lie outside of the marks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanoserve.tasks.profile.spans import ATTENTION

ON_DEVICE = {"kernel": "", "gpu_memcpy": "copies", "gpu_memset": "copies"}
RUNTIME = ("cuda_runtime", "cuda_driver")

#: Class of a kernel or operation by the first pattern that occurs in its name; ``other`` if none does.
CLASSES = (
    ("sampling", r"chunk_kernel|pick_kernel|argmax|multinomial|topk|sort|exponential"),
    ("attention", r"flash|paged|int8_fused|hopper_decode|varlen|fmha|attention|attn|softmax|bmm|_plan\b|_merge\b"),
    ("attention", r"unpack_kernel"),
    ("matrix products", r"gemm|gemv|nvjet|cutlass|xmma|splitk|skinny|wgmma|_mm_|::mm\b|addmm|linear|matmul"),
    (
        "norms, rope, activations, cache",
        r"norm|rope|silu|store|rsqrt|elementwise|decode_inputs|index|gather|embedding|vectorized|"
        r"::(add|addcmul|mul|pow|mean|cat|where|copy_|sum|div|exp|max|fill_|clamp_min)",
    ),
    ("copies", r"memcpy|memset|take_kernel"),
)


@dataclass(frozen=True)
class Activity:
    """One kernel, copy, or (on a CPU) operation. Times in µs; duration: without operations that it calls."""

    name: str
    kind: str
    begin: float
    end: float
    duration: float


@dataclass
class Phase:
    """What the device did in ``steps`` marked steps that took ``span`` µs, ``busy`` of them at work.

    launches, syncs: calls of the CUDA runtime by name; empty on a CPU.
    """

    steps: int
    span: float
    busy: float
    on_gpu: bool
    activities: list[Activity]
    launches: Counter[str]
    syncs: Counter[str]

    @property
    def idle_share(self) -> float:
        return 1 - self.busy / self.span

    def by(self, key: str) -> dict[str, tuple[float, float]]:
        """(count, µs) per step by an attribute of the activities, the longest first."""
        count: Counter[str] = Counter()
        time: Counter[str] = Counter()
        for activity in self.activities:
            count[getattr(activity, key)] += 1
            time[getattr(activity, key)] += activity.duration  # type: ignore[assignment]  # a Counter of floats
        return {name: (count[name] / self.steps, us / self.steps) for name, us in time.most_common()}


def classify(name: str) -> str:
    return next((kind for kind, pattern in CLASSES if re.search(pattern, name, re.IGNORECASE)), "other")


def read(trace: Mapping[str, Any], mark: str) -> Phase:
    """The steps annotated ``mark``. Raises ValueError if there are none."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    marks = [event for event in events if event.get("cat") == "user_annotation" and event["name"] == mark]
    if not marks:
        raise ValueError(f"the trace has no step marked {mark!r}")
    begin = min(event["ts"] for event in marks)
    end = max(event["ts"] + event["dur"] for event in marks)
    inside = [event for event in events if event["ts"] < end and event["ts"] + event["dur"] > begin]
    on_gpu = any(event.get("cat") in ON_DEVICE for event in events)
    if on_gpu:
        activities = [
            Activity(
                event["name"],
                ON_DEVICE[event["cat"]] or classify(event["name"]),
                max(begin, event["ts"]),
                min(end, event["ts"] + event["dur"]),
                event["dur"],
            )
            for event in inside
            if event.get("cat") in ON_DEVICE
        ]
    else:
        threads = {event["tid"] for event in marks}
        operations = [event for event in inside if event.get("cat") == "cpu_op" and event["tid"] in threads]
        spans = [event for event in inside if event["name"] == ATTENTION and event.get("cat") == "user_annotation"]
        activities = _operations(operations + spans)
    calls = Counter(event["name"] for event in inside if event.get("cat") in RUNTIME)
    return Phase(
        steps=len(marks),
        span=end - begin,
        busy=union((activity.begin, activity.end) for activity in activities),
        on_gpu=on_gpu,
        activities=activities,
        launches=Counter({n: c for n, c in calls.items() if re.search("LaunchK|GraphLaunch|(cpy|set)Async", n)}),
        syncs=Counter({n: c for n, c in calls.items() if n.endswith("Synchronize") or n in ("cudaMemcpy", "cudaFree")}),
    )


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union."""
    total, last = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, last))
        last = max(last, end)
    return total


def _operations(events: Iterable[Mapping[str, Any]]) -> list[Activity]:
    """Operations of one thread, which nest: the duration of each without those it calls.

    Whatever runs inside a span of attention is attention. Elsewhere, an operation that no pattern knows is of the class
    of its caller.
    """
    found: list[Activity] = []
    callers: list[tuple[Mapping[str, Any], str, list[float]]] = []

    def close(until: float) -> None:
        while callers and callers[-1][0]["ts"] + callers[-1][0]["dur"] <= until:
            event, kind, inner = callers.pop()
            end = event["ts"] + event["dur"]
            if event["cat"] == "cpu_op":
                found.append(Activity(event["name"], kind, event["ts"], end, max(0.0, event["dur"] - sum(inner))))
            if callers:
                callers[-1][2].append(event["dur"])

    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        close(event["ts"])
        caller = callers[-1][1] if callers else "other"
        kind = classify(event["name"])
        callers.append((event, caller if caller == ATTENTION or kind == "other" else kind, []))
    close(float("inf"))
    return found


def named(counts: Counter[str], steps: int) -> str:
    """``1 cudaEventSynchronize, 2.5 …`` per step."""
    return ", ".join(f"{count / steps:g} {name}" for name, count in counts.most_common()) or "none"


def shorten(name: str, width: int = 60) -> str:
    """Template arguments say little."""
    name = re.sub(r"<.*", "<…>", name.removeprefix("void "))
    return name if len(name) <= width else name[: width - 1] + "…"


def longest(phase: Phase, count: int) -> Sequence[tuple[str, str, float, float]]:
    """(name, class, calls per step, µs per step) of the activities that take most of the time."""
    kinds = {activity.name: activity.kind for activity in phase.activities}
    return [(name, kinds[name], calls, us) for name, (calls, us) in list(phase.by("name").items())[:count]]
