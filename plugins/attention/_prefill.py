"""Query tiles: how a ragged prefill batch becomes the grid of a flash-attention kernel.

A tile is a run of query tokens of one sequence. The list is built on the host from the step's host twins, once for all
layers, longest context first, so that the last programs to start are the shortest. One record of four int32 tells a
program everything: no chain of dependent loads through sequence ids and cumulative lengths.
"""

from __future__ import annotations

import numpy as np
import torch

from nanoserve.contracts.attention import PrefillMetadata


def query_tiles(meta: PrefillMetadata, tokens_per_tile: int, sources: np.ndarray | None = None) -> np.ndarray:
    """Records ``(source, row, rows, position)`` int32 ``[tiles, 4]``, longest first.

    source: where the keys of the tile's sequence are found: its offset in the flattened block table or, for K and V
    that lie densely, the row of its first key (``sources[sequence]``; default: the block table). row: first query row
    in the packed batch; rows: query tokens; position: absolute position of the first.
    """
    starts_q, starts_k = np.array(meta.cu_seqlens_q_cpu), np.array(meta.cu_seqlens_k_cpu)
    query_lens, context_lens = np.diff(starts_q), np.diff(starts_k)
    if sources is None:
        sources = np.arange(meta.num_seqs) * meta.block_table.stride(0)
    tiles_per_seq = -(-query_lens // tokens_per_tile)
    sequence = np.repeat(np.arange(meta.num_seqs), tiles_per_seq)
    first_tile = np.cumsum(tiles_per_seq) - tiles_per_seq
    offset = (np.arange(len(sequence)) - first_tile[sequence]) * tokens_per_tile
    records = np.empty((len(sequence), 4), np.int32)
    records[:, 0] = sources[sequence]
    records[:, 1] = starts_q[sequence] + offset
    records[:, 2] = np.minimum(query_lens[sequence] - offset, tokens_per_tile)
    records[:, 3] = (context_lens - query_lens)[sequence] + offset
    longest_first = np.argsort(-(records[:, 2] + records[:, 3]), kind="stable")
    return records[longest_first]


def fresh_rows(meta: PrefillMetadata) -> np.ndarray:
    """Row of each sequence's first key in the step's own k and v (only right when no sequence has a prefix)."""
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


def tile_records(): ...
