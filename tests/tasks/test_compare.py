"""The regression gate: its rule by hand, a slowed scheduler caught end to end, and the CPU set as ratios."""

from __future__ import annotations

import json
import statistics
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoserve import LLM
from nanoserve.config import build, load_yaml
from nanoserve.contracts.errors import ConfigError
from nanoserve.tasks import Job
from nanoserve.tasks.bench.serve import Serve, measure, resolve
from nanoserve.tasks.compare import Gate, compare
from nanoserve.tasks.compare_changes import Change, Sample
from tests.helpers.distributions import Distributions
from tests.helpers.distributions import distributions as distributions
from tests.tasks.conftest import Cli

REAL_LLM = Job.llm
BASELINES = Path(__file__).parents[1] / "baselines" / "cpu_ratios.json"


def change(name: str, base: list[float], new: list[float], limit: float | None = 0.1) -> Change:
    return Change(name, Sample(base), Sample(new), limit)


@pytest.mark.parametrize(
    ("name", "base", "new", "verdict"),
    [
        ("output tok/s", [100], [100], "same"),
        ("output tok/s", [100], [89], "fell"),  # 11 % of 10 %
        ("output tok/s", [100], [91], "worse"),
        ("output tok/s", [100], [150], "better"),
        ("TTFT p95 ms", [100], [111], "fell"),  # the direction is the metric's
        ("TTFT p95 ms", [100], [50], "better"),
        ("output tok/s", [100, 80, 120], [85, 95, 70], "noise"),  # quartiles 90 … 110 and 77.5 … 90
        ("output tok/s", [100, 99, 101], [80, 81, 300], "noise"),
        ("output tok/s", [100, 99, 101], [80, 81, 82], "fell"),
        ("preemptions", [0], [0], "same"),
        ("preemptions", [0], [1], "fell"),
        ("prefix hit rate", [0], [0.5], "better"),
        ("TPOT p50 ms", [5], [], "fell"),  # undefined now: every request had one token, or none ended
        ("TPOT p50 ms", [], [5], ""),
    ],
)
def test_the_rule(name: str, base: list[float], new: list[float], verdict: str) -> None:
    assert change(name, base, new).verdict == verdict


def test_what_is_not_gated_never_falls() -> None:
    assert change("output tok/s", [100], [1], limit=None).verdict == "worse"


def test_ratio_is_of_medians() -> None:
    assert change("QPS", [1, 2, 9], [1, 4, 5]).ratio == 2.0
    assert change("failed", [0], [3]).ratio is None


def test_gate_refuses_what_it_cannot_judge() -> None:
    with pytest.raises(ConfigError, match="no direction of 'requests'"):
        Gate({"requests": 0.1})
    with pytest.raises(ConfigError, match="at least 0"):
        Gate({"QPS": -0.1})
    record = {"figures": {"output tok/s": 1.0}}
    with pytest.raises(ConfigError, match="neither record has 'TTFT p95 ms'"):
        compare(record, record, Gate({"TTFT p95 ms": 0.1}))


# --- the command ---------------------------------------------------------------------------------------------------


def save(path: str, rates: list[float], **more: Any) -> None:
    runs = [{"output tok/s": rate} for rate in rates]
    record = {"hardware": "CPU", "workload": {"seed": 0, "repeat": len(rates)}, "runs": runs, **more}
    Path(path).write_text(json.dumps({**record, "figures": {"output tok/s": statistics.median(rates)}}))


@pytest.fixture
def gate(cli: Cli) -> Any:
    """``gate(base, new, …)`` compares files under a gate of one metric, 5 %."""
    folder = Path("conf/gate")
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("limits: {output tok/s: 0.05}\nsame_hardware: true\nsame_workload: true\n")
    flags = ["task=compare", "gate=mine", f"hydra.searchpath=[file://{Path('conf').resolve()}]"]
    return lambda base, new, *more: cli(*flags, f"base={base}", f"new={new}", *more)


def test_exit_codes(gate: Any) -> None:
    save("a.json", [100, 101, 99])
    save("b=1,x.json", [80, 81, 82])
    fell = gate("a.json", "b=1,x.json")
    assert fell.code == 1 and "1 of 1 gated metrics fell: output tok/s" in fell.err and "0.81" in fell.out
    risen = gate("b=1,x.json", "a.json")
    assert risen.code == 0 and "better" in risen.out and risen.err == ""


