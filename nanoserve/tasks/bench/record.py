"""What every measurement has: a table, figures, and a record that says what they were measured on."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nanoserve

if TYPE_CHECKING:
    import torch

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
    """Model and plugins of a record, in one line."""
    engine = record.get("engine", {})
    attention = ", ".join(f"{phase} {name}" for phase, name in (engine.get("attention") or {}).items())
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
