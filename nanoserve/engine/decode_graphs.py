"""Decode on fixed buffers, captured as CUDA graphs: one replay launches a whole step, sampling included.

A step of decoding sequences differs from the one before it in three integers per sequence (table row, context length,
last block) and a few sampling parameters. The host writes those into one pinned buffer; everything else is derived on
the device. Batches are padded to a bucket: padding rows have context 0, point at a scratch row of the block table and
write to no slot. Graphs are captured the first time a bucket is met, and share one memory pool.

Sampling is a graph of its own: a batch with top-k, penalties or logprobs replays the model and samples eagerly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nanoserve.contracts.attention import AttentionBackend, DecodeMetadata
from nanoserve.contracts.kvcache import KVCacheFormat
from nanoserve.engine.attention import AttentionStep
from nanoserve.engine.batch import Batch, RowState
from nanoserve.engine.sampler import Sampler, SamplerOutput, SamplingPlan
from nanoserve.engine.sequence import Sequence
from nanoserve.models.qwen3 import Qwen3ForCausalLM
from nanoserve.ops.decode_inputs import DecodeInputs, decode_inputs

log = logging.getLogger("nanoserve")

NUM_INTS, NUM_FLOATS = 3, 5  # per sequence: row, context length, last block; the sampler's parameters


def buckets_up_to(max_num_seqs: int) -> list[int]:
    """Captured batch sizes: 1, 2, 4, multiples of 8 to 64, of 16 to 256, of 32 beyond, and the limit itself."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs + 1, 32), max_num_seqs]
    return sorted({size for size in sizes if size <= max_num_seqs})


@dataclass(slots=True)
class _Bucket:
    """A batch size with its buffers. The callables run the step or replay its capture."""

    size: int
    ints: torch.Tensor  # [3, size] int32
    params: torch.Tensor  # [5, size] fp32
    forward: Callable[[], None]
    sample: Callable[[], None]
    logits: torch.Tensor | None = None
    token_ids: torch.Tensor | None = None


