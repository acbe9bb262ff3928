"""Rotary tables: plain RoPE (Su et al., 2021) and YaRN (Peng et al., 2023), as `transformers` computes them."""

from __future__ import annotations

import math

import torch

from nanoserve.models.config import RopeConfig


def build_cos_sin(rope: RopeConfig, head_dim: int, max_positions: int, device: torch.device) -> torch.Tensor:
    """``[max_positions, head_dim]`` fp32: cos of the head_dim / 2 angles, then sin, both × YaRN's attention factor."""
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse_frequencies(rope, head_dim))
    return (torch.cat([angles.cos(), angles.sin()], dim=-1) * rope.attention_factor).to(device)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """``[head_dim / 2]`` fp32: radians per position, highest frequency first.

    The order of operations is that of `transformers`: at position 40,000 one rounding apart is 0.002 rad apart.
    """
    wavelengths = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.type == "default":
        return 1.0 / wavelengths

    def dimension_that_turns(rotations: float) -> float:
        """The (fractional) index of the pair that makes so many full turns over the original context."""
        positions_per_radian = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(positions_per_radian) / (2 * math.log(rope.theta))

    low, high = dimension_that_turns(rope.beta_fast), dimension_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
