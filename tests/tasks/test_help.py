"""``--help`` of one task and of all, and how a run that is told to stop ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from nanoserve.cli import Terminated, _terminable
from nanoserve.config import group_names, load_yaml
from tests.tasks.conftest import Cli


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("bench", ["bench      ci, latency, multi_turn, nano_vllm, *serve", "bench.scenario=null", "output=null"]),
        ("compare", ["gate       ci, *default", "gate.same_hardware=true", "against.kv=null", "base=null"]),
        ("eval", ["eval       full, *quick", "eval.max_delta_ppl=0.005"]),
        ("simulate", ["seed_mixed_pressure", "simulate.fit=null"]),
    ],
)
def test_a_task_explains_its_own_options_and_groups(cli: Cli, task: str, expected: list[str]) -> None:
    run = cli(f"task={task}", "--help")
    assert run.code == 0 and run.out.startswith(f"nanoserve task={task}: ")
    assert all(text in run.out for text in expected), run.out
    assert "engine.block_size" not in run.out
    everything = cli("--help").out
    assert all(text in everything for text in expected)


def test_every_key_of_the_workloads_is_explained(cli: Cli) -> None:
    """A key without a comment would be missing from the help."""
    told = set(re.findall(r"(?m)^  (\S+?)(?:=| )", cli("--help").out))
    for task, group, name in (("bench", "bench", "serve"), ("eval", "eval", "quick"), ("simulate", "task", "simulate")):
        values = load_yaml(group, name) or {}
        keys = values["simulate"] if task == "simulate" else values
        assert not {f"{task}.{key}" for key in keys if key != "kind"} - told
    for task in group_names("task"):
        own = {key: value for key, value in (load_yaml("task", task) or {}).items() if key not in ("defaults", "task")}
        inner = {f"{key}.{name}" for key, value in own.items() if isinstance(value, dict) for name in value}
        assert inner | {key for key, value in own.items() if not isinstance(value, dict)} <= told, task


def test_an_unknown_task_is_a_wrong_command(cli: Cli) -> None:
    run = cli("task=bunch", "--help")
    assert run.code == 2 and "did you mean 'bench'" in run.err and "bench" in group_names("task")


@pytest.mark.parametrize(
    "words",
    [
        ["prompt=import", "sampling.max_tokens=3000", "sampling.ignore_eos=true"],
        ["-m", "task=simulate", "simulate.num_requests=200000"],
    ],
)
def test_sigterm_is_one_line_and_143(tmp_path: Path, words: list[str]) -> None:
    """As Ctrl-C: what is open is closed, a sweep goes no further, and nothing is traced back."""
    command = [sys.executable, "-m", "nanoserve", *words]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        (process.stderr.readline if words[0] == "-m" else lambda: process.stdout.read(1))()  # it has begun
        process.send_signal(signal.SIGTERM)
        try:
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 143
    assert err.decode().splitlines() == ["nanoserve: terminated"]


def test_sigterm_in_a_destructor_is_not_lost_and_does_not_interrupt_what_it_ends() -> None:
    class Dies:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(1000):  # the handler runs between two instructions
                pass

    closed = False
    with pytest.raises(Terminated), _terminable():
        try:
            died = Dies()
            del died
            time.sleep(30)
        finally:
            with suppress(KeyError):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.5)
                raise KeyError
            closed = True
    assert closed
