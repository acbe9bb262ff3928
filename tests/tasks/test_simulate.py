"""``task=simulate`` against timelines computed by hand, and a latency model that must find known coefficients."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml

from nanoserve.contracts.errors import ConfigError
from nanoserve.contracts.scheduling import SchedulerLimits
from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.simulator import Replay, StepLoad
from nanoserve.metrics import Objectives
from nanoserve.registry import Registry
from nanoserve.tasks.simulate import LatencyModel, compare, not_learnt, read_record, summary, timeline
from nanoserve.workload import Request, Workload
from tests.helpers.distributions import Distributions
from tests.helpers.distributions import distributions as distributions
from tests.tasks.conftest import Cli


def replay(
    *requests: Request, budget: int = 64, num_blocks: int = 64, concurrency: int | None = None, **options
) -> Replay:
    registry = Registry.discover()
    spec = registry.get("scheduler", "decode_first")
    run = Replay(
        lambda limits, blocks: spec.factory(registry.make_options("scheduler", spec, {}), limits, blocks),
        SchedulerLimits(16, budget, 1000),
        BlockManager(num_blocks, 4),
        Workload(requests, concurrency),
        **options,
    )
    run.run(1000)
    return run


# --- the clock ---------------------------------------------------------------------------------------------------

A, B = Request(0, 0.0, 4, 3), Request(1, 1.5, 2, 1)


def seconds(load: StepLoad) -> float:
    return 1 + load.num_prefill_tokens / 4


def test_a_timeline_by_hand() -> None:
    """0 – 2: A's prompt. 2 – 3.5: A decodes, B's prompt, which came at 1.5. 3.5 – 4.5: A decodes."""
    run = replay(A, B, step_time=seconds)
    assert [(step.start, step.end, step.load) for step in run.steps] == [
        (0, 2, (0, 4, 0)), (2, 3.5, (1, 2, 5)), (3.5, 4.5, (1, 0, 6)),
    ]  # fmt: skip
    a, b = [p.timeline for p in run.progress]
    assert (a.ttft, a.tpot, a.e2e, a.queue) == (2, 1.25, 4.5, 0)
    assert (b.ttft, b.tpot, b.e2e, b.queue) == (2, None, 2, 0.5)
    figures = summary(run, Objectives(ttft=2.0, tpot=1.0), timed=True)
    assert (figures["goodput share"], figures["output tok/s"]) == (0.5, 4 / 4.5)  # A's TPOT is too long
    assert figures["TTFT mean ms"] == 2000 and figures["wait max ms"] == 500


def test_with_overlap_a_step_is_scheduled_before_the_last_has_ended() -> None:
    """At 0 B is not there yet, so the second step (2 – 3) goes without it, and it runs in the third (3 – 4.5)."""
    run = replay(A, B, step_time=seconds, overlap=True)
    assert [(step.start, step.end) for step in run.steps] == [(0, 2), (2, 3), (3, 4.5)]
    a, b = [p.timeline for p in run.progress]
    assert (a.ttft, a.tpot, b.ttft) == (2, 1.25, 3)


def test_an_idle_engine_waits_for_the_next_request() -> None:
    run = replay(A, Request(1, 100.0, 2, 1), step_time=seconds)
    assert run.progress[1].timeline.ttft == 1.5 and run.progress[1].max_wait == 0


def test_a_closed_loop() -> None:
    """One at a time: each is sent when the one before it has ended."""
    run = replay(A, Request(1, 0.0, 4, 3), concurrency=1, step_time=seconds)
    assert [p.timeline.arrival for p in run.progress] == [0, 4]
    assert [p.timeline.ttft for p in run.progress] == [2, 2]


def test_preemption_by_hand() -> None:
    """Spec C's last case. Four prompts of three fill four blocks; at the fifth token two sequences take the blocks of
    the others, which compute their four tokens again when these have ended; then the next four."""
    run = replay(*(Request(i, 0.0, 3, 4) for i in range(8)), budget=12, num_blocks=4, keep_marks=True)
    figures = summary(run, Objectives(), timed=False)
    assert {name: figures[name] for name in ("rounds", "preemptions", "peak blocks", "leaked blocks")} == {
        "rounds": 12, "preemptions": 4, "peak blocks": 4, "leaked blocks": 0,
    }  # fmt: skip
    assert figures["recomputed tokens"] == 4 * 4
    assert [p.max_passed_over for p in run.progress] == [0, 0, 2, 2, 6, 6, 6, 6] and figures["passed over max"] == 6
    assert figures["TTFT mean rounds"] == (4 * 1 + 4 * 7) / 8 and figures["TTFT p50 rounds"] == 4
    lines = timeline(run)
    assert lines[1:5] == ["0 PDDD", "1 PDDD", "2 PDx.PD", "3 PDx.PD"]
    assert lines[5] == "4 ......PDDD" and lines[7] == "6 ......PDx.PD"


def test_a_cached_prefix_is_not_recomputed() -> None:
    """A preempted sequence finds its blocks in the cache unless they were overwritten."""
    prefix = ((7, 8),)
    first, second = Request(0, 0.0, 9, 1, prefix), Request(1, 5.0, 9, 1, prefix)
    run = replay(first, second)
    assert [step.load.num_prefill_tokens for step in run.steps] == [9, 1]
    assert summary(run, Objectives(), timed=False)["prefix hit rate"] == 8 / 18


# --- the command line --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "rounds", "preemptions", "peak"),
    [
        ("seed_mixed_ample", 10, 0, 9),
        ("seed_mixed_pressure", 12, 0, 7),
        ("seed_decode_fairness", 12, 0, 4),
        ("seed_decode_preemption", 12, 4, 4),
    ],
)
def test_the_seeds_table(cli: Cli, preset: str, rounds: int, preemptions: int, peak: int) -> None:
    """Spec C, and its incremental allocation: 16 blocks reserved up front, 9 at the peak."""
    outcome = cli("task=simulate", f"simulate={preset}", "output=run.json")
    assert outcome.code == 0 and "starvation age" in outcome.out
    figures = json.loads(Path("run.json").read_text())["figures"]
    assert (figures["rounds"], figures["preemptions"], figures["peak blocks"]) == (rounds, preemptions, peak)
    assert figures["leaked blocks"] == 0
    if preset == "seed_mixed_ample":
        assert figures["reserved up front"] == 16


def test_any_scheduler_and_the_same_again(cli: Cli) -> None:
    small = ("task=simulate", "simulate.num_requests=30")
    for name, scheduler in (("a", "decode_first"), ("b", "decode_first"), ("c", "prefill_first")):
        assert cli(*small, f"scheduler={scheduler}", f"output={name}.json").code == 0
    a, b, c = [json.loads(Path(f"{name}.json").read_text()) for name in "abc"]
    assert a["requests"] == b["requests"] and a["steps"] == b["steps"] and a["steps"] != c["steps"]


URGENT = """
from nanoserve.contracts.scheduling import SchedulerSpec
from nanoserve.hookspecs import hookimpl
from nanoserve_plugins.scheduler.decode_first import DecodeFirst, DecodeFirstOptions

