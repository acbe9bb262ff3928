"""``task=bench``: the driver against a timeline computed by hand (fake clock, fake model), then the real thing."""

from __future__ import annotations

import csv
import json
import math
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve import LLM
from nanoserve.contracts.errors import ConfigError
from nanoserve.contracts.scheduling import Schedule, SchedulerLimits
from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.engine import Engine
from nanoserve.engine.runner import SampledTokens
from nanoserve.engine.sequence import Sequence
from nanoserve.metrics import Objectives
from nanoserve.registry import Registry
from nanoserve.sampling_params import SamplingParams
from nanoserve.tasks import Job
from nanoserve.tasks.bench import html
from nanoserve.tasks.bench.record import Backends
from nanoserve.tasks.bench.serve import Run, drive, resolve
from nanoserve.tasks.bench.synthetic import Latency, latency
from nanoserve.workload import Request, Workload
from tests.tasks.conftest import Cli

REAL_LLM = Job.llm


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time = max(self.time + seconds, math.nextafter(self.time, math.inf))  # every clock moves on


class FakeModel:
    """A step takes 0.1 s and 0.01 s per prompt token. on_step: what happens at the launch of the step of this number.

    beside: steps run beside the host, so that a launch returns at once, as on a GPU.
    """

    def __init__(self, clock: Clock, blocks: BlockManager, beside: bool) -> None:
        self.clock, self.blocks, self.beside = clock, blocks, beside
        self.busy_until = 0.0
        self.on_step: dict[int, Any] = {}
        self.num_steps = 0

    def launch(self, schedule: Schedule) -> Any:
        self.num_steps += 1
        if self.num_steps in self.on_step:
            self.on_step[self.num_steps]()
        self.blocks.take_new_rows()
        seconds = 0.1 + 0.01 * sum(count for _, count in schedule.prefill)
        self.busy_until = max(self.busy_until, self.clock.time) + seconds
        prefill = [cast(Sequence, seq) for seq, _ in schedule.prefill]
        sampled = [*schedule.decode, *(seq for seq in prefill if seq.num_pending)]
        step = FakeStep(sampled, [seq for seq in prefill if not seq.num_pending], self.clock, self.busy_until)
        if not self.beside:
            step.wait()
        return step

    def synchronize(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class FakeStep:
    sampled: list[Any]
    chunks: list[Any]
    clock: Clock
    end: float

    def wait(self) -> SampledTokens:
        self.clock.time = max(self.clock.time, self.end)
        return SampledTokens([7] * len(self.sampled))


class Bench:
    """``bench([(arrival, prompt_len, output_len), …])`` drives a real engine on the fake model."""

    def __init__(self, num_blocks: int = 64, overlap: bool = False) -> None:
        self.clock = Clock()
        blocks = BlockManager(num_blocks, 16)
        self.model = FakeModel(self.clock, blocks, overlap)
        registry = Registry.discover()
        spec = registry.get("scheduler", "decode_first")
        limits = SchedulerLimits(8, 1000, 200)
        scheduler = spec.factory(registry.make_options("scheduler", spec, {}), limits, blocks)
        self.engine = Engine(
            self.model, scheduler, blocks, vocab_size=100, max_model_len=200, overlap=overlap, debug=True
        )

    def __call__(self, requests: list[tuple[float, int, int]], concurrency: int | None = None, token: int = 1) -> Run:
        workload = Workload(tuple(Request(i, *r) for i, r in enumerate(requests)), concurrency)
        prompts = [[token + i] * r.prompt_len for i, r in enumerate(workload.requests)]
        params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=r.output_len) for r in workload.requests]
        return drive(self.engine, workload, prompts, params, clock=self.clock, sleep=self.clock.sleep)


def near(*values: float) -> Any:
    return pytest.approx(list(values), abs=1e-9)


