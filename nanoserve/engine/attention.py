"""The attention of one step: norm, rotate and store the new K/V, then let the chosen backend of each phase read."""

from __future__ import annotations

import torch

from nanoserve.contracts.attention import AttentionBackend
from nanoserve.contracts.kvcache import KVCacheFormat, LayerCache
from nanoserve.engine.batch import Batch
from nanoserve.engine.guard import wrote_out
from nanoserve.ops.rope import Rotation, norm_rope, rotation_of


class KVWriter:
    """Norm, rotation and store of a step's tokens, fused if the format can: the same work for every kind of step.

    needs_kv: whether any of them attends to the step's own k and v instead of the cache.
    """

    def __init__(
        self,
        kv: KVCacheFormat,
        num_q_heads: int,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        needs_kv: bool = True,
    ) -> None:
        self.kv = kv
        self.num_q_heads = num_q_heads
        self.positions = positions
        self.slot_mapping = slot_mapping
        self.needs_kv = needs_kv
        self.fused = kv.norm_rope_store()
        self._rotation: Rotation | None = None

    def write(
        self,
        layer: LayerCache,
        qkv: torch.Tensor,
        q_norm_weight: torch.Tensor,
        k_norm_weight: torch.Tensor,
        eps: float,
        cos_sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """qkv ``[tokens, (q_heads + 2 * kv_heads) * head_dim]`` → q, k, v ``[tokens, heads, head_dim]``; without
        ``needs_kv`` k and v may be None."""
        if self.fused is not None:
            step = self.positions, self.slot_mapping, self.needs_kv
            return self.fused(layer, qkv, q_norm_weight, k_norm_weight, eps, cos_sin, *step)
        if self._rotation is None:
            self._rotation = rotation_of(cos_sin, self.positions)
        heads = (self.num_q_heads, self.kv.shape.num_kv_heads, self.kv.shape.head_dim)
        q, k, v = norm_rope(qkv, q_norm_weight, k_norm_weight, eps, self._rotation, *heads)
        self.kv.store(layer, k, v, self.slot_mapping)
        return q, k, v


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
        needs_kv = batch.prefill is not None
        self.writer = KVWriter(kv, num_q_heads, batch.positions, batch.slot_mapping, needs_kv)
        # Fresh and cached keys must be the same numbers, or a prefix hit would change the answer.
        self._rereads = self.writer.fused is None and not kv.exact
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
        q, k, v = self.writer.write(self.kv.layers[layer_index], qkv, q_norm_weight, k_norm_weight, eps, cos_sin)
        out = torch.empty(qkv.shape[0], self.num_q_heads, q.shape[-1], dtype=qkv.dtype, device=qkv.device)
        self.read(layer_index, q, k, v, out)
        return out.view(qkv.shape[0], -1)

    def read(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        """Attention of q ``[tokens, q_heads, head_dim]`` over the stored contexts into ``out``, of the same shape."""
        batch, layer, split = self.batch, self.kv.layers[layer_index], self.batch.num_decode
        if batch.decode is not None and self.decode is not None:
            returned: object = self.decode.decode(q[:split], layer, batch.decode, out[:split])  # type: ignore[func-returns-value]
            wrote_out(self.decode, returned)
        if batch.prefill is not None and self.prefill is not None:
            if split:
                q, out = q[split:], out[split:]
            if self._rereads:
                k, v = self.kv.gather(layer, batch.prefill.slot_mapping)
            elif split:
                k, v = k[split:], v[split:]
            returned = self.prefill.prefill(q, k, v, layer, batch.prefill, out)  # type: ignore[func-returns-value]
            wrote_out(self.prefill, returned)
