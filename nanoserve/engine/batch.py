"""One step, packed: built on the host with numpy, copied to the device once.

Tokens are ordered ``[decode | prefill]``: one token per decoding sequence, then the chunks. Host work is
O(sequences + new prompt tokens); it does not grow with context length, because the block table lives on the device and
only its new entries travel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from nanoserve.contracts.attention import DecodeMetadata, PrefillMetadata
from nanoserve.contracts.scheduling import Schedule
from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.sequence import Sequence


@dataclass(slots=True)
class Batch:
    """A step as the runner needs it. Device tensors are int32.

    input_ids, positions, slot_mapping: ``[num_decode + num_prefill]``; the decode part of ``input_ids`` is filled on
    the device from the tokens sampled last.
    sampled: sequences that sample a token in this step, in logits order (decode first). sampled_rows: their table rows.
    logits_index: token index of each logits row, or None when every token is sampled in order. Rows beyond
    ``len(sampled)`` are padding.
    chunks: sequences whose prompt continues in a later step; they sample nothing.
    """

    num_decode: int
    num_prefill: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    decode: DecodeMetadata | None
    prefill: PrefillMetadata | None
    sampled: list[Sequence]
    sampled_rows: torch.Tensor
    sampled_rows_cpu: np.ndarray
    sample_positions_cpu: np.ndarray
    logits_index: torch.Tensor | None
    chunks: list[Sequence]

    @classmethod
    def of_decode(cls, input_ids: torch.Tensor, positions: torch.Tensor, decode: DecodeMetadata) -> Batch:
        """A decode-only step on fixed buffers: what the model and the attention need of it, and no bookkeeping."""
        empty = np.zeros(0, dtype=np.int64)
        return cls(
            num_decode=decode.num_seqs,
            num_prefill=0,
            input_ids=input_ids,
            positions=positions,
            slot_mapping=decode.slot_mapping,
            decode=decode,
            prefill=None,
            sampled=[],
            sampled_rows=input_ids,
            sampled_rows_cpu=empty,
            sample_positions_cpu=empty,
            logits_index=None,
            chunks=[],
        )


class RowState:
    """What the device remembers of each sequence that holds blocks, by its table row.

    table: ``[rows, width]`` int32 block table; last_tokens: ``[rows]`` int32, the token sampled last.
    scratch: a row that no sequence owns, for padding. generation: changes when the tensors have moved.
    """

    def __init__(self, num_rows: int, width: int, device: torch.device) -> None:
        self.width = width
        self.generation = 0
        self.table = torch.zeros(num_rows + 1, width, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)

    @property
    def scratch(self) -> int:
        return len(self.last_tokens) - 1

    def reserve(self, num_rows: int) -> None:
        """Make room for rows ``0 … num_rows - 1``."""
        if num_rows > self.scratch:
            grown = RowState(2 * num_rows, self.width, self.table.device)
            grown.table[: len(self.table)] = self.table
            grown.last_tokens[: len(self.last_tokens)] = self.last_tokens
            self.table, self.last_tokens = grown.table, grown.last_tokens
            self.generation += 1


class Packer:
    """Copies int32 host arrays to the device in one transfer and hands back a view for each.

    Two pinned buffers alternate, so that one step may be built while the copy of the step before is still under way.
    """

    ALIGN = 4  # ints: every view starts on 16 bytes, or Triton would compile a variant per alignment

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers = [self._pinned(1 << 12) for _ in range(2)] if device.type == "cuda" else []

    @staticmethod
    def _pinned(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, pin_memory=True)

    def __call__(self, arrays: list[np.ndarray]) -> list[torch.Tensor]:
        starts, total = [], 0
        for array in arrays:
            starts.append(total)
            total += -(-len(array) // self.ALIGN) * self.ALIGN
        if self.device.type == "cuda":
            self._buffers.reverse()
            if len(self._buffers[0]) < total:
                self._buffers[0] = self._pinned(2 * total)
            host = self._buffers[0][:total]
        else:
            host = torch.empty(total, dtype=torch.int32)
        view = host.numpy()
        for start, array in zip(starts, arrays, strict=True):
            view[start : start + len(array)] = array
        packed = host.to(self.device, non_blocking=True)
        return [packed[start : start + len(array)] for start, array in zip(starts, arrays, strict=True)]


class BatchBuilder:
    """Turns a :class:`Schedule` into a :class:`Batch` and keeps the device's block table up to date."""

    def __init__(self, blocks: BlockManager, rows: RowState, device: torch.device) -> None:
        self.blocks = blocks
        self.block_size = blocks.block_size
        self.rows = rows
        self.device = device
        self.pack = Packer(device)

    def build(self, schedule: Schedule, logits_size: Callable[[int], int] | None = None) -> Batch:
        """The batch of ``schedule``, whose grants have just been made.

        logits_size: to how many rows the logits of a step with prompts are padded.
        """
        decode: list[Sequence] = schedule.decode  # type: ignore[assignment]
        prefill: list[tuple[Sequence, int]] = schedule.prefill  # type: ignore[assignment]
        num_decode = len(decode)
        bs = self.block_size

        contexts = [s.num_computed_tokens for s in decode]
        context = np.array(contexts, dtype=np.int32)
        decode_rows = np.array([s.table_row for s in decode], dtype=np.int32)
        position = context - 1
        slots = np.array([s.block_table[-1] for s in decode], dtype=np.int32) * bs + position % bs

        rows, cols, block_ids = self.blocks.take_table_updates()
        updates = np.array(rows, dtype=np.int64) * self.rows.width + np.array(cols, dtype=np.int64)
        decode_arrays = [position, slots, decode_rows, context, updates, np.array(block_ids, dtype=np.int32)]
        if not prefill:
            return self._decode_only(decode, contexts, decode_arrays)

        sampled = list(decode)
        chunks: list[Sequence] = []
        ids_parts, position_parts, slot_parts = [], [position], [slots]
        lens_q, lens_k, logits_index, last = [], [], [], num_decode - 1
        for seq, n in prefill:
            end = seq.num_computed_tokens
            start = end - n
            ids_parts.append(np.array(seq.token_ids[start:end], dtype=np.int32))
            positions = np.arange(start, end, dtype=np.int32)
            first_block = start // bs
            held = np.array(seq.block_table[first_block : (end - 1) // bs + 1], dtype=np.int32)
            position_parts.append(positions)
            slot_parts.append(held[positions // bs - first_block] * bs + positions % bs)
            lens_q.append(n)
            lens_k.append(end)
            last += n
            if seq.num_pending:
                sampled.append(seq)
                logits_index.append(last)
            else:
                chunks.append(seq)
        logits_index = [*range(num_decode), *logits_index]
        if logits_size is not None:
            logits_index += [0] * (logits_size(len(sampled)) - len(sampled))
        num_prefill = sum(lens_q)
        all_positions = np.concatenate(position_parts)
        cu_q = np.concatenate(([0], np.cumsum(lens_q, dtype=np.int32))).astype(np.int32)
        cu_k = np.concatenate(([0], np.cumsum(lens_k, dtype=np.int32))).astype(np.int32)
        prefill_rows = np.array([s.table_row for s, _ in prefill], dtype=np.int32)
        sampled_rows = np.array([s.table_row for s in sampled], dtype=np.int32)

        (
            d_positions,
            d_slots,
            d_ids,
            d_decode_rows,
            d_context,
            d_prefill_rows,
            d_cu_q,
            d_cu_k,
            d_lens_k,
            d_seq_ids,
            d_sampled_rows,
            d_logits_index,
            d_updates,
            d_block_ids,
        ) = self.pack(
            [
                all_positions,
                np.concatenate(slot_parts),
                np.concatenate([np.zeros(num_decode, dtype=np.int32), *ids_parts]),
                decode_rows,
                context,
                prefill_rows,
                cu_q,
                cu_k,
                np.array(lens_k, dtype=np.int32),
                np.repeat(np.arange(len(prefill), dtype=np.int32), lens_q),
                sampled_rows,
                np.array(logits_index, dtype=np.int32),
                *decode_arrays[-2:],
            ]
        )
        self._update_table(d_updates, d_block_ids)

        longest = max(lens_k)
        prefill_meta = PrefillMetadata(
            num_seqs=len(prefill),
            num_tokens=num_prefill,
            cu_seqlens_q=d_cu_q,
            cu_seqlens_k=d_cu_k,
            context_lens=d_lens_k,
            block_table=self._table_of(d_prefill_rows, longest),
            slot_mapping=d_slots[num_decode:],
            seq_ids=d_seq_ids,
            query_positions=d_positions[num_decode:],
            cu_seqlens_q_cpu=tuple(cu_q.tolist()),
            cu_seqlens_k_cpu=tuple(cu_k.tolist()),
            max_seqlen_q=max(lens_q),
            max_seqlen_k=longest,
            has_prefix=lens_q != lens_k,
        )
        decode_meta = None
        if decode:
            decode_meta = self._decode_metadata(contexts, d_decode_rows, d_context, d_slots[:num_decode])
        return Batch(
            num_decode=num_decode,
            num_prefill=num_prefill,
            input_ids=d_ids,
            positions=d_positions,
            slot_mapping=d_slots,
            decode=decode_meta,
            prefill=prefill_meta,
            sampled=sampled,
            sampled_rows=d_sampled_rows,
            sampled_rows_cpu=sampled_rows,
            sample_positions_cpu=_sample_positions(sampled),
            logits_index=d_logits_index,
            chunks=chunks,
        )

    def _decode_only(self, decode: list[Sequence], contexts: list[int], arrays: list[np.ndarray]) -> Batch:
        """The common step: no prompt, every token is sampled; ``input_ids`` is left to the runner."""
        positions, slots, rows, context, updates, block_ids = self.pack(arrays)
        self._update_table(updates, block_ids)
        return Batch(
            num_decode=len(decode),
            num_prefill=0,
            input_ids=positions,
            positions=positions,
            slot_mapping=slots,
            decode=self._decode_metadata(contexts, rows, context, slots),
            prefill=None,
            sampled=decode,
            sampled_rows=rows,
            sampled_rows_cpu=arrays[2],
            sample_positions_cpu=_sample_positions(decode),
            logits_index=None,
            chunks=[],
        )

    def _decode_metadata(
        self, contexts: list[int], rows: torch.Tensor, context: torch.Tensor, slots: torch.Tensor
    ) -> DecodeMetadata:
        longest = max(contexts)
        return DecodeMetadata(
            num_seqs=len(contexts),
            context_lens=context,
            block_table=self._table_of(rows, longest),
            slot_mapping=slots,
            context_lens_cpu=tuple(contexts),
            max_context_len=longest,
        )

    def _update_table(self, flat_index: torch.Tensor, block_ids: torch.Tensor) -> None:
        if len(block_ids):
            self.rows.table.view(-1).index_copy_(0, flat_index.long(), block_ids)

    def _table_of(self, rows: torch.Tensor, longest: int) -> torch.Tensor:
        """Block table ``[len(rows), blocks of the longest context]`` of this step."""
        return self.rows.table[:, : -(-longest // self.block_size)].index_select(0, rows)


def _sample_positions(sampled: list[Sequence]) -> np.ndarray:
    """Index among its output tokens of the token that each sequence samples now."""
    return np.array([s.num_tokens - 1 - s.num_prompt_tokens for s in sampled], dtype=np.int64)
