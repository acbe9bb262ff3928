"""``task=bench``: how fast the composed engine is, on a workload of ``conf/bench``.

``kind`` of the workload says how it is measured: *serve* sends requests as clients would and reports the field's
serving metrics (:mod:`.serve`); *throughput* and *latency* time plain engine calls and set them beside what the
hardware allows (:mod:`.synthetic`). A record is one JSON file: hardware, versions, git revision, configuration,
workload and figures. ``task=compare`` and ``task=simulate`` read those of *serve*.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from nanoserve.config import build
from nanoserve.contracts.errors import ConfigError
from nanoserve.tasks.bench import html, serve, synthetic
from nanoserve.tasks.bench.record import Backends, composition, describe, print_line, print_table, write

if TYPE_CHECKING:
    from nanoserve.tasks import Job


@dataclass(frozen=True)
class Options:
    """The keys of ``conf/task/bench.yaml``; ``bench`` is one of ``conf/bench``."""

    bench: dict[str, Any]
    output: str | None = None
    report: str | None = None


def run(job: Job) -> dict[str, Any]:
    kinds = {"serve": serve.Serve, "throughput": synthetic.Throughput, "latency": synthetic.Latency}
    values = dict(job.options.bench)
    kind = values.get("kind")
    if kind not in kinds:
        raise ConfigError(f"bench.kind: {kind!r} is not one of {', '.join(kinds)}")
    if kind == "serve":
        values = serve.resolve(values)
    workload: Any = build(kinds[kind], values, "bench", owner=f"bench kind {kind}")
    if job.options.report is not None:
        if kind != "serve":
            raise ConfigError(f"report: only bench kind serve has plots, not {kind}")
        html.require()
    output = job.options.output
    if output is None and job.folder is not None and kind == "serve":
        output = "bench.json"
    file, report = job.file("output", output), job.file("report", job.options.report, (".html", ".htm"))
    with job.llm() as llm:
        if isinstance(workload, serve.Serve):
            measured = serve.measure(llm, workload)
        else:
            call = synthetic.throughput if isinstance(workload, synthetic.Throughput) else synthetic.latency
            with Backends(llm) as backends:
                measured = call(llm, workload)
            measured.record |= backends.as_record()
        record = {**describe(llm), "workload": asdict(workload), "config": asdict(job.config), **measured.record}
    print_table(measured.title, measured.columns, measured.rows)
    for line in measured.lines:
        print_line(line)
    print_line(f"{record['hardware']}, torch {record['versions']['torch']}, {composition(record)}")
    if file is not None:
        write(file, record)
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(html.render(record), encoding="utf-8")
    return measured.figures
