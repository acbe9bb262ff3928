"""``task=eval``: every metric against a worked example, and wrong KV formats that it must catch."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoserve.config import EngineConfig
from nanoserve.contracts.capabilities import Capabilities
from nanoserve.contracts.errors import ConfigError
from nanoserve.contracts.kvcache import KVCacheSpec
from nanoserve.hookspecs import hookimpl
from nanoserve.llm import LLM
from nanoserve.registry import Registry
from nanoserve.sampling_params import SamplingParams
from nanoserve.tasks import Job
from nanoserve.tasks.eval import Bar, EvalFailedError, EvalOptions, Options, run, texts
from nanoserve.tasks.eval.attention_check import Recorded, attention, compare, int8_steps
from nanoserve.tasks.eval.scoring import (
    Divergence,
    Perplexity,
    first_divergence,
    greedy_agreement,
    kl_divergence,
    percentile,
    prompt_logits,
    score,
    token_scores,
    windows,
)
from nanoserve.tasks.eval.task_set import Gap, bracket_gaps, brackets, cloze, cloze_gaps
from nanoserve_plugins.kvcache.int8 import Int8Config, Int8KVCache
from tests.helpers.tiny_model import build_tiny_model
from tests.tasks.conftest import Cli

LOG2, LOG4 = math.log(2), math.log(4)
#: Rows of logits: p = (1/2, 1/4, 1/4) and (1/4, 1/2, 1/4), shifted, because logits are known up to a constant.
P = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]]).log() + 3
#: q = (1/4, 1/2, 1/4) twice.
Q = torch.tensor([[0.25, 0.5, 0.25], [0.25, 0.5, 0.25]]).log() - 1


# --- metrics by hand -----------------------------------------------------------------------------------------------


def test_perplexity_by_hand() -> None:
    """Tokens of probability 1/2 and 1/4 make 3 bits; over 6 bytes that is half a bit each."""
    total = Perplexity(num_bytes=6)
    total.add(token_scores(P, torch.tensor([0, 0])).nll)
    figures = total.figures()
    assert total.num_tokens == 2
    assert figures == pytest.approx({"nll": 1.5 * LOG2, "ppl": 2**1.5, "byte_ppl": 2**0.5, "bits_per_byte": 0.5})


def test_divergence_by_hand() -> None:
    """KL((1/2, 1/4, 1/4) ‖ (1/4, 1/2, 1/4)) = 1/2 log 2 + 1/4 log 1/2 = log(2) / 4, and 0 for the second row."""
    targets = torch.tensor([0, 1])
    kl = kl_divergence(P, Q)
    assert kl.tolist() == pytest.approx([LOG2 / 4, 0], abs=1e-6)
    divergence = Divergence()
    divergence.add(token_scores(P, targets), token_scores(Q, targets), kl)
    assert divergence.figures() == pytest.approx(
        {
            "delta_nll": LOG2 / 2,  # −log 1/4 + log 1/2 for the first token, nothing for the second
            "delta_nll_stderr": LOG2 / 2,  # deviation log 2 / √2 over √2
            "delta_ppl": 2**0.5 - 1,
            "kl": LOG2 / 8,
            "kl_p99": LOG2 / 4,
            "top1_agreement": 0.5,
        },
        abs=1e-6,
    )


def test_kl_is_not_symmetric_and_its_first_argument_weighs() -> None:
    p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.75, 0.25]]).log()
    assert kl_divergence(p, q).item() == pytest.approx(0.5 * math.log(2 / 3) + 0.5 * math.log(2))


def test_windows_score_every_token_once_with_enough_context() -> None:
    assert list(windows(8, 4, 2)) == [(0, 4, 0), (2, 6, 4), (4, 7, 6)]
    for num_tokens in range(1, 20):
        for window in range(1, 8):
            for stride in range(1, window + 1):
                found = list(windows(num_tokens, window, stride))
                scored = [i for w in found for i in range(w.first, w.end)]
                assert scored == list(range(num_tokens - 1))
                assert all(w.end - w.start <= window for w in found)
                assert all(
                    i - w.start + 1 >= min(i + 1, window - stride + 1) for w in found for i in range(w.first, w.end)
                )


def test_greedy_agreement_by_hand() -> None:
    assert first_divergence([1, 2, 3], [1, 2, 3]) == 3
    figures = greedy_agreement([([1, 2, 3, 4], [1, 2, 3, 4]), ([1, 2, 3, 4], [1, 9, 3, 9])])
    assert figures == {"greedy_agreement": 0.75, "greedy_identical": 0.5, "first_divergence": 2.5}


def test_percentile_is_the_nearest_rank() -> None:
    values = torch.tensor([[5.0, 1.0], [4.0, 2.0], [3.0, 6.0]])
    assert [percentile(values, share) for share in (0.0, 0.5, 0.51, 1.0)] == [1, 3, 4, 6]


def test_attention_and_its_errors_by_hand() -> None:
    """Two query heads share a KV head of size 4: scores are q·k / 2, so weights are (3/4, 1/4) and (1/2, 1/2)."""
    k = torch.tensor([[[[1.0, 0, 0, 0]], [[0.0, 0, 0, 0]]]])  # [batch, context, kv_heads, head_dim]
    v = torch.tensor([[[[4.0, 0, 0, 0]], [[0.0, 8, 0, 0]]]])
    q = torch.tensor([[[2 * math.log(3), 0, 0, 0], [0.0, 5, 0, 0]]])
    out = attention(q, k, v)
    torch.testing.assert_close(out, torch.tensor([[[3.0, 2, 0, 0], [2.0, 4, 0, 0]]]))

    base = Recorded(torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[3.0, 4.0]]]), 0.0, 0.5)
    other = Recorded(torch.tensor([[[4.0, 3.0]]]), torch.tensor([[[4.0, 1.0]]]), 0.4, 0.5)
    assert compare(base, other) == pytest.approx(
        {
            "attention_cosine": 24 / 25,
            "attention_max_error": 1.0,
            "attention_error_p999": 1.0,
            "explicit_error": 2 / (1 + 1),
            "recovery_steps": 0.4,
        }
    )
    stored = torch.tensor([[[127.0, 10.0]], [[1.27, 0.0]]])
    assert int8_steps(stored, torch.tensor([[[127.0, 10.5]], [[1.27, 0.02]]])) == pytest.approx(2.0)


def test_a_bar_is_met_on_its_side_and_never_by_nan() -> None:
    figures = {"x": 0.5, "nan": math.nan}
    assert Bar("x", 0.5).met(figures) and Bar("x", 0.5, at_least=True).met(figures)
    assert not Bar("x", 0.4).met(figures) and not Bar("x", 0.6, at_least=True).met(figures)
    assert not Bar("nan", 1.0).met(figures) and not Bar("nan", 0.0, at_least=True).met(figures)


# --- texts and tasks -----------------------------------------------------------------------------------------------


def test_texts_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name, data in {"b/z.py": b"z", "a.txt": "é".encode(), "c.bin": b"\xff\xfe", ".git/x": b"x", "d": b"\n"}.items():
        (tmp_path / name).write_bytes(data)
    assert [(Path(n).name, t) for n, t in texts.documents_in(tmp_path)] == [("a.txt", "é"), ("z.py", "z")]
    with pytest.raises(ConfigError, match="holds no UTF-8 text"):
        texts.documents_in(tmp_path / "c.bin")
    with pytest.raises(ConfigError, match="eval.text: .* does not exist"):
        texts.documents_in(tmp_path / "nothing")


def test_cut_ends_after_a_line_or_between_characters() -> None:
    documents = [("a", "12\n45\n"), ("b", "éé"), ("c", "x")]
    assert texts.cut(documents, None) == documents
    assert texts.cut(documents, 5) == [("a", "12\n")]
    assert texts.cut(documents, 9) == [("a", "12\n45\n"), ("b", "é")]
    assert texts.cut(documents, 6) == [("a", "12\n45\n")]
    assert texts.cut(documents, 11) == documents


SOURCE = """\
value = first(alpha)
other = table[alpha]
pairs = {alpha: value}
# call(alpha) in a comment, and "text(alpha)" in a string
value = other.first(pairs)
"""


def test_gaps_are_where_python_has_them() -> None:
    gaps = bracket_gaps([("x", SOURCE)], 3, seed=0)
    assert sorted(gap.target for gap in gaps) == [")", "]", "}"]
    assert all(SOURCE.startswith(gap.prompt + gap.target) for gap in gaps)
    assert not any("comment" in gap.prompt.splitlines()[-1] for gap in gaps)
    assert bracket_gaps([("x", SOURCE)], 3, seed=0) == gaps  # seeded

    clozes = cloze_gaps([("x", SOURCE)], 99, seed=0)
    assert all(SOURCE.startswith(gap.prompt + gap.target) for gap in clozes)
    # " alpha" never comes after a blank, "first" comes after a dot the second time, "pairs" only after a bracket.
    assert sorted(gap.target for gap in clozes) == [" other", " value", ".first"]


# --- through the engine --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("oracle")
    return folder, build_tiny_model(folder)


def test_prompt_logits_are_those_of_transformers(oracle: tuple[Path, Any]) -> None:
    """In chunks that cut blocks, twice on the same blocks; the pool is whole afterwards, also if the reader stops."""
    folder, model = oracle
    ids = torch.randint(0, 512, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    with LLM(str(folder), enable_prefix_caching=False, num_kv_blocks=4, debug=True) as llm:
        for chunk in (7, 50):
            got = torch.cat(list(prompt_logits(llm.engine, ids, chunk)))
            torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)
        next(prompt_logits(llm.engine, ids, 7)).sum()
        llm.engine.blocks.audit()
        assert llm.stats().num_free_blocks == 4
        torch.testing.assert_close(score(llm.engine, ids[:40], ids[40:43], 16), expected[39:42], atol=2e-4, rtol=2e-4)
        with pytest.raises(ValueError, match="cannot hold 65"):
            list(prompt_logits(llm.engine, [1] * 65, 16))
        assert llm.stats().num_free_blocks == 4
        llm.generate([ids], SamplingParams(max_tokens=2))  # the engine still serves


def test_scoring_refuses_a_prefix_cache(oracle: tuple[Path, Any]) -> None:
    """C11: tokens found in the cache would have no logits."""
    with LLM(str(oracle[0])) as llm, pytest.raises(ValueError, match="enable_prefix_caching=false"):
        next(prompt_logits(llm.engine, [1, 2], 16))


def test_tasks_count_what_the_model_would_write() -> None:
    """The embedded checkpoint closes the bracket and repeats the name; wrong targets are counted as wrong."""
    with LLM("tiny", enable_prefix_caching=False, num_kv_blocks=64) as llm:
        prompt = "class A:\n    def __init__(self, value):\n        self.value = value\n        self.other = len(value"
        answers = [brackets(llm, [Gap(prompt, closer)], 64).right for closer in ")]}"]
        assert answers == [1, 0, 0]
        prompt = "class A:\n    def __init__(self, value):\n        self.value ="
        assert [cloze(llm, [Gap(prompt, t)], 64).right for t in (" value", " self", " vampire")] == [1, 0, 0]


# --- the verdict ---------------------------------------------------------------------------------------------------

SMALL = EvalOptions(max_bytes=16384, window=512, stride=256, chunk=128, num_prompts=4, num_items=0)


class ScaledInt8(Int8KVCache):
    """Stores right data beside scales that are 2 % too large."""

    name = "wrong_scale"

    def _store_torch(self, layer: Any, k: Any, v: Any, slot_mapping: Any) -> None:
        super()._store_torch(layer, k, v, slot_mapping)
        rows = slot_mapping[slot_mapping >= 0].long()
        blocks, offsets = rows // self.shape.block_size, rows % self.shape.block_size
        layer.k_scale[blocks, :, offsets] *= 1.02
        layer.v_scale[blocks, :, offsets] *= 1.02


class SharedScaleInt8(Int8KVCache):
    """Every KV head reads the scale of head 0."""

    name = "shared_scale"

    def gather(self, layer: Any, slots: torch.Tensor) -> Any:
        first = {
            field: getattr(layer, field)[:, :1].expand_as(getattr(layer, field)).contiguous()
            for field in ("k_scale", "v_scale")
        }
        return super().gather(replace(layer, **first), slots)


class WrongFormats:
    @hookimpl
    def nanoserve_kvcache(self, register: Any) -> None:
        for cls in (ScaledInt8, SharedScaleInt8):
            register(KVCacheSpec(cls.name, "wrong on purpose", Capabilities(), Int8Config, cls))


def job(options: EvalOptions, output: Path | None = None) -> Job:
    return Job(
        options=Options(options, None if output is None else str(output)),
        config=EngineConfig.from_kwargs(model="tiny"),
        sampling=SamplingParams(),
        registry=Registry.discover(extra=[WrongFormats()]),
    )


def test_int8_passes_on_the_embedded_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ΔPPL ≤ 0.5 %, and every bar."""
    swept = run(job(SMALL, tmp_path / "eval.json"))
    record = json.loads((tmp_path / "eval.json").read_text())
    figures = record["figures"]
    assert abs(figures["delta_ppl"]) <= 0.005 and 0 < figures["kl"] < 1e-3 and figures["top1_agreement"] > 0.98
    assert 3 < figures["base.ppl"] < 20 and swept["base.ppl"] == pytest.approx(figures["base.ppl"], rel=1e-4)
    assert all(bar["met"] for bar in record["bars"] if bar["gates"]) and len(record["bars"]) == 7
    table = capsys.readouterr().out
    assert "kv=bf16" in table and "no quality metric" in table and "FAIL" not in table


