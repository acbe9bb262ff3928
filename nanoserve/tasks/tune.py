"""``task=tune``: measure where one attention backend overtakes another on this device, and write that as a policy.

Every backend that can run here is timed (:mod:`nanoserve.tasks.kernels.measure`) over grids of shapes, in both phases,
for several KV formats. A backend that is left far behind at a few shapes running is not measured at the larger ones.
The times become the rows of a table that policy ``auto`` reads (:mod:`nanoserve.tasks.kernels.rules`), written with
what it costs against always knowing the best. Shapes that do not fit the device, or the time limit, are left out and
named.
"""

from __future__ import annotations

import datetime
import importlib.util
import math
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nanoserve.config import CONFIG_PATHS, config_folders, group_names
from nanoserve.contracts.capabilities import PHASES, Phase
from nanoserve.contracts.errors import ConfigError
from nanoserve.contracts.policy import SelectionPolicy, SelectionShape
from nanoserve.tasks.bench.record import environment, print_line, print_table, write
from nanoserve.tasks.kernels.measure import Bench, Effort, Heads, ShapeOutOfMemoryError, Timing, out_of_memory
from nanoserve.tasks.kernels.rules import Point, Rule, derive
from nanoserve.tasks.kernels.shapes import CPU_TABLE, KernelShape, parse_all

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nanoserve.registry import Registry
    from nanoserve.tasks import Job

#: Small to large, since slow backends drop out on the way.
GRID: dict[Phase, tuple[str, ...]] = {
    "prefill": (
        *("1x32", "8x32", "8x128", "1x256", "8x256", "8x512", "1x1024", "8x1024", "4x4096"),
        *("8x32+1000", "4x256+2000", "4x512+7500"),
    ),
    "decode": (
        *("1x512", "8x512", "32x512", "128x512", "256x512", "1x2048", "8x2048", "32x2048", "128x2048", "256x2048"),
        *("1x8192", "8x8192", "32x8192", "1x32768"),
    ),
}
QUICK_GRID: dict[Phase, tuple[str, ...]] = {
    "prefill": ("8x32", "8x256", "8x1024", "4x512+4000"),
    "decode": ("1x512", "8x2048", "32x2048", "256x1024"),
}
EFFORT, QUICK_EFFORT = Effort(rounds=7, milliseconds=2.0, gigabytes=1.0), Effort(5, 1.0, 0.5)
#: A backend this many times slower than the best, at so many shapes running, is given up.
FAR_BEHIND, PATIENCE = 3.0, 3


@dataclass(frozen=True)
class Options:
    """The keys of ``conf/task/tune.yaml``.

    formats: KV formats; None is all that can be used here, or with ``quick`` the one of ``kv=``. prefill_shapes,
    decode_shapes: names as :class:`KernelShape` reads them; None is the built-in grid. min_gain: share of the time that
    a rule must save. seconds: after which no further shape is begun; None is 160, or 40 with ``quick``.
    """

    quick: bool = False
    formats: list[str] | None = None
    prefill_shapes: list[str] | None = None
    decode_shapes: list[str] | None = None
    num_q_heads: int = 16
    num_kv_heads: int = 8
    head_dim: int = 128
    min_gain: float = 0.02
    seconds: float | None = None
    output: str | None = None
    plot: str | None = None
    record: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.min_gain < 1:
            raise ConfigError(f"min_gain must be at least 0 and below 1, not {self.min_gain}")
        if self.seconds is not None and not self.seconds > 0:
            raise ConfigError(f"seconds must be above 0, not {self.seconds}")
        if self.formats == []:
            raise ConfigError("formats: the list is empty; null is all")
        if self.prefill_shapes == [] and self.decode_shapes == []:
            raise ConfigError("prefill_shapes, decode_shapes: there is nothing to measure")
        if self.output is not None and (
            Path(self.output).suffix != ".yaml" or Path(self.output).parent.name != "policy"
        ):
            raise ConfigError(
                f"output must be FOLDER/policy/NAME.yaml, where a configuration finds it, not {self.output}"
            )
        if self.plot is not None and not has_matplotlib():
            raise ConfigError("plot: it needs matplotlib; pip install 'nanoserve[bench]', or leave plot out")


