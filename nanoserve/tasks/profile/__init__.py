"""``task=profile``: where the time of a step goes, and what to optimise next.

Two phases. *prefill* is one step that reads as many prompts of ``context`` tokens as ``batch`` and the engine's budget
allow. *decode* is a steady step in which ``batch`` sequences of about ``context`` tokens decode together. Each is first
timed as it is, with a stopwatch around the engine's own calls (:mod:`.spans`), and then run again under
``torch.profiler``, whose trace is read in :mod:`.trace`; step and host times therefore carry no cost of the profiler.
Bytes and FLOPs of the kernels, and what the device could do, are in :mod:`.roofline`.

``idle share`` is read from the trace. ``idle share, timed`` sets the trace's busy time against the step's time without
the profiler, which is the truer one where the profiler slows the host.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoserve.contracts.errors import ConfigError
from nanoserve.tasks.bench.record import composition, describe, print_line, print_table, write
from nanoserve.tasks.profile import trace
from nanoserve.tasks.profile.spans import PARTS, Span, Stopwatch, instrumented

if TYPE_CHECKING:
    from nanoserve.engine.engine import Engine
    from nanoserve.llm import LLM
    from nanoserve.tasks import Job
    from nanoserve.tasks.profile import roofline

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler announces itself; torch reads this when it is imported

WARM_UP = 6  # steps before the timed ones, and again before the traced ones
TOP = 12  # kernels in the table


@dataclass(frozen=True)
class Options:
    """The keys of ``conf/task/profile.yaml``.

    batch: sequences that decode together. context: tokens of each when they begin. steps: steps timed, and traced.
    nvtx: mark steps and spans for nsys instead of tracing them. output: folder for the traces, the page and the JSON.
    """

    batch: int = 8
    context: int = 128
    steps: int = 20
    nvtx: bool = False
    output: str | None = "profile"

    def __post_init__(self) -> None:
        for key in ("batch", "context", "steps"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key} must be at least 1, not {getattr(self, key)}")


@dataclass
class Timed:
    """Without the profiler, medians over the steps. step: seconds. parts: seconds inside each span."""

    step: float
    parts: dict[str, float]

    @classmethod
    def of(cls, laps: Sequence[dict[str, float]]) -> Timed:
        names = dict.fromkeys(name for lap in laps for name in lap)
        return cls(
            statistics.median(sum(lap.values()) for lap in laps),
            {name: statistics.median(lap.get(name, 0.0) for lap in laps) for name in names},
        )


@dataclass
class Measured:
    """One phase. tokens: new tokens per step. work: the least a step must do, by class of kernels. trace: None under
    nsys."""

    name: str
    tokens: int
    timed: Timed
    work: dict[str, roofline.Work]
    trace: trace.Phase | None = None


def run(job: Job) -> dict[str, Any]:
    import torch

    from nanoserve.tasks.profile import roofline

    options: Options = job.options
    if options.nvtx and not torch.cuda.is_available():
        raise ConfigError("nvtx=true marks ranges for nsys, which needs a CUDA device; leave it out to trace a CPU")
    folder = None if options.output is None or options.nvtx else job.directory("output", options.output)
    with job.llm() as llm, _progress(4) as done:
        check(llm, options)
        phases = [prefill(llm, options, folder, done), decode(llm, options, folder, done)]
        model: Any = llm.engine.runner
        ceilings = roofline.measure(model.device, model.kv.shape.dtype)
        environment = describe(llm)
    tables = make_tables(phases, ceilings)
    for table in tables:
        print_table(*table)
    ranked = [] if options.nvtx else what_next(phases, ceilings)
    for rank, (gain, line) in enumerate(ranked[:5], 1):
        print_line(f"{rank}. {line} (at most {gain:.0%} of the step)")
    figures = make_figures(phases)
    if folder is not None:
        record = {
            **environment,
            "config": asdict(job.config),
            "profile": asdict(options),
            "ceilings": asdict(ceilings),
            "figures": figures,
            "phases": [as_record(phase, ceilings) for phase in phases],
            "next": [line for _, line in ranked],
        }
        write(folder / "profile.json", record)
        (folder / "profile.md").write_text(page(tables, ranked, environment, options), encoding="utf-8")
        print_line(f"{folder}/: profile.md, profile.json; open prefill.json.gz and decode.json.gz at ui.perfetto.dev")
    return {name: value if value is None else float(f"{value:.4g}") for name, value in figures.items()}


def check(llm: LLM, options: Options, longest: int = 0) -> None:
    """Raise ConfigError unless the batch can decode together to the end. longest: tokens of a sequence by now."""
    engine, limits = llm.engine, llm.config.engine
    if options.context > limits.max_num_batched_tokens:
        raise ConfigError(
            f"context={options.context} is more than engine.max_num_batched_tokens={limits.max_num_batched_tokens}: "
            "a prompt must fit in one step"
        )
    tokens = max(longest, options.context + 1) + 2 * (WARM_UP + options.steps)
    blocks = options.batch * -(-tokens // engine.blocks.block_size)
    if tokens > engine.capacity or blocks > engine.blocks.num_blocks or options.batch > limits.max_num_seqs:
        raise ConfigError(
            f"batch={options.batch} sequences of context={options.context} grow to {tokens} tokens each and "
            f"{blocks} KV blocks; the engine has {engine.capacity} tokens for one, {engine.blocks.num_blocks} blocks "
            f"and engine.max_num_seqs={limits.max_num_seqs}: lower batch, context or steps"
        )


# --- the two phases ----------------------------------------------------------------------------------------------


def prefill(llm: LLM, options: Options, folder: Path | None, done: Any) -> Measured:
    """One step over fresh prompts, sampling the first token of each. Runs a few times; the last are measured."""
    from nanoserve.tasks.profile import roofline

    engine = llm.engine
    prompts = min(options.batch, llm.config.engine.max_num_batched_tokens // options.context)
    rounds = min(options.steps, 5)
    rng = random.Random(0)

    def step(around: AbstractContextManager[Any]) -> None:
        for i in range(prompts):
            _add(engine, f"profile-{i}", rng, options.context, 1)
        with around:
            while engine.has_work:
                engine.step()

    for _ in range(2):
        step(nullcontext())
    watch, laps = Stopwatch(), []
    with instrumented(engine, watch):
        for _ in range(rounds):
            step(watch("other"))
            laps.append(watch.lap())
    done("prefill timed")

    def steps(mark: Any) -> None:
        for _ in range(rounds):
            step(mark())

    traced = _traced(engine, options, "prefill", folder, steps)
    done("prefill traced")
    work = roofline.least_work(engine, [options.context] * prompts, [options.context] * prompts)
    return Measured("prefill", prompts * options.context, Timed.of(laps), work, traced)


def decode(llm: LLM, options: Options, folder: Path | None, done: Any) -> Measured:
    """Steady steps of one batch. Warm-up steps, in which graphs are captured, are outside of what is measured."""
    from nanoserve.tasks.profile import roofline

    engine = llm.engine
    preemptions = llm.stats().preemptions
    rng = random.Random(1)
    for i in range(options.batch):
        _add(engine, f"profile-{i}", rng, options.context, None)
    try:
        # Those that run first decode meanwhile: all of them decode when none has more to compute than its last token.
        while engine.scheduler.waiting or any(s.num_tokens == options.context for s in engine.scheduler.running):
            engine.step()
            if len(engine.requests) < options.batch or llm.stats().preemptions > preemptions:
                raise ConfigError(f"batch={options.batch}: the first sequences ended before the last had begun")
        check(llm, options, max(seq.num_tokens for seq in engine.scheduler.running))
        _steps(engine, WARM_UP)
        watch, laps = Stopwatch(), []
        with instrumented(engine, watch):
            for _ in range(options.steps):
                with watch("other"):
                    engine.step()
                laps.append(watch.lap())
        done("decode timed")
        contexts = [seq.num_tokens for seq in engine.scheduler.running]

        def steps(mark: Any) -> None:
            _steps(engine, WARM_UP)
            for _ in range(options.steps):
                with mark():
                    engine.step()

        traced = _traced(engine, options, "decode", folder, steps)
        done("decode traced")
    finally:
        for request_id in list(engine.requests):
            engine.abort(request_id)
        while engine.has_work:
            engine.step()
    return Measured(
        "decode", options.batch, Timed.of(laps), roofline.least_work(engine, contexts, [1] * len(contexts)), traced
    )


def _add(engine: Engine, request_id: str, rng: random.Random, length: int, max_tokens: int | None) -> None:
    from nanoserve.sampling_params import SamplingParams

    top = min(10_000, engine.vocab_size) - 1
    params = SamplingParams(temperature=0.6, seed=0, ignore_eos=True, max_tokens=max_tokens)
    engine.add_request(request_id, [rng.randint(0, top) for _ in range(length)], params)


def _steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.step()


def _traced(engine: Engine, options: Options, name: str, folder: Path | None, steps: Any) -> trace.Phase | None:
    """Run ``steps(mark)`` under the profiler, or with ranges for nsys."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    on_gpu = engine.runner.device.type == "cuda"  # type: ignore[attr-defined]
    span: Span = _nvtx_range if options.nvtx else record_function
    if options.nvtx:
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        with instrumented(engine, span):
            steps(lambda: _nvtx_range(name))
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        return None
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        with instrumented(engine, span, attention=True):
            steps(lambda: record_function(name))
        if on_gpu:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as scratch:
        file = (folder or Path(scratch)) / f"{name}.json.gz"
        profiler.export_chrome_trace(str(file))
        with gzip.open(file, "rt", encoding="utf-8") as text:
            return trace.read(json.load(text), name)


