"""The README's code is run: a stranger starts by copying it."""

from __future__ import annotations

import re
import types
from pathlib import Path

import pytest

from nanoserve import LLM, SamplingParams
from nanoserve.registry import Registry

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def block(marker: str) -> str:
    (code,) = [b for b in BLOCKS if marker in b]
    return code


def test_the_offline_example_runs(capsys):
    exec(block("with LLM("), {})
    assert "EngineStats" in capsys.readouterr().out


@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_the_plugin_example_is_a_right_backend(tiny_folder, kv):
    plugin = types.ModuleType("my_attention")
    exec(block("class Naive"), vars(plugin))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[5, 6, 7], list(range(40))]
    tokens = []
    for attention in ("naive", "sdpa"):
        registry = Registry.discover(extra=[plugin])
        with LLM(str(tiny_folder[0]), attention=attention, kv=kv, device="cpu", registry=registry) as llm:
            if attention == "naive":
                assert llm.engine.runner.selector.candidates["decode"] == ("naive",)
            tokens.append([o.token_ids for o in llm.generate(prompts, params)])
    assert tokens[0] == tokens[1]