@dataclass
class Series:
    """Times of one phase and KV format. behind: at how many shapes running a backend has been far behind."""

    bench: Bench
    phase: Phase
    shapes: list[KernelShape]
    times: dict[str, dict[str, Timing]] = field(default_factory=dict)
    behind: dict[str, int] = field(default_factory=dict)

    def measure(self, shape: KernelShape) -> None:
        """Raises torch.OutOfMemoryError."""
        names = [name for name in self.bench.candidates[self.phase] if self.behind.get(name, 0) < PATIENCE]
        timings = self.bench.measure(shape, names, with_torch=False)
        self.times[shape.name] = timings
        best = min((t.us for t in timings.values() if t.valid and t.us is not None), default=0.0)
        for name, timing in timings.items():
            far = not timing.valid or (timing.us or 0.0) > FAR_BEHIND * best
            self.behind[name] = self.behind.get(name, 0) + 1 if far else 0

    def points(self, never: Iterable[str]) -> list[Point]:
        """Without the backends of ``never``. What has no time at a shape, having failed or been given up, counts as far
        behind there."""
        names = [name for name in self.bench.candidates[self.phase] if name not in set(never)]
        points = []
        for shape in self.shapes:
            measured = {n: t.us for n, t in self.times.get(shape.name, {}).items() if n in names and t.us is not None}
            if not measured:
                continue
            slow = FAR_BEHIND * min(measured.values())
            points.append(
                Point(
                    self.phase,
                    selection_shape(self.bench, shape),
                    {name: measured.get(name, slow) for name in names},
                    frozenset(name for name in names if self.phase == "decode" and self.bench.capturable(name)),
                )
            )
        return points


def selection_shape(bench: Bench, shape: KernelShape) -> SelectionShape:
    """As the engine's runner describes such a step to the policy."""
    return SelectionShape(
        batch=shape.batch,
        num_tokens=shape.num_tokens,
        max_seqlen_q=max(shape.query_lens),
        max_context=max(shape.context_lens),
        kv_format=bench.kv,
        compute_capability=bench.capability,
        has_prefix=shape.has_prefix,
    )


def run(job: Job) -> dict[str, Any]:
    options: Options = job.options
    if job.config.attention.name != "auto":
        raise ConfigError(f"attention={job.config.attention.name}: tune compares backends; leave attention=auto")
    output, record_file = job.file("output", options.output), job.file("record", options.record)
    plot_file = job.file("plot", options.plot, (".svg", ".png"))
    start = time.perf_counter()
    series = make_series(job, options)
    bench = series[0].bench
    left_out = measure_all(series, start, options.seconds or (40.0 if options.quick else 160.0))
    wrong = {
        name: one.bench.kv for one in series for t in one.times.values() for name, timing in t.items() if timing.wrong
    }
    broken = {phase: failed_everywhere([one for one in series if one.phase == phase]) for phase in PHASES}
    points = [point for one in series for point in one.points({*wrong, *broken[one.phase]})]
    if not points:
        why = f"left out: {', '.join(left_out)}" if left_out else "no backend gave a right result"
        raise ConfigError(f"no shape could be measured: {why}")
    rules = derive(points, options.min_gain)
    policy = make_policy(job.registry, rules)
    regret = [share_lost(policy, point) for point in points]
    in_graphs = [share_lost(policy, captured) for p in points if (captured := as_captured(p)).times]

    for one in series:
        print_series(one, policy, {*wrong, *broken[one.phase]})
    for name, kv in sorted(wrong.items()):
        how = f"task=bench_kernels backends=[{name}] kv={kv} engine.dtype={job.config.engine.dtype}"
        print_line(f"{name} gave WRONG results and is in no rule; {how} shows where")
    for phase, names in broken.items():
        for name in sorted(names):
            print_line(f"{name} failed in {phase} wherever it was tried, and is in no rule for it")
    if left_out:
        print_line(f"left out: {', '.join(left_out)}")
    print_line(f"{environment(bench.device)['hardware']}: {len(points)} shapes in {time.perf_counter() - start:.0f} s")
    if bench.device.type != "cuda":
        print_line("wall time on a CPU, launches included: the policy is for this CPU and says nothing about a GPU")

    output = output or (job.folder or Path()) / f"policy/tuned_{short_name(bench.device)}.yaml"
    output.parent.mkdir(parents=True, exist_ok=True)
    text = policy_text(bench, rules, regret, options.min_gain)
    output.write_text(text, encoding="utf-8")
    print_line(f"\n{text}")
    print_line(f"written to {output}; {how_to_use(output)}")
    if has_matplotlib():
        plot_file = plot_file or output.with_suffix(".svg")
        plot_file.parent.mkdir(parents=True, exist_ok=True)
        plot(series).savefig(plot_file)
        print_line(f"plotted in {plot_file}")
    else:
        print_line("not plotted: pip install 'nanoserve[bench]'")
    if record_file is not None:
        write(record_file, record(series, rules))
    return {
        "shapes": len(points),
        "rules": len(rules),
        "mean loss": f"{sum(regret) / len(regret):.1%}",
        "largest loss": f"{max(regret):.1%}",
        "largest loss in graphs": f"{max(in_graphs):.1%}" if in_graphs else None,
        "policy": str(output),
    }


