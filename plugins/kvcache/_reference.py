"""Paged storage in the built-in layout, in plain torch: right on every device, and the oracle of the Triton kernels.

A cache tensor is ``[num_blocks, kv_heads, block_size, *rest]``. Seen as rows of ``rest``, token slot ``s`` of head
``h`` is row ``(s // block_size * kv_heads + h) * block_size + s % block_size``.
"""

from __future__ import annotations

import weakref

import torch


def token_rows(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Row numbers of slots ``S`` (any shape, all >= 0) in a cache tensor: int64 ``[kv_heads, *S]``."""
    _, num_kv_heads, block_size = cache.shape[:3]
    slots = slots.long()
    first_head = torch.add(slots, slots // block_size, alpha=(num_kv_heads - 1) * block_size)
    heads = torch.arange(0, num_kv_heads * block_size, block_size, device=slots.device)
    return first_head + heads.view(-1, *(1,) * slots.dim())


def read_rows(cache: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows ``[kv_heads, *S]`` of a cache tensor as a fresh ``[*S, kv_heads, *rest]``.

    Its memory is head-major, so that the transpose attention wants is the contiguous one.
    """
    # index_select on a flat view, because indexing with several tensors is several times slower on the CPU.
    rest = cache.shape[3:]
    picked = cache.view(-1, *rest).index_select(0, rows.view(-1))
    return picked.view(*rows.shape, *rest).movedim(0, rows.dim() - 1)


def write_rows(cache: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Write values ``[tokens, kv_heads, *rest]`` to rows ``[kv_heads, tokens]`` of a cache tensor."""
    flat = cache.view(-1, *cache.shape[3:])
    flat.index_copy_(0, rows.view(-1), values.transpose(0, 1).flatten(0, 1).to(cache.dtype))


class SlotRows:
    """Row numbers of slots, remembered for the tensor that was asked about last: all layers of a step ask alike."""

    def __init__(self) -> None:
        self._slots: weakref.ref[torch.Tensor] | None = None
        self._kept: torch.Tensor | None = None
        self._rows = torch.empty(0)

    def read(self, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """:func:`token_rows` of slots that are all written."""
        if self._slots is None or self._slots() is not slots:
            rows = token_rows(cache, slots)
            narrow = cache.shape[:3].numel() < 2**31  # half the bytes to read beside every row
            self._slots, self._rows = weakref.ref(slots), rows.int() if narrow else rows
        return self._rows

    def write(self, cache: torch.Tensor, slot_mapping: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Tokens to keep (None: all), for those with a negative slot are skipped, and the rows of those kept.

        Reads a flag on the host.
        """
        if self._slots is None or self._slots() is not slot_mapping:
            slots, self._kept = slot_mapping, None
            if (slots < 0).any():
                self._kept = (slots >= 0).nonzero().view(-1)
                slots = slots[self._kept]
            self._slots, self._rows = weakref.ref(slot_mapping), token_rows(cache, slots)
        return self._kept, self._rows