def test_a_format_against_itself_differs_in_nothing(tmp_path: Path) -> None:
    run(job(replace(SMALL, against="bf16", max_bytes=4096), tmp_path / "eval.json"))
    figures = json.loads((tmp_path / "eval.json").read_text())["figures"]
    exact = ("delta_nll", "kl", "attention_max_error", "recovery_steps")
    assert [figures[name] for name in exact] == [0, 0, 0, 0]
    assert figures["top1_agreement"] == figures["greedy_identical"] == 1


@pytest.mark.parametrize("name", ["wrong_scale", "shared_scale"])
def test_a_wrong_int8_scale_is_caught(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EvalFailedError, match=f"kv={name} misses the bar for .*recovery_steps"):
        run(job(replace(SMALL, against=name, max_bytes=4096)))
    assert "FAIL" in capsys.readouterr().out


# --- the command line ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval.stride=2000"], "eval.stride=2000 exceeds eval.window=1024"),
        (["eval.window=0"], "eval.window must be at least 1"),
        (["eval.max_delta_ppl=nan"], "eval.max_delta_ppl must be at least 0"),
        (["kv=int8"], "eval.against: int8 would be compared with itself"),
        (["eval.text=nowhere"], "eval.text: 'nowhere' does not exist"),
        (["eval.windw=5"], "unknown option 'eval.windw'"),
    ],
)
def test_wrong_options_are_refused(cli: Cli, arguments: list[str], message: str) -> None:
    run = cli("task=eval", *arguments)
    assert run.code == 2 and message in run.err and not cli.llms
