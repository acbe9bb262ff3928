"""Triton kernels of the built-in KV formats: store, and q/k norm + rotary embedding + store as one launch.

``_reference.py`` and the formats' torch paths are their oracles, to the bit for what is quantised. Cache tensors are
``[num_blocks, kv_heads, block_size, head_dim]``, scales without the last axis; seen as rows of ``head_dim``, slot ``s``
of head ``h`` is row ``(s // block_size * kv_heads + h) * block_size + s % block_size``, computed in 64 bits because
pools exceed 2^31 elements. A slot < 0 is skipped: C division would put it one block before the first.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from nanoserve.contracts.kvcache import LayerCache
from nanoserve.ops.linear import MIN_WGMMA_TOKENS
from nanoserve_plugins._launch import Launcher


@triton.jit
def _cache_row(slot, head, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    slot = slot.to(tl.int64)
    return (slot // BLOCK_SIZE * KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE


@triton.jit
def _magnitude(x):
    """Largest |x| of each row, fp32. Compared as integers, NaN is the largest, so one of them is never lost."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def _int8_scale(magnitude):
    """Bits of max |x| → (fp32 scale to divide by, fp16 scale to keep): NaN where fp16 cannot express it."""
    scale = tl.div_rn(magnitude.to(tl.float32, bitcast=True), tl.full(magnitude.shape, 127.0, tl.float32))
    scale = tl.where(scale < 1e-8, 1e-8, scale)
    stored = scale.to(tl.float16)
    return scale, tl.where(tl.abs(stored.to(tl.float32)) < float("inf"), stored, float("nan")).to(tl.float16)


@triton.jit
def _int8_round(x, scale):
    """x / scale, half away from zero, as spec'd. The quotient must be IEEE's, or a tie would fall to the other side:
    from the reciprocal, one step of correction gives it (Markstein, 1990) in 3 instructions instead of about 10."""
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, None]
    ratio = x * inverse
    ratio = tl.fma(tl.fma(-ratio, scale[:, None], x), inverse, ratio)
    return tl.where(ratio >= 0, ratio + 0.5, ratio - 0.5).to(tl.int8)