@contextmanager
def _nvtx_range(name: str) -> Iterator[None]:
    import torch

    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    from tqdm import tqdm

    with tqdm(total=total, unit="run", disable=not sys.stderr.isatty(), leave=False) as bar:

        def done(what: str) -> None:
            bar.set_description(what, refresh=False)
            bar.update()

        yield done


# --- what it says --------------------------------------------------------------------------------------------------

Table = tuple[str, list[str], list[list[str]]]


def make_figures(phases: Sequence[Measured]) -> dict[str, float | None]:
    """Numbers for a sweep's table and the JSON. Times are ms per step."""
    figures: dict[str, float | None] = {}
    for phase in phases:
        figures[f"{phase.name} ms"] = 1e3 * phase.timed.step
        if phase.trace is not None:
            busy = phase.trace.busy / phase.trace.steps / 1e3
            figures[f"{phase.name} busy ms"] = busy
            figures[f"{phase.name} idle share"] = phase.trace.idle_share
            figures[f"{phase.name} idle share, timed"] = max(0.0, 1 - busy / (1e3 * phase.timed.step))
            figures[f"{phase.name} launches"] = phase.trace.launches.total() / phase.trace.steps
            figures[f"{phase.name} syncs"] = phase.trace.syncs.total() / phase.trace.steps
        host = sum(seconds for name, seconds in phase.timed.parts.items() if name not in _device_parts(phase))
        figures[f"{phase.name} host ms"] = 1e3 * host
    return figures


