"""SwiGLU's gate (Shazeer, 2020). Torch reference."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``. gate_up: ``[tokens, 2 * n]``, gate first. Returns a fresh ``[tokens, n]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
