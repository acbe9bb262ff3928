"""The command as a process: what --help costs, and one run and one sweep with a real engine."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "nanoserve"]


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], cwd=cwd, capture_output=True, text=True, encoding="utf-8")


def test_help_is_ours_and_cheap(tmp_path: Path) -> None:
    """C47, and <= 1.5 s of processor time with nothing heavy imported by us; plugins of others are left out."""
    others = {e.name for e in entry_points(group="nanoserve") if e.dist is not None and e.dist.name != "nanoserve"}
    alone = {**os.environ, "NANOSERVE_DISABLE_PLUGINS": ",".join(others)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "nanoserve", "--help"],
        cwd=tmp_path,
        env=alone,
        capture_output=True,
        text=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert process.returncode == 0
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5
    imported = {line.rpartition("|")[2].strip() for line in process.stderr.splitlines()}
    assert "nanoserve.cli" in imported
    assert not imported & {"torch", "transformers", "triton", "hydra"}
    for expected in (
        'nanoserve prompt="def read_json(path):"',
        "nanoserve -m kv=bf16,int8",
        "*decode_first, prefill_first",
        "engine.block_size=16",
        "sampling.temperature=0.6",
        "null: the engine draws one for each request, from engine.seed",
        "hydra.sweep.dir=FOLDER",
    ):
        assert expected in process.stdout


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    process = subprocess.Popen([*COMMAND, "--help"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait() == 1 and process.stderr.read() == b""
    process.stderr.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_output_that_cannot_be_written_is_one_plain_line(tmp_path: Path) -> None:
    """A closed standard output, and a full disk; nothing is left for the interpreter to complain about at exit."""
    for redirection, why in ((">&-", "standard output is closed"), (">/dev/full", "cannot write: No space left")):
        process = subprocess.run(
            ["sh", "-c", f'"$0" -m nanoserve --version {redirection}', sys.executable],
            cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip
        assert process.returncode == 1 and process.stderr.count("\n") == 1, process.stderr
        assert process.stderr.startswith(f"nanoserve: error: {why}")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_sweep_whose_table_cannot_be_written_fails(tmp_path: Path) -> None:
    command = f"{sys.executable} -m nanoserve -m task=plugins format=markdown >/dev/full"
    process = subprocess.run(["sh", "-c", command], cwd=tmp_path, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.returncode == 1 and process.stderr.splitlines()[-1] == (
        b"nanoserve: error: cannot write: No space left on device"
    )


def test_a_real_engine_from_another_folder(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """C47: a relative path is the user's; text on standard output, figures on standard error, no file left."""
    process = run(
        f"model=../{tiny_checkpoint.name}", "kv=int8", "attention=sdpa", "scheduler=prefill_first",
        "prompt=def f(x, y): return {x: 1}", "sampling.max_tokens=4", "engine.max_model_len=64",
        cwd=_beside(tiny_checkpoint),
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert len(process.stdout) > 1
    assert "tokens 4" in process.stderr and "kv int8" in process.stderr and "prefill_first" in process.stderr
    assert list(_beside(tiny_checkpoint).iterdir()) == []


def test_a_real_sweep(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """C47: jobs of one process, each with an engine of its own: equal jobs give equal text, the bad one is a row."""
    process = run(
        "-m", f"model.path={tiny_checkpoint}", "engine.max_num_seqs=4,0,2", "prompt=def f(x):",
        "sampling.max_tokens=8", "engine.max_model_len=64", "hydra.sweep.dir=out", cwd=tmp_path,
    )  # fmt: skip
    assert process.returncode == 1, process.stderr
    results = [json.loads((tmp_path / "out" / str(i) / "result.json").read_text()) for i in range(3)]
    assert [bool(result["error"]) for result in results] == [False, True, False]
    texts = [result["figures"].get("text") for result in results]
    assert texts[0] and texts[0] == texts[2]
    assert "job 1 failed with engine.max_num_seqs=0: engine.max_num_seqs must be 1 to 65536, not 0" in process.stderr


def _beside(folder: Path) -> Path:
    work = folder.parent / "work"
    work.mkdir(exist_ok=True)
    return work
