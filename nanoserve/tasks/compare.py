"""``task=compare base=a.json new=b.json gate=NAME``: what got better, what got worse, and whether that is too much.

Rule of the gate. A metric falls when the median of its repeats got worse by more than its limit (a share of the
base's median) *and* the middle halves of the repeats, first to third quartile, do not overlap: a difference within
the noise is none. Records without repeats have no noise to show, and the limit alone decides. A metric that was defined
and no longer is has fallen; so has a count of something bad that was 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nanoserve.config import did_you_mean
from nanoserve.contracts.errors import ConfigError, NanoserveError
from nanoserve.metrics import better, percentile
from nanoserve.tasks.bench.record import print_line, print_table
from nanoserve.tasks.bench.serve import FIGURES

if TYPE_CHECKING:
    from nanoserve.tasks import Job


class RegressionError(NanoserveError):
    """A gated metric fell."""


@dataclass(frozen=True)
class Gate:
    """The keys of ``conf/gate``. limits: share of the base's value that each metric may lose."""

    limits: dict[str, float]
    same_hardware: bool = True
    same_workload: bool = True

    def __post_init__(self) -> None:
        for name, limit in self.limits.items():
            if better(name) is None:
                raise ConfigError(f"gate.limits: no direction of {name!r} is good or bad, so it cannot fall")
            if not 0 <= limit < math.inf:
                raise ConfigError(f"gate.limits: the limit of {name!r} must be at least 0, not {limit}")


@dataclass(frozen=True)
class Options:
    """The keys of ``conf/task/compare.yaml``."""

    base: str
    new: str
    gate: Gate


@dataclass(frozen=True)
class Sample:
    """One metric of one record. values: its repeats; empty if it is undefined."""

    values: list[float] = field(default_factory=list)

    def quantile(self, q: float) -> float | None:
        return percentile(self.values, q)

    def __str__(self) -> str:
        if not self.values:
            return "–"
        middle, low, high = (_number(self.quantile(q)) for q in (50, 25, 75))
        return middle if len(self.values) == 1 else f"{middle} ({low} … {high})"


@dataclass(frozen=True)
class Change:
    """base, new: the metric in both records. limit: None if it is not gated."""

    name: str
    base: Sample
    new: Sample
    limit: float | None

    @property
    def ratio(self) -> float | None:
        """Median of new over median of base."""
        base, new = self.base.quantile(50), self.new.quantile(50)
        if base is None or new is None:
            return None
        return new / base if base else (1.0 if new == 0 else None)

    @property
    def loss(self) -> float | None:
        """Share of the base's value by which it got worse, negative if better; infinite from 0 or into nothing."""
        base, new = self.base.quantile(50), self.new.quantile(50)
        if base is None:
            return None
        if new is None:
            return math.inf
        worse = base - new if better(self.name) == "higher" else new - base
        return worse / abs(base) if base else math.copysign(math.inf, worse) if worse else 0.0

    @property
    def verdict(self) -> Literal["fell", "noise", "worse", "better", "same", ""]:
        loss = self.loss
        if loss is None:
            return ""
        if not self.base.values or not self.new.values:
            apart = True
        else:
            (b1, b3), (n1, n3) = [(s.quantile(25), s.quantile(75)) for s in (self.base, self.new)]
            apart = n1 > b3 or n3 < b1  # type: ignore[operator]  # neither is empty
        if loss == 0:
            return "same"
        if not apart:
            return "noise"
        if loss < 0:
            return "better"
        return "fell" if self.limit is not None and loss > self.limit else "worse"


def run(job: Job) -> dict[str, Any]:
    options = job.options
    base, new = (_read(key, path) for key, path in (("base", options.base), ("new", options.new)))
    _same(base, new, options.gate)
    changes = compare(base, new, options.gate)
    shown = [c for c in changes if c.limit is not None or c.name in FIGURES or c.verdict in ("better", "worse")]
    print_table(
        "base → new: median (first … third quartile of the repeats)",
        ["metric", "better", "base", "new", "new / base", "verdict", "limit"],
        [[c.name, better(c.name), c.base, c.new, _number(c.ratio), c.verdict, _share(c.limit)] for c in shown],
    )
    print_line(f"{len(changes) - len(shown)} more metrics are the same or within the noise")
    for key, record in (("base", base), ("new", new)):
        engine = record.get("engine", {})
        print_line(
            f"{key}: {record.get('hardware')}, git {record.get('git')}, {engine.get('model')}, "
            f"attention {engine.get('attention')}, kv {engine.get('kv')}, scheduler {engine.get('scheduler')}"
        )
    fallen = [change for change in changes if change.verdict == "fell"]
    if fallen:
        reasons = "; ".join(f"{c.name} {c.base} → {c.new}, limit {_share(c.limit)}" for c in fallen)
        raise RegressionError(f"{len(fallen)} of {len(options.gate.limits)} gated metrics fell: {reasons}")
    return {"compared": len(changes), "fell": 0}


def compare(base: Mapping[str, Any], new: Mapping[str, Any], gate: Gate) -> list[Change]:
    """Every metric with a good direction that either record has, the gated ones first.

    Raises ConfigError for a gated metric that neither has.
    """
    known = [n for n in {**base["figures"], **new["figures"]} if better(n) is not None]
    for name in gate.limits:
        if name not in known:
            raise ConfigError(f"gate.limits: neither record has {name!r}{did_you_mean(name, known)}")
    names = [*gate.limits, *(name for name in known if name not in gate.limits)]
    return [Change(name, _sample(base, name), _sample(new, name), gate.limits.get(name)) for name in names]


def _sample(record: Mapping[str, Any], name: str) -> Sample:
    """The repeats of a metric, or its one figure if the record keeps no repeats of it."""

    def numbers(runs: list[dict[str, Any]]) -> list[float]:
        return [value for run_ in runs if isinstance(value := run_.get(name), (int, float))]

    return Sample(numbers(record.get("runs", [])) or numbers([record["figures"]]))


def _read(key: str, path: str) -> dict[str, Any]:
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path!r}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{key}: {path!r} is not JSON: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get("figures"), dict):
        raise ConfigError(f"{key}: {path!r} is no record of task=bench (it has no figures)")
    return record


def _same(base: Mapping[str, Any], new: Mapping[str, Any], gate: Gate) -> None:
    if gate.same_hardware and base.get("hardware") != new.get("hardware"):
        raise ConfigError(
            f"base was measured on {base.get('hardware')}, new on {new.get('hardware')}; "
            "absolute figures of different hardware prove nothing (gate.same_hardware=false compares them anyway)"
        )
    before, after = ({k: v for k, v in r.get("workload", {}).items() if k != "repeat"} for r in (base, new))
    if gate.same_workload and before != after:
        keys = sorted(key for key in {*before, *after} if before.get(key) != after.get(key))
        raise ConfigError(
            f"the workloads differ in {', '.join(f'{k} ({before.get(k)} and {after.get(k)})' for k in keys)}; "
            "measure the same one twice (gate.same_workload=false compares them anyway)"
        )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
