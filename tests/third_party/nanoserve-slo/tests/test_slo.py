"""The scheduler against the contract, its order, its ageing, and its goodput beside decode_first's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from nanoserve.contracts.errors import ConfigError
from nanoserve.contracts.scheduling import SchedulerLimits, Status
from nanoserve.testing import SchedulerSuite
from nanoserve.testing.scheduler import Harness


class TestDefaults(SchedulerSuite):
    """The suite's clock counts rounds: by default a round lasts a TTFT, so nearly everybody is late and ages soon."""

    scheduler = "slo"
    num_examples = 150


class TestInTime(SchedulerSuite):
    """Deadlines that all can meet: earliest deadline first."""

    scheduler = "slo"
    options: ClassVar[dict[str, Any]] = {"ttft_ms": 1e6, "tpot_ms": 1e4}
    num_examples = 150


def harness(options: dict[str, Any], **limits: Any) -> Harness:
    suite = type("Suite", (SchedulerSuite,), {"scheduler": "slo", "options": options})
    return suite.harness(
        **{"num_blocks": 64, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 8, **limits}
    )


def prefills(run: Harness) -> list[str]:
    """Who got prompt tokens, round by round."""
    return [name for _, prefill in run.trace for name, _ in prefill]


# --- order ---------------------------------------------------------------------------------------------------------


def test_the_urgent_go_first_and_equals_in_order_of_arrival() -> None:
    """One prompt per round: priority -1 has half of a deadline, 1 has twice as long."""
    run = harness({"ttft_ms": 1e6})
    for name, priority in (("late", 1), ("first", 0), ("second", 0), ("urgent", -1)):
        run.add(name, [1] * 8, 1, priority=priority)
    run.finish()
    assert prefills(run) == ["urgent", "first", "second", "late"]


def test_who_can_still_make_it_goes_before_who_cannot() -> None:
    """Three rounds are too long for a's deadline, which is over when b arrives; b has all of its own."""
    run = harness({"ttft_ms": 2000, "max_wait": 1000})
    run.add("hog", [0] * 24, 1, priority=-20)
    run.add("a", [1] * 8, 1)
    for _ in range(3):
        run.step()
    run.add("b", [2] * 8, 1)
    run.finish()
    assert prefills(run)[-2:] == ["b", "a"]


def test_the_token_that_is_due_first_decodes_first() -> None:
    """Ten running sequences, a budget of eight: with equal deadlines they take turns, an urgent one never waits."""
    run = harness({"ttft_ms": 1e6, "tpot_ms": 1000}, max_num_seqs=10, max_num_batched_tokens=10)
    run.limits = run.scheduler.limits = SchedulerLimits(10, 10, 256)
    for i in range(10):
        run.add(str(i), [i], 12, priority=-1 if i == 3 else 0)
    run.step()
    run.limits = run.scheduler.limits = SchedulerLimits(10, 8, 256)
    for _ in range(10):
        run.step()
    rounds = [decode for decode, _ in run.trace[1:]]
    assert all("3" in decode for decode in rounds)
    counts = [sum(str(i) in decode for decode in rounds) for i in range(10) if i != 3]
    assert max(counts) - min(counts) <= 1
    run.limits = run.scheduler.limits = SchedulerLimits(10, 10, 256)
    run.finish()


# --- starvation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_wait", [10, 1000])
def test_ageing_bounds_the_wait_of_a_late_prompt(max_wait: int, overlap: bool) -> None:
    """A prompt of 40 is late at once, and in every round comes one that is in time and takes the whole budget.

    With ageing after 10 rounds it is served then, in five rounds; without, never.
    """
    run = harness({"ttft_ms": 1000, "max_wait": max_wait}, num_blocks=40, overlap=overlap)
    starved = run.add("starved", [9] * 40, 1)
    for i in range(60):
        run.add(str(i), [i] * 8, 1)
        run.step()
    served = [i for i, (_, prefill) in enumerate(run.trace) if any(name == "starved" for name, _ in prefill)]
    assert served[0] == 0  # before the scheduler knows how long a round takes
    if max_wait == 10:
        assert starved.status == Status.FINISHED and not set(range(2, 10)) & set(served) and served[-1] <= 16
    else:
        assert starved.status == Status.WAITING and served[-1] <= 1
    run.finish()


# --- goodput -------------------------------------------------------------------------------------------------------

#: Seconds of a step, and per decoding sequence, prompt token and token of context: as of a small model on a GPU.
STEP, DECODE, PREFILL, CONTEXT = 8e-3, 3e-5, 5e-5, 2e-8
LOADS = [(d, p, 50 * d * (1 + d % 5)) for d in range(0, 64, 9) for p in (0, 100, 2048)]
#: A third more than can be served: Poisson arrivals, long-tailed lengths, 1 s to the first token, 100 ms to each other.
OVERLOAD = (
    "simulate.num_requests=300", "simulate.arrival=poisson", "simulate.rate=9",
    "simulate.input_len={median: 1000, sigma: 1.0, max: 6000}",
    "simulate.output_len={median: 100, sigma: 0.8, max: 800}",
    "simulate.ttft_slo_ms=1000", "simulate.tpot_slo_ms=100",
    "engine.num_kv_blocks=4096", "engine.max_num_seqs=64", "engine.max_num_batched_tokens=1024",
    "engine.max_model_len=8192",
)  # fmt: skip


def test_goodput_is_more_than_twice_decode_firsts_under_overload_and_nobody_starves(tmp_path: Path) -> None:
    steps = [[*load, STEP + DECODE * load[0] + PREFILL * load[1] + CONTEXT * load[2]] for load in LOADS]
    record = {
        "steps": steps,
        "requests": [{"ttft": 0.013, "tpot": 0.008, "e2e": 0.021}],
        "workload": {"num_requests": 1, "input_len": 100, "output_len": 2},
        "config": {"engine": {}, "scheduler": {"name": "decode_first"}},
        "engine": {"num_blocks": 64, "max_model_len": 4096},
    }
    (tmp_path / "steps.json").write_text(json.dumps(record))
    command = [sys.executable, "-m", "nanoserve", "-m", "task=simulate", "scheduler=decode_first,slo"]
    command += [f"simulate.fit={tmp_path / 'steps.json'}", "output=run.json", f"hydra.sweep.dir={tmp_path}"]
    subprocess.run([*command, *OVERLOAD], check=True, capture_output=True, cwd=tmp_path)
    theirs, ours = [json.loads((tmp_path / f"{i}/run.json").read_text()) for i in (0, 1)]
    assert ours["config"]["scheduler"]["name"] == "slo"
    assert ours["figures"]["goodput req/s"] > 2 * theirs["figures"]["goodput req/s"]
    assert all(row["finish_reason"] == "length" for row in ours["requests"]) and len(ours["requests"]) == 300
    # max_wait is 20 s by default; what remains is the queue of those who have aged before.
    assert ours["figures"]["wait max ms"] < 25e3


def test_wrong_options_are_named() -> None:
    for options, message in (({"ttft_ms": 0.0}, "scheduler.ttft_ms must be above 0"), ({"max_wait": 0.5}, "max_wait")):
        with pytest.raises(ConfigError, match=message):
            harness(options)
