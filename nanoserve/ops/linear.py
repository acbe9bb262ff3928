"""Matrix products with a weight ``W [out, in]``, alone and with what surrounds them in a transformer.

This is the one place that decides how a product is computed: ``own_product`` says whether the tokens are few enough for
a kernel of ours, which takes gate, residual add and where it can the norm along: ``_skinny.py``, or in CUDA graphs on
Hopper ``_wgmma.py``. Otherwise each function is the composition that it stands for, over cuBLAS or the CPU's
library.

Everything is 2-D: x ``[tokens, in]``, bias ``[out]`` of the weight's dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from nanoserve.ops.activation import silu_and_mul
from nanoserve.ops.norm import rms_norm

if TYPE_CHECKING:
    from nanoserve.ops._skinny import Tile
    from nanoserve.ops._wgmma import Tile as WgmmaTile
    from nanoserve.ops._wgmma import Weighted

MAX_SKINNY_TOKENS = 64
MIN_WGMMA_TOKENS, MAX_WGMMA_TOKENS = 33, 256  # see NOTES.md
MAX_FUSED_NORM_TOKENS = 8  # every program normalises all tokens: beyond this a launch of its own is cheaper

# F.linear in fp32 calls MKL; on AMD's CPUs oneDNN takes half the time from four rows on (measured, torch 2.13). This
# operator, which torch.compile emits, is the only way to it.
ONEDNN_LINEAR = torch.ops.mkldnn._linear_pointwise.default if torch.backends.mkldnn.is_available() else None


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``x Wᵀ + b`` in ``out_dtype``, by default that of x and W."""
    out_dtype = out_dtype or x.dtype
    product = own_product(x, weight)
    if product is not None:
        out = torch.empty(x.shape[0], weight.shape[0], dtype=out_dtype, device=x.device)
        return product(x, weight, out, bias=bias)
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
    product = own_product(x, weight)
    if product is not None:
        return product(x, weight, residual, bias=bias, add=True)
    if x.is_cuda and bias is None and residual.dtype == x.dtype:
        return residual.addmm_(x, weight.t())
    return residual.add_(linear(x, weight, bias, residual.dtype))


def linear_add_norm_(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
) -> Norm:
    """``linear_add_``, and the norm of what it leaves in ``residual``, as the products below take it."""
    tile = _wgmma_tile(x, weight)
    if tile is None or residual.dtype != torch.bfloat16:  # fp16 could overflow before it is divided
        return Norm(linear_add_(residual, x, weight, bias), norm_weight, eps)
    from nanoserve.ops import _wgmma

    weighted = _wgmma.Weighted.of(residual, norm_weight, eps, tile)
    _wgmma.wgmma_linear(x, weight, residual, tile, bias=bias, add=True, weighted=weighted)
    return Norm(residual, norm_weight, eps, weighted)


@dataclass(slots=True)
class Norm:
    """``rms_norm(residual, weight, eps)``, left to the product that follows; residual may be fp32 where W is not.

    It reads ``residual`` late: whoever changes it in between changes the norm.
    """

    residual: torch.Tensor
    weight: torch.Tensor
    eps: float
    weighted: Weighted | None = None

    def __call__(self) -> torch.Tensor:
        return rms_norm(self.residual, self.weight, self.eps)


