"""RMSNorm (Zhang and Sennrich, 2019), alone and fused with the residual add; mathematics in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last dimension; the result has the dtype of ``weight``.

    x: ``[..., n]``, of the dtype of ``weight`` or fp32. weight: ``[n]``.
    """
    if x.is_cuda:
        from nanoserve.ops import _elementwise

        return _elementwise.rms_norm(x, weight, eps)
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add ``x`` to the residual stream and normalise the sum.

    x, residual: ``[tokens, n]``; residual, contiguous, has the dtype of ``weight`` or is fp32. Returns ``(normed in the
    dtype of weight, residual + x)``; the sum is written into ``residual``.
    """
    if x.is_cuda:
        from nanoserve.ops import _elementwise

        return _elementwise.rms_norm(x, weight, eps, residual), residual
    residual.add_(x)
    return rms_norm_reference(residual, weight, eps), residual


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``rms_norm`` in torch."""
    if x.dtype == weight.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps).to(weight.dtype)