def _device_parts(phase: Measured) -> tuple[str, ...]:
    """Spans that are the device's time: on a CPU a launch runs the model."""
    return ("wait",) if phase.trace is None or phase.trace.on_gpu else ("wait", "launch")


def make_tables(phases: Sequence[Measured], ceilings: roofline.Ceilings) -> list[Table]:
    figures = make_figures(phases)
    columns = ("ms", "busy ms", "idle share", "idle share, timed", "launches", "syncs", "host ms")
    titles = ["step ms", "device busy ms", "idle share", "idle share, timed", "launches", "syncs", "host ms"]
    tables: list[Table] = [
        (
            "Per step (step and host times without the profiler)",
            ["phase", "tokens", *titles],
            [[p.name, f"{p.tokens:,}", *(_show(figures.get(f"{p.name} {c}"), c) for c in columns)] for p in phases],
        ),
        (
            "Host time per step by part, µs, without the profiler (on a CPU launch is the model itself)",
            ["phase", *PARTS, "other"],
            [[p.name, *(f"{1e6 * p.timed.parts.get(part, 0.0):,.1f}" for part in (*PARTS, "other"))] for p in phases],
        ),
    ]
    classes: list[list[str]] = []
    kernels: list[list[str]] = []
    for phase in phases:
        if phase.trace is None:
            continue
        total = sum(us for _, us in phase.trace.by("kind").values())
        for kind, (count, us) in phase.trace.by("kind").items():
            work = phase.work.get(kind)
            amounts = ["", "", ""]
            if work is not None:
                verdict = work.verdict(us / 1e6, ceilings)
                amounts = [f"{work.num_bytes / 1e6:,.1f}", f"{work.flops / 1e9:,.2f}", verdict]
            classes.append([phase.name, kind, f"{count:,.0f}", f"{us / 1e3:.3f}", f"{us / total:.1%}", *amounts])
        for name, kind, calls, us in trace.longest(phase.trace, TOP):
            kernels.append([phase.name, trace.shorten(name), kind, f"{calls:,.1f}", f"{us:,.1f}", f"{us / total:.1%}"])
        if phase.trace.on_gpu:
            for what, counts in (("launches", phase.trace.launches), ("syncs", phase.trace.syncs)):
                kernels.append([phase.name, trace.named(counts, phase.trace.steps), what, "", "", ""])
    if classes:
        measured = f"{ceilings.bandwidth / 1e9:,.0f} GB/s and {ceilings.matrix_rate / 1e12:,.2f} TFLOP/s"
        amounts = ["ms", "share", "least MB", "GFLOP", f"bound by (measured ceilings: {measured})"]
        tables.append(("Device time per step by class of kernel", ["phase", "class", "calls", *amounts], classes))
        tables.append(
            ("Kernels that take most of it", ["phase", "kernel", "class", "calls", "µs per step", "share"], kernels)
        )
    return tables


