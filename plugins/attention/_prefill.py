"""Tiles: how a ragged prefill batch becomes the grid of a flash-attention kernel.

A tile is a run of consecutive tokens of one sequence. The list is built on the host from the step's host twins, once
for all layers, longest context first, so that the last programs to start are the shortest. One record of four int32
tells a program everything: no chain of dependent loads through sequence ids and cumulative lengths.
"""

from __future__ import annotations

import numpy as np
import torch

from nanoserve.contracts.attention import AttentionContext, PrefillMetadata


def tile_records(
    lengths: np.ndarray,
    sources: np.ndarray,
    rows: np.ndarray,
    positions: np.ndarray,
    tokens_per_tile: int,
    section: int,
) -> np.ndarray:
    """Cut sequences of ``lengths`` tokens into tiles: ``(source, row, num_rows, position)`` int32 ``[tiles, 4]``.

    sources: where a sequence's keys are found, copied to its tiles. rows: its first row in a packed tensor, positions:
    that row's absolute position; a tile's own are those of its first token. Sequences come in sections of about
    ``section`` tokens of context, longest first, whose keys and values stay in the L2 cache while their tiles run;
    within a section the longest tile comes first.
    """
    contexts = positions + lengths
    by_length = np.argsort(-contexts, kind="stable")
    sections = np.empty_like(contexts)
    sections[by_length] = (np.cumsum(contexts[by_length]) - contexts[by_length]) // section
    tiles_per_seq = -(-lengths // tokens_per_tile)
    sequence = np.repeat(np.arange(len(lengths)), tiles_per_seq)
    first_tile = np.cumsum(tiles_per_seq) - tiles_per_seq
    offset = (np.arange(len(sequence)) - first_tile[sequence]) * tokens_per_tile
    records = np.empty((len(sequence), 4), np.int32)
    records[:, 0] = sources[sequence]
    records[:, 1] = rows[sequence] + offset
    records[:, 2] = np.minimum(lengths[sequence] - offset, tokens_per_tile)
    records[:, 3] = positions[sequence] + offset
    return records[np.lexsort((-(records[:, 2] + records[:, 3]), sections[sequence]))]


def query_tiles(
    meta: PrefillMetadata, tokens_per_tile: int, section: int, key_rows: np.ndarray | None = None
) -> np.ndarray:
    """Records of the query tokens. source: the sequence's offset in the flattened block table, or ``key_rows[i]``, its
    first row in K and V that lie densely."""
    starts_q, starts_k = np.array(meta.cu_seqlens_q_cpu), np.array(meta.cu_seqlens_k_cpu)
    query_lens, context_lens = np.diff(starts_q), np.diff(starts_k)
    sources = table_offsets(meta) if key_rows is None else key_rows
    return tile_records(query_lens, sources, starts_q[:-1], context_lens - query_lens, tokens_per_tile, section)


TILE_COST = 96  # keys that could be attended to in the time that starting and ending a tile takes


def deal(records: np.ndarray, head_tiles: int, programs: int) -> np.ndarray:
    """Work for persistent programs: int32 ``[programs, rounds, 4]``, every record once for each of ``head_tiles``.

    Dealt in order, one item a round to each program, the longest to the program that has had least. num_rows becomes
    ``num_rows | head_tile << 8``; it is 0 where a program has nothing in the last round.
    """
    work = np.repeat(records, head_tiles, axis=0)
    cost = work[:, 2] + work[:, 3] + TILE_COST
    work[:, 2] |= np.tile(np.arange(head_tiles, dtype=np.int32) << 8, len(records))
    programs = min(programs, len(work))
    rounds = -(-len(work) // programs)
    padding = rounds * programs - len(work)
    work = np.concatenate([work, np.zeros((padding, 4), np.int32)]).reshape(rounds, programs, 4)
    cost = np.concatenate([cost, np.zeros(padding, cost.dtype)]).reshape(rounds, programs)
    longest = np.argsort(-cost, axis=1, kind="stable")
    work = np.take_along_axis(work, longest[:, :, None], axis=1)
    cost = np.take_along_axis(cost, longest, axis=1)
    owner, load = np.empty((rounds, programs), np.int64), np.zeros(programs, np.int64)
    for i in range(rounds):
        owner[i] = least = load.argsort(kind="stable")
        load[least] += cost[i]
    dealt = np.empty((programs, rounds, 4), np.int32)
    dealt[owner, np.arange(rounds)[:, None]] = work
    return dealt


def section_tokens(context: AttentionContext) -> int:
    """Tokens whose K and V take 16 MiB: what a large L2 cache surely keeps beside queries and outputs."""
    return max(1, (16 << 20) // (2 * context.num_kv_heads * context.head_dim * context.dtype.itemsize))


def table_offsets(meta: PrefillMetadata) -> np.ndarray:
    return np.arange(meta.num_seqs) * meta.block_table.stride(0)


def fresh_rows(meta: PrefillMetadata) -> np.ndarray:
    """First row of each sequence in the step's own k and v (only right when no sequence has a prefix)."""
    return np.array(meta.cu_seqlens_q_cpu[:-1])


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy that does not wait: from pinned memory, in stream order."""
    host = torch.from_numpy(array)
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Of the GPU; the interpreter counts as the oldest GPU that the tiled kernels support."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)


def num_multiprocessors(device: torch.device) -> int:
    """1 on the CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
