"""What every measurement has: a table, figures, and a record that says what they were measured on."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nanoserve
from nanoserve.metrics import Objectives, RequestTimeline, summarise

if TYPE_CHECKING:
    import torch

    from nanoserve.contracts.attention import AttentionBackend
    from nanoserve.contracts.scheduling import Scheduler
    from nanoserve.llm import LLM


@dataclass
class Measured:
    """figures: what a sweep shows. record: what the JSON adds to hardware, versions, workload and configuration."""

    title: str
    columns: list[str]
    rows: list[list[Any]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)


def describe(llm: LLM) -> dict[str, Any]:
    """Hardware, versions, git revision and composition, for the record."""
    info = llm.engine.info
    device = llm.engine.runner.device  # type: ignore[attr-defined]
    return {**environment(device), "engine": asdict(info) if info is not None else {}}


class Backends:
    """Counts which attention backends an engine chooses while it is entered, by phase: once for every step, and under
    "decode, captured" once for every CUDA graph of a batch size, which then serves any number of steps.

    A backend of another distribution than ours is named with it.
    """

    def __init__(self, llm: LLM) -> None:
        self.chosen: dict[str, Counter[str]] = {}
        self._selector: Any = llm.engine.runner.selector  # type: ignore[attr-defined]

    def __enter__(self) -> Backends:
        select = self._selector.select

        def counted(phase: str, *arguments: Any, captured: bool = False, **more: Any) -> AttentionBackend:
            backend: AttentionBackend = select(phase, *arguments, captured=captured, **more)
            name = re.sub(r"^attention=| of nanoserve \S+$", "", backend.plugin or type(backend).__name__)
            self.chosen.setdefault(f"{phase}, captured" if captured else phase, Counter())[name] += 1
            return backend

        self._selector.select = counted
        return self

    def __exit__(self, *error: object) -> None:
        del self._selector.select

    def forget_steps(self) -> None:
        """As before a run: what has been captured goes on to be used."""
        self.chosen = {phase: counts for phase, counts in self.chosen.items() if phase.endswith("captured")}

    def as_record(self) -> dict[str, Any]:
        return {"attention": {phase: dict(counts) for phase, counts in sorted(self.chosen.items(), reverse=True)}}


def by_priority(
    priorities: Sequence[int], requests: Sequence[RequestTimeline], objectives: Objectives
) -> dict[int, dict[str, float | None]]:
    """The figures of the requests of each priority, the most urgent first; empty if they are all of one."""
    classes = sorted(set(priorities))
    return {
        one: summarise([r for r, p in zip(requests, priorities, strict=True) if p == one], objectives)
        for one in (classes if len(classes) > 1 else ())
    }


def unused_priorities(scheduler: Scheduler, priorities: Sequence[int]) -> list[str]:
    """A sentence, if the scheduler does not look at the priorities that there are."""
    if scheduler.uses_priority or not any(priorities):
        return []
    return [
        f"{scheduler.plugin or type(scheduler).__name__} does not look at priorities; it is judged by them all the same"
    ]


def environment(device: torch.device) -> dict[str, Any]:
    """Hardware, versions and git revision."""
    import torch
    import transformers

    cuda = device.type == "cuda"
    return {
        "hardware": torch.cuda.get_device_name(device) if cuda else f"{_cpu_name()}, {torch.get_num_threads()} threads",
        "versions": {
            "nanoserve": nanoserve.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "git": git_revision(),
    }


def composition(record: Mapping[str, Any]) -> str:
    """Model and plugins of a record, in one line. Of attention backends those that ran, or else that could have."""
    engine = record.get("engine", {})
    chosen = {phase: "|".join(counts) for phase, counts in (record.get("attention") or {}).items()}
    attention = "; ".join(f"{phase} {names}" for phase, names in (chosen or engine.get("attention") or {}).items())
    if "policy_origin" in engine:  # older records have none
        attention += f"; policy {engine['policy']} ({engine['policy_origin']})"
    return f"{engine.get('model')}, kv {engine.get('kv')}, scheduler {engine.get('scheduler')}, attention: {attention}"


def _cpu_name() -> str:
    try:
        model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        model = None
    return f"CPU {model[1] if model else platform.machine()}"


def git_revision() -> str | None:
    """The commit of the checkout that this package is imported from, ``-dirty`` if edited; None outside of one."""
    package = Path(nanoserve.__file__)

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=package.parent, capture_output=True, text=True, check=True, timeout=10
        )
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", package.name)  # an installed copy may lie in somebody's repository
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


def write(path: Path, record: dict[str, Any]) -> None:
    """As JSON, one key per line; the long lists of steps and requests have one item per line. Makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = []
    for key, value in record.items():
        if isinstance(value, list) and value:
            text = "[\n" + ",\n".join(f"    {json.dumps(item, default=str)}" for item in value) + "\n  ]"
        else:
            text = json.dumps(value, indent=2, default=str).replace("\n", "\n  ")
        parts.append(f"  {json.dumps(key)}: {text}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def print_line(text: str) -> None:
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 200).print(text, highlight=False, markup=False)
