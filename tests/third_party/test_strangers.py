"""What a stranger's package may import, and what a user gets who installs it: C48, C49 are in ``tests/core``."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from nanoserve import LLM, PluginError, RequestError, SamplingParams
from nanoserve.cli import main
from nanoserve.contracts.attention import AttentionBackend, AttentionContext, AttentionSpec
from nanoserve.contracts.capabilities import Capabilities
from nanoserve.registry import Registry
from nanoserve.testing.attention import AttentionBackendSuite, NoScalarReads
from tests.helpers.distributions import Distributions
from tests.helpers.distributions import distributions as distributions

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NAMES = ("window", "fp8", "slo")
PUBLIC = ("nanoserve.contracts", "nanoserve.hookspecs", "nanoserve.ops", "nanoserve.testing")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

MISSING = sorted(
    set(NAMES) - {n for kind in ("attention", "kvcache", "scheduler") for n in Registry.discover().names(kind)}
)
installed = pytest.mark.skipif(
    bool(MISSING),
    reason="not installed; pip install --no-deps " + " ".join(f"./tests/third_party/nanoserve-{n}" for n in MISSING),
)


FULL_ATTENTION = """
from dataclasses import replace
from nanoserve.hookspecs import hookimpl
from nanoserve_plugins.attention import sdpa

@hookimpl
def nanoserve_attention(register):
    sdpa.nanoserve_attention(lambda spec: register(replace(spec, name="acme")))
