"""From measured times to the fewest rows of a threshold table that are nearly as good as knowing the times.

The rows of a phase are the leaves of a decision tree, grown greedily: a region of shapes has one list of backends by
preference, and is cut at the threshold that saves most time, as long as on one side of it the saving is above
``min_gain`` on average. The side below a threshold is written first, with the bound; the other follows without one,
since the first row that matches decides. Differences count by the logarithm of time, so that a long shape weighs no
more than a short one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from nanoserve.contracts.capabilities import Phase
from nanoserve.contracts.policy import SelectionShape

FEATURES: dict[Phase, tuple[str, ...]] = {
    "prefill": ("max_seqlen_q", "num_tokens", "has_prefix", "kv_format"),
    "decode": ("batch", "max_context", "kv_format"),
}


@dataclass(frozen=True)
class Point:
    """times: microseconds of every backend that can serve ``shape``; capturable: those that may be in a CUDA graph."""

    phase: Phase
    shape: SelectionShape
    times: dict[str, float]
    capturable: frozenset[str] = frozenset()

    def loss(self, name: str) -> float:
        """Logarithm of how many times slower than the best backend ``name`` is."""
        return math.log(self.times[name] / min(self.times.values()))

    def captured(self, max_context: int) -> Point:
        """The same point as a CUDA graph meets it: the policy learns the batch, but not the context."""
        shape = replace(self.shape, captured=True, max_context=max_context)
        return replace(self, shape=shape, times={n: t for n, t in self.times.items() if n in self.capturable})


@dataclass(frozen=True)
class Rule:
    """A row of the policy's table. when: conditions as the YAML has them."""

    phase: Phase
    use: tuple[str, ...]
    when: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        when = f", when: {_flow(self.when)}" if self.when else ""
        return f"{{phase: {self.phase}{when}, use: {_flow(self.use)}}}"


def derive(points: Sequence[Point], min_gain: float) -> list[Rule]:
    """Rules of both phases, as far as ``points`` has them.

    Decode inside a CUDA graph is decided by the batch alone, before any context is known. If the rules of decode look
    at the context, rules for graphs come before them, judged by the mean over all contexts that were measured.
    """
    rules: list[Rule] = []
    for phase, features in FEATURES.items():
        of_phase = [point for point in points if point.phase == phase]
        if not of_phase:
            continue
        grown = [Rule(phase, use, when) for when, use in _grow(of_phase, features, min_gain)]
        in_graphs = [point for p in of_phase if (point := p.captured(p.shape.max_context)).times]
        if phase == "decode" and in_graphs and any("max_context" in rule.when for rule in grown):
            leaves = _grow(in_graphs, tuple(f for f in features if f != "max_context"), min_gain)
            rules += [Rule(phase, use, {"captured": True, **when}) for when, use in leaves]
        rules += grown
    return rules


class _Cut(NamedTuple):
    """A region in two: the points that meet a condition, and the others."""

    when: dict[str, Any]
    inside: list[Point]
    outside: list[Point]


def _grow(
    points: Sequence[Point], features: tuple[str, ...], min_gain: float
) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
    """Leaves of the region of ``points``: what is to hold, and the backends by preference."""
    order = _preference(points)
    best: tuple[float, _Cut] | None = None
    for cut in _cuts(points, features):
        sides = (cut.inside, cut.outside)
        gains = [_loss(side, order) - _loss(side, _preference(side)) for side in sides]
        worthwhile = any(gain / len(side) > math.log1p(min_gain) for gain, side in zip(gains, sides, strict=True))
        if worthwhile and (best is None or sum(gains) > best[0]):
            best = sum(gains), cut
    if best is None:
        return [({}, order)]
    cut = best[1]
    below = [({**cut.when, **when}, use) for when, use in _grow(cut.inside, features, min_gain)]
    return below + _grow(cut.outside, features, min_gain)


def _cuts(points: Sequence[Point], features: tuple[str, ...]) -> Iterator[_Cut]:
    for feature in features:
        values = sorted({getattr(point.shape, feature) for point in points})
        conditions: list[tuple[Any, set[Any]]]
        if isinstance(values[0], (str, bool)):
            few = values if len(values) > 2 else values[:-1]
            conditions = [([value] if isinstance(value, str) else value, {value}) for value in few]
        else:
            conditions = [
                ({"max": math.isqrt(low * high)}, {v for v in values if v <= low}) for low, high in pairwise(values)
            ]
        for condition, met in conditions:
            inside = [point for point in points if getattr(point.shape, feature) in met]
            outside = [point for point in points if getattr(point.shape, feature) not in met]
            yield _Cut({feature: condition}, inside, outside)


def _preference(points: Sequence[Point]) -> tuple[str, ...]:
    """Backends by their mean loss over the points that they can serve."""
    losses: dict[str, list[float]] = {}
    for point in points:
        for name in point.times:
            losses.setdefault(name, []).append(point.loss(name))
    return tuple(sorted(losses, key=lambda name: (sum(losses[name]) / len(losses[name]), name)))


def _loss(points: Sequence[Point], order: Sequence[str]) -> float:
    return sum(point.loss(next(name for name in order if name in point.times)) for point in points)


def _flow(value: Any) -> str:
    """YAML in one line."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_flow(item)}' for key, item in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_flow, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
