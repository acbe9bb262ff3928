"""The attention of one step: norm, rotate and store the new K/V, then let the chosen backend of each phase read."""

from __future__ import annotations

import torch

from nanoserve.contracts.attention import AttentionBackend
from nanoserve.contracts.kvcache import KVCacheFormat
from nanoserve.engine.batch import Batch
from nanoserve.ops.rope import Rotation, norm_rope, rotation_of


class AttentionStep:
    """What the model's layers see of a step. Built once per step; ``attend`` runs once per layer."""

    def __init__(
        self,
        batch: Batch,
        kv: KVCacheFormat,
        num_q_heads: int,
        prefill: AttentionBackend | None,
        decode: AttentionBackend | None,
    ) -> None:
        self.batch = batch
        self.kv = kv
        self.num_q_heads = num_q_heads
        self.prefill = prefill
        self.decode = decode
        self.fused = kv.norm_rope_store()
        self._rotation: Rotation | None = None
        if batch.prefill is not None and prefill is not None:
            batch.prefill.plan = prefill.plan_prefill(batch.prefill)
        if batch.decode is not None and decode is not None:
            batch.decode.plan = decode.plan_decode(batch.decode)

    def attend(
        self,
        layer_index: int,
        qkv: torch.Tensor,
        q_norm_weight: torch.Tensor,
        k_norm_weight: torch.Tensor,
        eps: float,
        cos_sin: torch.Tensor,
    ) -> torch.Tensor:
        """qkv ``[tokens, (q_heads + 2 * kv_heads) * head_dim]`` → attention output ``[tokens, q_heads * head_dim]``."""
        batch, kv = self.batch, self.kv
        layer = kv.layers[layer_index]
        num_kv_heads, head_dim = kv.shape.num_kv_heads, kv.shape.head_dim
        split = batch.num_decode
        if self.fused is not None:
            q, k, v = self.fused(
                layer, qkv, q_norm_weight, k_norm_weight, eps, cos_sin, batch.positions, batch.slot_mapping
            )
            k, v = k[split:], v[split:]
        else:
            if self._rotation is None:
                self._rotation = rotation_of(cos_sin, batch.positions)
            heads = (self.num_q_heads, num_kv_heads, head_dim)
            q, k, v = norm_rope(qkv, q_norm_weight, k_norm_weight, eps, self._rotation, *heads)
            kv.store(layer, k, v, batch.slot_mapping)
            k, v = k[split:], v[split:]
            if batch.prefill is not None and not kv.exact:
                # Fresh and cached keys must be the same numbers, or a prefix hit would change the answer.
                k, v = kv.gather(layer, batch.prefill.slot_mapping)
        out = torch.empty(qkv.shape[0], self.num_q_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
        if batch.decode is not None and self.decode is not None:
            self.decode.decode(q[:split], layer, batch.decode, out[:split])
        if batch.prefill is not None and self.prefill is not None:
            self.prefill.prefill(q[split:], k, v, layer, batch.prefill, out[split:])
        return out.view(qkv.shape[0], -1)
