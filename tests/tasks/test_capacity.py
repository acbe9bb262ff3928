"""``task=capacity`` against what the engine really allocates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nanoserve.config import EngineConfig
from nanoserve.contracts.errors import ConfigError
from nanoserve.llm import LLM
from nanoserve.registry import Registry
from nanoserve.tasks.capacity import GIB, plan
from tests.tasks.conftest import Cli


@pytest.mark.parametrize("kv", ["bf16", "int8"])
@pytest.mark.parametrize("num_kv_blocks", [None, 33])
def test_the_engine_allocates_what_was_planned(kv: str, num_kv_blocks: int | None) -> None:
    keywords = {"kv": kv, "device": "cpu", "max_num_seqs": 4, "max_model_len": 512, "num_kv_blocks": num_kv_blocks}
    planned = plan(EngineConfig.from_kwargs(**keywords), Registry.discover(), kv, 24.0, 0.5)
    with LLM(**keywords) as llm:
        runner = llm.engine.runner
        tensors = [t for layer in runner.kv.layers for t in vars(layer).values() if isinstance(t, torch.Tensor)]
        assert planned.num_blocks == llm.engine.blocks.num_blocks
        assert planned.pool_bytes == pytest.approx(sum(t.nbytes for t in tensors), rel=0.01)
        weights = [t for matrix in _weights(runner.model) for t in matrix]
        assert planned.weight_bytes == pytest.approx(sum(weights), rel=0.01)


def _weights(model) -> list[list[int]]:
    size = model.config
    hidden, inner, width = size.hidden_size, size.intermediate_size, size.head_dim
    q, kv = size.num_attention_heads * width, size.num_key_value_heads * width
    layer = hidden * (q + 2 * kv) + q * hidden + 3 * hidden * inner + 2 * hidden + 2 * width
    parameters = size.vocab_size * hidden + size.num_hidden_layers * layer + hidden
    return [[4 * parameters], [model.cos_sin.nbytes]]


def test_the_formula_of_the_spec() -> None:
    """Spec G: 2 · layers · kv_heads · head_dim · bytes per token; Qwen3-0.6B in bf16 on 24 GiB."""
    config = EngineConfig.from_kwargs(model="qwen3_0_6b", max_model_len=4096)
    planned = plan(config, Registry.discover(), "bf16", 24.0, 0.5)
    assert planned.bytes_per_token == 2 * 28 * 8 * 128 * 2
    # 596,049,920 parameters, and the rotary table.
    assert planned.weight_bytes == 2 * 596_049_920 + 4096 * 128 * 4
    room = (24.0 * 0.9 - 0.5) * GIB - planned.weight_bytes - planned.activation_bytes
    assert 0 <= room - planned.pool_bytes < planned.bytes_per_block
    assert planned.batch(1024) == planned.num_blocks // 64 and planned.batch(1025) == planned.num_blocks // 65
    int8 = plan(config, Registry.discover(), "int8", 24.0, 0.5)
    assert int8.num_blocks / planned.num_blocks == pytest.approx(256 / 130, rel=1e-3)


def test_a_gpu_that_is_too_small() -> None:
    with pytest.raises(ConfigError, match="memory_gib=24 leaves no room"):
        plan(EngineConfig.from_kwargs(model="qwen3_32b"), Registry.discover(), "bf16", 24.0, 0.5)


def test_the_command(cli: Cli) -> None:
    outcome = cli("task=capacity", "model=qwen3_0_6b", "contexts=[1024]", "output=new/plans.json")
    assert outcome.code == 0 and "batch at 1,024" in outcome.out and "58,240" in outcome.out
    plans = json.loads(Path("new/plans.json").read_text())["plans"]
    assert [p["kv"] for p in plans] == Registry.discover().names("kvcache")
    not_finite = "memory_gib=inf", "reserved_gib=nan"
    for bad in ("contexts=[99999]", "contexts=[0]", "memory_gib=0.0", *not_finite, "formats=[fp1]", "formats=[]"):
        assert cli("task=capacity", "model=qwen3_0_6b", bad).code == 2, bad