def test_open_loop_by_hand() -> None:
    """A runs alone until 0.2; B came at 0.05 and waits for that; both decode; C finds an idle engine at 5.

    There is no tokenizer: tokens are streamed without text.

    step 1: 0.0-0.2 prefill A; 2: 0.2-0.5 decode A, prefill B; 3: 0.5-0.6 and 4: 0.6-0.7 decode; 5: 5.0-5.15 prefill C
    """
    run = Bench()([(0.0, 10, 3), (0.05, 20, 3), (5.0, 5, 1)])
    a, b, c = run.requests
    assert [r.ttft for r in run.requests] == near(0.2, 0.45, 0.15)
    assert [r.queue for r in run.requests] == near(0.0, 0.15, 0.0)
    assert [r.e2e for r in run.requests] == near(0.6, 0.65, 0.15)
    assert [a.tpot, b.tpot] == near(0.2, 0.1) and c.tpot is None
    assert a.itl == near(0.3, 0.1)
    assert [(s.num_decode, s.num_prefill_tokens, s.context_tokens) for s in run.steps] == [
        (0, 10, 0), (1, 20, 11), (2, 0, 12 + 21), (1, 0, 22), (0, 5, 0),
    ]  # fmt: skip
    assert run.durations() == near(0.2, 0.3, 0.1, 0.1, 0.15)
    assert [step.used_blocks for step in run.steps] == [1, 3, 3, 2, 1]
    assert run.timeline()[3:] == [
        near(0.6, 1, 0, 2 / 64),
        near(0.7, 0, 0, 0),
        near(5, 1, 0, 1 / 64),
        near(5.15, 0, 0, 0),
    ]
    figures = run.figures(Objectives(ttft=0.3, tpot=0.25))
    assert [figures[k] for k in ("duration s", "QPS", "output tok/s", "goodput req/s")] == near(
        5.15, 3 / 5.15, 7 / 5.15, 2 / 5.15
    )
    assert figures["busy s"] == pytest.approx(0.85) and figures["KV use peak"] == 3 / 64
    assert figures["batch mean"] == pytest.approx((1 * 0.2 + 2 * 0.3 + 2 * 0.1 + 1 * 0.1 + 1 * 0.15) / 0.85)


def test_closed_loop_by_hand() -> None:
    """One at a time: a request arrives when it is sent, so nobody queues. A: 0-0.3, B: 0.3-0.6."""
    run = Bench()([(0.0, 10, 2), (0.0, 10, 2)], concurrency=1)
    assert [r.arrival for r in run.requests] == near(0.0, 0.3)
    assert [r.queue for r in run.requests] == near(0.0, 0.0)
    assert max(step.num_decode + step.num_prefill for step in run.steps) == 1


def test_steps_that_overlap_are_not_counted_twice() -> None:
    """Step 2 is launched at 0, before the tokens of step 1 are there; it has the device from 0.2 to 0.3."""
    run = Bench(overlap=True)([(0.0, 10, 3)])
    assert [(step.begin, step.end) for step in run.steps] == [near(0.0, 0.2), near(0.0, 0.3), near(0.2, 0.4)]
    assert run.durations() == near(0.2, 0.1, 0.1)
    assert [run.requests[0].ttft, run.requests[0].e2e] == near(0.2, 0.4)


def test_what_is_refused_aborted_or_fails_is_counted_and_the_rest_goes_on() -> None:
    bench = Bench()
    bench.model.on_step = {2: lambda: bench.engine.abort("bench-0"), 4: lambda: 1 / 0}
    run = bench([(0.0, 10, 50), (0.0, 500, 1), (0.0, 10, 3), (4.0, 10, 2), (5.0, 10, 2)])
    assert [r.finish_reason for r in run.requests] == ["abort", "error", "length", "error", "length"]
    figures = run.figures(Objectives())
    assert [figures[k] for k in ("requests", "completed", "aborted", "failed")] == [5, 2, 1, 2]
    assert figures["E2E count"] == 2
    assert "max_model_len is 200" in run.reasons[0] and "ZeroDivisionError" in run.reasons[1]
    assert bench.engine.runner is bench.model and not bench.engine.requests