class DecodeGraphs:
    """Runs decode-only steps of up to ``max_num_seqs`` sequences.

    backend_for: batch size → the backend to capture. capture: False runs the same code on the same buffers without a
    graph, which is how it is tested without a GPU. pool: the memory pool of the graphs.
    """

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        kv: KVCacheFormat,
        sampler: Sampler,
        rows: RowState,
        backend_for: Callable[[int], AttentionBackend],
        max_num_seqs: int,
        max_model_len: int,
        *,
        capture: bool,
        pool: Any = None,
    ) -> None:
        self.model = model
        self.kv = kv
        self.sampler = sampler
        self.rows = rows
        self.backend_for = backend_for
        self.max_model_len = max_model_len
        self.capture = capture
        self.device = kv.shape.device
        self.sizes = buckets_up_to(max_num_seqs)
        self._buckets: dict[int, _Bucket] = {}
        self.pool = pool
        self._generation = rows.generation
        largest = self.sizes[-1]
        self.inputs = DecodeInputs.empty(largest, rows.width, self.device)
        words = (NUM_INTS + NUM_FLOATS) * largest
        self._device_buffer = torch.zeros(words, dtype=torch.int32, device=self.device)
        pinned = self.device.type == "cuda"
        self._host_buffers = [torch.zeros(words, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]

    def launch(self, decode: list[Sequence]) -> SamplerOutput:
        """One step of ``decode``, whose blocks have just been granted. Results follow its order."""
        if self._generation != self.rows.generation:  # the block table has moved: captured pointers are stale
            self._buckets.clear()
            self._generation = self.rows.generation
        n = len(decode)
        size = next(s for s in self.sizes if s >= n)
        bucket = self._buckets.get(size)
        if bucket is None:
            bucket = self._buckets[size] = self._make(size)

        self._host_buffers.reverse()
        host = self._host_buffers[0][: (NUM_INTS + NUM_FLOATS) * size]
        ints = host.numpy()[: NUM_INTS * size].reshape(NUM_INTS, size)
        floats = host.numpy()[NUM_INTS * size :].view(np.float32).reshape(NUM_FLOATS, size)
        ints[0, :n] = [s.table_row for s in decode]
        ints[1, :n] = [s.num_computed_tokens for s in decode]
        ints[2, :n] = [s.block_table[-1] for s in decode]
        ints[0, n:] = self.rows.scratch
        ints[1:, n:] = 0
        floats[:] = 0  # 1 / temperature = 0 is greedy

        def upload(params: np.ndarray) -> torch.Tensor:
            floats[:, :n] = params
            return bucket.params[:, :n]

        positions = np.array([s.num_tokens - 1 - s.num_prompt_tokens for s in decode], dtype=np.int64)
        plan = self.sampler.prepare(ints[0, :n], positions, decode, upload)
        self._device_buffer[: len(host)].copy_(host, non_blocking=True)
        bucket.forward()
        if plan.is_plain:
            bucket.sample()
            return SamplerOutput(bucket.token_ids[:n], None)  # type: ignore[index]
        return self.sampler(bucket.logits[:n], plan, bucket.ints[0, :n], self.rows.last_tokens)  # type: ignore[index]

    # ---------------------------------------------------------------- inside

    def _make(self, size: int) -> _Bucket:
        ints = self._device_buffer[: NUM_INTS * size].view(NUM_INTS, size)
        words = self._device_buffer[NUM_INTS * size : (NUM_INTS + NUM_FLOATS) * size]
        bucket = _Bucket(size, ints, words.view(torch.float32).view(NUM_FLOATS, size), lambda: None, lambda: None)
        bucket.forward = lambda: self._forward(bucket)
        bucket.sample = lambda: self._sample(bucket)
        if self.capture:
            self._capture(bucket)
        return bucket

    def _forward(self, bucket: _Bucket) -> None:
        size, all_ = bucket.size, self.inputs
        inputs = DecodeInputs(
            all_.input_ids[:size], all_.positions[:size], all_.slot_mapping[:size], all_.block_table[:size]
        )
        rows, context_lens, last_blocks = bucket.ints
        decode_inputs(
            rows, context_lens, last_blocks, self.rows.table, self.rows.last_tokens, self.kv.shape.block_size, inputs
        )
        meta = DecodeMetadata(
            num_seqs=size,
            context_lens=context_lens,
            block_table=inputs.block_table,
            slot_mapping=inputs.slot_mapping,
            context_lens_cpu=(self.max_model_len,) * size,
            max_context_len=self.max_model_len,
        )
        batch = Batch.of_decode(inputs.input_ids, inputs.positions, meta)
        step = AttentionStep(batch, self.kv, self.model.num_q_heads, None, self.backend_for(size))
        bucket.logits = self.model.compute_logits(self.model.forward(inputs.input_ids, step), self.model.dtype)

    def _sample(self, bucket: _Bucket) -> None:
        plan = SamplingPlan(bucket.params)
        bucket.token_ids = self.sampler(bucket.logits, plan, bucket.ints[0], self.rows.last_tokens).token_ids  # type: ignore[arg-type]

    def _capture(self, bucket: _Bucket) -> None:
        """Run once on padding only (kernels compile, libraries allocate), then record both graphs."""
        bucket.ints[0].fill_(self.rows.scratch)
        bucket.ints[1:].zero_()
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            self._forward(bucket)
            self._sample(bucket)
        torch.cuda.current_stream(self.device).wait_stream(side)
        graphs = []
        for run in (self._forward, self._sample):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                run(bucket)
            graphs.append(graph)
        bucket.forward, bucket.sample = graphs[0].replay, graphs[1].replay
        log.debug("captured decode graphs for batches up to %d", bucket.size)

    def capture_all(self) -> None:
        """Capture every size now, the largest first: the others fit into its memory."""
        for size in reversed(self.sizes):
            if size not in self._buckets:
                self._buckets[size] = self._make(size)

    def close(self) -> None:
        self._buckets.clear()
        del self.model, self.sampler, self.rows, self.inputs, self._device_buffer
