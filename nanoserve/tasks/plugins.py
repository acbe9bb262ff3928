"""``task=plugins``: every plugin, where it comes from, what it can do; and which are broken, and why."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from nanoserve.contracts.capabilities import PHASES, Capabilities
from nanoserve.registry import KINDS, Registration, Registry

if TYPE_CHECKING:
    from nanoserve.tasks import Job

FILE_WIDTH = 140  # characters, in a file or a pipe; COLUMNS sets another
COLUMNS = ("choose", "what", "phases", "KV formats", "dtypes", "head sizes", "devices")


@dataclass(frozen=True)
class Options:
    """The keys of ``conf/task/plugins.yaml``."""

    format: Literal["table", "markdown"] = "table"


def run(job: Job) -> dict[str, Any]:
    registry = job.registry
    if job.options.format == "markdown":
        print(markdown(registry))
    else:
        print_table(registry)
    return {"plugins": sum(len(registry.names(kind)) for kind in KINDS), "broken": len(registry.broken)}


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
        ", ".join(phase for phase in PHASES if phase in can.phases),
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
