"""Self-contained HTML pages, of one record and of a sweep: figures, and plots as inline SVG made with matplotlib.

Matplotlib is the optional extra ``bench``; nothing here imports it before a page is asked for.
"""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Callable, Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from nanoserve.contracts.errors import ConfigError
from nanoserve.metrics import QUANTILES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: .2rem .8rem; border-bottom: 1px solid #ddd }
td { text-align: right; font-variant-numeric: tabular-nums } td:first-child, th { text-align: left }
svg { max-width: 100%; height: auto } pre { background: #f6f6f6; padding: 1rem; overflow: auto }
h1, h2 { font-weight: 600 }
"""


def available() -> bool:
    """Whether there is a library to plot with."""
    return importlib.util.find_spec("matplotlib") is not None


def require() -> None:
    """ConfigError when matplotlib is missing, before anything has been measured."""
    if not available():
        raise ConfigError("report: the plots need matplotlib; pip install 'nanoserve[bench]', or leave report= out")


def render(record: Mapping[str, Any]) -> str:
    """The page of one record of bench kind serve."""
    figures, workload = record["figures"], record["workload"]
    columns = ["mean", *(f"p{q}" for q in QUANTILES)]
    latencies = [
        [name, *(_number(figures[f"{name} {column} ms"]) for column in columns)]
        for name in ("TTFT", "TPOT", "ITL", "E2E", "queue", "prefill", "decode")
    ]
    rest = [[name, _number(value)] for name, value in figures.items() if not name.endswith((" ms", " count"))]
    phases = [[name, "not separable" if ms is None else _number(ms)] for name, ms in record["phases_ms"].items()]
    kept = {key: record[key] for key in ("hardware", "versions", "git", "engine", "workload", "config")}
    title = f"nanoserve bench: {record['engine'].get('model', '')}, {workload['scenario'] or workload['arrival']}"
    return _page(
        title,
        [
            f"<p>{escape(str(record['hardware']))}; medians of {len(record['runs'])} runs, "
            f"plots of run {record['shown_run'] + 1}</p>",
            "<h2>Latency, milliseconds</h2>" + _table(["", *columns], latencies),
            "<h2>Rates and the engine</h2>" + _table(["", ""], rest),
            f"<h2>Where a request's time goes, milliseconds</h2>{_table(['', 'mean'], phases)}"
            f"<p>{escape(record['phases_note'])}</p>",
            *(f"<h2>{escape(name)}</h2>{_svg(draw, record)}" for name, draw in PLOTS.items()),
            f"<h2>Measured on</h2><pre>{escape(json.dumps(kept, indent=2, default=str))}</pre>",
        ],
    )


def render_sweep(jobs: list[str], figures: Mapping[str, list[float | None]], best: Mapping[str, float | None]) -> str:
    """The page of a sweep: for each figure one bar per job, the best in another colour.

    jobs: what each is called. figures: their values in the order of jobs, None where there is none.
    """

    def draw(figure: Figure, record: Mapping[str, Any]) -> None:
        rows = -(-len(figures) // 2)
        figure.set_size_inches(11, rows * (0.9 + 0.28 * len(jobs)))
        grid = list(figure.subplots(rows, 2, squeeze=False, sharey=True).flat)
        for axes, (name, values) in zip(grid, figures.items(), strict=False):
            colours = ["tab:orange" if value == best[name] else "tab:blue" for value in values]
            bars = axes.barh(range(len(jobs)), [value or 0.0 for value in values], color=colours)
            axes.bar_label(bars, ["none" if value is None else _number(value) for value in values], padding=2)
            axes.set_title(name, fontsize="medium", loc="left")
            axes.set_yticks(range(len(jobs)), jobs)
            axes.margins(x=0.15)
        grid[0].invert_yaxis()  # jobs from top to bottom
        for axes in grid[len(figures) :]:
            axes.remove()

    note = "<p>Orange: the best of its figure. A job without a bar has failed, or the figure is undefined there.</p>"
    return _page(f"nanoserve sweep: {len(jobs)} jobs", [note + _svg(draw, {})])


def _page(title: str, parts: list[str]) -> str:
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{STYLE}</style>"
    return "\n".join([head, f"<h1>{escape(title)}</h1>", *parts, "</html>"])


def _table(columns: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{escape(column)}" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}" for cell in row) for row in rows)
    return f"<table><tr>{head}{body}</table>"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _svg(draw: Callable[[Figure, Mapping[str, Any]], None], record: Mapping[str, Any]) -> str:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "nanoserve"}):  # text stays text; same input, same file
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        draw(figure, record)
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]


def _latency_cdf(figure: Figure, record: Mapping[str, Any]) -> None:
    for axes, name in zip(figure.subplots(1, 3, sharey=True), ("ttft", "tpot", "e2e"), strict=True):
        values = sorted(1e3 * r[name] for r in _completed(record) if r[name] is not None)
        axes.step(values, [(i + 1) / len(values) for i in range(len(values))], where="post")
        axes.set(xlabel=f"{name.upper()}, ms", ylim=(0, 1.02))
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("share of requests")


def _timeline(figure: Figure, record: Mapping[str, Any]) -> None:
    times, batch, waiting, use = zip(*record["timeline"], strict=True) if record["timeline"] else ([], [], [], [])
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.step(times, batch, where="post", label="in the step")
    upper.step(times, waiting, where="post", label="waiting")
    upper.set_ylabel("requests")
    upper.legend(loc="upper right")
    lower.fill_between(times, [100 * u for u in use], step="post", alpha=0.5)
    lower.set(ylabel="KV pool in use, %", xlabel="seconds", ylim=(0, None))


def _scatter(figure: Figure, record: Mapping[str, Any]) -> None:
    points = [(1e3 * r["ttft"], 1e3 * r["tpot"]) for r in _completed(record) if r["tpot"] is not None]
    axes = figure.subplots()
    axes.scatter([x for x, _ in points], [y for _, y in points], s=14, alpha=0.7)
    workload = record["workload"]
    if workload["ttft_slo_ms"] is not None:
        axes.axvline(workload["ttft_slo_ms"], color="tab:red", linestyle="--", linewidth=1)
    if workload["tpot_slo_ms"] is not None:
        axes.axhline(workload["tpot_slo_ms"], color="tab:red", linestyle="--", linewidth=1)
    axes.set(xlabel="TTFT, ms", ylabel="TPOT, ms")
    if points:  # an objective that is far away must not squeeze them into a corner
        axes.set(xlim=(0, 1.2 * max(x for x, _ in points)), ylim=(0, 1.2 * max(y for _, y in points)))
    axes.grid(alpha=0.3)


def _completed(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [request for request in record["requests"] if request["finish_reason"] in ("stop", "length")]


PLOTS: dict[str, Callable[[Figure, Mapping[str, Any]], None]] = {
    "Latency: share of requests that waited no longer": _latency_cdf,
    "Timeline": _timeline,
    "TTFT and TPOT of each request; dashed: the objectives, if they lie so low": _scatter,
}
