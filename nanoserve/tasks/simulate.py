"""``task=simulate``: a scheduler without a model, on a workload of ``conf/simulate``.

Scheduler, block manager and prefix cache are the engine's own; only the device is missing. Without a latency model
every step lasts one *round*, the clock counts rounds, and a workload's times are in rounds too. With one, fitted from
the steps of a ``task=bench`` record (``simulate.fit=FILE``), the same run predicts TTFT, TPOT and goodput in seconds.
To learn step times once and to search configurations on a simulator is the idea of VIDUR (Agrawal et al., "Vidur: A
Large-Scale Simulation Framework for LLM Inference", MLSys 2024); the model here is far simpler, four coefficients, so
it says how far off it was on the run it was fitted on and on another one (``simulate.check=FILE``), and what it could
not learn. What limits it is seldom the form: requests of one length tie the context to the number of sequences, so one
run does not tell what each costs, and several do (``simulate.fit=FOLDER``, of a sweep). It does not know the square of
a long prompt's attention, and a machine that is slower in one run than in another puts all of its times off alike.

Definitions. *recomputed tokens*: tokens whose KV was computed, lost in a preemption, and computed again. *passed
over*: the most steps in a row that did not serve an unfinished request, and *wait* the longest time between two that
did (or from its arrival to the first); their maxima are the starvation age. *reserved up front*: blocks that all
requests together would hold if each reserved its full length when it is admitted.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nanoserve.config import EngineConfig, EngineOptions, PluginChoice, build
from nanoserve.contracts.errors import ConfigError
from nanoserve.contracts.scheduling import SchedulerLimits
from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.simulator import Progress, Replay, StepLoad
from nanoserve.metrics import QUANTILES, Objectives, percentile, summarise
from nanoserve.tasks.bench.record import by_priority, print_line, print_table, unused_priorities, write
from nanoserve.tasks.bench.serve import OF_PRIORITY
from nanoserve.workload import Workload, WorkloadOptions, make_workload

if TYPE_CHECKING:
    from nanoserve.registry import Registry
    from nanoserve.tasks import Job

SCHEMA = "nanoserve.simulate/1"
TIMELINE_WIDTH = 100  # characters


@dataclass(frozen=True)
class Simulation(WorkloadOptions):
    """A workload, and how its steps are timed and judged.

    fit, check: JSON files of ``task=bench``: the latency model is fitted on one and tried on the other. fit may be a
    folder, such as that of a sweep; then it is fitted on all ``bench.json`` in it.
    ttft_slo_ms, tpot_slo_ms: the objectives of goodput, with a latency model only.
    timeline: print what happened to each request. plot: file for a plot of the run, .svg or .png.
    """

    fit: str | None = None
    check: str | None = None
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None
    timeline: bool = False
    plot: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("check", "ttft_slo_ms", "tpot_slo_ms"):
            if getattr(self, key) is not None and self.fit is None:
                raise ValueError(f"{key} needs a latency model: set fit to the JSON of a task=bench run")
        for key in ("ttft_slo_ms", "tpot_slo_ms"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise ValueError(f"{key} must be above 0, not {value!r}")

    @property
    def objectives(self) -> Objectives:
        def seconds(ms: float | None) -> float | None:
            return None if ms is None else ms / 1e3

        return Objectives(seconds(self.ttft_slo_ms), seconds(self.tpot_slo_ms))


@dataclass(frozen=True)
class Options:
    """The keys of ``conf/task/simulate.yaml``; ``simulate`` is one of ``conf/simulate``."""

    simulate: Simulation
    output: str | None = None


def run(job: Job) -> dict[str, Any]:
    options: Simulation = job.options.simulate
    if options.plot is not None:
        require_matplotlib()
    plotted = job.file("simulate.plot", options.plot, (".svg", ".png"))
    output = job.file("output", job.options.output)
    model = comparisons = None
    if options.fit is not None:
        records = read_records(options.fit, "simulate.fit")
        fitted_on = [step for record in records.values() for step in record["steps"]]
        if options.check is not None:
            records["check"] = read_record(options.check, "simulate.check")
        same_engine(job.config, next(iter(records.values())))
        model = LatencyModel.fit(fitted_on)
        comparisons = {name: compare(record, model, job.registry) for name, record in records.items()}
    replay = make_replay(job.config, job.registry, options, model)
    drive(replay)
    figures = summary(replay, options.objectives, timed=model is not None)
    print_summary(replay, figures, job.config, timed=model is not None)
    priorities = [request.priority for request in replay.workload.requests]
    classes = by_priority(priorities, [p.timeline for p in replay.progress], options.objectives)
    print_priorities(classes, timed=model is not None)
    for line in unused_priorities(replay.scheduler, priorities):
        print_line(line)
    if options.timeline:
        print("\n".join(timeline(replay)))
    if model is not None and comparisons is not None:
        print_accuracy(model, comparisons)
        print_line("fitted on {}, kv {}, {}".format(*engine_of(next(iter(records.values())))))
        if "check" in records and engine_of(records["check"]) != engine_of(next(iter(records.values()))):
            print_line("simulate.check was measured on {}, kv {}, {}".format(*engine_of(records["check"])))
        for name, loads in (
            ("this workload", [step.load for step in replay.steps]),
            *([("the run of simulate.check", records["check"]["steps"])] if "check" in records else ()),
        ):
            for line in not_learnt(fitted_on, loads, name):
                print_line(line)
    if plotted is not None:
        plotted.parent.mkdir(parents=True, exist_ok=True)
        plot(replay, plotted, "seconds" if model is not None else "rounds")
    if output is not None:
        record = {
            "schema": SCHEMA,
            "workload": asdict(options),
            "config": asdict(job.config),
            "engine": {"num_blocks": replay.blocks.num_blocks, "max_model_len": replay.limits.max_model_len},
            "latency_model": None if model is None else asdict(model),
            "accuracy": comparisons,
            "figures": figures,
            "priorities": classes,
            "requests": [request_row(progress) for progress in replay.progress],
            "steps": [[*step.load, step.end - step.start] for step in replay.steps],
        }
        write(output, record)
    shown = {name: figures.get(name) for name in SHOWN}
    for one, of_class in classes.items():
        name, value = "TTFT p95 ms", of_class["TTFT p95 ms"]
        shown[f"priority {one}: {name if model else _in_rounds(name)}"] = value if model else _rounds(name, value)
    return {name: _rounded(value) for name, value in shown.items() if value is not None}


# --- the run -----------------------------------------------------------------------------------------------------


def make_replay(config: EngineConfig, registry: Registry, options: Simulation, model: LatencyModel | None) -> Replay:
    """The composed scheduler, limits and pool, about to meet the workload."""
    engine = config.engine
    if engine.num_kv_blocks is None:
        raise ConfigError("engine.num_kv_blocks: task=simulate needs a number; task=capacity says what fits a GPU")
    if engine.max_model_len is None:
        from nanoserve.tasks.capacity import longest_sequence

        max_model_len = longest_sequence(config)
    else:
        max_model_len = engine.max_model_len
    blocks = BlockManager(engine.num_kv_blocks, engine.block_size, engine.enable_prefix_caching)
    workload = make_workload(options, min(max_model_len, blocks.max_num_tokens), "simulate")
    return _replay(
        registry, config.scheduler, engine, max_model_len, blocks, workload, model,
        overlap=bool(engine.overlap), keep_marks=options.timeline,
    )  # fmt: skip


def _replay(
    registry: Registry,
    scheduler: PluginChoice,
    engine: EngineOptions,
    max_model_len: int,
    blocks: BlockManager,
    workload: Workload,
    model: LatencyModel | None,
    *,
    overlap: bool,
    keep_marks: bool = False,
) -> Replay:
    spec = registry.get("scheduler", scheduler.name)
    scheduler_options = registry.make_options("scheduler", spec, scheduler.options)
    return Replay(
        lambda limits, blocks: spec.factory(scheduler_options, limits, blocks),
        SchedulerLimits(engine.max_num_seqs, engine.max_num_batched_tokens, max_model_len),
        blocks,
        workload,
        step_time=model.step_time if model is not None else lambda load: 1.0,
        overlap=overlap,
        keep_marks=keep_marks,
    )


def drive(replay: Replay) -> None:
    """Run to the end, with a progress bar on a terminal."""
    from tqdm import tqdm

    with tqdm(unit="step", disable=not sys.stderr.isatty()) as bar:
        while replay.has_work:
            replay.step()
            bar.update()


def summary(replay: Replay, objectives: Objectives, timed: bool) -> dict[str, Any]:
    """Every figure of the run. Times are in ms with a latency model and in rounds without."""
    progress, blocks = replay.progress, replay.blocks
    size = blocks.block_size
    lengths = [p.timeline.prompt_len + p.timeline.output_len - 1 for p in progress]  # the last token's KV is not stored
    figures: dict[str, Any] = {
        "rounds": replay.num_steps,
        "preemptions": replay.scheduler.num_preemptions,
        "peak blocks": replay.peak_blocks,
        "blocks": blocks.num_blocks,
        "reserved up front": sum(-(-n // size) for n in lengths),
        "leaked blocks": blocks.num_blocks - blocks.num_free,
        "recomputed tokens": sum(p.num_recomputed for p in progress),
        "passed over max": max(p.max_passed_over for p in progress),
        "wait max ms": 1e3 * max(p.max_wait for p in progress),
        "batch mean": statistics.fmean(step.load.num_decode for step in replay.steps),
        "waiting mean": statistics.fmean(step.num_waiting for step in replay.steps),
    }
    served = summarise([p.timeline for p in progress], objectives)
    served["preemptions"] = replay.scheduler.num_preemptions
    figures = {**served, **figures}
    return figures if timed else {_in_rounds(name): _rounds(name, value) for name, value in figures.items()}


def print_priorities(classes: Mapping[int, Mapping[str, Any]], timed: bool) -> None:
    if classes:
        names = [name for name in OF_PRIORITY if timed or name != "goodput share"]
        shown = names if timed else [_in_rounds(name) for name in names]
        rows = [
            [str(one), *(_number(figures[n] if timed else _rounds(n, figures[n])) for n in names)]
            for one, figures in classes.items()
        ]
        print_table("by priority, the most urgent first", ["priority", *shown], rows)


def _in_rounds(name: str) -> str:
    if name == "QPS":
        return "requests/round"
    if name == "duration s":
        return "duration rounds"
    return name.replace(" ms", " rounds").replace("/s", "/round")


def _rounds(name: str, value: Any) -> Any:
    return value / 1e3 if name.endswith(" ms") and value is not None else value


#: What a sweep's table shows, with and without a latency model.
SHOWN = (
    "rounds", "preemptions", "peak blocks", "recomputed tokens", "passed over max", "TTFT p50 ms", "TTFT p95 ms",
    "TPOT p50 ms", "TPOT p95 ms", "output tok/s", "goodput req/s", "TTFT p50 rounds", "TTFT p95 rounds",
    "TPOT p50 rounds", "TPOT p95 rounds", "output tok/round",
)  # fmt: skip


def request_row(progress: Progress) -> dict[str, Any]:
    """One request in the JSON, with the keys of a ``task=bench`` record; times in seconds, or rounds."""
    return {
        **progress.timeline.as_row(),
        "recomputed": progress.num_recomputed,
        "passed_over": progress.max_passed_over,
        "wait": progress.max_wait,
    }


# --- the latency model -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LatencyModel:
    """Seconds of a step: ``step + decode · sequences that decode + prefill · prompt tokens + context · tokens of
    context that decoding reads``. All coefficients are at least 0."""

    step: float
    decode: float
    prefill: float
    context: float

    @classmethod
    def fit(cls, steps: Sequence[Sequence[float]]) -> LatencyModel:
        """Non-negative least squares over records ``[num_decode, num_prefill_tokens, context_tokens, seconds]``.

        With four unknowns, the best of all sixteen sets of non-zero coefficients is the exact solution.
        """
        records = np.asarray(steps, dtype=float).reshape(-1, 4)
        if not len(records):
            raise ConfigError("simulate.fit: the record holds no steps")
        loads, seconds = np.column_stack([np.ones(len(records)), records[:, :3]]), records[:, 3]
        scale = np.maximum(loads.max(axis=0), 1e-12)  # columns of one size: context counts thousands, decode tens
        best, least = np.zeros(4), float(seconds @ seconds)
        for used in itertools.chain.from_iterable(itertools.combinations(range(4), n) for n in range(1, 5)):
            columns = list(used)
            found = np.linalg.lstsq(loads[:, columns] / scale[columns], seconds, rcond=None)[0]
            residual = float(np.sum((loads[:, columns] / scale[columns] @ found - seconds) ** 2))
            if (found >= 0).all() and residual < least * (1 - 1e-9):
                best, least = np.zeros(4), residual
                best[columns] = found / scale[columns]
        return cls(*best.tolist())

    def step_time(self, load: StepLoad) -> float:
        """Seconds."""
        return (
            self.step
            + self.decode * load.num_decode
            + self.prefill * load.num_prefill_tokens
            + self.context * load.context_tokens
        )


def read_records(path: str, key: str) -> dict[str, dict[str, Any]]:
    """``{"fit": record}`` of a file; of a folder every ``bench.json`` in it, with its own folder in the name.

    Raises ConfigError if there is none, or they were measured on different hardware, models or KV formats.
    """
    folder = Path(path)
    if not folder.is_dir():
        return {"fit": read_record(path, key)}
    files = sorted(folder.rglob("bench.json"))
    if not files:
        raise ConfigError(f"{key}: no bench.json is in {path}; a sweep of task=bench leaves one in each job's folder")
    records = {f"fit {file.parent.relative_to(folder)}": read_record(str(file), key) for file in files}
    measured_on = {engine_of(record) for record in records.values()}
    if len(measured_on) > 1:
        which = " and ".join("{}, kv {}, {}".format(*one) for one in sorted(measured_on, key=str))
        raise ConfigError(f"{key}: the records in {path} are of different engines: {which}")
    return records


def engine_of(record: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Model, KV format and hardware that a record was measured on."""
    return record["engine"].get("model"), record["engine"].get("kv"), record.get("hardware")


