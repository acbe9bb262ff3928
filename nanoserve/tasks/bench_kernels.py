"""``task=bench_kernels``: attention backends beside torch's kernels, at the shapes that decide how fast an engine is.

One run is one KV format and one block size; a sweep has more: ``-m kv=bf16,int8 engine.block_size=16,256``. How a shape
is measured stands in :mod:`nanoserve.tasks.kernels.measure`. The rate is that of the work which cannot be avoided, in
prefill the FLOPs that the causal mask leaves, in decode the bytes of K and V; it is set beside what the device reached
in the same run, in a matrix product and in a copy. A copy also writes: reading alone can be a little faster than 100 %.
The exit status is 1 if a result is wrong or a backend has failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from nanoserve.contracts.capabilities import PHASES, Phase
from nanoserve.contracts.errors import ConfigError, NanoserveError
from nanoserve.tasks.bench.record import environment, print_line, print_table, write
from nanoserve.tasks.kernels.measure import (
    TOLERANCES,
    Bench,
    Effort,
    Heads,
    ShapeOutOfMemoryError,
    Timing,
    fastest,
    out_of_memory,
)
from nanoserve.tasks.kernels.shapes import CPU_TABLE, TABLE, KernelShape, parse_all

if TYPE_CHECKING:
    from nanoserve.tasks import Job

NO_MEMORY = "the device has not enough memory for this shape"
COLUMNS = ("shape", "kernel", "µs", "rate", "of ceiling", "× torch", "error", "")


class FailedKernelError(NanoserveError):
    """A kernel's result misses the reference, or there is none."""


@dataclass(frozen=True)
class Options:
    """The keys of ``conf/task/bench_kernels.yaml``.

    shapes: names as :class:`KernelShape` reads them; None is the table of the device. backends: of those that can;
    None is all. torch: also time torch's own kernels.
    """

    phase: Literal["prefill", "decode"] | None = None
    shapes: list[str] | None = None
    backends: list[str] | None = None
    torch: bool = True
    num_q_heads: int = 16
    num_kv_heads: int = 8
    head_dim: int = 128
    rounds: int = 9
    output: str | None = None

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError(f"rounds must be at least 1, not {self.rounds}")
        for key in ("shapes", "backends"):
            if getattr(self, key) == []:
                raise ConfigError(f"{key}: the list is empty; null is all")

    @property
    def heads(self) -> Heads:
        return Heads(self.num_q_heads, self.num_kv_heads, self.head_dim)


@dataclass(frozen=True)
class Result:
    """One candidate at one shape. rate: TFLOP/s in prefill, TB/s in decode. over_torch: how many times faster than the
    best of torch's."""

    shape: KernelShape
    name: str
    timing: Timing
    rate: float | None
    of_ceiling: float | None
    over_torch: float | None


def run(job: Job) -> dict[str, Any]:
    options: Options = job.options
    output = job.file("output", options.output)
    bench = Bench(job.config, job.registry, options.heads, job.config.kv.name, Effort(rounds=options.rounds))
    results: dict[Phase, list[Result]] = {}
    phases = [phase for phase in PHASES if options.phase in (None, phase)]
    names = {phase: chosen_backends(bench, phase, options.backends) for phase in phases}
    if not any(names.values()):
        raise ConfigError(f"backends: none of {', '.join(options.backends or [])} implements {' or '.join(phases)}")
    table = TABLE if bench.device.type == "cuda" else CPU_TABLE
    shapes = {phase: parse_all(options.shapes or table[phase], phase) for phase in phases if names[phase]}
    for phase, of_phase in shapes.items():
        results[phase] = [result for shape in of_phase for result in measure(bench, shape, names[phase], options.torch)]
        print_results(bench, phase, results[phase])
    print_line(conditions(bench))
    if output is not None:
        write(output, record(bench, results))
    measured = figures(results)
    refuse_failures(bench, results, measured)
    return measured


def chosen_backends(bench: Bench, phase: Phase, wanted: list[str] | None) -> tuple[str, ...]:
    """Those that can, of ``wanted`` if given. Raises ConfigError for one that could not serve any phase here."""
    can = bench.candidates[phase]
    if wanted is None:
        return can
    for name in wanted:
        spec = bench.registry.get("attention", name)
        reasons = [spec.capabilities.refusals(bench.need, p) for p in PHASES if p in spec.capabilities.phases]
        if all(reasons):
            raise ConfigError(f"backends: {name} cannot run here: {'; '.join(reasons[0])}")
    return tuple(name for name in can if name in wanted)


