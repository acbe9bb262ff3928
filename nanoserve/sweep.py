"""What a multirun adds: every job leaves its outcome in its own folder, and one table at the end compares them.

The best value of a column is marked where it is known which direction is good. The table also goes, in full, into
``sweep.csv`` in the sweep's folder, and what can be good or bad is plotted in ``sweep.html`` beside it, if matplotlib
is there.
The outcome travels through a file because a launcher may run jobs in other processes or on other machines. A failed
job is a row with its reason; it stops no other job and makes the exit code 1.
"""

from __future__ import annotations

import csv
import json
import os
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from nanoserve.metrics import better

FILE = "result.json"
CSV_FILE = "sweep.csv"
PLOT_FILE = "sweep.html"
MAX_CELL = 48  # characters
FILE_WIDTH = 320  # characters: a table that goes into a file or a pipe is not squeezed


def running() -> bool:
    """Whether this job is one of a multirun."""
    return bool(HydraConfig.get().mode == RunMode.MULTIRUN)


def announce() -> None:
    """Say on standard error which job begins."""
    hydra = HydraConfig.get()
    words = " ".join(_short(f"{key}={value}") for key, value in _overrides(list(hydra.overrides.task)).items())
    print(f"--- job {hydra.job.num}: {words}", file=sys.stderr)


def folder() -> Path:
    """The folder of the current job."""
    return Path(HydraConfig.get().runtime.output_dir)


