"""Greedy tokens equal `transformers` in fp32 over random models, prompts, budgets, block sizes and pools."""

from __future__ import annotations

import random

import pytest

from nanoserve import LLM, SamplingParams
from tests.helpers.oracle import is_greedy

MODELS = [
    {},
    {"num_key_value_heads": 1},
    {"num_key_value_heads": 4, "head_dim": 64},
    {"tie_word_embeddings": False, "num_hidden_layers": 3},
    {"num_attention_heads": 8, "num_key_value_heads": 1, "hidden_size": 32},
]
DRAWS = 200


def draw(seed: int) -> tuple[dict, dict, list[list[int]], list[SamplingParams]]:
    """A random model shape, engine configuration and workload; small pools, so that preemption is common."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 4, 8, 16, 32])
    prefix = [rng.randrange(512) for _ in range(rng.choice([0, 16, 40]))]
    prompts, params = [], []
    for _ in range(rng.randint(1, 7)):
        prompt = prefix[: rng.randint(0, len(prefix))] + [rng.randrange(512) for _ in range(rng.randint(1, 60))]
        prompts.append(prompt)
        params.append(SamplingParams(temperature=0, max_tokens=rng.randint(1, 24), ignore_eos=True))
    longest = max(len(p) + q.max_tokens for p, q in zip(prompts, params, strict=True))
    enough = -(-longest // block_size)
    engine = {
        "block_size": block_size,
        "num_kv_blocks": rng.choice([enough, enough + enough // 2 + 1, 4 * enough, 1000]),
        "max_num_batched_tokens": rng.choice([8, 32, 100, 1000]),
        "max_num_seqs": rng.choice([1, 2, 3, 16]),
        "enable_prefix_caching": rng.random() < 0.7,
        "scheduler": rng.choice(["decode_first", {"name": "decode_first", "max_partial_prefills": 1}, "prefill_first"]),
        "overlap": rng.random() < 0.5,
    }
    return rng.choice(MODELS), engine, prompts, params


@pytest.mark.parametrize("group", range(10))
def test_greedy_tokens_equal_transformers(tiny_models, group):
    preemptions = hits = 0
    for seed in range(group * DRAWS // 10, (group + 1) * DRAWS // 10):
        shape, engine, prompts, params = draw(seed)
        folder, oracle = tiny_models(seed=0, **shape)
        with LLM(model=str(folder), dtype="float32", device="cpu", debug=True, **engine) as llm:
            outputs = llm.generate(prompts, params)
            stats = llm.stats()
        for prompt, p, output in zip(prompts, params, outputs, strict=True):
            assert len(output.token_ids) == p.max_tokens, (seed, output)
            assert is_greedy(oracle, prompt, output.token_ids), f"draw {seed}: {shape} {engine}"
        assert stats.num_free_blocks == stats.num_blocks, f"draw {seed} leaks blocks"
        preemptions += stats.preemptions
        hits += stats.prefix_hits
    assert preemptions and hits, "the draws must exercise preemption and the prefix cache"