def test_records_that_prove_nothing_are_refused(gate: Any) -> None:
    save("a.json", [100])
    save("gpu.json", [100], hardware="GPU")
    save("other.json", [100], workload={"seed": 1, "repeat": 3})
    save("nan.json", [100, float("nan")])
    Path("bad.json").write_text("{}")
    for new, message in [
        ("nan.json", "new: 'nan.json' has output tok/s nan"),
        ("gpu.json", "base was measured on CPU, new on GPU"),
        ("other.json", "the workloads differ in seed (0 and 1)"),
        ("bad.json", "no record of task=bench"),
        ("none.json", "new: cannot read 'none.json'"),
    ]:
        run = gate("a.json", new)
        assert run.code == 2 and message in run.err
    assert gate("a.json", "gpu.json", "gate.same_hardware=false").code == 0
    assert gate("a.json", "other.json", "gate.same_workload=false").code == 0


# --- two engines here and now --------------------------------------------------------------------------------------


def test_without_records_two_engines_take_turns(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path
) -> None:
    """What is counted is the same for both; a slower format is no regression, so the exit code is 0."""
    monkeypatch.setattr(Job, "llm", REAL_LLM)
    small = [f"model.path={tiny_checkpoint}", "engine.num_kv_blocks=64", "bench.num_requests=3", "bench.repeat=3"]
    run = cli("task=compare", *small, "bench.input_len=4", "bench.output_len=3", "bench.shared_prefix_len=0")
    assert run.code == 0, run.err
    assert "base: " in run.out and "kv bf16" in run.out and "kv int8" in run.out
    rows = {line.split("│")[1].strip(): line for line in run.out.splitlines() if line.startswith("│")}
    assert "same" in rows["preemptions"] and "…" in rows["output tok/s"]  # repeats give bounds


def eval_record(against: str = "int8") -> str:
    figures = {"base.ppl": 8.0, "against.ppl": 8.01, "delta_ppl": 0.00125, "tokens": 1000, "bytes": 3000}
    bar = {"figure": "delta_ppl", "limit": 0.005, "at_least": False, "gates": True, "met": True}
    more = {"engine": {"model": "judged"}, "hardware": "GPU"}
    return json.dumps({"base": "bf16", "against": against, "figures": figures, "bars": [bar], **more})