def record(figures: Mapping[str, Any] | None = None, error: str | None = None, traceback: str | None = None) -> None:
    """Write the outcome of the current job into its folder."""
    hydra = HydraConfig.get()
    outcome = {
        "job": hydra.job.num,
        "overrides": _overrides(list(hydra.overrides.task)),
        "figures": dict(figures or {}),
        "error": error,
        "traceback": traceback,
    }
    (folder() / FILE).write_text(json.dumps(outcome, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


class SweepTable(Callback):
    """The Hydra callback (``hydra.callbacks`` in ``conf/config.yaml``) that ends a multirun."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        self.started = time.time()

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print the table. Raises SystemExit(1) if a job failed: Hydra passes nothing else out of a callback."""
        outcomes = [
            json.loads(file.read_text(encoding="utf-8"))
            for file in Path(config.hydra.sweep.dir).rglob(FILE)
            if file.stat().st_mtime >= self.started - 1  # a folder that is used again holds older results
        ]
        outcomes.sort(key=lambda outcome: outcome["job"])
        if outcomes:
            write_csv(outcomes, Path(config.hydra.sweep.dir) / CSV_FILE)
            write_plot(outcomes, Path(config.hydra.sweep.dir) / PLOT_FILE)
        try:
            print_table(table(outcomes))
            sys.stdout.flush()
        except OSError as error:  # a full disk
            raise SystemExit(1) from error
        written = [name for name in (CSV_FILE, PLOT_FILE) if (Path(config.hydra.sweep.dir) / name).is_file()]
        print(f"nanoserve: in {config.hydra.sweep.dir}: {', '.join(written)}", file=sys.stderr)
        failed = [outcome for outcome in outcomes if outcome["error"]]
        for outcome in failed:
            words = "".join(f" {key}={value}" for key, value in _swept(outcomes, outcome).items())
            print(
                f"nanoserve: job {outcome['job']} failed{words and ' with' + words}: {outcome['error']}",
                file=sys.stderr,
            )
        if failed:
            raise SystemExit(1)


def print_table(grid: Table) -> None:
    """To standard output, as wide as the terminal, or as wide as it wants to be when there is none."""
    given = sys.stdout.isatty() or "COLUMNS" in os.environ
    Console(width=None if given else FILE_WIDTH).print(grid)


def table(outcomes: list[dict[str, Any]]) -> Table:
    """One row per job: the overrides that differ between jobs, the figures, and why it failed; * at the best.

    A number that is the same in all jobs stands below the table.
    """
    keys, columns = _columns(outcomes)
    values = {column: [outcome["figures"].get(column) for outcome in outcomes] for column in columns}
    done = [i for i, outcome in enumerate(outcomes) if not outcome["error"]]
    same = {}
    for column in columns if len(done) > 1 else []:
        first, *rest = (values[column][i] for i in done)
        if _is_number(first) and all(value == first for value in rest):
            same[column] = first
    columns = [column for column in columns if column not in same]
    best = {column: _best(values[column], column) for column in columns}
    grid = Table(title=f"{len(outcomes)} job{'s' * (len(outcomes) != 1)}", title_justify="left", caption_justify="left")
    for name in ("job", *keys, *columns):
        grid.add_column(name, overflow="fold")
    for i, outcome in enumerate(outcomes):
        cells = [_cell(outcome["overrides"].get(key)) for key in keys]
        for column in columns:
            value = outcome["error"] if column == "error" else values[column][i]
            mark = " *" if best[column] is not None and value == best[column] else ""
            cells.append(_cell(value) + mark)
        grid.add_row(str(outcome["job"]), *cells)
    notes = ["* is the best of its column"] if any(value is not None for value in best.values()) else []
    if same:
        notes.append("the same in all jobs: " + ", ".join(f"{name} {value}" for name, value in same.items()))
    grid.caption = "; ".join(notes) or None
    return grid


def write_csv(outcomes: list[dict[str, Any]], path: Path) -> None:
    """The table without shortening, one line per job."""
    keys, columns = _columns(outcomes)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["job", *keys, *columns])
        for outcome in outcomes:
            values = {**outcome["figures"], "error": outcome["error"]}
            row = [outcome["overrides"].get(key) for key in keys] + [values.get(column) for column in columns]
            writer.writerow([outcome["job"], *row])


def write_plot(outcomes: list[dict[str, Any]], path: Path) -> None:
    """The figures that have a best job. Nothing is written if there is none, or no library to plot with."""
    from nanoserve.tasks.bench import html

    keys, columns = _columns(outcomes)
    values = {column: [outcome["figures"].get(column) for outcome in outcomes] for column in columns}
    best = {column: _best(values[column], column) for column in columns}
    figures = {
        column: [value if _is_number(value) else None for value in values[column]]
        for column in columns
        if best[column] is not None
    }
    if figures and html.available():
        jobs = [
            _cell(f"{outcome['job']}: " + " ".join(str(outcome["overrides"].get(key)) for key in keys))
            for outcome in outcomes
        ]
        path.write_text(html.render_sweep(jobs, figures, best), encoding="utf-8")


def _columns(outcomes: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Overrides that differ between jobs, and figures; ``error`` is the last of these if a job failed."""
    keys = list(_swept(outcomes, outcomes[0])) if outcomes else []
    columns = list(dict.fromkeys(name for outcome in outcomes for name in outcome["figures"]))
    if any(outcome["error"] for outcome in outcomes):
        columns.append("error")
    return keys, columns


def _best(values: list[Any], column: str) -> float | None:
    """The best of a column's numbers; None if no direction is good, or if all are equal."""
    numbers = {value for value in values if _is_number(value)}
    direction = better(column)
    if direction is None or len(numbers) < 2:
        return None
    return max(numbers) if direction == "higher" else min(numbers)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _swept(outcomes: list[dict[str, Any]], outcome: dict[str, Any]) -> dict[str, Any]:
    """The overrides of one job that are not the same in all jobs; all of them if there is one job only."""
    overrides: dict[str, Any] = outcome["overrides"]
    if len(outcomes) == 1:
        return overrides
    return {k: v for k, v in overrides.items() if any(o["overrides"].get(k) != v for o in outcomes)}


def _overrides(lines: list[str]) -> dict[str, str]:
    """``{key: value as typed}`` of Hydra's override strings."""
    parsed = OverridesParser.create().parse_overrides(lines)
    return {o.key_or_group: str(o.value()) for o in parsed}


def _short(text: str) -> str:
    return shlex.quote(text if len(text) <= MAX_CELL else text[: MAX_CELL - 1] + "…")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = "".join(c if c.isprintable() else "·" for c in " ".join(str(value).split()))
    return text if len(text) <= MAX_CELL else text[: MAX_CELL - 1] + "…"