def what_next(phases: Sequence[Measured], ceilings: roofline.Ceilings) -> list[tuple[float, str]]:
    """(largest possible gain as a share of its phase's step, what and why), the largest first.

    Idle time could vanish altogether; a class of kernels could come down to its bound; one without a bound, since what
    it does could be fused into others, to nothing.
    """
    found = []
    for phase in phases:
        if phase.trace is None:
            continue
        busy = phase.trace.busy / phase.trace.steps / 1e6
        step = max(phase.timed.step, busy)  # the profiler may have slowed a CPU's operations
        slowest = max((p for p in PARTS if p not in _device_parts(phase)), key=lambda p: phase.timed.parts.get(p, 0.0))
        idle = "the device waits for the host" if phase.trace.on_gpu else "Python between the operations"
        found.append(
            (
                max(0.0, 1 - busy / step),
                f"{phase.name}: {idle}: {1e3 * step:.3f} ms per step, {1e3 * busy:.3f} ms of them at work; most of the "
                f"host's own time is {slowest} ({1e6 * phase.timed.parts.get(slowest, 0.0):,.0f} µs)",
            )
        )
        for kind, (count, us) in phase.trace.by("kind").items():
            seconds = us / 1e6
            work = phase.work.get(kind)
            bound = 0.0 if work is None else min(seconds, work.seconds(ceilings))
            first = next(name for name, of, _, _ in trace.longest(phase.trace, 10**6) if of == kind)
            why = (
                f"{count:,.0f} launches with no bound of their own" if work is None else work.verdict(seconds, ceilings)
            )
            line = f"{phase.name}: {kind}: {1e3 * seconds:.3f} ms per step; {why}; first is {trace.shorten(first)}"
            found.append(((seconds - bound) / step, line))
    return sorted(found, key=lambda one: -one[0])


def as_record(phase: Measured, ceilings: roofline.Ceilings) -> dict[str, Any]:
    record: dict[str, Any] = {
        "phase": phase.name,
        "tokens": phase.tokens,
        "step_s": phase.timed.step,
        "host_s": phase.timed.parts,
        "least_work": {kind: {**asdict(work), "bound_s": work.seconds(ceilings)} for kind, work in phase.work.items()},
    }
    if phase.trace is not None:
        record |= {
            "traced_steps": phase.trace.steps,
            "classes": phase.trace.by("kind"),
            "kernels": phase.trace.by("name"),
            "launches": phase.trace.launches,
            "syncs": phase.trace.syncs,
        }
    return record


def page(
    tables: Sequence[Table], ranked: Sequence[tuple[float, str]], environment: dict[str, Any], options: Options
) -> str:
    """The tables and the ranked list in Markdown."""
    lines = [
        f"# Profile of {environment['engine']['model']}: batch {options.batch}, context {options.context}",
        f"{environment['hardware']}, torch {environment['versions']['torch']}, git {environment['git']}; "
        f"{composition(environment)}.",
        "## What to optimise next",
        "\n".join(f"{i}. {line}. At most **{gain:.0%}** of the step." for i, (gain, line) in enumerate(ranked, 1)),
    ]
    for title, columns, rows in tables:
        cells = [columns, ["---"] * len(columns), *rows]
        lines += [f"## {title}", "\n".join("| " + " | ".join(c.replace("|", "\\|") for c in r) + " |" for r in cells)]
    return "\n\n".join(lines) + "\n"


def _show(value: float | None, column: str) -> str:
    if value is None:
        return "–"
    return f"{value:.1%}" if "share" in column else f"{value:.3f}" if column.endswith("ms") else f"{value:,.1f}"