def make_series(job: Job, options: Options) -> list[Series]:
    effort = QUICK_EFFORT if options.quick else EFFORT
    heads = Heads(options.num_q_heads, options.num_kv_heads, options.head_dim)
    first = Bench(job.config, job.registry, heads, job.config.kv.name, effort)
    formats = options.formats
    if formats is None:
        usable = [s.name for s in job.registry.specs("kvcache") if not s.capabilities.refusals(first.need)]
        formats = [first.kv] if options.quick else usable
    if first.kv not in formats and first.kv_options != first.spec.config():
        raise ConfigError(
            f"kv={first.kv} is given options, and is not among formats: {', '.join(formats)}; add it there"
        )
    grid = (QUICK_GRID if options.quick else GRID) if first.device.type == "cuda" else CPU_TABLE
    given = {"prefill": options.prefill_shapes, "decode": options.decode_shapes}
    return [
        Series(bench, phase, shapes)
        for bench in [Bench(job.config, job.registry, heads, kv, effort) for kv in formats]
        for phase in PHASES
        if (shapes := parse_all(grid[phase] if given[phase] is None else given[phase] or (), phase))
    ]


def failed_everywhere(series: Sequence[Series]) -> set[str]:
    """Backends that were tried and have no time at any shape of any KV format."""
    tried = [(name, t.us) for one in series for timings in one.times.values() for name, t in timings.items()]
    return {name for name, _ in tried} - {name for name, us in tried if us is not None}


def measure_all(series: Sequence[Series], start: float, seconds: float) -> list[str]:
    """A shape of every series in turn, so that a time limit cuts all of them alike. Returns what was left out."""
    left_out = []
    for shapes in zip_longest(*(one.shapes for one in series)):
        for one, shape in zip(series, shapes, strict=True):
            if shape is None:
                continue
            what = f"{one.phase} {shape.name} {one.bench.kv}"
            if time.perf_counter() - start > seconds:
                left_out.append(f"{what} (time)")
                continue
            try:
                one.measure(shape)
            except RuntimeError as error:
                if not out_of_memory(f"{type(error).__name__}: {error}"):
                    raise
                why = f": {error}" if isinstance(error, ShapeOutOfMemoryError) else ""
                left_out.append(f"{what} (memory{why})")
            if sys.stderr.isatty():
                print(f"{time.perf_counter() - start:5.0f} s  {what}", file=sys.stderr)
    return left_out


# --- the policy ------------------------------------------------------------------------------------------------------


def make_policy(registry: Registry, rules: Sequence[Rule]) -> SelectionPolicy:
    """Policy ``auto`` as it will read the rules."""
    from omegaconf import OmegaConf

    spec = registry.get("policy", "auto")
    values: Any = OmegaConf.to_container(OmegaConf.create(table_text(rules)))
    policy: SelectionPolicy = spec.factory(registry.make_options("policy", spec, values))
    return policy


def share_lost(policy: SelectionPolicy, point: Point) -> float:
    """How much longer the policy's choice takes than the best: 0.05 is 5 %."""
    return math.expm1(point.loss(policy.select(point.phase, point.shape, tuple(point.times))))


def as_captured(point: Point) -> Point:
    """What the engine asks when it captures a graph: the longest context stands for all."""
    return point.captured(max_context=1 << 20)


def table_text(rules: Sequence[Rule]) -> str:
    return "table:\n" + "".join(f"  - {rule}\n" for rule in rules)