def test_prefix_hits_and_preemptions_reach_the_figures() -> None:
    bench = Bench(num_blocks=8)
    run = bench([(0.0, 40, 60), (0.0, 40, 60)])  # 14 blocks in the end, of 8
    assert run.figures(Objectives())["preemptions"] == run.requests[1].num_preemptions > 0
    bench = Bench()
    bench([(0.0, 40, 1)])
    again = bench([(0.0, 40, 1)])
    assert again.requests[0].num_cached_tokens == 32 and again.figures(Objectives())["prefix hit rate"] == 0.8


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 30).map(lambda n: n / 10), st.integers(1, 150), st.integers(1, 20)),
        min_size=1,
        max_size=12,
    ),
    st.booleans(),
    st.none() | st.integers(1, 3),
    st.integers(12, 40),
)
def test_any_workload_adds_up(
    requests: list[tuple[float, int, int]], overlap: bool, concurrency: int | None, num_blocks: int
) -> None:
    """Fake clock and model: a request's parts make up its latency, and nothing takes longer than the run."""
    run = Bench(num_blocks, overlap)(sorted(requests), concurrency)
    for request, (_, _, output_len) in zip(run.requests, sorted(requests), strict=True):
        assert request.finish_reason == "length" and request.output_len == output_len
        assert request.queue + request.prefill + request.decode == pytest.approx(request.e2e)
        assert request.queue >= 0 and request.prefill > 0
        assert sum(request.itl) == pytest.approx(request.decode)
        if request.tpot is not None:
            assert request.tpot * (output_len - 1) == pytest.approx(request.decode)
    figures = run.figures(Objectives(ttft=0.5, tpot=0.2))
    assert figures["completed"] == len(requests) and figures["failed"] == 0
    assert figures["goodput req/s"] <= figures["QPS"] + 1e-9
    assert figures["busy s"] <= max(step.end for step in run.steps) + 1e-9
    assert 0 < figures["KV use peak"] <= 1
    read = sum(step.num_prefill_tokens for step in run.steps)
    if not figures["preemptions"]:  # what was found in the cache is not read, and nothing is read twice
        assert read == sum(request.prompt_len - request.num_cached_tokens for request in run.requests)


# --- scenarios -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scenario", "arrival", "rate", "concurrency"),
    [("offline", "all", None, None), ("server", "poisson", 8.0, None), ("single_stream", "closed", None, 1),
     (None, "poisson", 8.0, None)],
)  # fmt: skip
def test_scenarios(scenario: str | None, arrival: str, rate: float | None, concurrency: int | None) -> None:
    values = resolve({"scenario": scenario, "arrival": None, "rate": None, "concurrency": None})
    assert (values["arrival"], values["rate"], values["concurrency"]) == (arrival, rate, concurrency)


def test_a_trace_gives_its_own_lengths() -> None:
    assert resolve({"trace": "a.csv", "arrival": "trace"}).get("input_len") is None
    assert resolve({"input_len": 5})["input_len"] == 5 and resolve({})["output_len"] == (16, 64)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"scenario": "offline", "arrival": "poisson"}, "bench.arrival: scenario=offline means arrival=all"),
        ({"scenario": "multi"}, "bench.scenario: 'multi' is not one of offline, server, single_stream"),
        ({"scenario": "single_stream", "concurrency": 4}, "bench.concurrency"),
        ({"arrival": "trace"}, "bench.trace: a value is required"),
    ],
)
def test_contradictions_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(values)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench.scenario=offline", "bench.rate=4"], "bench.rate must be null with arrival=all"),
        (["bench.repeat=0"], "bench.repeat must be at least 1"),
        (["bench.tpot_slo_ms=0"], "bench.tpot_slo_ms must be above 0"),
        (["bench=nano_vllm", "report=a.html"], "report: only bench kind serve"),
        (["bench=nano_vllm", "bench.kind=x"], "bench.kind: 'x' is not one of serve, throughput, latency"),
    ],
)
def test_a_wrong_option_is_refused_before_an_engine_is_built(cli: Cli, arguments: list[str], message: str) -> None:
    run = cli("task=bench", *arguments)
    assert (run.code, cli.llms) == (2, []) and message in run.err


