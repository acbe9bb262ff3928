"""Attention backend ``triton_flash``: packed varlen FlashAttention-2 (Dao, 2023) over the paged cache, in plain Triton.

A program owns one query tile, ``tokens × the query heads of one KV head`` rows, so that a K/V tile serves its whole GQA
group. It walks the keys from first to last: tiles that every row sees run without a mask, only those on the diagonal
compare positions. One source serves bf16 and INT8 caches. K and V come straight from the cache, or, when no sequence
has a prefix, from the step's own k and v, which a format guarantees to be what the cache holds. Runs from sm_80 on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nanoserve.contracts.attention import AttentionBackend, AttentionContext, AttentionSpec, PrefillMetadata
from nanoserve.contracts.capabilities import Capabilities
from nanoserve.contracts.kvcache import LayerCache
from nanoserve.hookspecs import hookimpl
from nanoserve_plugins._launch import MANY, Descriptors, Launcher
from nanoserve_plugins.attention._kernels import qk_scale
from nanoserve_plugins.attention._prefill import (
    compute_capability,
    fresh_rows,
    query_tiles,
    section_tokens,
    to_device,
)

SHORT = 128  # keys


@dataclass(frozen=True)
class TritonFlashConfig:
    """use_tma: read K and V tiles with TMA descriptors where the GPU, head size and block size allow it and the longest
    context is not short."""

    use_tma: bool = True


@triton.jit
def _page(table, start, num_keys, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Cache block of the key tile at ``start``; one per key where a tile can span several blocks."""
    if PAGE == 0:
        page = 0
    elif PAGE % BLOCK_N == 0:
        page = tl.load(table + start // PAGE, mask=start < num_keys, other=0)
    else:
        key = start + tl.arange(0, BLOCK_N)
        page = tl.load(table + key // PAGE, mask=key < num_keys, other=0)
    return page


@triton.jit
def flash_kernel(
    q,
    k,  # cache [blocks, kv_heads, PAGE, HEAD_DIM], or dense [tokens, kv_heads, HEAD_DIM]
    v,
    k_tiles,  # the same as TMA descriptors of [BLOCK_N, HEAD_DIM], if TMA
    v_tiles,
    k_scale,
    v_scale,
    out,
    records,
    block_table,
    scale,  # softmax scale × log2 e
    Q_TOKEN: tl.constexpr,  # strides in elements
    Q_HEAD: tl.constexpr,
    K_TOKEN: tl.constexpr,  # of dense K and V, which may be views of different tensors
    K_HEAD: tl.constexpr,
    V_TOKEN: tl.constexpr,
    V_HEAD: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,  # tokens per cache block, 0 when K and V are dense
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QUANTIZED: tl.constexpr,
    TMA: tl.constexpr,
):
    record = records + tl.program_id(0) // KV_HEADS * 4
    kv_head = tl.program_id(0) % KV_HEADS
    source = tl.load(record)
    first_row = tl.load(record + 1)
    rows = tl.load(record + 2)
    position = tl.load(record + 3)
    num_keys = position + rows
    table = block_table + source

    token = tl.arange(0, BLOCK_M) // GROUP
    head = kv_head * GROUP + tl.arange(0, BLOCK_M) % GROUP
    dim = tl.arange(0, BLOCK_D)
    q_mask = (token < rows)[:, None] & (dim < HEAD_DIM)[None, :]
    row = (first_row + token).to(tl.int64)
    query = tl.load(q + (row * Q_TOKEN + head * Q_HEAD)[:, None] + dim[None, :], mask=q_mask, other=0.0)

    maximum = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    num_unmasked = (position + 1) // BLOCK_N * BLOCK_N
    # The page of a tile is loaded one iteration ahead: in its own, it would stand between the loop counter and the K/V
    # loads, and the pipeliner would keep half as many tiles in flight.
    page = _page(table, 0, num_keys, PAGE, BLOCK_N)
    for DIAGONAL in tl.static_range(2):
        first = num_unmasked if DIAGONAL else 0
        last = num_keys if DIAGONAL else num_unmasked
        for start in range(first, last, BLOCK_N):
            next_page = _page(table, start + BLOCK_N, num_keys, PAGE, BLOCK_N)
            key = start + tl.arange(0, BLOCK_N)
            if PAGE == 0:
                kv_row = (source + key).to(tl.int64)
                k_offset = kv_row * K_TOKEN + kv_head * K_HEAD
                v_offset = kv_row * V_TOKEN + kv_head * V_HEAD
            else:
                kv_row = (page.to(tl.int64) * KV_HEADS + kv_head) * PAGE + key % PAGE
                k_offset = kv_row * HEAD_DIM
                v_offset = k_offset
            if TMA and not DIAGONAL:
                if PAGE == 0:
                    k_tile = k_tiles.load([source + start, kv_head * K_HEAD]).T
                    v_tile = v_tiles.load([source + start, kv_head * V_HEAD])
                else:
                    tile_row = (page * KV_HEADS + kv_head) * PAGE + start % PAGE
                    k_tile = k_tiles.load([tile_row, 0]).T
                    v_tile = v_tiles.load([tile_row, 0])
            else:
                # Rows past the context are stale: a NaN among them must not reach the accumulator as 0 × NaN.
                kv_mask = (dim < HEAD_DIM)[None, :]
                if DIAGONAL:
                    kv_mask &= (key < num_keys)[:, None]
                if DIAGONAL or BLOCK_D != HEAD_DIM:
                    k_tile = tl.load(k + k_offset[:, None] + dim[None, :], mask=kv_mask, other=0).T
                    v_tile = tl.load(v + v_offset[:, None] + dim[None, :], mask=kv_mask, other=0)
                else:
                    k_tile = tl.load(k + k_offset[:, None] + dim[None, :]).T
                    v_tile = tl.load(v + v_offset[:, None] + dim[None, :])

            score = tl.dot(query, k_tile.to(query.dtype), input_precision="ieee")
            if QUANTIZED:  # a scale per key multiplies its column of scores, and its column of p (not of the sum)
                score *= tl.load(k_scale + kv_row, mask=key < num_keys, other=0.0).to(tl.float32)[None, :]
            if DIAGONAL:
                score = tl.where(key[None, :] <= (position + token)[:, None], score, -float("inf"))
            new_maximum = tl.maximum(maximum, tl.max(score, 1))
            p = tl.exp2(score * scale - (new_maximum * scale)[:, None])
            decay = tl.exp2((maximum - new_maximum) * scale)
            total = total * decay + tl.sum(p, 1)
            if QUANTIZED:
                p *= tl.load(v_scale + kv_row, mask=key < num_keys, other=0.0).to(tl.float32)[None, :]
            acc = tl.dot(p.to(query.dtype), v_tile.to(query.dtype), acc * decay[:, None], input_precision="ieee")
            maximum = new_maximum
            page = next_page

    result = (acc / total[:, None]).to(out.dtype.element_ty)
    out_row = row * (KV_HEADS * GROUP) + head
    tl.store(out + out_row[:, None] * HEAD_DIM + dim[None, :], result, mask=q_mask)


@dataclass(frozen=True, slots=True)
class Tile:
    """block_m: rows (tokens × query heads of a group); block_n: keys per iteration; num_stages: tiles in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(slots=True)
class FlashPlan:
    """records: int32 ``[tiles, 4]`` of ``_prefill.query_tiles``; dense: K and V are the step's own, not the cache's;
    use_tma: whether descriptors pay. Two of them take the host longer than a launch, and short prompts wait for the
    host.
    """

    tile: Tile
    records: torch.Tensor
    dense: bool
    use_tma: bool
    descriptors: Descriptors = field(default_factory=lambda: Descriptors(3))


def choose_tile(context: AttentionContext, meta: PrefillMetadata, capability: tuple[int, int]) -> Tile:
    """Measured on an H200 for 16-bit types at head size 128; elsewhere what fits shared memory without spills."""
    head_dim, group = context.head_dim, context.num_q_heads // context.num_kv_heads
    if context.dtype.itemsize == 4:
        return Tile(16, 16, 4, 1)
    block_m = 64 if meta.max_seqlen_q * group > 32 else 32
    if head_dim > 128:
        return Tile(block_m, 32, 8, 2)
    if capability < (9, 0):
        return Tile(block_m, 64 if head_dim <= 64 else 32, 4, 2)
    if block_m == 64 and meta.max_seqlen_k > 2048:
        return Tile(128, 128, 8, 3)
    if 64 < meta.max_seqlen_q <= 128:
        return Tile(block_m, 64, 4, 2)
    return Tile(block_m, 32, 4, 2 if meta.max_seqlen_q <= 64 else 3)


class TritonFlashBackend(AttentionBackend):
    """capability: tiles are chosen for this GPU (default: the device's)."""

    def __init__(
        self, context: AttentionContext, options: TritonFlashConfig, capability: tuple[int, int] | None = None
    ) -> None:
        super().__init__(context, options)
        self.group = context.num_q_heads // context.num_kv_heads
        self.capability = capability or compute_capability(context.device)
        self.section = section_tokens(context)
        self.flash, self.descriptors = Launcher(flash_kernel), Descriptors(MANY)
        power_of_two = context.head_dim & (context.head_dim - 1) == 0
        self.use_tma = options.use_tma and self.capability >= (9, 0) and power_of_two

    def plan_prefill(self, meta: PrefillMetadata) -> FlashPlan:
        return self.plan(meta, choose_tile(self.context, meta, self.capability))

    def plan(self, meta: PrefillMetadata, tile: Tile) -> FlashPlan:
        dense = not meta.has_prefix
        tokens = tile.block_m // self.group
        records = query_tiles(meta, tokens, self.section, fresh_rows(meta) if dense else None)
        return FlashPlan(
            tile, to_device(records, self.context.device), dense, self.use_tma and meta.max_seqlen_k > SHORT
        )

    def prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LayerCache,
        meta: PrefillMetadata,
        out: torch.Tensor,
    ) -> None:
        context, plan, tile = self.context, meta.plan, meta.plan.tile
        k_scale, v_scale = layer.k_scale, layer.v_scale
        if plan.dense:
            page, k_scale, v_scale = 0, None, None
            use_tma = plan.use_tma and k.stride(1) == v.stride(1) == context.head_dim
        else:
            page, k, v = context.block_size, layer.k, layer.v
            use_tma = plan.use_tma and page % tile.block_n == 0
        dense_strides = (*k.stride()[:2], *v.stride()[:2]) if plan.dense else (0, 0, 0, 0)
        strides = (*q.stride()[:2], *dense_strides)
        k_tiles = v_tiles = None
        if use_tma:
            descriptors = plan.descriptors if plan.dense else self.descriptors
            k_tiles, v_tiles = (descriptors.get(tile_descriptor, x, page, tile.block_n) for x in (k, v))
        self.flash(
            plan.records.shape[0] * context.num_kv_heads,
            (q, k, v, k_tiles, v_tiles, k_scale, v_scale, out, plan.records, meta.block_table, qk_scale(context)),
            (tile, page, strides),
            lambda: {
                "Q_TOKEN": strides[0],
                "Q_HEAD": strides[1],
                "K_TOKEN": strides[2],
                "K_HEAD": strides[3],
                "V_TOKEN": strides[4],
                "V_HEAD": strides[5],
                "GROUP": self.group,
                "KV_HEADS": context.num_kv_heads,
                "PAGE": page,
                "HEAD_DIM": context.head_dim,
                "BLOCK_D": triton.next_power_of_2(context.head_dim),
                "BLOCK_M": tile.block_m,
                "BLOCK_N": tile.block_n,
                "QUANTIZED": k_scale is not None,
                "TMA": use_tma,
                "num_warps": tile.num_warps,
                "num_stages": tile.num_stages,
            },
        )


def tile_descriptor(x: torch.Tensor, page: int, block_n: int) -> TensorDescriptor:
    """[block_n, head_dim] tiles of the cache's rows ``[blocks · kv_heads · page, head_dim]``, or (page 0) of one head
    of dense ``[tokens, kv_heads, head_dim]``, whose heads lie side by side."""
    head_dim = x.shape[-1]
    if page:
        return TensorDescriptor(x, [x.numel() // head_dim, head_dim], [head_dim, 1], [block_n, head_dim])
    return TensorDescriptor(x, [x.shape[0], x.shape[1] * head_dim], [x.stride(0), 1], [block_n, head_dim])


@hookimpl
def nanoserve_attention(register) -> None:
    register(
        AttentionSpec(
            name="triton_flash",
            summary="packed varlen FlashAttention in Triton, tensor cores, straight from a bf16 or INT8 cache",
            capabilities=Capabilities(
                phases=frozenset({"prefill"}),
                kv_formats=frozenset({"bf16", "int8"}),
                dtypes=frozenset({"float32", "float16", "bfloat16"}),
                head_dims=frozenset({32, 64, 96, 128, 256}),
                max_gqa_ratio=8,
                devices=frozenset({"cuda"}),
                interpretable=True,
                min_compute_capability=(8, 0),
                block_size_multiple_of=16,
                requires=("triton",),
            ),
            config=TritonFlashConfig,
            factory=TritonFlashBackend,
        )
    )
