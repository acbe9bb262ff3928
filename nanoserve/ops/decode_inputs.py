"""Inputs of a decode step, made on the device from little that the host knows: replayable inside a CUDA graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Buffers of one batch size, int32: ``[B]``, and block_table ``[B, width]``.

    Of a row of ``block_table`` only the entries that its context needs are ever written.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.input_ids, self.positions, self.slot_mapping, self.block_table

    @classmethod
    def empty(cls, batch: int, width: int, device: torch.device) -> DecodeInputs:
        """Zeros: padding reads block 0 at most, whatever the memory held before."""
        shapes = [(batch,)] * 3 + [(batch, width)]
        return cls(*(torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes))


def decode_inputs(
    rows: torch.Tensor,
    context_lens: torch.Tensor,
    last_blocks: torch.Tensor,
    table: torch.Tensor,
    last_tokens: torch.Tensor,
    block_size: int,
    out: DecodeInputs,
) -> None:
    """Fill ``out`` for B sequences that decode one token each; everything int32 and contiguous, on one device.

    rows: ``[B]`` table row of each; no two live ones are equal.
    context_lens: ``[B]`` with the new token, which is at position ``context - 1``. 0 marks padding: input id 0,
        position 0, slot -1, first block 0.
    last_blocks: ``[B]`` id of the block that holds that position. It is written into ``table`` ``[num_rows, width]``;
        the blocks before it must be there already.
    last_tokens: ``[num_rows]`` token sampled last, the input of this step.
    """
    if table.is_cuda:
        from nanoserve.ops import _elementwise

        _elementwise.decode_inputs(rows, context_lens, last_blocks, table, last_tokens, block_size, out.tensors)
    else:
        decode_inputs_reference(rows, context_lens, last_blocks, table, last_tokens, block_size, out)


def decode_inputs_reference(
    rows: torch.Tensor,
    context_lens: torch.Tensor,
    last_blocks: torch.Tensor,
    table: torch.Tensor,
    last_tokens: torch.Tensor,
    block_size: int,
    out: DecodeInputs,
) -> None:
    """``decode_inputs`` in torch."""
    live = context_lens > 0
    position = (context_lens - 1).clamp_min(0)
    last_column = position // block_size
    table[rows[live], last_column[live]] = last_blocks[live]
    out.input_ids.copy_(torch.where(live, last_tokens[rows], 0))
    out.positions.copy_(position)
    out.slot_mapping.copy_(torch.where(live, last_blocks * block_size + position % block_size, -1))
    needed = torch.arange(table.shape[1], device=table.device) <= last_column[:, None]
    held = torch.where(live[:, None], table[rows], 0)
    out.block_table.copy_(torch.where(needed, held, out.block_table))