def norm_linear(norm: Norm, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``linear(norm(), weight, bias)``."""
    product = _product_with_norm(norm, weight, bias=bias)
    return linear(norm(), weight, bias) if product is None else product


def norm_swiglu(norm: Norm, weight: torch.Tensor) -> torch.Tensor:
    """``silu_and_mul(linear(norm(), weight))``: ``[tokens, out / 2]``."""
    y = _product_with_norm(norm, weight, swiglu=True)
    if y is not None:
        return y
    x = norm()
    product = own_product(x, weight, swiglu=True)
    if product is None:
        return silu_and_mul(_dense(x, weight, None))
    return product(x, weight, x.new_empty(x.shape[0], weight.shape[0] // 2), swiglu=True)


def _product_with_norm(
    norm: Norm, weight: torch.Tensor, bias: torch.Tensor | None = None, swiglu: bool = False
) -> torch.Tensor | None:
    """In one kernel, or None where that is slower or not possible. bf16 only: what is multiplied with W is not divided
    by the norm yet, and fp16 could overflow."""
    h = norm.residual
    width = weight.shape[0] // 2 if swiglu else weight.shape[0]
    if norm.weighted is not None:
        wgmma_tile = _wgmma_tile(norm.weighted.x, weight, swiglu)
        if wgmma_tile is not None and wgmma_tile.split == 1:
            from nanoserve.ops._wgmma import wgmma_linear

            x, out = norm.weighted.x, h.new_empty(h.shape[0], width)
            return wgmma_linear(x, weight, out, wgmma_tile, bias=bias, swiglu=swiglu, norm=norm.weighted)
    if h.dtype == torch.bfloat16 and h.shape[0] <= MAX_FUSED_NORM_TOKENS:
        tile = skinny_tile(h, weight)
        if tile is not None:
            from nanoserve.ops._skinny import skinny_linear

            out = h.new_empty(h.shape[0], width)
            return skinny_linear(h, weight, out, tile, bias=bias, norm=(norm.weight, norm.eps), swiglu=swiglu)
    return None


def own_product(x: torch.Tensor, weight: torch.Tensor, swiglu: bool = False) -> Callable[..., torch.Tensor] | None:
    """Our kernel for this product, to be called like ``skinny_linear`` less ``tile``; None where cuBLAS is better."""
    wgmma_tile = _wgmma_tile(x, weight, swiglu)
    if wgmma_tile is not None:
        from nanoserve.ops._wgmma import wgmma_linear

        return functools.partial(wgmma_linear, tile=wgmma_tile)
    tile = skinny_tile(x, weight)
    if tile is None:
        return None
    from nanoserve.ops._skinny import skinny_linear

    return functools.partial(skinny_linear, tile=tile)


def row_multiple(weight: torch.Tensor) -> int:
    """To a multiple of how many tokens a captured step of 65 to 256 is best padded: of 64 where ``_wgmma.py`` serves
    products with ``weight``, for its tiles cost more when only part of them are tokens."""
    if not _has_wgmma(weight.device, weight.dtype):
        return 16
    from nanoserve.ops._wgmma import tile_for

    n, k = weight.shape
    return 64 if tile_for(128, n, k, swiglu=False) else 16


def _has_wgmma(device: torch.device, dtype: torch.dtype) -> bool:
    """Compute capability 9.0 alone compiles the kernel."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    from nanoserve.ops._elementwise import compute_capability

    return compute_capability(device) == (9, 0)


def _wgmma_tile(x: torch.Tensor, weight: torch.Tensor, swiglu: bool = False) -> WgmmaTile | None:
    """None outside of graphs: eagerly the host would not keep up. TMA wants alignment."""
    if not x.is_cuda or not MIN_WGMMA_TOKENS <= x.shape[0] <= MAX_WGMMA_TOKENS or x.dtype != weight.dtype:
        return None
    if not torch.cuda.is_current_stream_capturing() or (x.data_ptr() | weight.data_ptr()) % 16:
        return None
    if not _has_wgmma(x.device, x.dtype):
        return None
    from nanoserve.ops._wgmma import tile_for

    n, k = weight.shape
    return tile_for(x.shape[0], n, k, swiglu)


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


def _dense(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if ONEDNN_LINEAR is None or x.dtype != torch.float32 or x.is_cuda:
        return F.linear(x, weight, bias)
    rows = x.shape[0]
    missing = onednn_rows(rows) - rows
    if missing:
        x = F.pad(x, (0, 0, 0, missing))
    return ONEDNN_LINEAR(x, weight, bias, "none", [], "")[:rows]


def onednn_rows(rows: int) -> int:
    """``rows``, rounded up to one of eight sizes between powers of two.

    oneDNN generates code for every shape and keeps much of it: a server whose batches have any size would grow by
    hundreds of MiB.
    """
    step = 1 << max(0, rows.bit_length() - 4)
    return -(-rows // step) * step
