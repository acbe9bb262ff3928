"""SwiGLU's gate (Shazeer, 2020)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``. gate_up: ``[tokens, 2 * n]``, gate first. Returns a fresh ``[tokens, n]``."""
    if gate_up.is_cuda:
        from nanoserve.ops import _elementwise

        return _elementwise.silu_and_mul(gate_up)
    return silu_and_mul_reference(gate_up)


def silu_and_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu_and_mul`` in torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