def same_engine(config: EngineConfig, record: Mapping[str, Any]) -> None:
    """Raise ConfigError if the record to fit on is of another model or KV format than is configured."""
    for group, chosen, measured in zip(
        ("model", "kv"), (config.model.name or str(config.model.path), config.kv.name), engine_of(record), strict=False
    ):
        if measured is not None and measured != chosen:
            raise ConfigError(
                f"simulate.fit: the record was measured with {group}={measured}, which says nothing about "
                f"{group}={chosen}; write {group}={measured}, or fit on a record of {chosen}"
            )


#: Above this correlation of two loads the fit cannot tell what each costs.
CORRELATED, BEYOND = 0.9, 1.5


def not_learnt(fitted_on: Sequence[Sequence[float]], loads: Sequence[Sequence[float]], name: str) -> list[str]:
    """Sentences about the loads of ``name`` on which the fitted steps ``[…, seconds]`` have taught too little."""
    known, asked = (np.asarray([row[:3] for row in rows], dtype=float) for rows in (fitted_on, loads))
    lines = [
        f"{name} has steps of {most:,.0f} {what}; those fitted on have at most {learnt:,.0f}"
        for most, learnt, what in zip(
            asked.max(axis=0),
            known.max(axis=0),
            ("decoding sequences", "prompt tokens", "tokens of context"),
            strict=True,
        )
        if most > BEYOND * learnt
    ]
    per_sequence = [rows[rows[:, 0] > 0][:, 2].sum() / max(1.0, rows[:, 0].sum()) for rows in (known, asked)]
    decoding = known[known[:, 0] > 0]
    varied = len(decoding) > 1 and decoding[:, 0].std() > 0 and decoding[:, 2].std() > 0
    tied = varied and np.corrcoef(decoding[:, 0], decoding[:, 2])[0, 1] > CORRELATED
    if tied and not 1 / BEYOND < per_sequence[1] / per_sequence[0] < BEYOND:
        lines.append(
            f"{name} has {per_sequence[1]:,.0f} tokens of context per sequence, those fitted on always about "
            f"{per_sequence[0]:,.0f}: what a sequence and what its context costs could not be told apart; fit on runs "
            "of several lengths, simulate.fit=FOLDER"
        )
    return lines