def policy_text(bench: Bench, rules: Sequence[Rule], regret: Sequence[float], min_gain: float) -> str:
    heads = bench.heads
    return (
        f"# Measured by task=tune on {environment(bench.device)['hardware']}, {datetime.date.today()}: "
        f"torch {torch.__version__},\n"
        f"# {heads.num_q}/{heads.num_kv} heads of {heads.dim}, {str(bench.dtype)[6:]}, blocks of {bench.block_size}. "
        f"At {len(regret)} shapes it is {sum(regret) / len(regret):.1%} slower\n"
        f"# than the best backend on average, {max(regret):.1%} at most; a rule had to gain {min_gain:.0%}.\n"
        f"name: auto\n{table_text(rules)}"
    )


def short_name(device: torch.device) -> str:
    """``NVIDIA GeForce RTX 3060 Laptop GPU`` → ``rtx_3060_laptop``."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "_".join(word for word in words if word not in ("nvidia", "geforce", "gpu"))


def how_to_use(output: Path) -> str:
    folder, name = output.parent.parent, output.stem
    if folder.resolve() in [Path(str(own)).resolve() for own in config_folders(CONFIG_PATHS)]:
        return f"use it: nanoserve policy={name}"
    if name in group_names("policy"):
        return f"rename it, since nanoserve has a policy {name} of its own, to use it with --config-dir {folder}"
    return f"use it: nanoserve --config-dir {folder} policy={name}"


# --- what is shown ---------------------------------------------------------------------------------------------------


def print_series(series: Series, policy: SelectionPolicy, wrong: Iterable[str]) -> None:
    """Microseconds of every backend, the policy's choice, also for a CUDA graph, and what that costs."""
    names = list(series.bench.candidates[series.phase])
    points = {point.shape: point for point in series.points(wrong)}
    rows = []
    for shape in series.shapes:
        timings = series.times.get(shape.name, {})
        point = points.get(selection_shape(series.bench, shape))
        if point is None:
            continue
        choices = [_choice(policy, point)]
        if series.phase == "decode":
            choices.append(_choice(policy, as_captured(point)))
        rows.append([shape.name, *(_cell(timings.get(name)) for name in names), *choices])
    columns = ["shape", *names, "chosen", *(["in a graph"] if series.phase == "decode" else [])]
    print_table(f"{series.phase}, kv {series.bench.kv}: µs", columns, rows)


def _choice(policy: SelectionPolicy, point: Point) -> str:
    if not point.times:
        return "–"
    loss = share_lost(policy, point)
    return policy.select(point.phase, point.shape, tuple(point.times)) + (f" +{loss:.1%}" if loss else "")


def _cell(timing: Timing | None) -> str:
    if timing is None:
        return "far behind"
    if timing.us is None:
        return "failed"
    return "WRONG" if timing.wrong else f"{'~' if timing.plain else ''}{timing.us:.1f}"


def plot(series: Sequence[Series]) -> Figure:
    """Per phase and format, how many times slower than the best each backend is at each shape."""
    from matplotlib.figure import Figure

    columns = 2 if len(series) > 1 else 1
    rows = -(-len(series) // columns)
    figure = Figure(figsize=(7 * columns, 3.6 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flat
    for axes, one in zip(grid, series, strict=False):
        shapes = [shape.name for shape in one.shapes if shape.name in one.times]
        best = {s: min((t.us for t in one.times[s].values() if t.valid and t.us), default=math.nan) for s in shapes}
        for name in one.bench.candidates[one.phase]:
            found = [(s, one.times[s][name]) for s in shapes if name in one.times[s]]
            ratios = [(s, timing.us / best[s]) for s, timing in found if timing.valid and timing.us is not None]
            axes.plot([shapes.index(s) for s, _ in ratios], [ratio for _, ratio in ratios], marker="o", label=name)
        axes.set_xticks(range(len(shapes)), shapes, rotation=60, fontsize="small")
        axes.set(title=f"{one.phase}, kv {one.bench.kv}", ylabel="time / best", yscale="log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    for axes in list(grid)[len(series) :]:
        axes.remove()
    return figure


def has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def record(series: Sequence[Series], rules: Sequence[Rule]) -> dict[str, Any]:
    return {
        **environment(series[0].bench.device),
        "rules": [str(rule) for rule in rules],
        "results": [
            {
                "phase": one.phase,
                **one.bench.measured(),
                "shape": shape,
                "us": {n: t.us for n, t in timings.items()},
            }
            for one in series
            for shape, timings in one.times.items()
        ],
    }
