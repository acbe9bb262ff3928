"""The simplest right attention: a ``step`` for the model's forward pass, over one packed batch without a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nanoserve.models.qwen3 import Qwen3ForCausalLM
from nanoserve.ops.rope import qk_norm_rope


class DenseStep:
    """Causal attention in fp32 over sequences packed back to back; every query sees its own sequence only."""

    def __init__(self, model: Qwen3ForCausalLM, lengths: Sequence[int]) -> None:
        self.model = model
        self.lengths = list(lengths)
        self.positions = torch.cat([torch.arange(n, device=model.device) for n in lengths])

    def attend(self, layer_index, qkv, q_norm_weight, k_norm_weight, eps, cos_sin):
        m, d = self.model, self.model.config.head_dim
        heads = (m.num_q_heads, m.num_kv_heads, d)
        q, k, v = qk_norm_rope(qkv, q_norm_weight, k_norm_weight, eps, cos_sin, self.positions, *heads)
        group = m.num_q_heads // m.num_kv_heads
        outputs = []
        for q_i, k_i, v_i in zip(*(x.float().split(self.lengths) for x in (q, k, v)), strict=True):
            k_i, v_i = k_i.repeat_interleave(group, dim=1), v_i.repeat_interleave(group, dim=1)
            scores = torch.einsum("qhd,khd->hqk", q_i, k_i) * d**-0.5
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, v_i))
        return torch.cat(outputs).flatten(1).to(qkv.dtype)


def packed_logits(model: Qwen3ForCausalLM, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """``[len(prompt), vocab]`` logits of every prompt, computed in one packed forward pass."""
    step = DenseStep(model, [len(p) for p in prompts])
    ids = torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int32, device=model.device)
    return list(model.compute_logits(model.forward(ids, step)).split(step.lengths))