def test_the_page_has_speed_capacity_and_quality_side_by_side(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path
) -> None:
    """Written into a page with the two marks, it replaces what stands between them and nothing else."""
    monkeypatch.setattr(Job, "llm", REAL_LLM)
    Path("eval.json").write_text(eval_record())
    Path("page.md").write_text("# Mine\n<!-- measured -->\nold\n<!-- /measured -->\nend\n")
    small = [f"model.path={tiny_checkpoint}", "engine.num_kv_blocks=64", "bench.num_requests=3", "bench.repeat=1",
             "bench.input_len=4", "bench.output_len=3", "bench.shared_prefix_len=0"]  # fmt: skip
    run = cli("task=compare", *small, "report=page.md", "quality=eval.json")
    assert run.code == 0, run.err
    page = Path("page.md").read_text()
    assert page.startswith("# Mine\n<!-- measured -->\n") and page.endswith("\n<!-- /measured -->\nend\n")
    assert "old" not in page and "perplexity +0.12%" in page
    rows = {line.split("|")[1].strip(): line for line in page.splitlines() if line.startswith("|")}
    assert rows["output tok/s"].count("|") == 6 and "1.00×" in rows["preemptions"]
    assert rows["tokens in the pool"].split("|")[2:4] == [" 1,024 ", " 1,024 "]
    unquantised, int8 = (float(cell.replace(",", "")) for cell in rows["bytes per token"].split("|")[2:4])
    assert 0.2 < int8 / unquantised < 0.4  # fp32 on a CPU
    assert "≤ +0.500% | pass" in rows["Δ perplexity"] and "1,000 tokens scored with judged on GPU" in page
    assert cli("task=compare", *small, "report=fresh.md").code == 0
    assert Path("fresh.md").read_text().startswith("# kv=int8 against kv=bf16\n\n**")
    assert "Not measured: give `quality=FILE`" in Path("fresh.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quality=eval.json"], "report=FILE is needed too"),
        (["base=a.json", "new=b.json", "report=a.md"], "report: it is about two engines that are measured here"),
        (["report=a.md", "quality=none.json"], "quality: cannot read 'none.json'"),
        (["report=a.md", "quality=bad.json"], "quality: 'bad.json' is no record of task=eval"),
        (["report=a.md", "quality=other.json"], "compares kv=bf16 with kv=fp8, here it is bf16 with int8"),
        (["base=a.json"], "base and new: give the files of two records, or neither"),
        (["base=a.json", "new=b.json", "against.kv=int8"], "against: it is for two engines that are measured here"),
        (["base=a.json", "new=b.json", "kv=int8"], "kv=int8: task=compare does not use kv with base and new"),
        (["base=a.json", "new=b.json", "bench=serve"], "bench=serve: task=compare does not use bench"),
        (["gate=ci"], "gate=ci: task=compare does not use gate without base and new"),
        (["against.nope=1"], "unknown option 'against.nope' (nanoserve task=compare --help"),
        (["against.kv=int9"], "unknown kv 'int9'"),
        (["bench.rate=3"], "bench.rate must be null with arrival=all"),
    ],
)
def test_which_two_must_be_clear(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(Job, "llm", REAL_LLM)
    Path("bad.json").write_text("{}")
    Path("other.json").write_text(eval_record("fp8"))
    run = cli("task=compare", f"model.path={tiny_checkpoint}", "engine.num_kv_blocks=64", *arguments)
    assert run.code == 2 and message in run.err and run.err.count("\n") == 1


def test_engines_take_turns_at_going_first_and_one_run_has_no_bounds(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Repeats:
        num_requests = 1

        def __init__(self, llm: Any, workload: Any) -> None:
            self.llm, self.name, self.repeat = llm, llm.job.config.kv.name, workload.repeat

        def run(self, on_finish: Any) -> None:
            order.append(self.name)

        def result(self) -> Any:
            figures = {"QPS": 1.0}
            return types.SimpleNamespace(record={"figures": figures, "runs": [figures] * self.repeat})

    monkeypatch.setattr("nanoserve.tasks.compare.Repeats", Repeats)
    monkeypatch.setattr("nanoserve.tasks.compare.describe", lambda llm: {})
    run = cli("task=compare", "bench.repeat=3")
    assert run.code == 0 and "no noise bounds" not in run.out
    assert order == ["bf16", "int8", "int8", "bf16", "bf16", "int8"]
    assert "base and new: one run, so no noise bounds" in cli("task=compare", "bench.repeat=1").out


# --- what it is for ------------------------------------------------------------------------------------------------

SLOW = """
import time
from nanoserve.contracts.scheduling import SchedulerSpec
from nanoserve.hookspecs import hookimpl
from nanoserve_plugins.scheduler.decode_first import DecodeFirst, DecodeFirstOptions

class Slow(DecodeFirst):
    def schedule(self):
        time.sleep({delay})
        return super().schedule()

@hookimpl
def nanoserve_scheduler(register):
    register(SchedulerSpec("slow", "a test", DecodeFirstOptions, Slow))
"""


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Other work on the machine disturbs one thread less than several that wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_slowed_scheduler_is_caught(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, distributions: Distributions, one_thread: None
) -> None:
    """Two sets on the same engine, and one whose scheduler sleeps in every step; the gate is that of conf/gate/ci."""
    monkeypatch.setattr(Job, "llm", REAL_LLM)
    bench = ["task=bench", "bench=ci", "bench.repeat=3", "bench.output_len=[4,8]", "engine.num_kv_blocks=512"]
    assert cli(*bench, "scheduler=decode_first", "output=decode_first.json").code == 0
    step = json.loads(Path("decode_first.json").read_text())["figures"]["TPOT p50 ms"] / 1000
    delay = max(0.1, 3 * step)  # a busy machine is slow already
    distributions.install("slow-dist", {"scheduler.slow": "slow_mod"}, slow_mod=SLOW.format(delay=delay))
    assert cli(*bench, "scheduler=slow", "output=slow.json").code == 0
    run = cli("task=compare", "gate=ci", "base=decode_first.json", "new=slow.json")
    assert run.code == 1 and "output tok/s" in run.err and "TPOT p50 ms" in run.err
    assert "steps" not in run.err  # the same work, later


def test_cpu_set_as_ratios_between_two_configurations(one_thread: None) -> None:
    """Each configuration against the default one, in one run, so that the machine's speed cancels out.

    What is counted must be as in the baseline exactly; rates may be at worst half as good.
    """
    baseline = json.loads(BASELINES.read_text())
    values = load_yaml("bench", "serve") | load_yaml("bench", "ci") | {"repeat": 1}  # type: ignore[operator]
    values.pop("defaults")
    workload = build(Serve, resolve(values), "bench")
    engines = {"base": LLM(**baseline["engine"])}
    engines |= {name: LLM(**baseline["engine"], **choice) for name, choice in baseline["configurations"].items()}
    rates: dict[str, list[float]] = {name: [] for name in engines}
    try:
        for _ in range(3):  # by turns, so that what disturbs one disturbs the other
            for name, llm in engines.items():
                figures = measure(llm, workload).record["figures"]
                rates[name].append(figures["output tok/s"])
                for counted, expected in baseline["counts"][name].items():
                    assert figures[counted] == expected, (name, counted)
    finally:
        for llm in engines.values():
            llm.close()
    for name, expected in baseline["output tok/s ratio"].items():
        ratio = statistics.median(a / b for a, b in zip(rates[name], rates["base"], strict=True))
        assert ratio > expected / 2, f"{name}: {ratio:.2f} of the default's output tok/s, baseline {expected:.2f}"
