"""Paged storage in the built-in layout, in plain torch: right on every device, and the oracle of the Triton kernels.

A cache tensor is ``[num_blocks, kv_heads, block_size, *rest]``. Seen as rows of ``rest``, token slot ``s`` of head
``h`` is row ``(s // block_size * kv_heads + h) * block_size + s % block_size``.
"""

from __future__ import annotations

import torch


def _rows(slots: torch.Tensor, num_kv_heads: int, block_size: int) -> torch.Tensor:
    """slots ``S`` (any shape, all >= 0) → row numbers ``[kv_heads, *S]``, int64."""
    slots = slots.long()
    first_head = slots + slots // block_size * ((num_kv_heads - 1) * block_size)
    heads = torch.arange(num_kv_heads, device=slots.device) * block_size
    return first_head + heads.view(-1, *(1,) * slots.dim())


def gather_rows(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """cache ``[num_blocks, kv_heads, block_size, *rest]``, slots ``S`` → ``[*S, kv_heads, *rest]``.

    A fresh copy whose memory is head-major, so that the transpose attention wants is the contiguous one.
    """
    num_blocks, num_kv_heads, block_size, *rest = cache.shape
    rows = _rows(slots, num_kv_heads, block_size)
    # index_select on a flat view, because indexing with several tensors is several times slower on the CPU.
    flat = cache.view(num_blocks * num_kv_heads * block_size, *rest)
    picked = flat.index_select(0, rows.view(-1)).view(*rows.shape, *rest)
    return picked.movedim(0, slots.dim())


def scatter_rows(cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """Write values ``[tokens, kv_heads, *rest]`` to slots ``[tokens]`` (all >= 0) of a cache shaped as above."""
    num_blocks, num_kv_heads, block_size, *rest = cache.shape
    rows = _rows(slots, num_kv_heads, block_size)
    flat = cache.view(num_blocks * num_kv_heads * block_size, *rest)
    flat.index_copy_(0, rows.view(-1), values.transpose(0, 1).reshape(-1, *rest).to(cache.dtype))


def drop_skipped(slots: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """slots and tensors, all ``[tokens, ...]``, without the tokens whose slot is negative. Reads a flag on the host."""
    if not (slots < 0).any():
        return slots, *tensors
    keep = (slots >= 0).nonzero().view(-1)
    return slots[keep], *(tensor[keep] for tensor in tensors)
