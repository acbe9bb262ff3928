"""Matrix products with a weight ``W [out, in]``, alone and with what surrounds them in a transformer.

This is the one place that decides how a product is computed: ``skinny_tile`` says whether the tokens are few enough
for our own kernel (``_skinny.py``), which takes norm, gate and residual add along. Otherwise each function is the
composition that it stands for, over cuBLAS or the CPU's library.

Everything is 2-D: x ``[tokens, in]``, bias ``[out]`` of the weight's dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from nanoserve.ops.activation import silu_and_mul
from nanoserve.ops.norm import rms_norm

if TYPE_CHECKING:
    from nanoserve.ops._skinny import Tile

MAX_SKINNY_TOKENS = 64
MAX_FUSED_NORM_TOKENS = 8  # every program normalises all tokens: beyond this a launch of its own is cheaper

# F.linear in fp32 calls MKL; on AMD's CPUs oneDNN takes half the time from four rows on (measured, torch 2.13). This
# operator, which torch.compile emits, is the only way to it.
ONEDNN_LINEAR = torch.ops.mkldnn._linear_pointwise.default if torch.backends.mkldnn.is_available() else None


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``x Wᵀ + b`` in ``out_dtype``, by default that of x and W."""
    out_dtype = out_dtype or x.dtype
    tile = skinny_tile(x, weight)
    if tile is not None:
        from nanoserve.ops._skinny import skinny_linear

        out = torch.empty(x.shape[0], weight.shape[0], dtype=out_dtype, device=x.device)
        return skinny_linear(x, weight, out, tile, bias=bias)
    if out_dtype == x.dtype:
        return _dense(x, weight, bias)
    if x.is_cuda:
        y = torch.mm(x, weight.t(), out_dtype=out_dtype)
    else:
        y = _dense(x.to(out_dtype), weight.to(out_dtype), None)
    return y if bias is None else y + bias


def linear_add_(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``residual += x Wᵀ + b`` in place; residual ``[tokens, out]`` has the dtype of x or a wider one."""
    tile = skinny_tile(x, weight)
    if tile is not None:
        from nanoserve.ops._skinny import skinny_linear

        return skinny_linear(x, weight, residual, tile, bias=bias, add=True)
    if x.is_cuda and bias is None and residual.dtype == x.dtype:
        return residual.addmm_(x, weight.t())
    return residual.add_(linear(x, weight, bias, residual.dtype))


def norm_linear(
    x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``linear(rms_norm(x, norm_weight, eps), weight, bias)``; x may be fp32 where the weights are not."""
    tile = skinny_tile(x, weight)
    if tile is None or not _fuses_norm(x):
        return linear(rms_norm(x, norm_weight, eps), weight, bias)
    from nanoserve.ops._skinny import skinny_linear

    out = x.new_empty(x.shape[0], weight.shape[0])
    return skinny_linear(x, weight, out, tile, bias=bias, norm=(norm_weight, eps))


def norm_swiglu(x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor) -> torch.Tensor:
    """``silu_and_mul(linear(rms_norm(x, norm_weight, eps), weight))``: ``[tokens, out / 2]``."""
    norm = (norm_weight, eps) if _fuses_norm(x) and skinny_tile(x, weight) else None
    if norm is None:
        x = rms_norm(x, norm_weight, eps)
    tile = skinny_tile(x, weight)
    if tile is None:
        return silu_and_mul(_dense(x, weight, None))
    from nanoserve.ops._skinny import skinny_linear

    out = x.new_empty(x.shape[0], weight.shape[0] // 2)
    return skinny_linear(x, weight, out, tile, norm=norm, swiglu=True)


def skinny_tile(x: torch.Tensor, weight: torch.Tensor) -> Tile | None:
    """How our kernel would divide the work; None where it cannot or should not."""
    if (
        not x.is_cuda
        or x.dtype != weight.dtype
        or x.dtype not in (torch.bfloat16, torch.float16)
        or not 0 < x.shape[0] <= MAX_SKINNY_TOKENS
    ):
        return None
    from nanoserve.ops._skinny import tile_for

    return tile_for(x.shape[0], *weight.shape)


def _fuses_norm(x: torch.Tensor) -> bool:
    """bf16 only: what is multiplied with W is not divided by the norm yet, and fp16 could overflow."""
    return x.dtype == torch.bfloat16 and x.shape[0] <= MAX_FUSED_NORM_TOKENS


def _dense(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if ONEDNN_LINEAR is not None and x.dtype == torch.float32 and not x.is_cuda:
        return ONEDNN_LINEAR(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)