@triton.jit(do_not_specialize=["num_rows"])
def store_kernel(
    k,
    v,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    slots,
    num_rows,  # tokens × kv_heads
    K_TOKEN: tl.constexpr,  # strides in elements
    K_HEAD: tl.constexpr,
    V_TOKEN: tl.constexpr,
    V_HEAD: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = row // KV_HEADS, row % KV_HEADS
    slot = tl.load(slots + token, mask=row < num_rows, other=-1)
    keep = slot >= 0
    cache_row = _cache_row(slot, head, KV_HEADS, BLOCK_SIZE)
    dim = tl.arange(0, BLOCK_D)
    mask = keep[:, None] & (dim < HEAD_DIM)[None, :]
    target = cache_row[:, None] * HEAD_DIM + dim[None, :]
    key = tl.load(k + (token * K_TOKEN + head * K_HEAD)[:, None] + dim[None, :], mask=mask, other=0.0)
    value = tl.load(v + (token * V_TOKEN + head * V_HEAD)[:, None] + dim[None, :], mask=mask, other=0.0)
    if QUANTIZED:
        key, value = key.to(tl.float32), value.to(tl.float32)
        divisor, stored = _int8_scale(_magnitude(key))
        tl.store(k_scale + cache_row, stored, mask=keep)
        tl.store(k_cache + target, _int8_round(key, divisor), mask=mask)
        divisor, stored = _int8_scale(_magnitude(value))
        tl.store(v_scale + cache_row, stored, mask=keep)
        tl.store(v_cache + target, _int8_round(value, divisor), mask=mask)
    else:
        tl.store(k_cache + target, key.to(k_cache.dtype.element_ty), mask=mask)
        tl.store(v_cache + target, value.to(v_cache.dtype.element_ty), mask=mask)


@triton.jit
def _rope(first, second, eps, first_weight, second_weight, cos, sin, HEAD_DIM: tl.constexpr):
    """RMS norm over both halves of each row, then the rotation of element i with i + head_dim / 2; fp32."""
    variance = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / HEAD_DIM
    inverse = tl.rsqrt(variance + eps)[:, None]
    first = first * inverse * first_weight[None, :]
    second = second * inverse * second_weight[None, :]
    return first * cos[None, :] - second * sin[None, :], second * cos[None, :] + first * sin[None, :]


@triton.jit
def _store_halves(
    first,
    second,
    cache,
    scales,
    copy,
    cache_row,
    copy_at,
    keep,
    half,
    in_half,
    HEAD_DIM: tl.constexpr,
    QUANTIZED: tl.constexpr,
    COPY: tl.constexpr,
):
    """Both halves of rows (values of the compute dtype, as fp32) into the cache and, COPY, as it holds them."""
    target = cache_row[:, None] * HEAD_DIM + half[None, :]
    mask = in_half[None, :]
    if QUANTIZED:
        divisor, stored = _int8_scale(tl.maximum(_magnitude(first), _magnitude(second)))
        tl.store(scales + cache_row, stored, mask=keep)
        first, second = _int8_round(first, divisor), _int8_round(second, divisor)
    first, second = first.to(cache.dtype.element_ty), second.to(cache.dtype.element_ty)
    tl.store(cache + target, first, mask=mask & keep[:, None])
    tl.store(cache + target + HEAD_DIM // 2, second, mask=mask & keep[:, None])
    if COPY:
        first, second = first.to(tl.float32), second.to(tl.float32)
        if QUANTIZED:
            first, second = first * stored.to(tl.float32)[:, None], second * stored.to(tl.float32)[:, None]
        tl.store(copy + copy_at, first.to(copy.dtype.element_ty), mask=mask)
        tl.store(copy + copy_at + HEAD_DIM // 2, second.to(copy.dtype.element_ty), mask=mask)


@triton.jit
def norm_rope_store_kernel(
    qkv,
    q_weight,
    k_weight,
    eps,
    cos_sin,
    positions,
    slots,
    fused,  # the results: rotated q and, COPY, k and for a quantised format v, [tokens, heads, head_dim]
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    OUT_HEADS: tl.constexpr,
    QKV_TOKEN: tl.constexpr,  # stride in elements
    HEAD_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,  # of one program; all are q heads, all k heads or all v heads
    QUANTIZED: tl.constexpr,
    COPY: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,  # whether the next kernel may start beside this one
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    groups: tl.constexpr = (Q_HEADS + 2 * KV_HEADS) // HEADS
    token = (tl.program_id(0) // groups).to(tl.int64)
    first_head = tl.program_id(0) % groups * HEADS
    # All but qkv is older than the kernel before.
    position = tl.load(positions + token)
    head = first_head + tl.arange(0, HEADS)
    slot = tl.load(slots + token + tl.zeros_like(head))  # one per row: the interpreter cannot broadcast a scalar mask
    keep = slot >= 0
    half = tl.arange(0, BLOCK_HALF)
    in_half = half < HEAD_DIM // 2
    rotated = half < tl.where(first_head < Q_HEADS + KV_HEADS, HEAD_DIM // 2, 0)  # v is not
    weight = (q_weight if first_head < Q_HEADS else k_weight) + half
    first_weight = tl.load(weight, mask=rotated, other=0.0).to(tl.float32)
    second_weight = tl.load(weight + HEAD_DIM // 2, mask=rotated, other=0.0).to(tl.float32)
    angle = cos_sin + position.to(tl.int64) * HEAD_DIM + half
    cos = tl.load(angle, mask=rotated, other=0.0)
    sin = tl.load(angle + HEAD_DIM // 2, mask=rotated, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    source = qkv + token * QKV_TOKEN + head[:, None] * HEAD_DIM + half[None, :]
    first = tl.load(source, mask=in_half[None, :], other=0.0).to(tl.float32)
    second = tl.load(source + HEAD_DIM // 2, mask=in_half[None, :], other=0.0).to(tl.float32)
    at = token * (OUT_HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + half[None, :]
    dtype: tl.constexpr = fused.dtype.element_ty
    if first_head < Q_HEADS:
        first, second = _rope(first, second, eps, first_weight, second_weight, cos, sin, HEAD_DIM)
        tl.store(fused + at, first.to(dtype), mask=in_half[None, :])
        tl.store(fused + at + HEAD_DIM // 2, second.to(dtype), mask=in_half[None, :])
    elif first_head < Q_HEADS + KV_HEADS:
        first, second = _rope(first, second, eps, first_weight, second_weight, cos, sin, HEAD_DIM)
        first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
        row = _cache_row(slot, head - Q_HEADS, KV_HEADS, BLOCK_SIZE)
        _store_halves(first, second, k_cache, k_scale, fused, row, at, keep, half, in_half, HEAD_DIM, QUANTIZED, COPY)
    else:
        row = _cache_row(slot, head - Q_HEADS - KV_HEADS, KV_HEADS, BLOCK_SIZE)
        if QUANTIZED:
            _store_halves(
                first, second, v_cache, v_scale, fused, row, at, keep, half, in_half, HEAD_DIM, QUANTIZED, COPY
            )
        else:
            target = row[:, None] * HEAD_DIM + half[None, :]
            mask = in_half[None, :] & keep[:, None]
            tl.store(v_cache + target, first.to(v_cache.dtype.element_ty), mask=mask)
            tl.store(v_cache + target + HEAD_DIM // 2, second.to(v_cache.dtype.element_ty), mask=mask)


ROWS = 16  # vectors of K and of V that one program stores
#: Most heads of a program that normalises, rotates and stores, and heads of a warp: up to FEW_TOKENS, and beyond.
FEW_TOKENS, FEW_HEADS, MANY_HEADS = 256, (4, 1), (8, 2)
#: From more tokens on, the product before keeps 200 KB of shared memory on every multiprocessor. Attention that started
#: beside it would read K and V through what is left of the L1 cache, for as long as it runs.
EARLY_TOKENS = MIN_WGMMA_TOKENS - 1
launch_store, launch_norm_rope_store = Launcher(store_kernel), Launcher(norm_rope_store_kernel)


def store(layer: LayerCache, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """``KVCacheFormat.store`` of both formats: quantises if the layer has scales."""
    num_tokens, num_heads, head_dim = k.shape
    block_size = layer.k.shape[2]
    num_rows = num_tokens * num_heads
    strides = (*k.stride()[:2], *v.stride()[:2])
    if not num_rows:
        return

    def constants() -> dict[str, Any]:
        pdl = supports_pdl(k)
        return {
            "K_TOKEN": strides[0],
            "K_HEAD": strides[1],
            "V_TOKEN": strides[2],
            "V_HEAD": strides[3],
            "KV_HEADS": num_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_D": triton.next_power_of_2(head_dim),
            "BLOCK_SIZE": block_size,
            "ROWS": ROWS,
            "QUANTIZED": layer.k_scale is not None,
            "PDL": pdl,
            "num_warps": 4,
            "launch_pdl": pdl,
        }

    arguments = (k, v, layer.k, layer.v, layer.k_scale, layer.v_scale, slot_mapping, num_rows)
    launch_store(triton.cdiv(num_rows, ROWS), arguments, (num_heads, head_dim, block_size, strides), constants)


def norm_rope_store(
    layer: LayerCache,
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    needs_kv: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """See ``KVCacheFormat.norm_rope_store``. q, k (and v, if it had to be rounded) are views of one fresh tensor; v of
    an unquantised format is a view of ``qkv``."""
    _, kv_heads, block_size, head_dim = layer.k.shape
    num_tokens = qkv.shape[0]
    total_heads = qkv.shape[1] // head_dim
    q_heads = total_heads - 2 * kv_heads
    quantized = layer.k_scale is not None
    out_heads = (total_heads if quantized else q_heads + kv_heads) if needs_kv else q_heads
    fused = qkv.new_empty(num_tokens, out_heads, head_dim)
    most_heads, heads_per_warp = FEW_HEADS if num_tokens <= FEW_TOKENS else MANY_HEADS
    heads = largest_power_of_two(math.gcd(q_heads, kv_heads), most_heads)
    token_stride = qkv.stride(0)
    early = num_tokens <= EARLY_TOKENS

    def constants() -> dict[str, Any]:
        pdl = supports_pdl(qkv)
        return {
            "Q_HEADS": q_heads,
            "KV_HEADS": kv_heads,
            "OUT_HEADS": out_heads,
            "QKV_TOKEN": token_stride,
            "HEAD_DIM": head_dim,
            "BLOCK_HALF": triton.next_power_of_2(head_dim // 2),
            "BLOCK_SIZE": block_size,
            "HEADS": heads,
            "QUANTIZED": quantized,
            "COPY": needs_kv,
            "PDL": pdl,
            "EARLY": pdl and early,
            "num_warps": max(1, heads // heads_per_warp),
            "launch_pdl": pdl,
        }

    if num_tokens:
        launch_norm_rope_store(
            num_tokens * (total_heads // heads),
            (qkv, q_weight, k_weight, eps, cos_sin, positions, slot_mapping, fused)
            + (layer.k, layer.v, layer.k_scale, layer.v_scale),
            (q_heads, kv_heads, head_dim, block_size, token_stride, early, needs_kv, most_heads),
            constants,
        )
    q, k = fused[:, :q_heads], fused[:, q_heads : q_heads + kv_heads]
    if not needs_kv:
        return q, None, None
    v = fused[:, q_heads + kv_heads :] if quantized else qkv.view(num_tokens, total_heads, head_dim)[:, -kv_heads:]
    return q, k, v


def supports_pdl(x: torch.Tensor) -> bool:
    """Programmatic dependent launch: a kernel starts while the one before it drains, and waits on the device."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)


def largest_power_of_two(number: int, limit: int) -> int:
    """The largest power of two that divides ``number`` and does not exceed ``limit``."""
    return min(number & -number, limit)
