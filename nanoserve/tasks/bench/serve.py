"""Requests sent to the engine as clients would send them, and the serving metrics of what came back.

One thread does both: between two steps it sends the requests whose time has come, and stamps every token with the time
at which the step that delivered it returned. A request that becomes due during a step waits for its end, and that wait
counts, since its arrival is the moment the workload gave.

Scenarios have the meanings of MLPerf's LoadGen (Reddi et al., "MLPerf Inference Benchmark", 2020), without its minimum
durations: *offline* sends everything at once and is judged by throughput; *server* sends at Poisson times and is valid
if the P99 of TTFT and TPOT keep the objectives; *single_stream* sends the next request when the last one has ended and
is judged by the P90 of its latency.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from nanoserve import metrics
from nanoserve.contracts.errors import ConfigError, RequestError
from nanoserve.metrics import QUANTILES, Objectives, RequestTimeline
from nanoserve.tasks.bench.record import Backends, Measured, by_priority, unused_priorities
from nanoserve.tasks.bench.synthetic import warm_up
from nanoserve.workload import Workload, WorkloadOptions, make_workload, token_ids

if TYPE_CHECKING:
    from nanoserve.contracts.scheduling import Schedule
    from nanoserve.engine.engine import Engine
    from nanoserve.engine.runner import InFlight, Runner, SampledTokens
    from nanoserve.llm import LLM
    from nanoserve.sampling_params import SamplingParams

SCHEMA = "nanoserve.bench/1"
SERVER_RATE = 8.0  # requests per second of scenario=server when no rate is given
LENGTHS = (16, 64)  # tokens of prompts and of outputs when neither a length nor a trace is given

IDLE = 1e-3  # seconds between two steps that are more than the loop's own turn

#: What a sweep's table shows.
FIGURES = (
    "completed", "failed", "QPS", "output tok/s", "TTFT p50 ms", "TTFT p95 ms", "TPOT p50 ms", "TPOT p95 ms",
    "ITL p99 ms", "E2E p95 ms", "goodput req/s", "prefix hit rate", "preemptions", "KV use peak",
)  # fmt: skip

OF_PRIORITY = ("requests", "TTFT p50 ms", "TTFT p95 ms", "TPOT p95 ms", "goodput share")

NOT_SEPARABLE = (
    "Sampling is part of the step that runs on the device, so on the host it cannot be told from the model's forward: "
    "it is inside prefill and decode. Tokenising and detokenising are timed apart, after the run, on as many tokens as "
    "it had: the engine was given token ids, and its own detokenising is inside prefill and decode."
)


@dataclass(frozen=True)
class Serve(WorkloadOptions):
    """A workload and how it is judged.

    scenario: offline, server or single_stream, which sets ``arrival``; None when ``arrival`` is given.
    ttft_slo_ms, tpot_slo_ms: the objectives of goodput. repeat: runs, each with prompts of its own; figures are
    medians.
    """

    kind: Literal["serve"] = "serve"
    scenario: Literal["offline", "server", "single_stream"] | None = None
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None
    temperature: float = 0.6
    repeat: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("ttft_slo_ms", "tpot_slo_ms"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise ValueError(f"{key} must be above 0, not {value!r}")
        if self.repeat < 1:
            raise ValueError(f"repeat must be at least 1, not {self.repeat!r}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be at least 0 and finite, not {self.temperature!r}")

    @property
    def objectives(self) -> Objectives:
        def seconds(ms: float | None) -> float | None:
            return None if ms is None else ms / 1e3

        return Objectives(seconds(self.ttft_slo_ms), seconds(self.tpot_slo_ms))


def resolve(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a configuration with what null stands for, above all the arrival pattern of the scenario.

    Raises ConfigError if scenario and arrival are both given.
    """
    values = dict(values)
    if values.get("arrival") == "trace" and values.get("trace") is None:
        raise ConfigError("bench.trace: a value is required (the file of a trace)")
    for key in ("input_len", "output_len"):
        if values.get(key) is None and values.get("trace") is None:
            values[key] = LENGTHS
    scenario, arrival = values.get("scenario"), values.get("arrival")
    if scenario is None and arrival is not None:
        return values
    patterns = {"offline": "all", "server": "poisson", "single_stream": "closed"}
    scenario = values["scenario"] = scenario or "server"
    if scenario not in patterns:
        raise ConfigError(f"bench.scenario: {scenario!r} is not one of {', '.join(patterns)}")
    if arrival is not None:
        raise ConfigError(f"bench.arrival: scenario={scenario} means arrival={patterns[scenario]}; set one of the two")
    values["arrival"] = patterns[scenario]
    if scenario == "server" and values.get("rate") is None:
        values["rate"] = SERVER_RATE
    if scenario == "single_stream":
        if values.get("concurrency") not in (None, 1):
            raise ConfigError(
                f"bench.concurrency: one at a time with scenario=single_stream, not {values['concurrency']}"
            )
        values["concurrency"] = 1
    return values