def test_the_missing_plotting_library_is_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run = cli("task=bench", "report=a.html")
    assert (run.code, cli.llms) == (2, []) and "pip install 'nanoserve[bench]'" in run.err
    assert run.err.count("\n") == 1


# --- the real thing ------------------------------------------------------------------------------------------------


@pytest.fixture
def real(cli: Cli, monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path) -> Any:
    """``real(…)`` runs a small task=bench on a random checkpoint."""
    monkeypatch.setattr(Job, "llm", REAL_LLM)
    sizes = ["bench.num_requests=6", "bench.input_len=[4,12]", "bench.output_len=[2,6]"]
    fixed = ["task=bench", f"model.path={tiny_checkpoint}", "engine.num_kv_blocks=64", *sizes]
    return lambda *arguments: cli(*fixed, *arguments)


def loads_nothing(page: str) -> bool:
    return not re.search(r"""(src|href)=["'](?!#)""", page.replace("xlink:href", "href"))


def test_a_record_has_all_that_others_need(real: Any) -> None:
    run = real("bench.rate=200", "bench.repeat=3", "bench.priorities=[0,1,1]", "output=a.json", "report=a.html")
    assert run.code == 0, run.err
    assert "priority 1: requests 4, TTFT p50 ms" in run.out and "decode_first" in run.out
    assert "does not look at priorities" in run.out
    assert all(word in run.out for word in ("TTFT", "ITL", "goodput share", "scenario server: valid at 200"))
    record = json.loads(Path("a.json").read_text())
    assert [record["priorities"][one]["requests"] for one in "01"] == [2, 4]
    assert {"hardware", "versions", "git", "engine", "config", "workload", "seed", "figures", "runs"} <= set(record)
    assert record["workload"]["scenario"] == "server" and len(record["runs"]) == 3
    assert all(set(row) >= {"arrival", "prompt_len", "output_len", "ttft", "tpot", "e2e"} for row in record["requests"])
    assert record["figures"]["completed"] == 6 and record["figures"]["prefix hit rate"] == 0  # repeats share no prompt
    decoded = sum(row["output_len"] - 1 for row in record["requests"])
    assert sum(step[0] for step in record["steps"]) == decoded
    assert sum(step[1] for step in record["steps"]) == sum(row["prompt_len"] for row in record["requests"])
    assert sum(step[3] for step in record["steps"]) <= record["runs"][record["shown_run"]]["duration s"] + 1e-6
    assert record["attention"].keys() == {"prefill", "decode"} and "attention: prefill sdpa; decode sdpa" in run.out
    assert "decode sdpa; policy auto (policy/auto.yaml)" in " ".join(run.out.split())
    assert all(counts.keys() == {"sdpa"} and counts["sdpa"] > 0 for counts in record["attention"].values())
    assert record["phases_ms"]["sample"] is None and record["phases_ms"]["tokenise"] > 0
    page = Path("a.html").read_text()
    assert page.count("<svg") == len(html.PLOTS) == 3
    assert loads_nothing(page)


def test_the_backends_that_ran_are_counted() -> None:
    """What was captured in a graph stays in use; a stranger's is named with its distribution."""
    plugins = {"prefill": "attention=flash of nanoserve 0.1.0", "decode": "attention=mine of nanoserve-mine 2.0"}
    backends = {phase: SimpleNamespace(plugin=plugin) for phase, plugin in plugins.items()}
    selector = SimpleNamespace(select=lambda phase, shape, captured=False, instance=0: backends[phase])
    select = selector.select
    counter = Backends(cast(Any, SimpleNamespace(engine=SimpleNamespace(runner=SimpleNamespace(selector=selector)))))
    with counter:
        selector.select("prefill", None)
        assert selector.select("decode", None, captured=True, instance=1) is backends["decode"]
    counter.forget_steps()
    selector.select = select
    with counter:
        selector.select("decode", None)
    mine = {"mine of nanoserve-mine 2.0": 1}
    assert counter.as_record() == {"attention": {"decode, captured": mine, "decode": mine}}


