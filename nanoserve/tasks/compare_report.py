"""The page of ``task=compare report=FILE``: speed, capacity and quality of two engines side by side, in Markdown.

Speed is what was just measured, capacity what ``task=capacity`` plans for the memory of this device, and quality the
record of a ``task=eval`` that compared the same two KV formats, perhaps on another model: random weights are as fast as
trained ones, but only these can lose quality.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoserve.contracts.errors import ConfigError
from nanoserve.tasks.bench.record import composition

if TYPE_CHECKING:
    from nanoserve.config import EngineConfig
    from nanoserve.registry import Registry
    from nanoserve.tasks.compare_changes import Change

#: In a file that has them, only what stands between them is replaced.
BEGIN, END = "<!-- measured -->", "<!-- /measured -->"
METRICS = (
    "output tok/s", "total tok/s", "QPS", "goodput req/s", "TTFT p50 ms", "TTFT p95 ms", "TPOT p50 ms", "TPOT p95 ms",
    "ITL p99 ms", "E2E p95 ms", "preemptions",
)  # fmt: skip


def read_quality(path: str, formats: tuple[str, str]) -> dict[str, Any]:
    """A record of ``task=eval`` over ``formats``. Raises ConfigError for anything else."""
    try:
        record: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        found = (record["base"], record["against"])
        record["figures"]["delta_ppl"]
    except OSError as error:
        raise ConfigError(f"quality: cannot read {path!r}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"quality: {path!r} is no record of task=eval") from None
    if found != formats:
        raise ConfigError(
            f"quality: {path!r} compares kv={found[0]} with kv={found[1]}, here it is {formats[0]} with {formats[1]}"
        )
    return record


def write(
    path: Path,
    records: Sequence[Mapping[str, Any]],
    changes: Iterable[Change],
    configs: Sequence[EngineConfig],
    registry: Registry,
    quality: Mapping[str, Any] | None,
) -> None:
    """Write the page, or its measured part into a page that has the two marks. Base comes first in every pair."""
    base, new = records
    by_name = {change.name: change for change in changes}
    capacity, capacity_line, more_tokens = _capacity(configs, registry)
    speed = by_name["output tok/s"]
    answer = [f"{_times(speed.ratio)} the output tokens per second ({speed.verdict})", f"{more_tokens} the KV tokens"]
    if quality is not None:
        answer.append(f"perplexity {quality['figures']['delta_ppl']:+.2%}")
    workload = {key: value for key, value in base["workload"].items() if value is not None}
    parts = [
        f"**{composition(new)}** against {composition(base)}: {', '.join(answer)}.",
        f"Measured on {base['hardware']}, torch {base['versions']['torch']}, git {base['git']}.",
        "### Speed",
        _table(
            ["", f"kv={base['engine']['kv']}", f"kv={new['engine']['kv']}", "ratio", ""],
            [
                [name, str(c.base), str(c.new), _times(c.ratio), c.verdict]
                for name in METRICS
                if (c := by_name.get(name)) is not None
            ],
        ),
        f"Medians of {base['workload']['repeat']} runs, the two engines by turns (first … third quartile). Workload: "
        f"`{json.dumps(workload)}`.",
        "### Capacity",
        capacity,
        capacity_line,
        "### Quality",
        _quality(quality),
    ]
    text = "\n\n".join(parts)
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    if BEGIN in before and END in before:
        text = re.sub(f"(?s){BEGIN}.*{END}", lambda _: f"{BEGIN}\n\n{text}\n\n{END}", before)
    else:
        text = f"# kv={new['engine']['kv']} against kv={base['engine']['kv']}\n\n{text}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _capacity(configs: Sequence[EngineConfig], registry: Registry) -> tuple[str, str, str]:
    """The table, what it is of, and how many times the tokens fit."""
    import torch

    from nanoserve.tasks import capacity

    gpu = torch.cuda.is_available() and configs[0].engine.device != "cpu"
    memory = torch.cuda.mem_get_info()[1] / 2**30 if gpu else 0.0
    plans = [
        capacity.plan(config if gpu else _on_cpu(config), registry, config.kv.name, memory, 0.5) for config in configs
    ]
    longest = capacity.longest_sequence(configs[0])
    contexts = [n for n in (longest // 16, longest // 4, longest) if n]
    rows = [
        ["bytes per token", *(f"{plan.bytes_per_token:,.0f}" for plan in plans)],
        ["tokens in the pool", *(f"{plan.num_blocks * plan.block_size:,}" for plan in plans)],
        *([f"sequences of {n:,} tokens at once", *(f"{plan.batch(n):,}" for plan in plans)] for n in contexts),
    ]
    what = (
        f"on a GPU of {memory:.1f} GiB beside weights and activations" if gpu else "in the pool that it takes on a CPU"
    )
    tokens = [plan.num_blocks * plan.block_size for plan in plans]
    return (
        _table(["", *(f"kv={plan.kv}" for plan in plans)], rows),
        f"One engine alone, {what} (`task=capacity`).",
        _times(tokens[1] / tokens[0]),
    )


def _on_cpu(config: EngineConfig) -> EngineConfig:
    from dataclasses import replace

    return replace(config, engine=replace(config.engine, device="cpu"))


def _quality(quality: Mapping[str, Any] | None) -> str:
    if quality is None:
        return "Not measured: give `quality=FILE`, the record of `nanoserve task=eval output=FILE`."
    from nanoserve.tasks.eval import report_rows

    rows = report_rows(quality["figures"], quality["bars"])
    columns = ["figure", f"kv={quality['base']}", f"kv={quality['against']}", "difference", "bar", ""]
    figures = quality["figures"]
    return "\n\n".join(
        [
            _table(columns, rows),
            f"{figures['tokens']:,} tokens scored with {quality['engine']['model']} on {quality['hardware']}. "
            "\\* no quality metric: one near-tie that falls the other way changes all that follows.",
        ]
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("*", "\\*") for cell in line) + " |" for line in lines
    )


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}×"
