"""Per-head q/k RMSNorm and rotary embedding (Su et al., 2021) of a fused qkv projection. Torch reference in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def qk_norm_rope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor | None,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalise and rotate q and k; v is passed through.

    qkv: ``[tokens, (q_heads + 2 * kv_heads) * head_dim]``, q heads first, then k, then v. q_weight, k_weight:
    ``[head_dim]``. cos_sin: ``[max_positions, head_dim]`` fp32, first half cos, second half sin. positions:
    ``[tokens]`` int32 or int64; None when ``cos_sin`` is ``[tokens, head_dim]`` already. Element i is paired with i + head_dim / 2 ("half" rotation, as Hugging Face and NeoX).
    Returns q ``[tokens, q_heads, head_dim]``, k and v ``[tokens, kv_heads, head_dim]`` in the dtype of ``qkv``;
    v is a view of ``qkv``, q and k are views of one fresh tensor.
    """
    num_qk_heads = num_q_heads + num_kv_heads
    heads = qkv.view(qkv.shape[0], num_qk_heads + num_kv_heads, head_dim)
    weight = torch.cat([q_weight.expand(num_q_heads, head_dim), k_weight.expand(num_kv_heads, head_dim)])
    x = F.rms_norm(heads[:, :num_qk_heads].float(), (head_dim,), eps=eps).mul_(weight)

    if positions is not None:
        cos_sin = cos_sin.index_select(0, positions)
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    rotated = torch.empty_like(x)
    half = head_dim // 2
    torch.mul(first, cos, out=rotated[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=rotated[..., half:]).addcmul_(first, sin)
    rotated = rotated.to(qkv.dtype)
    return rotated[:, :num_q_heads], rotated[:, num_q_heads:], heads[:, num_qk_heads:]