def test_a_sweep_marks_the_best_and_keeps_failing_jobs(real: Any) -> None:
    run = real("-m", "scheduler=decode_first,prefill_first", "engine.max_num_seqs=4,0", "bench.scenario=offline",
               "hydra.sweep.dir=sweep")  # fmt: skip
    assert run.code == 1
    lines = [line for line in run.out.splitlines() if line.startswith("│") and "first" in line]
    assert len(lines) == 4 and sum(" * " in line for line in lines) >= 1
    assert "* is the best of its column" in run.out
    with Path("sweep/sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["engine.max_num_seqs"] for row in rows] == ["4", "0", "4", "0"]
    assert [bool(row["output tok/s"]) for row in rows] == [True, False, True, False]
    assert [row["error"][:27] for row in rows] == ["", "engine.max_num_seqs must be", "", "engine.max_num_seqs must be"]
    assert json.loads(Path("sweep/2/bench.json").read_text())["engine"]["scheduler"] == "prefill_first"
    page = Path("sweep/sweep.html").read_text()
    assert page.count("<svg") == 1 and loads_nothing(page)
    assert all(f">{text}</text>" in page for text in ("output tok/s", "2: prefill_first 4", "none"))


@pytest.mark.parametrize(("best", "colours"), [(20.0, 2), (None, 1)])
def test_the_plot_of_a_sweep_marks_the_best(best: float | None, colours: int) -> None:
    page = html.render_sweep(["a", "b"], {"QPS": [10.0, 20.0]}, {"QPS": best})
    assert len(set(re.findall(r"fill: (#1f77b4|#ff7f0e)", page))) == colours and ">20</text>" in page


def test_joblib_launches_a_sweep(tmp_path: Path, tiny_checkpoint: Path) -> None:
    """Hydra's own launchers work: jobs in other processes, the table here."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    command = [sys.executable, "-m", "nanoserve", "-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2",
               "hydra.sweep.dir=sweep", "task=bench", f"model.path={tiny_checkpoint}", "engine.num_kv_blocks=64",
               "bench.num_requests=2", "bench.input_len=4", "bench.output_len=2", "kv=bf16,int8,nope"]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "job 2 failed with kv=nope: unknown kv 'nope'" in done.stderr, done.stderr
    assert "3 jobs" in done.stdout and (tmp_path / "sweep" / "1" / "bench.json").is_file()
    assert len((tmp_path / "sweep" / "sweep.csv").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench=smoke", "bench.num_requests=-1"], "bench.num_requests must be at least 1, not -1"),
        (["bench=smoke", "bench.repeat=0"], "bench.repeat must be at least 1, not 0"),
        (["bench=smoke", "bench.output_len=[9,3]"], "bench.output_len must be a range"),
        (["bench=smoke", "bench.temperature=nan"], "bench.temperature must be at least 0 and finite"),
        (["bench=latency", "bench.repeat=-1"], "bench.repeat must be"),
        (["bench=latency", "bench.batches=[0]"], "bench.batches must be"),
        (["bench=latency", "bench.batches=[]", "bench.prompts=[]"], "bench.batches must be"),
        (["bench=latency", "bench.output_len=2"], "bench.output_len must be at least 8"),
        (["bench.temperature=inf"], "bench.temperature must be at least 0 and finite"),
        (["sampling.temperature=1"], "task=bench does not use sampling (it has bench.temperature)"),
        (["report=x.txt"], "report=x.txt: the file's name must end in .html"),
        (["hydra/launcher=joplib"], "pip install hydra-joplib-launcher"),
    ],
)
def test_what_is_refused_before_an_engine_starts(cli: Cli, arguments: list[str], message: str) -> None:
    run = cli("task=bench", *arguments)
    assert (run.code, cli.llms) == (2, []) and message in run.err, run.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench.context=100000", "bench.batches=[2]", "bench.prompts=[]"], "bench.context: 1000"),
        (["bench.prompts=[[1,99999]]"], "bench.prompts: 100000 tokens"),
        (
            ["bench.batches=[8]", "bench.context=9", "bench.output_len=8", "bench.prompts=[]", "engine.max_num_seqs=4"],
            "bench.batches: 8 sequences exceed",
        ),
        (["bench.batches=[]", "bench.prompts=[[8,9]]", "engine.max_num_seqs=4"], "bench.prompts: 8 sequences exceed"),
        (
            ["bench.batches=[2]", "bench.context=10", "bench.output_len=40", "bench.prompts=[]"],
            "bench.context=10 is too short for 2 sequences",
        ),
        (
            [
                "bench.batches=[8]",
                "bench.context=64",
                "bench.output_len=9",
                "bench.prompts=[]",
                "engine.num_kv_blocks=8",
            ],
            "bench.batches: 8 sequences of 64 tokens take 32 blocks, and there are 8",
        ),
        (
            ["bench.batches=[]", "bench.prompts=[[8,16]]", "engine.num_kv_blocks=4"],
            "bench.prompts: 8 sequences of 16 tokens take 8 blocks, and there are 4; lower it",
        ),
    ],
)
def test_a_latency_that_the_engine_cannot_measure(
    real: Any, tiny_checkpoint: Path, cli: Cli, arguments: list[str], message: str
) -> None:
    run = cli("task=bench", "bench=latency", f"model.path={tiny_checkpoint}", "bench.repeat=1", *arguments)
    assert run.code == 2 and message in run.err, run.err


def test_prompts_that_exceed_a_step_are_read_in_chunks(real: Any, tiny_checkpoint: Path, cli: Cli) -> None:
    words = ["bench.batches=[]", "bench.prompts=[[8,16]]", "engine.max_num_batched_tokens=32", "engine.num_kv_blocks=4"]
    run = cli("task=bench", "bench=latency", f"model.path={tiny_checkpoint}", "bench.repeat=1", *words)
    assert run.code == 0 and "TTFT" in run.out, run.err


def test_the_older_kinds_work_as_they_did(real: Any, tiny_checkpoint: Path, cli: Cli) -> None:
    model = ["task=bench", f"model.path={tiny_checkpoint}", "engine.num_kv_blocks=256", "output=a.json"]
    lengths = ["bench.num_requests=4", "bench.input_len=[4,8]", "bench.output_len=[3,3]", "bench.max_token_id=200"]
    assert cli(*model, "bench=nano_vllm", *lengths).code == 0
    record = json.loads(Path("a.json").read_text())
    assert record["figures"]["output tokens"] == 12 and len(record["figures"]["runs"]) == 2
    shape = ["bench.batches=[2]", "bench.context=16", "bench.output_len=12", "bench.prompts=[[2,8]]", "bench.repeat=1"]
    run = cli(*model, "bench=latency", *shape)
    assert run.code == 0 and set(json.loads(Path("a.json").read_text())["figures"]) == {"TTFT 2x8 ms", "TPOT b2 ms"}


@pytest.mark.parametrize("batch", [1, 6, 16, 40])
def test_latency_is_that_of_the_context_asked_for(tiny_checkpoint: Path, batch: int) -> None:
    """However long it takes to read all prompts, while the first of them decode already."""
    workload = Latency("latency", batches=[batch], context=48, output_len=24, prompts=[], repeat=1)
    options: dict[str, Any] = {"num_kv_blocks": 512, "max_num_batched_tokens": 64, "device": "cpu", "overlap": False}
    with LLM(str(tiny_checkpoint), **options) as llm:
        engine, contexts = llm.engine, []
        step = engine.step

        def stepped() -> Any:
            outputs = step()
            if len(engine.scheduler.running) == batch and not engine.scheduler.waiting:
                contexts.append(sum(seq.num_tokens for seq in engine.scheduler.running) / batch)
            return outputs

        engine.step = stepped  # type: ignore[method-assign]
        latency(llm, workload)
    window = contexts[len(contexts) // 2 :]  # the first round warms up
    assert 20 <= len(window) <= 30
    assert abs(sum(window) / len(window) - 48) <= 2
