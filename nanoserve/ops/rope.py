"""Per-head q/k RMSNorm and rotary embedding (Su et al., 2021) of a fused qkv projection. Torch reference in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F

Rotation = tuple[torch.Tensor, torch.Tensor]


def rotation_of(cos_sin: torch.Tensor, positions: torch.Tensor) -> Rotation:
    """What rotates tokens at ``positions``, in every layer alike: cos and sin, each ``[tokens, 1, head_dim]`` fp32.

    cos_sin: ``[max_positions, head_dim]`` fp32, first half cos, second half sin. positions: ``[tokens]`` int32 / int64.
    The first half of the sines is negative: they multiply x rolled by half a head.
    """
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def norm_rope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    rotation: Rotation,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalise and rotate q and k; v is passed through.

    qkv: ``[tokens, (q_heads + 2 * kv_heads) * head_dim]``, q heads first, then k, then v. q_weight, k_weight:
    ``[head_dim]``. rotation: see :func:`rotation_of`. Element i is paired with i + head_dim / 2 ("half" rotation, as
    Hugging Face and NeoX). Returns q ``[tokens, q_heads, head_dim]``, k and v ``[tokens, kv_heads, head_dim]`` in the
    dtype of ``qkv``; v is a view of ``qkv``, q and k are views of one fresh tensor.
    """
    num_qk_heads = num_q_heads + num_kv_heads
    heads = qkv.view(qkv.shape[0], num_qk_heads + num_kv_heads, head_dim)
    weight = torch.cat([q_weight.expand(num_q_heads, head_dim), k_weight.expand(num_kv_heads, head_dim)])
    x = F.rms_norm(heads[:, :num_qk_heads].float(), (head_dim,), eps=eps).mul_(weight)
    cos, sin = rotation
    rotated = (x * cos).addcmul_(x.roll(head_dim // 2, -1), sin).to(qkv.dtype)
    return rotated[:, :num_q_heads], rotated[:, num_q_heads:], heads[:, num_qk_heads:]


def qk_norm_rope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`norm_rope` at ``positions`` of the table ``cos_sin``: what a KV format's fused launch computes."""
    rotation = rotation_of(cos_sin, positions)
    return norm_rope(qkv, q_weight, k_weight, eps, rotation, num_q_heads, num_kv_heads, head_dim)
