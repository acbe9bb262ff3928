"""``task=tune``: the rules it derives from times, read by the policy that will use them, and the file it writes."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from nanoserve.config import EngineConfig, load_yaml
from nanoserve.contracts.policy import SelectionShape
from nanoserve.registry import Registry
from nanoserve.tasks.kernels.measure import Bench, Effort, Heads, Timing
from nanoserve.tasks.kernels.rules import Point, derive
from nanoserve.tasks.kernels.shapes import KernelShape, parse_all
from nanoserve.tasks.tune import (
    FAR_BEHIND,
    PATIENCE,
    Series,
    failed_everywhere,
    make_policy,
    measure_all,
    share_lost,
)
from tests.tasks.conftest import Cli

CAPTURABLE = frozenset({"a", "b"})


def decode(batch: int, context: int, kv: str = "bf16", **times: float) -> Point:
    return Point("decode", SelectionShape(batch, batch, 1, context, kv, (9, 0), has_prefix=True), times, CAPTURABLE)


def prefill(batch: int, length: int, prefix: int = 0, kv: str = "bf16", **times: float) -> Point:
    shape = SelectionShape(batch, batch * length, length, length + prefix, kv, (9, 0), has_prefix=prefix > 0)
    return Point("prefill", shape, times)


def losses(points: list[Point], min_gain: float = 0.02) -> tuple[list[str], float]:
    """The rules as text, and the largest loss of the policy that reads them."""
    rules = derive(points, min_gain)
    policy = make_policy(Registry.discover(), rules)
    return [str(rule) for rule in rules], max(share_lost(policy, point) for point in points)


def test_one_backend_that_is_best_everywhere_is_one_rule():
    points = [decode(b, n, kv, a=1.0, b=2.0) for b in (1, 8) for n in (512, 4096) for kv in ("bf16", "int8")]
    assert losses(points) == (["{phase: decode, use: [a, b]}"], 0)


def test_a_difference_below_the_gain_is_no_rule():
    points = [decode(1, 512, a=1.0, b=1.015), decode(8, 512, a=1.015, b=1.0), decode(64, 512, a=1.015, b=1.0)]
    assert losses(points) == (["{phase: decode, use: [b, a]}"], pytest.approx(0.015))
    assert losses(points, min_gain=0.01) == (
        ["{phase: decode, when: {batch: {max: 2}}, use: [a, b]}", "{phase: decode, use: [b, a]}"],
        0,
    )


def test_thresholds_lie_between_what_was_measured():
    points = [prefill(8, n, a=n, b=100 + n / 2) for n in (32, 128, 512, 2048)]
    rules, loss = losses(points)
    assert rules == ["{phase: prefill, when: {max_seqlen_q: {max: 256}}, use: [a, b]}", "{phase: prefill, use: [b, a]}"]
    assert loss == 0


def test_a_backend_of_one_format_is_passed_over_at_the_others():
    """So a table needs no condition on the format where the preference alone says it."""
    points = [decode(1, n, a=1.0, b=2.0) for n in (512, 4096)]
    points += [decode(1, n, "int8", only=0.5, a=1.0, b=2.0) for n in (512, 4096)]
    assert losses(points) == (["{phase: decode, use: [only, a, b]}"], 0)
    points += [decode(8, n, "int8", only=4.0, a=2.0, b=1.0) for n in (512, 4096)]
    points += [decode(8, n, a=1.0, b=2.0) for n in (512, 4096)]
    assert losses(points)[1] == 0


def test_prefixes_and_formats_are_told_apart():
    points = [
        prefill(4, 512, p, kv, a=1 + (p > 0) + (kv == "int8"), b=1.5) for p in (0, 4096) for kv in ("bf16", "int8")
    ]
    rules, loss = losses(points)
    assert loss == 0 and any("has_prefix: false" in rule for rule in rules) and any("[bf16]" in rule for rule in rules)


def test_graphs_get_rules_that_do_not_look_at_the_context():
    """They are captured for every context, with the longest as a bound: a threshold on it would always say "long"."""
    points = [decode(1, 512, a=1.0, b=8.0), decode(1, 4096, a=2.0, b=1.0)]  # short contexts matter more
    points += [decode(64, 512, a=2.0, b=1.0), decode(64, 4096, a=2.0, b=1.0)]
    rules = derive(points, 0.02)
    policy = make_policy(Registry.discover(), rules)
    assert max(share_lost(policy, point) for point in points) == 0
    captured = [point.captured(40960) for point in points]
    assert [policy.select("decode", p.shape, ("a", "b")) for p in captured] == ["a", "a", "b", "b"]
    # Where no rule looks at the context, graphs need none of their own.
    assert "captured" not in str([str(rule) for rule in derive(points[2:], 0.02)])


def test_graphs_are_judged_by_what_can_be_captured():
    points = [decode(1, 512, eager=0.1, a=1.0, b=2.0), decode(1, 4096, eager=9.0, a=1.0, b=2.0)]
    policy = make_policy(Registry.discover(), derive(points, 0.02))
    assert policy.select("decode", points[0].captured(40960).shape, ("a", "b")) == "a"
    assert policy.select("decode", points[0].shape, ("a", "b", "eager")) == "eager"


class FakeBench:
    """Times from a formula; remembers what it was asked for."""

    kv, capability, candidates = "bf16", (9, 0), {"decode": ("good", "slow", "wrong", "broken")}

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[str, ...]]] = []

    def measure(self, shape, backends, with_torch):
        if shape.name == "9x9":
            raise torch.OutOfMemoryError
        self.asked.append((shape.name, tuple(backends)))
        times = {"good": 1.0, "slow": 50.0, "wrong": 0.1}
        return {name: Timing(times.get(name), wrong=name == "wrong") for name in backends}

    def capturable(self, name):
        return True


def test_backends_far_behind_are_given_up_and_shapes_that_do_not_fit_are_named():
    bench = FakeBench()
    series = Series(bench, "decode", parse_all(["1x1", "1x2", "9x9", "1x3", "1x4"], "decode"))  # type: ignore[arg-type]
    assert measure_all([series], 0.0, float("inf")) == ["decode 9x9 bf16 (memory)"]
    assert [len(names) for _, names in bench.asked] == [4] * PATIENCE + [1]
    assert failed_everywhere([series]) == {"broken"}
    points = series.points({"wrong", "broken"})
    assert len(points) == 4 and points[0].times == {"good": 1.0, "slow": 50.0}
    assert points[-1].times == {"good": 1.0, "slow": FAR_BEHIND}
    late = Series(bench, "decode", series.shapes)  # type: ignore[arg-type]
    assert len(measure_all([late], 0.0, 0.0)) == 5 and not late.times and not failed_everywhere([late])


def test_a_backend_that_fails_with_one_kv_format_stays_far_behind_there():
    """Else a rule without a format could name it."""
    shapes = parse_all(["1x1"], "decode")
    fine, broken = (Series(FakeBench(), "decode", shapes) for _ in range(2))  # type: ignore[arg-type]
    fine.times = {"1x1": {"good": Timing(2.0), "broken": Timing(1.0)}}
    broken.times = {"1x1": {"good": Timing(2.0), "broken": Timing(failed="RuntimeError: boom")}}
    assert failed_everywhere([fine, broken]) == set() and failed_everywhere([broken]) == {"broken"}
    (point,) = broken.points({"slow", "wrong"})
    assert point.times == {"good": 2.0, "broken": 2.0 * FAR_BEHIND}


def test_a_shape_that_the_memory_of_a_cpu_cannot_hold_is_left_out(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    """Before it is begun: Linux gives the memory and ends the process that uses it."""
    monkeypatch.setattr("nanoserve.tasks.kernels.measure.available_on_cpu", lambda: 2.0**20)
    shapes = ["prefill_shapes=[]", "decode_shapes=[1x3,1x9999]", "num_q_heads=2", "num_kv_heads=1", "head_dim=32"]
    outcome = cli("task=tune", "engine.device=cpu", "formats=[bf16]", *shapes)
    assert outcome.code == 0 and "left out: decode 1x9999 bf16 (memory: 0.0" in outcome.out


@pytest.mark.parametrize("kv, with_torch", [("bf16", True), ("bf16", False), ("int8", False)])
@pytest.mark.parametrize(
    "shape, phase", [("1x9000", "decode"), ("3x3000", "decode"), ("2x200+4000", "prefill"), ("2x800", "prefill")]
)
def test_what_a_shape_takes_of_a_cpu_was_foreseen(monkeypatch, kv, with_torch, shape, phase):
    bench = Bench(EngineConfig.from_kwargs(device="cpu"), Registry.discover(), Heads(4, 2, 64), kv, Effort(1, 1.0))
    one = KernelShape.parse(shape, phase)
    monkeypatch.setattr("nanoserve.tasks.kernels.measure.available_on_cpu", lambda: 0.0)
    with pytest.raises(torch.OutOfMemoryError) as refused:
        bench.measure(one, ["sdpa"], with_torch)
    monkeypatch.undo()
    foreseen = float(str(refused.value).split()[0]) * 2**30
    with torch.profiler.profile(profile_memory=True) as profiler:
        assert bench.measure(one, ["sdpa"], with_torch)["sdpa"].valid
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    most = max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    assert foreseen / 2 < most < foreseen


def test_the_file_is_a_policy_that_the_command_line_takes(cli: Cli):
    words = ["engine.device=cpu", "num_q_heads=2", "num_kv_heads=1", "head_dim=32", "record=times.json"]
    words += ["prefill_shapes=[1x3]", "decode_shapes=[1x3]"]
    outcome = cli("task=tune", *words)
    assert outcome.code == 0, outcome.err
    text = Path("policy/tuned_cpu.yaml").read_text()
    assert "use: [sdpa" in text and text in outcome.out and Path("policy/tuned_cpu.svg").stat().st_size > 1000
    assert "nanoserve --config-dir . policy=tuned_cpu" in outcome.out
    stored = load_yaml("policy", "tuned_cpu", ["file://."])
    assert stored is not None and [row["phase"] for row in stored["table"]] == ["prefill", "decode"]
    results = json.loads(Path("times.json").read_text())["results"]
    assert {r["kv"] for r in results} >= {"bf16", "int8"}
    of = {"heads": {"num_q": 2, "num_kv": 1, "dim": 32}, "dtype": "float32", "block_size": 16}
    assert all(r.items() >= of.items() for r in results) and {"dtype": "auto"} in [r["kv_options"] for r in results]
    used = cli("--config-dir", ".", "policy=tuned_cpu", "--cfg", "job")
    assert used.code == 0 and "- sdpa" in used.out


@pytest.mark.parametrize(
    "words, complaint",
    [
        (["attention=sdpa"], "leave attention=auto"),
        (["output=h200.yaml"], "FOLDER/policy/NAME.yaml"),
        (["formats=[]"], "formats"),
        (["formats=[fp1]"], "fp1"),
        (["formats=[int8]", "kv.dtype=float16"], "kv=bf16 is given options, and is not among formats: int8"),
        (["decode_shapes=[65537x1]"], "shape '65537x1': an engine has at most 65536 sequences"),
        (["prefill_shapes=[ragged65537]"], "an engine has at most 65536 sequences"),
        (["min_gain=1.0"], "min_gain"),
        (["seconds=0"], "seconds"),
        (["decode_shapes=[]", "prefill_shapes=[]"], "nothing to measure"),
    ],
)
def test_what_cannot_work_is_refused_in_words(cli: Cli, words, complaint):
    outcome = cli("task=tune", "engine.device=cpu", *words)
    assert outcome.code == 2 and complaint in outcome.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU does not interpret")
def test_interpreted_kernels_are_measured_too():
    """The whole way from kernels to a table, with every backend that a CPU can run."""
    bench = Bench(EngineConfig.from_kwargs(device="cpu"), Registry.discover(), Heads(2, 1, 32), "bf16", Effort(1, 1.0))
    series = Series(bench, "decode", parse_all(["2x5", "1x9"], "decode"))
    assert measure_all([series], 0.0, float("inf")) == []
    points = series.points(())
    assert {"sdpa", "paged_v1", "paged_v2", "paged_v2_split"} <= set(points[0].times)
    policy = make_policy(Registry.discover(), derive(points, 0.02))
    assert [policy.select("decode", point.shape, tuple(point.times)) for point in points] == ["sdpa", "sdpa"]
