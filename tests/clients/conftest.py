"""A server for all clients, and the Python interpreters in which clients are installed.

Their requirements clash, so each may have an environment of its own, which ``NANOSERVE_CLIENT_PYTHONS`` names:

    python -m venv lm && lm/bin/pip install "lm_eval[api]" transformers
    python -m venv perf && perf/bin/pip install aiperf
    python -m venv fuzz && fuzz/bin/pip install schemathesis
    NANOSERVE_CLIENT_PYTHONS=lm/bin/python:perf/bin/python:fuzz/bin/python pytest tests/clients
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from tests.helpers.serving import Server  # noqa: E402

HERE = Path(__file__).parent
#: Python interpreters to look for clients in, beside our own: those that want other versions have environments.
PYTHONS = "NANOSERVE_CLIENT_PYTHONS"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded checkpoint and the defaults."""
    running = Server(tmp_path_factory.mktemp("server"), "log_level=warning")
    yield running
    assert running.stop() == 0


def python_with(modules: str) -> str:
    """An interpreter that can import ``modules``; skips the test, saying why, if there is none."""
    for python in (sys.executable, *filter(None, os.environ.get(PYTHONS, "").split(os.pathsep))):
        if subprocess.run([python, "-c", f"import {modules}"], capture_output=True).returncode == 0:
            return python
    return pytest.skip(f"no Python here or in {PYTHONS} has {modules}")


def program_of(module: str, name: str) -> str:
    """A console script of a client, beside the interpreter that has it."""
    program = Path(python_with(module)).parent / name
    return str(program) if program.is_file() else shutil.which(name) or pytest.skip(f"{name} is not installed")


def run(command: list[str], timeout: float, **options: Any) -> str:
    """Standard output and error of a command that must succeed."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout, **options
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout
