"""``task=compare base=a.json new=b.json gate=NAME``: what got better, what got worse, and whether that is too much.

Without records two engines are measured here, in one process and by turns, so that what disturbs one disturbs the
other: the configured one, and the same with the plugins of ``against``, or with INT8 KV if it names none. Choosing a
plugin is no regression, so nothing is gated then.

Rule of the gate. A metric falls when the median of its repeats got worse by more than its limit (a share of the
base's median) *and* the middle halves of the repeats, first to third quartile, do not overlap: a difference within
the noise is none. Records without repeats have no noise to show, and the limit alone decides. A metric that was defined
and no longer is has fallen; so has a count of something bad that was 0.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from nanoserve.config import PluginChoice, build, did_you_mean
from nanoserve.contracts.errors import ConfigError, NanoserveError
from nanoserve.metrics import better
from nanoserve.tasks import compare_report
from nanoserve.tasks.bench.record import composition, describe, print_line, print_table
from nanoserve.tasks.bench.serve import FIGURES, Repeats, Serve, resolve
from nanoserve.tasks.compare_changes import Change, Sample, number

if TYPE_CHECKING:
    from nanoserve.config import EngineConfig
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
class Against:
    """Plugins of the second engine; None: as in the first."""

    #: What the second engine has where nothing is chosen for it.
    DEFAULT: ClassVar = {"kv": "int8"}

    attention: str | None = None
    kv: str | None = None
    scheduler: str | None = None
    policy: str | None = None

    @property
    def plugins(self) -> dict[str, PluginChoice]:
        chosen = {group: name for group, name in asdict(self).items() if name is not None}
        return {group: PluginChoice(name) for group, name in (chosen or self.DEFAULT).items()}


@dataclass(frozen=True)
class Options:
    """The keys of ``conf/task/compare.yaml``. base, new: both, or neither: then ``bench`` is run with two engines.

    report: file for a page about the two engines; quality: record of ``task=eval`` for it.
    """

    gate: Gate
    bench: dict[str, Any]
    against: Against = Against()
    base: str | None = None
    new: str | None = None
    report: str | None = None
    quality: str | None = None

    def __post_init__(self) -> None:
        if (self.base is None) != (self.new is None):
            raise ConfigError("base and new: give the files of two records, or neither to measure two engines here")
        if self.base is not None and self.against != Against():
            raise ConfigError(
                "against: it is for two engines that are measured here; leave base and new out, or against"
            )
        if self.report is not None and self.base is not None:
            raise ConfigError("report: it is about two engines that are measured here; leave base and new out")
        if self.quality is not None and self.report is None:
            raise ConfigError("quality: it goes into a page, so report=FILE is needed too")


def run(job: Job) -> dict[str, Any]:
    options: Options = job.options
    quality = None
    page = job.file("report", options.report)
    plugins: dict[str, Any] = options.against.plugins
    configs = [job.config, replace(job.config, **plugins)]
    if options.quality is not None:
        quality = compare_report.read_quality(options.quality, (configs[0].kv.name, configs[1].kv.name))
    if options.base is None or options.new is None:
        base, new = side_by_side(job, configs)
        gate = Gate({})
    else:
        base, new = _read("base", options.base), _read("new", options.new)
        gate = options.gate
        _same(base, new, gate)
    changes = compare(base, new, gate)
    shown = [c for c in changes if c.limit is not None or c.name in FIGURES or c.verdict in ("better", "worse")]
    print_table(
        "base → new: median (first … third quartile of the repeats)",
        ["metric", "better", "base", "new", "new / base", "verdict", "limit"],
        [[c.name, better(c.name), c.base, c.new, number(c.ratio), c.verdict, _share(c.limit)] for c in shown],
    )
    print_line(f"{len(changes) - len(shown)} more metrics are the same or within the noise")
    if unbounded := [key for key, record in (("base", base), ("new", new)) if len(record.get("runs", [])) < 2]:
        print_line(f"{' and '.join(unbounded)}: one run, so no noise bounds: all may be noise (bench.repeat=5 tells)")
    for key, record in (("base", base), ("new", new)):
        print_line(f"{key}: {record.get('hardware')}, git {record.get('git')}, {composition(record)}")
    if page is not None:
        compare_report.write(page, (base, new), changes, configs, job.registry, quality)
        print_line(f"{page}: speed, capacity and quality side by side")
    fallen = [change for change in changes if change.verdict == "fell"]
    if fallen:
        reasons = "; ".join(f"{c.name} {c.base} → {c.new}, limit {_share(c.limit)}" for c in fallen)
        raise RegressionError(f"{len(fallen)} of {len(gate.limits)} gated metrics fell: {reasons}")
    ratios = {f"{c.name}, new / base": c.ratio for c in changes if c.name in ("output tok/s", "TTFT p50 ms")}
    return {"compared": len(changes), "fell": 0, **{k: v and float(f"{v:.4g}") for k, v in ratios.items()}}


def side_by_side(job: Job, configs: Sequence[EngineConfig]) -> list[dict[str, Any]]:
    """The records of two engines that run the workload of ``bench`` by turns."""
    from tqdm import tqdm

    options: Options = job.options
    workload = build(Serve, resolve(options.bench), "bench")
    # The second engine gets what the first leaves of a GPU.
    half = replace(configs[0].engine, gpu_memory_utilization=configs[0].engine.gpu_memory_utilization / 2)
    jobs = [replace(job, config=replace(configs[0], engine=half)), replace(job, config=configs[1])]
    with contextlib.ExitStack() as stack:
        llms = [stack.enter_context(one.llm()) for one in jobs]
        bar = stack.enter_context(tqdm(unit="request", disable=not sys.stderr.isatty()))
        both = [Repeats(llm, workload) for llm in llms]
        bar.reset(total=sum(one.num_requests for one in both))
        for i in range(workload.repeat):
            for repeats in both if i % 2 == 0 else both[::-1]:  # who goes first finds another machine than who follows
                repeats.run(bar.update)
        return [{**describe(one.llm), "workload": asdict(workload), **one.result().record} for one in both]


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
    for figures in (record["figures"], *record.get("runs", [])):
        for name, value in figures.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{key}: {path!r} has {name} {value}, which compares with nothing; measure it again")
    return record


def _same(base: Mapping[str, Any], new: Mapping[str, Any], gate: Gate) -> None:
    if gate.same_hardware and base.get("hardware") != new.get("hardware"):
        raise ConfigError(
            f"base was measured on {base.get('hardware')}, new on {new.get('hardware')}; "
            "absolute figures of different hardware prove nothing (gate.same_hardware=false compares them anyway)"
        )
    before, after = ({k: v for k, v in r.get("workload", {}).items() if k != "repeat"} for r in (base, new))
    keys = sorted(key for key in {*before, *after} if before.get(key) != after.get(key))
    if gate.same_workload and keys:
        raise ConfigError(
            f"the workloads differ in {', '.join(f'{k} ({before.get(k)} and {after.get(k)})' for k in keys)}; "
            "measure the same one twice (gate.same_workload=false compares them anyway)"
        )


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