def measure(bench: Bench, shape: KernelShape, backends: tuple[str, ...], with_torch: bool = True) -> Iterator[Result]:
    """Every candidate at ``shape``, the fastest first; one that failed or is wrong comes last."""
    try:
        timings = bench.measure(shape, backends, with_torch)
    except RuntimeError as error:
        if not out_of_memory(f"{type(error).__name__}: {error}"):
            raise
        why = f": {error}" if isinstance(error, ShapeOutOfMemoryError) else ""
        timings = {"all": Timing(failed=NO_MEMORY + why)}
    best_of_torch = fastest(timings, [name for name in timings if name.startswith("torch ")])
    for name, timing in sorted(timings.items(), key=lambda item: (not item[1].valid, item[1].us or 0.0)):
        rate = of_ceiling = over = None
        if timing.us is not None:
            if shape.phase == "prefill":
                rate = shape.flops(bench.heads.num_q, bench.heads.dim) / timing.us / 1e6
                of_ceiling = rate / bench.ceilings.matmul
            else:
                dense = 2 * bench.heads.num_kv * bench.heads.dim * bench.dtype.itemsize
                per_token = dense if name.startswith("torch ") else bench.bytes_per_token
                rate = sum(shape.context_lens) * per_token / timing.us / 1e6
                of_ceiling = rate / bench.ceilings.copy
            if best_of_torch is not None:
                over = (timings[best_of_torch].us or 0.0) / timing.us
        yield Result(shape, name, timing, rate, of_ceiling, over)


def print_results(bench: Bench, phase: Phase, results: list[Result]) -> None:
    unit = "TFLOP/s" if phase == "prefill" else "TB/s of K and V"
    rows, last = [], None
    for result in results:
        timing = result.timing
        note = "WRONG" if timing.wrong else timing.failed or ("one plain call" if timing.plain else "")
        rows.append(
            [
                result.shape.name if result.shape is not last else "",
                result.name,
                "–" if timing.us is None else f"{timing.us:.1f}",
                "–" if result.rate is None else f"{result.rate:.3g}",
                "–" if result.of_ceiling is None else f"{result.of_ceiling:.0%}",
                "–" if result.over_torch is None else f"{result.over_torch:.2f}",
                "–" if timing.error is None else f"{timing.error:.1e}",
                note,
            ]
        )
        last = result.shape
    columns = [unit if column == "rate" else column for column in COLUMNS]
    heads = f"{bench.heads.num_q}/{bench.heads.num_kv} heads of {bench.heads.dim}"
    print_table(f"{phase}, kv {bench.kv}, block {bench.block_size}, {heads}", columns, rows)


def conditions(bench: Bench) -> str:
    """What the figures were measured on, and how."""
    how = "medians of CUDA graph replays, K and V cold"
    if bench.device.type != "cuda":
        how = "wall time on a CPU, launches included: these figures say nothing about a GPU"
    return (
        f"{environment(bench.device)['hardware']}, torch {torch.__version__}, {str(bench.dtype)[6:]}; "
        f"copy {bench.ceilings.copy:.3g} TB/s, matmul {bench.ceilings.matmul:.3g} TFLOP/s; {how}"
    )


def record(bench: Bench, results: dict[Phase, list[Result]]) -> dict[str, Any]:
    return {
        **environment(bench.device),
        **bench.measured(),
        "ceilings": {"copy TB/s": bench.ceilings.copy, "matmul TFLOP/s": bench.ceilings.matmul},
        "results": [
            {
                "phase": phase,
                "shape": result.shape.name,
                "kernel": result.name,
                **asdict(result.timing),
                "rate": result.rate,
                "of_ceiling": result.of_ceiling,
                "over_torch": result.over_torch,
            }
            for phase, of_phase in results.items()
            for result in of_phase
        ],
    }


def refuse_failures(bench: Bench, results: dict[Phase, list[Result]], measured: dict[str, Any]) -> None:
    """Raise FailedKernelError, which names shapes and backends, if a result is wrong or a backend failed, unless for
    want of memory. torch's kernels are only there to compare with."""
    wrong: dict[str, list[str]] = {}
    failed: dict[str, list[str]] = {}
    for phase, of_phase in results.items():
        for result in of_phase:
            where, timing = f"{phase} {result.shape.name}", result.timing
            if result.name.startswith("torch "):
                continue
            if timing.wrong:
                wrong.setdefault(where, []).append(result.name)
            elif timing.failed and not timing.failed.startswith(NO_MEMORY) and not out_of_memory(timing.failed):
                failed.setdefault(where, []).append(result.name)
    above = f"WRONG results, relative error above {TOLERANCES[bench.dtype]:g} against float64"
    faults = []
    for what, names_at in ((above, wrong), ("failed", failed)):
        if names_at:
            rows = [f"{where}: {', '.join(names)}" for where, names in names_at.items()]
            faults.append(f"{what}, at {'; '.join(rows)}")
    if faults:
        error = FailedKernelError(". ".join(faults))
        error.figures = measured
        raise error


def figures(results: dict[Phase, list[Result]]) -> dict[str, Any]:
    """Per shape the time of the best backend, torch's kernels left out."""
    found: dict[str, Any] = {}
    for phase, of_phase in results.items():
        for result in of_phase:
            key = f"{phase} {result.shape.name} µs"
            if result.timing.valid and not result.name.startswith("torch ") and key not in found:
                found[key] = round(result.timing.us or 0.0, 2)
    return found
