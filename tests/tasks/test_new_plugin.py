"""``task=new_plugin``: what it writes is installed with pip, passes its own tests, and runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanoserve.cli import main

KINDS = ("attention", "kvcache", "scheduler", "policy", "grammar", "observer")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of every kind, called ``my_KIND``, and all of them installed in ``site``."""
    folder = tmp_path_factory.mktemp("packages")
    for kind in KINDS:
        assert main(["task=new_plugin", f"kind={kind}", f"name=my_{kind}", f"path={folder}"]) == 0
    options = [
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--disable-pip-version-check",
        "--target",
        folder / "site",
    ]
    written = sorted(folder.glob("nanoserve-*"))
    assert [package.name for package in written] == sorted(f"nanoserve-my-{kind}" for kind in KINDS)
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *written], check=True)
    return folder


def python(packages: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(packages / "site"), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, *arguments], cwd=packages, env=environment, capture_output=True, text=True)


def test_every_kind_passes_its_own_tests(packages: Path) -> None:
    folders = [f"nanoserve-my-{kind}" for kind in KINDS]
    run = python(packages, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-rA", *folders)
    assert run.returncode == 0, run.stdout[-3000:]
    for suite in (
        "MyAttention",
        "MyKvcache",
        "SdpaReadsMyKvcache",
        "MyScheduler",
        "MyPolicy",
        "MyGrammar",
        "MyObserver",
    ):
        assert f"::Test{suite}::" in run.stdout and f"FAILED {suite}" not in run.stdout


def test_they_run_together(packages: Path) -> None:
    command = ["attention=my_attention", "kv=my_kvcache", "scheduler=my_scheduler", "policy=my_policy"]
    command.append("grammar=my_grammar")
    own = ["attention.upcast=false", "scheduler.max_prefill_tokens=4", "policy.min_context=8"]
    run = python(
        packages, "-m", "nanoserve", *command, *own, "prompt=def f(x):", "sampling.max_tokens=8", "engine.device=cpu"
    )
    assert run.returncode == 0 and run.stdout.strip() and "warning" not in run.stderr, run.stderr
    assert "prefill my_attention, decode my_attention · kv my_kvcache · my_scheduler · policy my_policy" in run.stderr
    line = {"prompt": "x", "max_tokens": 9, "structured": {"choice": ["yes, é€", "no\n"]}}
    (packages / "in.jsonl").write_text(json.dumps(line))
    run = python(packages, "-m", "nanoserve", *command, "prompts=in.jsonl", "engine.device=cpu")
    assert run.returncode == 0 and json.loads(run.stdout)["text"] in ("yes, é€", "no\n"), run.stderr
    shown = python(packages, "-m", "nanoserve", *command, "--cfg", "job").stdout
    assert "upcast: true" in shown and "favourite: paged_v2_split" in shown
    refused = python(packages, "-m", "nanoserve", *command, "scheduler.max_prefill_tokens=-1", "prompt=a")
    assert refused.returncode == 2 and "scheduler.max_prefill_tokens must be at least 0, not -1" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kind=attentio", "name=mine"], "kind: 'attentio' is not one of attention, .*did you mean 'attention'"),
        (["kind=policy"], "name: a value is required"),
        (["kind=policy", "name=My-Own"], "name=My-Own: a name is lower-case letters.* as in name=my_own"),
        (["kind=policy", "name=class"], "no word of Python's, as in name=my_class"),
        (["kind=policy", "name='9x'"], "as in name=my_9x"),
        (["kind=policy", "name=x_"], "as in name=x$"),
        (["kind=policy", "name=x__y"], "as in name=x_y"),
        (["kind=policy", f"name={'x' * 99}"], "99 characters are more than 60"),
        (["kind=attention", "name=auto"], "leaves the choice to the policy.*name=my_auto"),
        (["kind=policy", "name=mine", "path=/proc"], "path=/proc: the package cannot be written"),
        (["kind=policy", "name=h200"], "stands for policy/h200.yaml, which we have; as in name=my_h200"),
        (["kind=attention", "name=sdpa"], "there is one of that name, 'attention.sdpa' of distribution nanoserve"),
        (["kind=policy", "name=mine", "path=nowhere"], "path=nowhere: there is no such folder"),
        (["kind=policy", "name=taken"], "path=.: nanoserve-taken is there"),
    ],
)
def test_what_is_refused(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line, exit code 2, nothing written."""
    import re

    monkeypatch.chdir(tmp_path)
    (tmp_path / "nanoserve-taken").mkdir()
    assert main(["task=new_plugin", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line
    assert [path.name for path in tmp_path.rglob("*")] == ["nanoserve-taken"]
