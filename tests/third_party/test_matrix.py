"""The compatibility matrix cannot lie: what is claimed is run, what is not is refused, and the page shows both."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoserve.cli import main
from nanoserve.config import PluginChoice
from nanoserve.contracts.attention import AttentionSpec
from nanoserve.contracts.capabilities import Capabilities
from nanoserve.contracts.errors import PluginError
from nanoserve.engine.selection import candidates_for
from nanoserve.hookspecs import hookimpl
from nanoserve.registry import Registry
from nanoserve.tasks.plugins import matrix, reference, replaced, update
from tests.third_party.test_strangers import ROOT, installed

PAGE, RESULTS = ROOT / "plugins/README.md", ROOT / "plugins/matrix.json"
OURS = ("nanoserve", "nanoserve-window", "nanoserve-fp8", "nanoserve-slo")


def registry() -> Registry:
    """Ours and the three strangers; not what else may be installed here."""
    from importlib.metadata import entry_points

    return Registry(e for e in entry_points(group="nanoserve") if e.dist is not None and e.dist.name in OURS)


REGISTRY = registry()
COMBINATIONS = list(matrix.combinations(REGISTRY))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("one", COMBINATIONS, ids=str)
def test_what_is_claimed_is_right_and_what_is_not_is_refused(one: matrix.Combination, device: str) -> None:
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    reasons = matrix.refusals(one, device, capability)
    if one.phase not in one.attention.capabilities.phases:
        assert f"does not implement {one.phase}" in reasons[0]
        return
    if reasons:
        with pytest.raises(PluginError) as refused:
            need = matrix.requirements(one, device, capability)
            candidates_for(REGISTRY, PluginChoice(one.attention.name), need)
        assert all(reason in str(refused.value) for reason in reasons)
        return
    if device == "cpu" and torch.cuda.is_available() and "cpu" not in one.attention.capabilities.devices:
        pytest.skip("the interpreter is off where there is a GPU")
    assert matrix.check(REGISTRY, one, device, capability) == matrix.OK


@installed
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_recorded_results_are_of_what_is_claimed(device: str) -> None:
    """No claim without a result, no result without a claim. To record anew: see plugins/README.md."""
    section = matrix.read(RESULTS).get(device)
    if section is None:
        assert device == "cuda"
        pytest.skip("not recorded yet: the page shows ? there")
    capability = tuple(section["compute_capability"]) if device == "cuda" else None
    claimed = {str(one) for one in COMBINATIONS if not matrix.refusals(one, device, capability)}
    assert section["results"] == dict.fromkeys(claimed, matrix.OK)


@installed
def test_the_page_shows_the_matrix() -> None:
    """To refresh: nanoserve task=plugins update=plugins/README.md record=plugins/matrix.json"""
    page = PAGE.read_text(encoding="utf-8")
    assert replaced(page, "matrix", matrix.markdown(REGISTRY, matrix.read(RESULTS))) == page


def test_the_page_shows_the_contracts() -> None:
    """To refresh: as the matrix."""
    page = PAGE.read_text(encoding="utf-8")
    assert "<!-- reference -->" in page and replaced(page, "reference", reference.markdown()) == page


def test_the_reference_has_every_public_class_and_method() -> None:
    text = reference.markdown()
    for needle in (
        "#### `AttentionBackend`", "- `decode(q: torch.Tensor, layer: LayerCache, meta: DecodeMetadata, out: ",
        "- `schedule() -> Schedule` (to implement)", "full_attention: bool = True", "- `num_free: int`", "`WAITING`",
        "- `nanoserve_kvcache(register: Callable[[KVCacheSpec], None]) -> None`",
    ):  # fmt: skip
        assert needle in text, needle
    assert not re.search(r":\w+:`|(?<!`)``(?!`)| at 0x", text)


# --- cells and faults ----------------------------------------------------------------------------------------------


def liar(**changes: Any) -> Registry:
    """sdpa as ``liar``, with a factory or capabilities that are not right."""
    spec = Registry.discover().get("attention", "sdpa")

    @hookimpl
    def nanoserve_attention(register: Any) -> None:
        register(replace(spec, name="liar", **changes))

    @hookimpl
    def nanoserve_kvcache(register: Any) -> None:
        register(Registry.discover().get("kvcache", "bf16"))

    return Registry(
        extra=[types.SimpleNamespace(nanoserve_attention=nanoserve_attention, nanoserve_kvcache=nanoserve_kvcache)]
    )


def test_a_cell_needs_a_claim_and_a_result() -> None:
    prefill_only = Capabilities(phases=frozenset({"prefill"}))
    name = "attention=liar kv=bf16 {}"
    cases = (
        ({}, "| ? / ? | – / – |"),
        ({"cpu": {"results": {name.format("prefill"): "ok"}}}, "| ✓ / ? | – / – |"),
        ({"cpu": {"results": {name.format("prefill"): "relative error 1"}}}, "| ✗ / ? | – / – |"),
        ({"cpu": {"results": {name.format("decode"): "ok"}}}, "| ? / ? | – / – |"),  # of a claim that was withdrawn
    )
    for results, row in cases:
        assert f"`liar` {row}" in matrix.markdown(liar(capabilities=prefill_only), results)
    interpreted = Capabilities(phases=frozenset({"prefill"}), devices=frozenset({"cuda"}), interpretable=True)
    results = {device: {"results": {name.format("prefill"): "ok"}} for device in ("cpu", "cuda")}
    assert "`liar` | i / ✓ | – / – |" in matrix.markdown(liar(capabilities=interpreted), results)


def test_a_wrong_backend_fails_the_check() -> None:
    spec: AttentionSpec = Registry.discover().get("attention", "sdpa")

    def half_scale(context: Any, options: Any) -> Any:
        return spec.factory(replace(context, scale=context.scale / 2), options)

    wrong = liar(factory=half_scale)
    for one in matrix.combinations(wrong):
        assert re.fullmatch(r"relative error .* in float32, allowed 2e-06", matrix.check(wrong, one, "cpu", None))
    sparse = replace(spec.capabilities, full_attention=False)
    for one in matrix.combinations(liar(factory=half_scale, capabilities=sparse)):
        assert matrix.check(wrong, one, "cpu", None) == matrix.OK  # only its own tests know what it should compute
    broken = liar(factory=lambda context, options: 1)
    assert "returned int, not a AttentionBackend" in matrix.check(
        broken, next(matrix.combinations(broken)), "cpu", None
    )


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Checks, records, writes a page; each mistake is one line."""
    monkeypatch.chdir(tmp_path)
    few = [one for one in COMBINATIONS if one.attention.name == "sdpa" and one.kv.name == "bf16"]
    monkeypatch.setattr(matrix, "combinations", lambda registry: few)
    assert main(["task=plugins", "check=true", "record=results.json"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{one}: ok" for one in few]
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- matrix -->\nold\n<!-- /matrix -->\nafter\n")
    assert main(["task=plugins", "update=page.md", "record=results.json"]) == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- matrix -->\n| `attention=` |") and text.endswith(
        "|\n<!-- /matrix -->\nafter\n"
    )
    assert "| `sdpa` |" in text and "old" not in text

    monkeypatch.setattr(matrix, "check", lambda *_: "relative error 1.0")
    assert main(["task=plugins", "check=true"]) == 1
    assert "2 of 2 combinations do not do what they claim: attention=sdpa kv=bf16 prefill" in capsys.readouterr().err
    monkeypatch.setattr(matrix, "combinations", lambda registry: [])
    assert main(["task=plugins", "update=page.md", "record=results.json"]) == 2
    assert "results.json has results of attention=sdpa kv=bf16" in capsys.readouterr().err
    page.write_text("nothing\n")
    assert main(["task=plugins", "update=page.md"]) == 2
    assert "it has no generated part; those are capabilities, matrix, reference" in capsys.readouterr().err
    assert main(["task=plugins", "update=page.md", "record=page.md"]) == 2
    assert "it holds no results of check=true" in capsys.readouterr().err


def test_the_interpreter_is_on_or_must_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A command of its own turns it on; where it is off, or Triton has been imported without, that is said."""
    if torch.cuda.is_available():
        pytest.skip("only without a GPU")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="set TRITON_INTERPRET=1"):
        matrix.check_all(REGISTRY)
    monkeypatch.delenv("TRITON_INTERPRET")
    done = subprocess.run(
        [sys.executable, "-m", "nanoserve", "task=plugins", "check=true"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0 and "in Triton's interpreter" in done.stderr, done.stderr
    assert "attention=triton_flash kv=bf16 prefill: ok" in done.stdout


def test_a_long_message_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler's, say, which would fill the file of results."""

    def factory(*_: object) -> Any:
        raise RuntimeError("no " * 9999)

    one = COMBINATIONS[0]
    broken = replace(one, attention=replace(one.attention, factory=factory))
    result = matrix.check(REGISTRY, broken, "cpu", None)
    assert result.startswith("RuntimeError: no no") and result.endswith(" …") and len(result) < 330


def test_the_capabilities_part_is_what_ships(tmp_path: Path) -> None:
    """Whatever else is installed where the README is written anew."""
    page = tmp_path / "page.md"
    page.write_text("<!-- capabilities -->\n<!-- /capabilities -->\n")
    update(page, Registry.discover(), None)
    assert "`attention=sdpa`" in page.read_text() and "`attention=window`" not in page.read_text()
