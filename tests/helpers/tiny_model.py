"""Tiny Qwen3 checkpoints that notice mistakes (recipe of the test plan: sensitive to one lost block or one wrong head).

Default initialisation makes a weak oracle: with std 0.02 and tied embeddings greedy output repeats the last prompt
token whatever the engine does. Here weights have std 0.2, every norm weight is 1 + 0.3 N(0, 1), and ``head_dim``
differs from ``hidden_size / heads``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
}


def build_tiny_model(
    path: str | Path,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Qwen3ForCausalLM:
    """Write a checkpoint folder and return the Hugging Face model (fp32, CPU, eval) that it holds: the oracle.

    overrides: Qwen3Config fields. dtype: of the saved weights; the returned model holds the same (rounded) values.
    max_shard_size: as in ``save_pretrained`` ("40KB" gives several shards and an index).
    """
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**TINY | overrides)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.normal_(std=0.2)
    torch.set_rng_state(generator_state)
    model.to(dtype).save_pretrained(path, max_shard_size=max_shard_size)
    return model.float().requires_grad_(False)