def read_record(path: str, key: str) -> dict[str, Any]:
    """A record of ``task=bench`` (or of this task). Raises ConfigError when it holds no steps and requests."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{key}: {path} is not JSON: {error}") from None
    needed = ("steps", "requests", "workload", "config", "engine")
    lacking = [name for name in needed if not isinstance(record, dict) or not record.get(name)]
    if lacking:
        raise ConfigError(
            f"{key}: {path} has no {lacking[0]!r}; it must be a record of task=bench with bench kind serve"
        )
    return record  # type: ignore[no-any-return]


def compare(record: Mapping[str, Any], model: LatencyModel, registry: Registry) -> dict[str, Any]:
    """How far the model is off on a recorded run: step by step, and on the metrics of the run simulated anew.

    The run is repeated with its own workload, scheduler, limits and pool. Errors are relative to what was measured.
    """
    measured = [seconds for *_, seconds in record["steps"]]
    predicted = [model.step_time(StepLoad(*load)) for *load, _ in record["steps"]]
    pairs = [(p, m) for p, m in zip(predicted, measured, strict=True) if m > 0]
    errors = [abs(p / m - 1) for p, m in pairs]
    scale = sum(predicted) / sum(measured)
    engine = build(EngineOptions, record["config"]["engine"], "engine")
    names = {f.name for f in dataclasses.fields(WorkloadOptions)}
    options = build(WorkloadOptions, {k: v for k, v in record["workload"].items() if k in names}, "workload")
    blocks = BlockManager(record["engine"]["num_blocks"], engine.block_size, engine.enable_prefix_caching)
    max_model_len = record["engine"]["max_model_len"]
    workload = make_workload(options, min(max_model_len, blocks.max_num_tokens), "the record's workload")
    # As the engine: null means on a GPU.
    on_gpu = not str(record.get("hardware", "CPU")).startswith("CPU")
    replay = _replay(
        registry, PluginChoice(**record["config"]["scheduler"]), engine, max_model_len, blocks, workload, model,
        overlap=on_gpu if engine.overlap is None else engine.overlap,
    )  # fmt: skip
    drive(replay)
    again = [request_row(progress) for progress in replay.progress]
    metrics = {}
    for name in ("ttft", "tpot", "e2e"):
        values = [[row[name] for row in rows if row[name] is not None] for rows in (again, record["requests"])]
        for label, of in (("mean", statistics.fmean), *((f"p{q}", _quantile(q)) for q in QUANTILES)):
            if all(values):
                metrics[f"{name.upper()} {label} ms"] = [1e3 * of(values[0]), 1e3 * of(values[1])]
    return {
        "steps": len(measured),
        "step error mean": statistics.fmean(errors),
        "step error p90": percentile(errors, 90),
        "step error scaled": statistics.fmean(abs(p / scale / m - 1) for p, m in pairs),
        "total error": scale - 1,
        "rounds": [replay.num_steps, len(measured)],
        "metrics": metrics,
    }


def _quantile(q: int) -> Any:
    return lambda values: percentile(values, q)


# --- on the terminal ---------------------------------------------------------------------------------------------


def print_summary(replay: Replay, figures: Mapping[str, Any], config: EngineConfig, timed: bool) -> None:
    unit = "ms" if timed else "rounds"
    per = "s" if timed else "round"
    columns = ["mean", *(f"p{q}" for q in QUANTILES)]
    rows: list[Sequence[str]] = [
        ["rounds", _number(figures["rounds"])],
        ["preemptions", _number(figures["preemptions"])],
        ["peak blocks", f"{_number(figures['peak blocks'])} of {_number(figures['blocks'])}"],
        ["blocks, all reserved up front", _number(figures["reserved up front"])],
        ["leaked blocks", _number(figures["leaked blocks"])],
        ["recomputed tokens", _number(figures["recomputed tokens"])],
        ["starvation age, rounds", _number(figures["passed over max"])],
    ]
    if timed:
        rows.append(["starvation age, ms", _number(figures["wait max ms"])])
    rows += [
        ["prefix hit rate", _number(figures["prefix hit rate"])],
        [f"output tok/{per}", _number(figures[f"output tok/{per}"])],
    ]
    if timed:
        rows += [[name, _number(figures[name])] for name in ("goodput req/s", "goodput share")]
    for name in ("TTFT", "TPOT", "E2E", "queue"):
        rows.append([f"{name}, {unit}", *(_number(figures[f"{name} {column} {unit}"]) for column in columns)])
    title = f"{len(replay.progress)} requests, scheduler {config.scheduler.name}"
    print_table(title, ["", "total or mean", *columns[1:]], rows)


def timeline(replay: Replay) -> list[str]:
    """One line per request, one character per step (or per several, on a long run; the rarest mark shows)."""
    num_steps = replay.num_steps
    stride = -(-num_steps // TIMELINE_WIDTH)
    lines = [f"D decode, P prefill, x preempted, . passed over; one character is {stride} step(s)"]
    width = max(len(p.timeline.request_id) for p in replay.progress)
    first_step = {p.timeline.request_id: min((s for s, _ in p.marks), default=0) for p in replay.progress}
    for progress in replay.progress:
        came = first_step[progress.timeline.request_id] - _passed_over_first(replay, progress)
        cells = [" " if step < came or step > progress.served_step else "." for step in range(num_steps)]
        for step, mark in progress.marks:
            cells[step] = mark
        groups = ["".join(cells[i : i + stride]) for i in range(0, num_steps, stride)]
        text = "".join(next(mark for mark in "xPD. " if mark in group) for group in groups)
        lines.append(f"{progress.timeline.request_id:>{width}} {text.rstrip()}")
    return lines


def _passed_over_first(replay: Replay, progress: Progress) -> int:
    """Steps that began between its arrival and the first that served it."""
    first = min((step for step, _ in progress.marks), default=0)
    return sum(replay.steps[i].start >= progress.timeline.arrival for i in range(first))


def print_accuracy(model: LatencyModel, comparisons: Mapping[str, Mapping[str, Any]]) -> None:
    """Beside what was measured; of more than two runs, only how far off each was."""
    wide = len(comparisons) <= 2
    rows = []
    for name, of, form in (
        ("steps: mean |error|", "step error mean", "{:.1%}"),
        ("steps: p90 |error|", "step error p90", "{:.1%}"),
        ("steps: mean |error|, were the total right", "step error scaled", "{:.1%}"),
        ("total time", "total error", "{:+.1%}"),
    ):
        cells = [[*(["", ""] if wide else []), form.format(c[of])] for c in comparisons.values()]
        rows.append([name, *itertools.chain.from_iterable(cells)])
    for name in ("rounds", *dict.fromkeys(name for c in comparisons.values() for name in c["metrics"])):
        row = [name]
        for comparison in comparisons.values():
            pair = comparison["rounds"] if name == "rounds" else comparison["metrics"].get(name)
            off = f"{pair[0] / pair[1] - 1:+.1%}" if pair and pair[1] else ""
            row += [*([_number(n) for n in pair] if pair else ["", ""]), off] if wide else [off]
        rows.append(row)
    header = [
        column for name in comparisons for column in ([f"{name}: predicted", "measured", "off"] if wide else [name])
    ]
    meaning = "fit: a run it was fitted on" + "; check: another run" * ("check" in comparisons)
    coefficients = (
        f"step time = {1e3 * model.step:.3g} ms + {1e6 * model.decode:.3g} µs per decoding sequence "
        f"+ {1e6 * model.prefill:.3g} µs per prompt token + {1e9 * model.context:.3g} ns per token of context"
    )
    print_table(f"{coefficients}\n{meaning}{'' if wide else '; how far off'}", ["", *header], rows)


def _rounded(value: float) -> float:
    """Four significant digits; an integer stays one."""
    return int(value) if value == int(value) else float(f"{value:.4g}")


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.3g}"


# --- the plot ----------------------------------------------------------------------------------------------------


def require_matplotlib() -> None:
    """ConfigError when matplotlib is missing, before anything has run."""
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "simulate.plot: it needs matplotlib; pip install 'nanoserve[bench]', or leave simulate.plot out"
        )


def plot(replay: Replay, path: Path, unit: str) -> None:
    """Batch and queue, KV use, and every request from arrival to end, over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 9), layout="constrained")
    batch, use, requests = figure.subplots(3, 1, sharex=True, height_ratios=(1, 1, 2))
    times = [step.start for step in replay.steps]
    batch.step(times, [step.load.num_decode for step in replay.steps], where="post", label="decoding")
    batch.step(times, [step.num_waiting for step in replay.steps], where="post", label="waiting")
    batch.set_ylabel("sequences")
    batch.legend()
    use.step(times, [step.blocks_used for step in replay.steps], where="post")
    use.axhline(replay.blocks.num_blocks, linestyle=":")
    use.set_ylabel("KV blocks")
    for label, colour, begin, end in (
        ("queued", "0.8", lambda t: t.arrival, lambda t: t.scheduled),
        ("prefill", "C1", lambda t: t.scheduled, lambda t: t.deliveries[0][0]),
        ("decode", "C0", lambda t: t.deliveries[0][0], lambda t: t.finished),
    ):
        lines = [progress.timeline for progress in replay.progress]
        requests.hlines(range(len(lines)), [begin(t) for t in lines], [end(t) for t in lines], colour, label=label)
    requests.set_ylabel("request")
    requests.set_xlabel(unit)
    requests.legend()
    figure.savefig(path)
