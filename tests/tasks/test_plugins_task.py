"""``task=plugins``: what is installed, what it can do, what is broken and why."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest

from nanoserve.contracts.capabilities import Capabilities
from nanoserve.contracts.kvcache import KVCacheSpec
from nanoserve.registry import KINDS, Registration, Registry, Source
from nanoserve.tasks.plugins import COLUMNS, FILE_WIDTH, markdown, row
from tests.helpers.distributions import SCHEDULER, Distributions
from tests.helpers.distributions import distributions as distributions
from tests.tasks.conftest import Cli

README = Path(__file__).parents[2] / "README.md"


def built_in() -> Registry:
    return Registry(e for e in entry_points(group="nanoserve") if e.dist is not None and e.dist.name == "nanoserve")


def test_the_table_names_every_plugin_and_its_distribution(cli: Cli, distributions: Distributions) -> None:
    """C48: a broken one stands below with its distribution and its exception; the command succeeds."""
    distributions.install("acme-dist", {"scheduler.acme": "acme_mod"}, acme_mod=SCHEDULER.format(name="acme"))
    distributions.install("sick-dist", {"scheduler.sick": "sick_mod"}, sick_mod="import no_such_module")
    run = cli("task=plugins")
    lines = run.out.splitlines()
    assert run.code == 0 and cli.llms == []
    assert any("scheduler=acme" in line and "acme-dist 1.5" in line for line in lines)
    for kind, details in KINDS.items():
        for name in built_in().specs(kind):
            assert any(f"{details.group}={name.name} " in line for line in lines)
    broken = lines[lines.index("broken") + 1 :]
    assert any("'scheduler.sick' of distribution sick-dist 1.5" in line and "no_such_module" in line for line in broken)


@pytest.mark.parametrize("columns", [None, 90])
def test_the_table_is_as_wide_as_it_may_be(cli: Cli, monkeypatch: pytest.MonkeyPatch, columns: int | None) -> None:
    """COLUMNS counts in a pipe too; a name to copy is never cut."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", str(columns))
    out = cli("task=plugins").out
    assert max(map(len, out.splitlines())) <= (columns or FILE_WIDTH)
    assert "│ attention=paged_v2_split │" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["record=x.json"], "record: it is read by update=FILE or written by check=true"),
        (["check=true", "update=x.md", "record=x.json"], "first check=true record=FILE, then update=PAGE"),
        (["update=nowhere.md"], "update=nowhere.md: it cannot be read"),
        (["update=page.md"], "update=page.md: it has a matrix of results; record=FILE"),
    ],
)
def test_what_is_refused(cli: Cli, arguments: list[str], message: str) -> None:
    Path("page.md").write_text(page := "<!-- matrix -->\n<!-- /matrix -->\n")
    run = cli("task=plugins", *arguments)
    assert run.code == 2 and message in run.err and len(run.err.strip().splitlines()) == 1
    assert Path("page.md").read_text() == page


def test_cells() -> None:
    """Capabilities in words; None is any."""
    capabilities = Capabilities(
        dtypes=frozenset({"float16", "bfloat16"}),
        head_dims=frozenset({128, 64}),
        devices=frozenset({"cuda"}),
        interpretable=True,
        min_compute_capability=(8, 0),
    )
    spec = KVCacheSpec("fp8", "small", capabilities, Capabilities, lambda *_: None)  # type: ignore[arg-type, return-value]
    cells = dict(zip(COLUMNS, row(Registration("kvcache", spec, Source("kvcache.fp8", "acme"))), strict=True))
    assert cells == {
        "choose": "kv=fp8",
        "what": "small",
        "phases": "",
        "KV formats": "",
        "dtypes": "bfloat16, float16",
        "head sizes": "64, 128",
        "devices": "cuda ≥ 8.0, cpu (interpreted)",
    }


def test_the_readme_shows_what_is_registered() -> None:
    """To refresh it: ``nanoserve task=plugins format=markdown``."""
    assert markdown(built_in()) in README.read_text(encoding="utf-8")