# --- one run -----------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """One step of the engine. Times are seconds after the start of the run.

    begin: when its scheduling began. end: when its tokens had been handed over; None while in flight.
    num_decode: sequences that decode. num_prefill_tokens: prompt tokens. context_tokens: tokens whose KV its decoding
    sequences read. used_blocks: KV blocks owned by sequences. waiting: requests that were not part of it.
    """

    begin: float
    num_decode: int
    num_prefill: int
    num_prefill_tokens: int
    context_tokens: int
    used_blocks: int
    waiting: int
    end: float | None = None


@dataclass
class Run:
    """requests: in order of the workload. steps: in order of launch. num_blocks: size of the KV pool."""

    requests: list[RequestTimeline]
    steps: list[Step]
    num_blocks: int
    reasons: list[str]  # why requests failed

    def durations(self) -> list[float]:
        """Seconds that each step took the engine, without time that two overlapping steps share: they add up to the
        time in which the engine was busy."""
        seconds, last = [], 0.0
        for step in self.steps:
            end = step.begin if step.end is None else step.end
            seconds.append(max(0.0, end - max(step.begin, last)))
            last = max(last, end)
        return seconds

    def timeline(self) -> list[list[float]]:
        """[time, sequences in the step, requests waiting, share of the KV pool in use], with a row of zeros where an
        idle time begins."""
        rows: list[list[float]] = []
        last = 0.0
        for step in self.steps:
            if step.begin - last > IDLE and rows:
                rows.append([last, 0, 0, 0.0])
            use = step.used_blocks / self.num_blocks
            rows.append([step.begin, step.num_decode + step.num_prefill, step.waiting, use])
            last = max(last, step.begin if step.end is None else step.end)
        if rows:
            rows.append([last, 0, 0, 0.0])
        return rows

    def figures(self, objectives: Objectives) -> dict[str, float | None]:
        """The metrics of the requests, and what the engine did for them (means over busy time)."""
        seconds = self.durations()
        busy = sum(seconds)

        def mean(values: list[float]) -> float | None:
            return sum(v * s for v, s in zip(values, seconds, strict=True)) / busy if busy else None

        use = [step.used_blocks / self.num_blocks for step in self.steps]
        return {
            **metrics.summarise(self.requests, objectives),
            "steps": len(self.steps),
            "batch mean": mean([step.num_decode + step.num_prefill for step in self.steps]),
            "KV use mean": mean(use),
            "KV use peak": max(use, default=None),
            "busy s": busy,
        }


class _Watch:
    """Stands before a runner and notes every step that passes."""

    def __init__(self, engine: Engine, now: Callable[[], float]) -> None:
        self.engine = engine
        self.runner: Runner = engine.runner
        self.now = now
        self.turn = 0.0  # begin of the current turn of the loop
        self.steps: list[Step] = []
        self.committed: list[Step] = []  # in this turn
        self.scheduled: dict[str, float] = {}

    def launch(self, schedule: Schedule) -> InFlight:
        begin = self.now()
        for seq, _ in schedule.prefill:
            self.scheduled.setdefault(seq.request_id, begin)
        num_running = len(schedule.decode) + len(schedule.prefill)
        blocks = self.engine.blocks
        step = Step(
            begin=self.turn,
            num_decode=len(schedule.decode),
            num_prefill=len(schedule.prefill),
            num_prefill_tokens=sum(count for _, count in schedule.prefill),
            context_tokens=sum(seq.num_computed_tokens for seq in schedule.decode),
            used_blocks=blocks.num_blocks - blocks.num_free,
            waiting=max(0, len(self.engine.requests) - num_running),
        )
        launched = self.runner.launch(schedule)
        self.steps.append(step)
        return _WatchedStep(launched, self, step)

    def synchronize(self) -> None:
        self.runner.synchronize()

    def close(self) -> None:
        self.runner.close()


class _WatchedStep:
    def __init__(self, launched: InFlight, watch: _Watch, step: Step) -> None:
        self.sampled, self.chunks = launched.sampled, launched.chunks
        self._launched, self._watch, self._step = launched, watch, step

    def wait(self) -> SampledTokens:
        self._watch.committed.append(self._step)
        return self._launched.wait()


def drive(
    engine: Engine,
    workload: Workload,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
    on_finish: Callable[[], object] = lambda: None,
) -> Run:
    """Send the workload to an idle engine in real time, until every request has ended. Prompts and params by request.

    A request that the engine refuses has failed; the others go on.
    """
    started = clock()

    def now() -> float:
        return clock() - started

    watch = _Watch(engine, now)
    pending = deque(zip(workload.requests, prompts, params, strict=True))
    timelines: dict[str, RequestTimeline] = {}
    reasons: list[str] = []
    num_open = 0

    def end(timeline: RequestTimeline, at: float, reason: str | None, why: str | None) -> None:
        timeline.finished, timeline.finish_reason = at, reason
        if reason == "error":
            reasons.append(f"{timeline.request_id}: {why}")
        on_finish()

    engine.runner = watch
    try:
        while pending or engine.has_work:
            while pending and (
                pending[0][0].arrival <= now() if workload.concurrency is None else num_open < workload.concurrency
            ):
                request, ids, one = pending.popleft()
                arrival = request.arrival if workload.concurrency is None else now()
                timeline = RequestTimeline(f"bench-{request.id}", arrival, len(ids))
                timelines[timeline.request_id] = timeline
                try:
                    engine.add_request(timeline.request_id, ids, one, stream=True, priority=request.priority)
                    num_open += 1
                except RequestError as error:
                    end(timeline, now(), "error", str(error))
            if not engine.has_work:
                if pending and workload.concurrency is None:
                    sleep(max(0.0, pending[0][0].arrival - now()))
                continue
            watch.turn = now()
            reports = engine.step()
            time_ = now()
            for step in watch.committed:
                step.end = time_
            watch.committed.clear()
            for report in reports:
                timeline = timelines[report.request_id]
                if count := sum(len(output.token_ids) for output in report.outputs):
                    timeline.deliveries.append((time_, count))
                if report.finished:
                    num_open -= 1
                    timeline.scheduled = watch.scheduled.get(report.request_id)
                    timeline.num_cached_tokens = report.num_cached_tokens
                    timeline.num_preemptions = report.metrics.num_preemptions
                    end(timeline, time_, report.finish_reason, report.outputs[0].error)
    finally:
        engine.runner = watch.runner
        for request_id in timelines:
            engine.abort(request_id)
    return Run(list(timelines.values()), watch.steps, engine.blocks.num_blocks, reasons)


# --- the measurement ---------------------------------------------------------------------------------------------


def measure(llm: LLM, options: Serve) -> Measured:
    """Warm up, run ``repeat`` times, and report medians; the requests and steps are those of the middle run."""
    from tqdm import tqdm

    repeats = Repeats(llm, options)
    with tqdm(total=repeats.num_requests, unit="request", disable=not sys.stderr.isatty()) as bar:
        for _ in range(options.repeat):
            repeats.run(bar.update)
    return repeats.result()


class Repeats:
    """A workload run again and again on one engine, which is warmed up first. Two of them can take turns.

    num_requests: in all ``repeat`` runs together. backends: those of attention that ran in them.
    """

    def __init__(self, llm: LLM, options: Serve) -> None:
        from nanoserve.sampling_params import SamplingParams

        self.llm = llm
        self.options = options
        self.workload = make_workload(options, llm.engine.capacity, "bench")
        self.num_requests = len(self.workload.requests) * options.repeat
        self.runs: list[Run] = []
        self._params = [
            SamplingParams(temperature=options.temperature, ignore_eos=True, max_tokens=r.output_len)
            for r in self.workload.requests
        ]
        self.backends = Backends(llm)
        with self.backends:
            warm_up(llm, self._prompts(options.repeat))
        self.backends.forget_steps()

    def run(self, on_finish: Callable[[], object] = lambda: None) -> None:
        """Once more. on_finish: called at the end of every request."""
        prompts = self._prompts(len(self.runs))
        with self.backends:
            self.runs.append(drive(self.llm.engine, self.workload, prompts, self._params, on_finish=on_finish))

    def result(self) -> Measured:
        """Medians over the runs, and the middle one in detail."""
        measured = _result(self.llm, self.options, self.runs, self._prompts)
        priorities = [request.priority for request in self.workload.requests]
        run = self.runs[measured.record["shown_run"]]
        classes = by_priority(priorities, run.requests, self.options.objectives)
        for one, figures in classes.items():
            shown = ", ".join(f"{name} {_number(figures[name])}" for name in OF_PRIORITY)
            measured.lines.append(f"priority {one}: {shown}")
            measured.figures[f"priority {one}: TTFT p95 ms"] = _rounded(figures["TTFT p95 ms"])
        measured.lines += unused_priorities(self.llm.engine.scheduler, priorities)
        measured.record |= {**self.backends.as_record(), "priorities": classes}
        return measured

    def _prompts(self, round_: int) -> list[list[int]]:
        """Ids of its own in every round: none finds those of another cached."""
        vocab_size, seed = self.llm.engine.vocab_size, self.options.seed + round_
        return [token_ids(request, vocab_size, seed) for request in self.workload.requests]


def _result(llm: LLM, options: Serve, runs: Sequence[Run], prompts: Callable[[int], list[list[int]]]) -> Measured:
    summaries = [run.figures(options.objectives) for run in runs]
    figures = {name: _median([summary[name] for summary in summaries]) for name in summaries[0]}
    order = sorted(range(len(runs)), key=lambda i: summaries[i]["output tok/s"] or 0.0)
    shown = order[len(order) // 2]
    run = runs[shown]
    phases = _phases(llm, run, figures, prompts(shown))
    record = {
        "schema": SCHEMA,
        "seed": options.seed,
        "scenario": options.scenario,
        "figures": figures,
        "runs": summaries,
        "phases_ms": phases,
        "phases_note": NOT_SEPARABLE,
        "failures": run.reasons,
        "shown_run": shown,
        "requests": [r.as_row() for r in run.requests],
        "steps": [
            [step.num_decode, step.num_prefill_tokens, step.context_tokens, seconds]
            for step, seconds in zip(run.steps, run.durations(), strict=True)
        ],
        "timeline": run.timeline(),
    }
    rows = [
        [name, _number(figures[f"{name} count"]), *(_number(figures[f"{name} {k} ms"]) for k in _COLUMNS)]
        for name in ("TTFT", "TPOT", "ITL", "E2E", "queue", "prefill", "decode")
    ]
    return Measured(
        title=f"{options.scenario or options.arrival}: milliseconds",
        columns=["", "samples", *_COLUMNS],
        rows=rows,
        lines=_lines(options, figures, phases, run),
        figures={name: _rounded(figures[name]) for name in FIGURES},
        record=record,
    )


_COLUMNS = ["mean", *(f"p{q}" for q in QUANTILES)]


def _phases(llm: LLM, run: Run, figures: Mapping[str, Any], prompts: list[list[int]]) -> dict[str, float | None]:
    """Mean milliseconds per request of each part of its way; None for what cannot be told apart or does not exist."""
    phases: dict[str, float | None] = {
        "tokenise": None,
        **{name: figures[f"{name} mean ms"] for name in ("queue", "prefill", "decode")},
        "sample": None,
        "detokenise": None,
    }
    if llm.tokenizer is not None:
        from nanoserve.engine.detokenizer import IncrementalDetokenizer

        tokenizer = llm.tokenizer
        ids = [[token for token in prompt if token < tokenizer.vocab_size] for prompt in prompts]
        texts = [tokenizer.decode(one, False) for one in ids]
        start = time.perf_counter()
        for text in texts:
            tokenizer.encode(text)
        phases["tokenise"] = 1e3 * (time.perf_counter() - start) / len(texts)
        start = time.perf_counter()
        for prompt_ids, request in zip(ids, run.requests, strict=True):
            detokenizer = IncrementalDetokenizer(tokenizer, True)
            for token in (prompt_ids * (1 + request.output_len // max(1, len(prompt_ids))))[: request.output_len]:
                detokenizer.push([token])
            detokenizer.flush()
        phases["detokenise"] = 1e3 * (time.perf_counter() - start) / len(texts)
    return phases


def _lines(options: Serve, figures: Mapping[str, Any], phases: Mapping[str, Any], run: Run) -> list[str]:
    def show(*names: str) -> str:
        return ", ".join(f"{name} {_number(figures[name])}" for name in names)

    bounds = [
        f"{name} ≤ {bound:g} ms"
        for name, bound in (("TTFT", options.ttft_slo_ms), ("TPOT", options.tpot_slo_ms))
        if bound is not None
    ]
    lines = [
        show("completed", "aborted", "failed", "duration s", "QPS", "output tok/s", "total tok/s"),
        show("goodput req/s", "goodput share") + f" ({' and '.join(bounds) or 'no objectives'})",
        show("prefix hit rate", "preemptions", "KV use mean", "KV use peak", "steps", "batch mean"),
        "ms per request: "
        + " → ".join(f"{name} {'not separable' if ms is None else _number(ms)}" for name, ms in phases.items()),
    ]
    if options.scenario == "offline":
        lines.append(f"scenario offline: {show('output tok/s')}")
    elif options.scenario == "single_stream":
        lines.append(f"scenario single_stream: {show('E2E p90 ms')}")
    elif options.scenario == "server":
        measured = (figures["TTFT p99 ms"], options.ttft_slo_ms), (figures["TPOT p99 ms"], options.tpot_slo_ms)
        kept = all(value is None or bound is None or value <= bound for value, bound in measured)
        verdict = "valid" if kept and figures["completed"] == figures["requests"] else "not valid"
        if options.ttft_slo_ms is None and options.tpot_slo_ms is None:
            verdict = "not judged, without objectives,"
        lines.append(f"scenario server: {verdict} at {options.rate:g} requests per second")
    if figures["TTFT count"] < 100:
        lines.append(f"p99 of {figures['TTFT count']:g} requests is little more than the slowest one")
    if run.reasons:
        lines.append(f"first failure: {run.reasons[0]}")
    return lines


def _median(values: Sequence[float | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return statistics.median(defined) if defined else None


def _rounded(value: float | None) -> float | None:
    """Four significant digits; an integer stays one."""
    if value is None or value == int(value):
        return value if value is None else int(value)
    return float(f"{value:.4g}")


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.3g}"