class Urgent(DecodeFirst):
    uses_priority = True

    def add(self, seq):
        super().add(seq)
        ordered = sorted(self.waiting, key=lambda waiting: waiting.priority)
        self.waiting.clear()
        self.waiting.extend(ordered)

@hookimpl
def nanoserve_scheduler(register):
    register(SchedulerSpec("urgent", "a test", DecodeFirstOptions, Urgent))
"""


def test_priorities_reach_the_scheduler(cli: Cli, distributions: Distributions) -> None:
    """Figures stand apart by priority; a scheduler that does not look at them is judged by them, and that is said."""
    distributions.install("urgent-dist", {"scheduler.urgent": "urgent_mod"}, urgent_mod=URGENT)
    trace = [{"timestamp": 0, "input_length": 16, "output_length": 8, "priority": i % 2} for i in range(8)]
    Path("trace.jsonl").write_text("\n".join(map(json.dumps, trace)))
    for workload in (
        ["simulate.num_requests=8", "simulate.input_len=16", "simulate.output_len=8", "simulate.arrival=all",
         "simulate.rate=null", "simulate.priorities=[0,1]"],
        ["simulate=trace", "simulate.trace=trace.jsonl"],
    ):  # fmt: skip
        waits = {}
        for scheduler in ("urgent", "decode_first"):
            run = cli("task=simulate", *workload, f"scheduler={scheduler}", "engine.max_num_seqs=1", "output=run.json")
            assert run.code == 0 and "by priority" in run.out, run.err
            assert ("does not look at priorities" in run.out) == (scheduler == "decode_first")
            classes = json.loads(Path("run.json").read_text())["priorities"]
            waits[scheduler] = [classes[priority]["TTFT p95 ms"] for priority in ("0", "1")]
        assert waits["urgent"][0] < waits["decode_first"][0] and waits["urgent"][1] >= waits["decode_first"][1]
    swept = cli("-m", "task=simulate", *workload, "scheduler=urgent,decode_first", "engine.max_num_seqs=1")
    assert "priority 0: TTFT p95 rounds" in swept.out
    assert "simulate.priorities must be null or a list" in cli("task=simulate", "simulate.priorities=[]").err


def test_a_prediction(cli: Cli) -> None:
    """A run in rounds is one whose steps all last a second: the model finds that and predicts the run exactly."""
    small = ("task=simulate", "simulate.num_requests=20")
    assert cli(*small, "output=new/measured.json").code == 0
    Path("new/measured.json").rename("measured.json")
    outcome = cli(*small, "simulate.fit=measured.json", "simulate.check=measured.json", "output=predicted.json")
    assert outcome.code == 0 and "a run it was fitted on" in outcome.out and "another run" in outcome.out
    measured, predicted = [json.loads(Path(f"{name}.json").read_text()) for name in ("measured", "predicted")]
    assert predicted["latency_model"] == pytest.approx({"step": 1, "decode": 0, "prefill": 0, "context": 0})
    assert predicted["figures"]["TTFT p95 ms"] == pytest.approx(1e3 * measured["figures"]["TTFT p95 rounds"])


def test_a_prediction_is_of_the_engine_it_was_fitted_on(cli: Cli) -> None:
    small = ("task=simulate", "simulate.num_requests=20")
    assert cli(*small, "output=measured.json").code == 0
    record = json.loads(Path("measured.json").read_text())
    record["engine"] |= {"model": "tiny", "kv": "bf16"}
    Path("measured.json").write_text(json.dumps(record))
    assert "fitted on tiny, kv bf16" in cli(*small, "simulate.fit=measured.json").out
    for other in ("kv=int8", "model=qwen3_0_6b"):
        refused = cli(*small, "simulate.fit=measured.json", other)
        assert refused.code == 2 and f"says nothing about {other}" in refused.err


@pytest.mark.parametrize("length", ["[10,50]", "{each: [1, 2]}", "{median: 20, sigma: 0.1, max: 30}", "7"])
@pytest.mark.parametrize("preset", ["default", "seed_mixed_ample"])
def test_a_length_replaces_the_presets_as_a_whole(cli: Cli, preset: str, length: str) -> None:
    run = cli("task=simulate", f"simulate={preset}", "simulate.num_requests=5", f"simulate.input_len={length}",
              "engine.num_kv_blocks=99", "output=out.json")  # fmt: skip
    assert run.code == 0, run.err
    assert json.loads(Path("out.json").read_text())["workload"]["input_len"] == yaml.safe_load(length)
    assert "{median: …, sigma: …, max: …}" in cli("task=simulate", "simulate.input_len={median: 20}").err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate.check=x.json"], "simulate.check needs a latency model"),
        (["simulate.ttft_slo_ms=100"], "simulate.ttft_slo_ms needs a latency model"),
        (["simulate.fit=missing.json"], "simulate.fit: cannot read missing.json: No such file"),
        (["simulate.fit=text.txt"], "simulate.fit: text.txt is not JSON"),
        (["simulate.trace=text.txt"], "simulate.input_len must be null with a trace, .*simulate=trace"),
        (["simulate=trace", "simulate.trace=text.txt"], "neither an Azure CSV .* no ContextTokens"),
        (
            ["simulate=trace", "simulate.trace=line.json"],
            "request 1: neither .* Mooncake .*: it has no 'output_length'",
        ),
        (["simulate=trace", "simulate.trace=bytes.bin"], "bytes.bin is not text in UTF-8\n"),
        (
            [
                "simulate.turns=2",
                "simulate.think_time=5",
                "simulate.arrival=closed",
                "simulate.concurrency=1",
                "simulate.rate=null",
            ],
            "simulate.think_time must be 0 with arrival=closed",
        ),
        (["kv=int8"], "kv=int8: task=simulate does not use kv without simulate.fit"),
        (["sampling.temperature=1"], "task=simulate does not use sampling"),
        (["engine.num_kv_blocks=null"], "engine.num_kv_blocks"),
        (["engine.num_kv_blocks=4"], "simulate.input_len: .* exceed"),
        (["simulate.plot=run.foo"], "simulate.plot=run.foo: .* must end in .svg or .png|nanoserve.bench"),
        (["simulate.ratio=1"], "simulate.ratio"),
        (["scheduler.nothing=1"], "scheduler.nothing"),
    ],
)
def test_what_is_refused(cli: Cli, arguments: list[str], message: str) -> None:
    Path("text.txt").write_text("hello")
    Path("line.json").write_text('{"timestamp": 0, "input_length": 9}')
    Path("bytes.bin").write_bytes(b"\x7fELF\xff")
    outcome = cli("task=simulate", *arguments)
    assert outcome.code == 2 and len(outcome.err.strip().splitlines()) == 1
    assert re.search(message, outcome.err), outcome.err


def test_plot(cli: Cli) -> None:
    outcome = cli("task=simulate", "simulate=seed_mixed_ample", "simulate.plot=run.svg")
    if importlib.util.find_spec("matplotlib") is None:
        assert outcome.code == 2 and "nanoserve[bench]" in outcome.err and not outcome.out
    else:
        assert outcome.code == 0 and "<svg" in Path("run.svg").read_text()


# --- the latency model -------------------------------------------------------------------------------------------

TRUE = LatencyModel(step=2e-3, decode=5e-5, prefill=2e-5, context=3e-8)
LOADS = [(d, p, 37 * d * (1 + d % 4)) for d in range(0, 30, 3) for p in (0, 17, 256)]


def test_the_fit_finds_the_coefficients() -> None:
    fitted = LatencyModel.fit([(*load, TRUE.step_time(StepLoad(*load))) for load in LOADS])
    assert (fitted.step, fitted.decode, fitted.prefill, fitted.context) == pytest.approx(
        (TRUE.step, TRUE.decode, TRUE.prefill, TRUE.context), rel=1e-6
    )


def test_no_coefficient_is_negative() -> None:
    """Steps that get shorter with their context are noise: the others explain them as well as they can."""
    steps = [(1, 0, context, 1.0 - 1e-4 * context) for context in (0, 100, 200)]
    fitted = LatencyModel.fit(steps)
    assert fitted.context == 0 and fitted.step_time(StepLoad(1, 0, 100)) == pytest.approx(0.99)


def test_how_far_off_it_is(cli: Cli) -> None:
    """A model that is 10 % too slow in every step is said to be so, on the steps and on what requests see."""
    assert cli("task=simulate", "simulate=seed_mixed_ample", "output=run.json").code == 0
    record = read_record("run.json", "simulate.check")
    off = compare(record, LatencyModel(1.1, 0, 0, 0), Registry.discover())
    errors = [off[name] for name in ("step error mean", "step error p90", "total error", "step error scaled")]
    assert errors == pytest.approx([0.1, 0.1, 0.1, 0.0])
    predicted, measured = off["metrics"]["TTFT mean ms"]
    assert predicted / measured == pytest.approx(1.1) and off["rounds"] == [10, 10]


def test_what_the_fitted_steps_could_not_teach() -> None:
    """Loads beyond theirs, and the context of a sequence where it was always the same."""
    tied = [[n, 0, 60 * n, 0.01] for n in range(1, 9)]
    assert not_learnt(tied, [[4, 0, 240], [0, 0, 0]], "it") == []
    beyond, apart = not_learnt(tied, [[4, 0, 1000]], "it")
    assert beyond == "it has steps of 1,000 tokens of context; those fitted on have at most 480"
    assert apart.startswith("it has 250 tokens of context per sequence, those fitted on always about 60: ")
    varied = tied + [[n, 0, 60 * (9 - n), 0.01] for n in range(1, 9)]
    assert len(not_learnt(varied, [[4, 0, 1000]], "it")) == 1
    assert not_learnt([[0, 8, 0, 0.1]], [[0, 8, 0]], "it") == []


def test_the_fit_on_a_sweep(cli: Cli) -> None:
    """A folder stands for all records in it, if they are of one engine."""
    for name, size in (("a", 4), ("b", 8)):
        assert cli("task=simulate", "simulate.num_requests=10", f"simulate.input_len={size}",
                   f"output=runs/{name}/bench.json").code == 0  # fmt: skip
    outcome = cli("task=simulate", "simulate.fit=runs", "simulate.check=runs/a/bench.json", "output=out.json")
    assert outcome.code == 0 and "fit a" in outcome.out and "how far off" in outcome.out
    assert json.loads(Path("out.json").read_text())["accuracy"].keys() == {"fit a", "fit b", "check"}
    record = json.loads(Path("runs/b/bench.json").read_text())
    Path("runs/b/bench.json").write_text(json.dumps({**record, "hardware": "a GPU"}))
    for fit, message in (("runs", "of different engines: .*a GPU"), (".", "of different"), ("work", "cannot read")):
        refused = cli("task=simulate", f"simulate.fit={fit}")
        assert refused.code == 2 and re.search(f"simulate.fit: .*{message}", refused.err), refused.err
    Path("empty").mkdir()
    assert "no bench.json is in empty" in cli("task=simulate", "simulate.fit=empty").err


def test_a_record_without_steps_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    file.write_text('{"figures": {}}')
    with pytest.raises(ConfigError, match="simulate.fit: .* has no 'steps'"):
        read_record(str(file), "simulate.fit")
