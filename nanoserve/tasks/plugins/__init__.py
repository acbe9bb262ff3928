"""``task=plugins``: every plugin, where it comes from, what it can do; and which are broken, and why.

``check=true`` tries what they claim. ``update=FILE`` brings the generated parts of a Markdown file up to date: those
between ``<!-- capabilities -->``, ``<!-- matrix -->`` or ``<!-- reference -->`` and the same with a slash.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nanoserve.contracts.capabilities import PHASES, Capabilities
from nanoserve.contracts.errors import ConfigError, NanoserveError
from nanoserve.registry import KINDS, OWN_DISTRIBUTION, Registration, Registry
from nanoserve.tasks.plugins import matrix, reference

if TYPE_CHECKING:
    from nanoserve.tasks import Job

FILE_WIDTH = 140  # characters, in a file or a pipe; COLUMNS sets another
COLUMNS = ("choose", "what", "phases", "KV formats", "dtypes", "head sizes", "devices")


@dataclass(frozen=True)
class Options:
    """The keys of ``conf/task/plugins.yaml``. record: file of results that ``check`` adds to and ``update`` shows."""

    format: Literal["table", "markdown"] = "table"
    check: bool = False
    record: str | None = None
    update: str | None = None

    def __post_init__(self) -> None:
        if self.record is not None and not self.check and self.update is None:
            raise ConfigError("record: it is read by update=FILE or written by check=true; give one of them")
        if self.check and self.update is not None:
            raise ConfigError("check, update: first check=true record=FILE, then update=PAGE record=FILE")


def run(job: Job) -> dict[str, Any]:
    registry, options = job.registry, job.options
    record = None if options.record is None else Path(options.record)
    if options.check:
        if (file := job.file("record", options.record)) is not None and file.exists():
            matrix.read(file)  # refuses what holds no results before they have been got
        return check(registry, record)
    if options.update is not None:
        update(Path(options.update), registry, record)
    elif options.format == "markdown":
        print(markdown(registry))
    else:
        print_table(registry)
    return {"plugins": sum(len(registry.names(kind)) for kind in KINDS), "broken": len(registry.broken)}


def check(registry: Registry, record: Path | None) -> dict[str, Any]:
    """Try every combination of attention backend, KV format and phase that is claimed here. Raises if one is wrong."""
    section = matrix.check_all(registry)
    results: dict[str, str] = section["results"]
    for combination, result in results.items():
        print(f"{combination}: {result}")
    if record is not None:
        matrix.record(record, section)
    wrong = [combination for combination, result in results.items() if result != matrix.OK]
    if wrong:
        raise NanoserveError(f"{len(wrong)} of {len(results)} combinations do not do what they claim: {wrong[0]}")
    return {"claimed": len(results), "right": len(results)}


def update(file: Path, registry: Registry, record: Path | None) -> None:
    """Rewrite the generated parts of a Markdown file. Raises ConfigError if it has none, or something is missing."""
    results = {} if record is None else matrix.read(record)
    shown = {str(one) for one in matrix.combinations(registry)}
    if lost := [name for section in results.values() for name in section["results"] if name not in shown]:
        raise ConfigError(f"update={file}: {record} has results of {lost[0]}, which is not installed here")
    makers: dict[str, Callable[[], str]] = {
        "capabilities": lambda: markdown(built_in()),
        "matrix": lambda: matrix.markdown(registry, results),
        "reference": reference.markdown,
    }
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"update={file}: it cannot be read ({type(error).__name__})") from None
    parts = [name for name in makers if f"<!-- {name} -->" in text]
    if not parts:
        raise ConfigError(f"update={file}: it has no generated part; those are {', '.join(makers)}")
    if "matrix" in parts and record is None:
        raise ConfigError(f"update={file}: it has a matrix of results; record=FILE is where check=true put them")
    for name in parts:
        text = replaced(text, name, makers[name]())
    file.write_text(text, encoding="utf-8")
    print(f"{file}: {', '.join(parts)}")


def replaced(text: str, name: str, new: str) -> str:
    """``text`` with ``new`` between its marks of that name."""
    marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    return marks.sub(lambda match: f"{match[1]}{new}\n{match[2]}", text)


def built_in() -> Registry:
    """What ships with nanoserve, and nothing that happens to be installed beside it."""
    ours = (e for e in entry_points(group="nanoserve") if e.dist is not None and e.dist.name == OWN_DISTRIBUTION)
    return Registry(ours)


def row(registration: Registration) -> tuple[str, ...]:
    """The cells of :data:`COLUMNS` for one component."""
    spec = registration.spec
    choose = f"{KINDS[registration.kind].group}={spec.name}"
    if registration.kind not in ("attention", "kvcache"):
        return (choose, spec.summary, *[""] * (len(COLUMNS) - 2))
    can: Capabilities = spec.capabilities
    devices = sorted(can.devices) + (["cpu (interpreted)"] if can.interpretable and "cpu" not in can.devices else [])
    low, high = (f"{c[0]}.{c[1]}" if c else "" for c in (can.min_compute_capability, can.max_compute_capability))
    architecture = f" {low or '…'} – {high}" if high else f" ≥ {low}" if low else ""
    return (
        choose,
        spec.summary,
        ", ".join(phase for phase in PHASES if phase in can.phases) + ("" if can.full_attention else ", if chosen"),
        "" if registration.kind == "kvcache" else _any_of(can.kv_formats),
        _any_of(can.dtypes),
        _any_of(can.head_dims),
        ", ".join(device + (architecture if device == "cuda" else "") for device in devices),
    )


def in_words(cells: Sequence[str]) -> tuple[str, str]:
    """``choose``, and the other cells in a few lines for a terminal of any width."""
    choose, what, phases, kv_formats, dtypes, head_sizes, devices = cells
    kv_formats, head_sizes = kv_formats and f"KV {kv_formats}", head_sizes and f"head size {head_sizes}"
    can = " · ".join(filter(None, (phases, kv_formats, dtypes, head_sizes, devices)))
    return choose, f"{what}\n{can}" if can else what


def markdown(registry: Registry) -> str:
    """The table of capabilities in the README."""
    rows = [row(registration) for kind in KINDS for registration in registry.registrations(kind)]
    lines = [COLUMNS, ["---"] * len(COLUMNS), *([f"`{cells[0]}`", *cells[1:]] for cells in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def print_table(registry: Registry) -> None:
    from rich.console import Console
    from rich.table import Table

    given = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if given else FILE_WIDTH)
    table = Table(title="plugins", title_justify="left")
    table.add_column("choose", no_wrap=True, overflow="fold")  # a name that is cut cannot be copied
    table.add_column("what")
    table.add_column("distribution", no_wrap=True, overflow="fold")
    for kind in KINDS:
        for registration in registry.registrations(kind):
            source = registration.source
            table.add_row(*in_words(row(registration)), f"{source.distribution} {source.version}".rstrip())
        table.add_section()
    console.print(table)
    if registry.broken:
        console.print("broken", style="bold")
    for broken in registry.broken:
        console.print(f"  {broken}", markup=False, highlight=False, soft_wrap=True)


def _any_of(values: frozenset[Any] | None) -> str:
    return "any" if values is None else ", ".join(map(str, _sorted(values)))


def _sorted(values: frozenset[Any]) -> Sequence[Any]:
    return sorted(values, key=lambda value: (isinstance(value, str), value))