"""


@dataclass(frozen=True)
class Nothing:
    """No options."""


def imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "."


@pytest.mark.parametrize("name", NAMES)
def test_a_stranger_imports_what_is_public(name: str) -> None:
    files = list((HERE / f"nanoserve-{name}").rglob("*.py"))
    assert len(files) >= 3
    for file in files:
        for module in imports(file):
            own = module.startswith(f"nanoserve_{name}")
            ours = module.partition(".")[0] in ("nanoserve", "nanoserve_plugins", "tests")
            assert own or not ours or module.startswith(PUBLIC), f"{file.name} imports {module}"


def test_a_name_that_nobody_installed(capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit code 2: what there is, and how to get what there is not."""
    assert main(["attention=bandit", "prompt=a"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "unknown attention 'bandit'; known are: " in line and "sdpa" in line
    assert line.endswith("if a package brings it, pip install that one (its entry point is called attention.bandit)")


@pytest.mark.parametrize(
    "wait",
    [lambda x: x[0].item(), lambda x: int(x.sum()), lambda x: x[x > 1], lambda x: bool(x[0] > 1)],
)
def test_the_suites_notice_what_waits_for_a_device(wait: Callable[[torch.Tensor], object]) -> None:
    """Without a device; and let pass what does not wait, torch.compile included."""
    x, compiled = torch.arange(3), torch.compile(lambda x: x * 0.5 + 1, backend="eager")
    with NoScalarReads():
        compiled(x + x.clamp_min(1).index_select(0, x))
        with pytest.raises(AssertionError, match="waits for the device"):
            wait(x)


class Packed(AttentionBackend):
    """All sequences of a step behind one mask."""

    def decode(self, q, layer, meta, out):  # type: ignore[no-untyped-def]
        lens, size = meta.context_lens_cpu, self.context.block_size
        owner = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens))
        token = torch.cat([torch.arange(n) for n in lens])
        k, v = self.context.kv.gather(layer, meta.block_table[owner, token // size] * size + token % size)
        grouped = q.view(len(q), k.shape[1], -1, q.shape[-1])
        scores = torch.einsum("shgd,nhd->shgn", grouped, k) * self.context.scale
        scores.masked_fill_((owner != torch.arange(len(q))[:, None])[:, None, None], -torch.inf)
        out.copy_(torch.einsum("shgn,nhd->shgd", scores.softmax(-1), v).reshape(out.shape))


def test_the_suite_notices_a_nan_that_leaks_into_other_sequences() -> None:
    class Suite(AttentionBackendSuite):
        backend = "packed"

        @property
        def spec(self) -> AttentionSpec:
            return AttentionSpec("packed", "", Capabilities(phases=frozenset({"decode"})), Nothing, Packed)

        def build(self, context: AttentionContext) -> AttentionBackend:
            return Packed(context, Nothing())

    Suite().test_random_ragged_batches("decode", "bf16", 0)  # what it computes is right
    with pytest.raises(AssertionError, match="NaN in v of one sequence shows in others"):
        Suite().test_a_nan_stays_in_its_sequence("decode", "bf16", "v")


@installed
def test_the_three_together(capsys: pytest.CaptureFixture[str]) -> None:
    """The command of the issue: their YAML is found, and they serve a prompt."""
    command = ["attention=window", "kv=fp8", "scheduler=slo", "scheduler.ttft_ms=500", "attention.sinks=2"]
    assert main([*command, "--cfg", "job"]) == 0
    shown = capsys.readouterr().out
    assert "window: 1024" in shown and "sinks: 2" in shown and "ttft_ms: 500" in shown and "tpot_ms: 100.0" in shown
    assert main([*command, "prompt=def f(x):", "sampling.max_tokens=8", "engine.device=cpu"]) == 0
    assert capsys.readouterr().out.strip()


@installed
def test_a_wide_window_is_full_attention_and_a_narrow_one_is_not() -> None:
    prompt = "import json\n\ndef read_json(path):\n    with open(path) as file:\n"
    texts = []
    for attention in ("sdpa", {"name": "window"}, {"name": "window", "window": 2, "sinks": 0}):
        with LLM("tiny", attention=attention, kv="fp8", scheduler="slo", device="cpu") as llm:
            info = llm.engine.info
            assert info is not None and (info.kv, info.scheduler) == ("fp8", "slo")
            texts.append(llm.generate(prompt, GREEDY)[0].text)
    assert texts[0] == texts[1] != texts[2]


@installed
def test_a_request_says_how_urgent_it_is() -> None:
    """One at a time: the last is the most urgent. A scheduler that does not care takes no priority."""
    done: list[int] = []
    with LLM("tiny", scheduler="slo", device="cpu", max_num_seqs=1) as llm:
        llm.generate(["a", "b", "c"], GREEDY, priority=[1, 0, -1], on_finish=lambda i, output: done.append(i))
        with pytest.raises(RequestError, match="2 priorities for 1 prompts"):
            llm.generate("a", GREEDY, priority=[1, 2])
        with pytest.raises(RequestError, match="a priority is an integer.*not 'high'"):
            llm.stream("a", GREEDY, priority="high")  # type: ignore[arg-type]
    with LLM("tiny", scheduler="decode_first", device="cpu", max_num_seqs=1) as llm:
        llm.generate(["a", "b", "c"], GREEDY, on_finish=lambda i, output: done.append(i))
        with pytest.raises(RequestError, match="scheduler=decode_first of nanoserve .* does not use it"):
            llm.generate("a", GREEDY, priority=1)
    assert done == [2, 1, 0, 0, 1, 2]


@installed
def test_nobody_gets_a_window_who_did_not_ask_for_one() -> None:
    """Its answers are not the model's, so neither a policy nor the other phase of some backend may pick it."""
    for attention in ("auto", "sdpa", "paged_v1"):
        with LLM("tiny", attention=attention) as llm:
            chosen = llm.engine.runner.selector.candidates  # type: ignore[attr-defined]
            assert all("window" not in names for names in chosen.values()) and all(chosen.values())


def test_auto_neither_imports_nor_considers_what_its_table_does_not_name(distributions: Distributions) -> None:
    distributions.install("acme-dist", {"attention.acme": "acme_mod"}, acme_mod=FULL_ATTENTION)
    with LLM("tiny", device="cpu") as llm:
        assert "acme" not in llm.engine.runner.selector.candidates["decode"]  # type: ignore[attr-defined]
    assert "acme_mod" not in sys.modules
    table = [{"phase": "decode", "use": ["acme"]}]
    with LLM("tiny", device="cpu", policy={"name": "auto", "table": table}) as llm:
        assert llm.engine.runner.selector.candidates["decode"] == ("acme",)  # type: ignore[attr-defined]


@installed
@pytest.mark.parametrize("attention", ["paged_v1", "triton_flash", "int8_fused"])
def test_kernels_that_cannot_read_fp8_say_so(attention: str) -> None:
    with pytest.raises(PluginError, match="cannot read KV format 'fp8'.* These would: .*sdpa"):
        LLM("tiny", attention=attention, kv="fp8", device="cpu")


@installed
def test_a_combination_of_options_is_refused_when_the_engine_is_built() -> None:
    with pytest.raises(ValueError, match="attention.kernel=triton reads kv=bf16, not kv=fp8"):
        LLM("tiny", attention={"name": "window", "kernel": "triton"}, kv="fp8", device="cpu")
