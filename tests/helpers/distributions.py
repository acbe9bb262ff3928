"""Fake installed distributions: modules and a ``dist-info`` folder on a temporary ``sys.path``, no pip involved."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

SCHEDULER = """
from dataclasses import dataclass
from nanoserve.contracts.scheduling import Schedule, Scheduler, SchedulerSpec
from nanoserve.hookspecs import hookimpl

@dataclass(frozen=True)
class Options:
    limit: int = 3

class Mine(Scheduler):
    def schedule(self):
        return Schedule()

SPEC = SchedulerSpec("{name}", "a test", Options, Mine)

@hookimpl
def nanoserve_scheduler(register):
    register(SPEC)
"""


class Distributions:
    """``install(name, {entry point: module}, module=source, …)``; everything is gone after the test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules: set[str] = set()

    def install(self, name: str, entry_points: Mapping[str, str], **modules: str) -> None:
        info = self.root / f"{name.replace('-', '_')}-1.5.dist-info"
        info.mkdir(parents=True)
        info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        lines = [f"{entry_point} = {target}" for entry_point, target in entry_points.items()]
        info.joinpath("entry_points.txt").write_text("\n".join(["[nanoserve]", *lines]) + "\n")
        for module, source in modules.items():
            self.root.joinpath(f"{module}.py").write_text(source)
            self.modules.add(module)
        importlib.invalidate_caches()


@pytest.fixture
def distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Distributions]:
    root = tmp_path / "site"
    root.mkdir()
    monkeypatch.syspath_prepend(root)
    fake = Distributions(root)
    yield fake
    for module in fake.modules:
        sys.modules.pop(module, None)
