"""Qwen3 (dense), for inference over packed tokens.

There is no batch dimension: a step's tokens lie in one row of ``T``. The model knows nothing of sequences, blocks or
kernels; each layer hands its fused qkv projection to ``step.attend``, which owns positions, KV cache and backends.
"""

from __future__ import annotations

from typing import Protocol

import torch

from nanoserve.models.config import ModelConfig
from nanoserve.models.layers import WeightShard, linear, make_linear, packed, whole
from nanoserve.models.parallel import ParallelContext
from nanoserve.models.rope import build_cos_sin
from nanoserve.ops.embedding import embedding
from nanoserve.ops.linear import Norm


class Step(Protocol):
    """What a forward pass needs from the engine: attention of this step's tokens over their contexts."""

    def attend(
        self,
        layer_index: int,
        qkv: torch.Tensor,
        q_norm_weight: torch.Tensor,
        k_norm_weight: torch.Tensor,
        eps: float,
        cos_sin: torch.Tensor,
    ) -> torch.Tensor:
        """qkv ``[T, (q_heads + 2 * kv_heads) * head_dim]`` before q/k norm and rope → ``[T, q_heads * head_dim]``."""
        ...


class DecoderLayer:
    """One transformer block: attention and SwiGLU, each behind an RMSNorm."""

    __slots__ = ("index", "qkv", "o", "gate_up", "down", "input_norm", "post_attention_norm", "q_norm", "k_norm")

    def __init__(
        self, index: int, config: ModelConfig, parallel: ParallelContext, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.index = index
        hidden = parallel.whole(config.hidden_size)
        q = parallel.split(config.num_attention_heads, "num_attention_heads").times(config.head_dim)
        kv = parallel.split(config.num_key_value_heads, "num_key_value_heads", replicate=True).times(config.head_dim)
        inner = parallel.split(config.intermediate_size, "intermediate_size")
        bias = config.attention_bias
        self.qkv = make_linear({"q_proj": q, "k_proj": kv, "v_proj": kv}, hidden, bias=bias, dtype=dtype, device=device)
        self.o = make_linear({"o_proj": hidden}, q, bias=bias, dtype=dtype, device=device)
        self.gate_up = make_linear({"gate_proj": inner, "up_proj": inner}, hidden, dtype=dtype, device=device)
        self.down = make_linear({"down_proj": hidden}, inner, dtype=dtype, device=device)
        self.input_norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        self.post_attention_norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        self.q_norm = torch.empty(config.head_dim, dtype=dtype, device=device)
        self.k_norm = torch.empty(config.head_dim, dtype=dtype, device=device)

    def shards(self) -> dict[str, WeightShard]:
        prefix = f"model.layers.{self.index}."
        return {
            **self.qkv.shards(prefix + "self_attn."),
            **self.o.shards(prefix + "self_attn."),
            **self.gate_up.shards(prefix + "mlp."),
            **self.down.shards(prefix + "mlp."),
            prefix + "input_layernorm.weight": whole(self.input_norm),
            prefix + "post_attention_layernorm.weight": whole(self.post_attention_norm),
            prefix + "self_attn.q_norm.weight": whole(self.q_norm),
            prefix + "self_attn.k_norm.weight": whole(self.k_norm),
        }


class Qwen3ForCausalLM:
    """Weights and forward pass of one rank. Built with uninitialised weights: the loader fills every shard or raises.

    max_positions: rows of the rotary table; default ``config.max_position_embeddings``. A larger value extends it by
    the same formula.
    """

    def __init__(
        self,
        config: ModelConfig,
        parallel: ParallelContext,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.num_q_heads = parallel.split(config.num_attention_heads, "num_attention_heads").size
        self.num_kv_heads = parallel.split(config.num_key_value_heads, "num_key_value_heads", replicate=True).size
        self.embed_tokens = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = [
            DecoderLayer(index, config, parallel, dtype, device) for index in range(config.num_hidden_layers)
        ]
        self.norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        self.lm_head = self.embed_tokens if config.tie_word_embeddings else torch.empty_like(self.embed_tokens)
        self.cos_sin = build_cos_sin(
            config.rope, config.head_dim, max_positions or config.max_position_embeddings, device
        )

    def shards(self) -> dict[str, WeightShard]:
        """Every tensor the checkpoint must hold, by its Hugging Face name, and where it goes."""
        shards = {"model.embed_tokens.weight": whole(self.embed_tokens), "model.norm.weight": whole(self.norm)}
        for layer in self.layers:
            shards |= layer.shards()
        if self.lm_head is not self.embed_tokens:
            shards["lm_head.weight"] = whole(self.lm_head)
        return shards

    def pack(self) -> None:
        """All weights are loaded: lay them out for speed. ``shards`` cannot be asked afterwards."""
        for layer in self.layers:
            for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down):
                matrix.pack()
        self.lm_head = packed(self.lm_head)

    def forward(self, input_ids: torch.Tensor, step: Step) -> torch.Tensor:
        """Hidden states ``[T, hidden_size]`` after the last norm.

        input_ids: ``[T]`` int32 or int64, all in ``[0, vocab_size)``. Their positions are ``step``'s affair.
        """
        eps, cos_sin = self.config.rms_norm_eps, self.cos_sin
        residual = embedding(input_ids, self.embed_tokens, residual_dtype_of(self.dtype))
        norm = Norm(residual, self.layers[0].input_norm, eps)
        following = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        for layer, next_norm in zip(self.layers, following, strict=True):
            qkv = layer.qkv.of_norm(norm)
            x = step.attend(layer.index, qkv, layer.q_norm, layer.k_norm, eps, cos_sin)
            norm = layer.o.add_to(residual, x, layer.post_attention_norm, eps)
            x = layer.gate_up.swiglu_of_norm(norm)
            norm = layer.down.add_to(residual, x, next_norm, eps)
        return norm()

    def compute_logits(self, hidden: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """hidden: ``[N, hidden_size]`` → ``[N, vocab_size]`` in ``dtype``, computed in the model's dtype on the CPU."""
        return linear(hidden, self.lm_head, out_dtype=dtype if hidden.is_cuda else None).to(dtype)


def residual_dtype_of(dtype: torch.dtype) -> torch.dtype:
    """Hidden states of models trained in bf16 exceed fp16's 65504, so fp16 keeps the residual stream in fp32."""
    return torch.float32 if dtype == torch.float16 else dtype
