"""Decode on fixed buffers, captured as CUDA graphs: one replay launches a whole step, sampling included.

A step of decoding sequences differs from the one before it in three integers per sequence (table row, context length,
last block) and a few sampling parameters. The host leaves those in a mailbox, and the graph's first kernel takes them;
everything else is derived on the device, and the sampled tokens are written straight into pinned memory. Batches are
padded to a bucket: padding rows have context 0, point at a scratch row of the block table and write to no slot. Graphs
are captured the first time a bucket is met, and share one memory pool.

A batch with a bias, penalties, a grammar or logprobs needs the logits: it replays a graph that ends there, captured
when it is first needed, and samples eagerly.

Two buffers alternate on the host, in either direction: a step may be launched while the one before it runs, but the
tokens of the step before that one must have been read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch

from nanoserve.contracts.attention import AttentionBackend, DecodeMetadata
from nanoserve.contracts.kvcache import KVCacheFormat
from nanoserve.engine.attention import AttentionStep
from nanoserve.engine.batch import Batch, RowState
from nanoserve.engine.capture import GraphPool
from nanoserve.engine.sampler import Sampler, SamplerOutput, SamplingPlan
from nanoserve.engine.sequence import Sequence
from nanoserve.models.qwen3 import Qwen3ForCausalLM
from nanoserve.ops.decode_inputs import DecodeInputs, decode_inputs
from nanoserve.ops.linear import row_multiple
from nanoserve.ops.mailbox import Mailbox

log = logging.getLogger("nanoserve")

# Per sequence: row, context length, last block, place among the sampled tokens; the sampler's parameters.
NUM_INTS, NUM_FLOATS = 4, 5
NUM_WORDS = NUM_INTS + NUM_FLOATS


def buckets_up_to(max_num_seqs: int, multiple: int) -> list[int]:
    """Captured batch sizes: 1, 2, 4, multiples of 8 to 64, of ``multiple`` to 256, of 32 beyond, and the limit."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, multiple), *range(256, max_num_seqs + 1, 32), max_num_seqs]
    return sorted({size for size in sizes if size <= max_num_seqs})


@dataclass(slots=True)
class _Bucket:
    """A batch size with its buffers.

    sample: runs a step or replays its capture. forward: only as far as ``logits``.
    """

    size: int
    ints: torch.Tensor  # [4, size] int32
    params: torch.Tensor  # [5, size] fp32
    forward: Callable[[], None]
    sample: Callable[[], None]
    logits: torch.Tensor | None = None


class DecodeGraphs:
    """Runs decode-only steps of up to ``max_num_seqs`` sequences.

    backend_for: batch size → the backend to capture. pool: None runs the same code on the same buffers without a graph,
    which is how it is tested without a GPU.
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
        pool: GraphPool | None,
    ) -> None:
        self.model = model
        self.kv = kv
        self.sampler = sampler
        self.rows = rows
        self.backend_for = backend_for
        self.max_model_len = max_model_len
        self.device = kv.shape.device
        self.sizes = buckets_up_to(max_num_seqs, row_multiple(model.layers[0].o.weight))
        self._buckets: dict[int, _Bucket] = {}
        self.pool = pool
        self._generation = rows.generation
        largest = self.sizes[-1]
        self.inputs = DecodeInputs.empty(largest, rows.width, self.device)
        self.mailbox = Mailbox(NUM_WORDS * largest, self.device)
        pinned = self.device.type == "cuda"
        self._tokens = torch.zeros(2 * largest + 1, dtype=torch.int64, pin_memory=pinned)  # the last place: nobody's
        self._first_place = 0  # of this step in _tokens
        self._last_decode: list[Sequence] = []
        self._last_ints = np.zeros((4, 0), np.int32)
        self._sampler_generation = -1

    def size_for(self, num_seqs: int) -> int:
        """The captured batch size that serves ``num_seqs``; beyond the largest one, ``num_seqs``."""
        return next((size for size in self.sizes if size >= num_seqs), num_seqs)

    def launch(self, decode: list[Sequence]) -> SamplerOutput:
        """One step of ``decode``, whose blocks have just been granted. Results follow its order.

        Unless the sampler needed the logits, the token ids lie on the host, to be read once the step is done.
        """
        if self._generation != self.rows.generation:  # the block table has moved: captured pointers are stale
            self._buckets.clear()
            self._generation = self.rows.generation
        n = len(decode)
        size = self.size_for(n)
        bucket = self._buckets.get(size)
        if bucket is None:
            bucket = self._buckets[size] = self._make(size)

        self._first_place = self.sizes[-1] - self._first_place
        letter = self.mailbox.letter()[: NUM_WORDS * size]
        ints = letter[: NUM_INTS * size].reshape(NUM_INTS, size)
        floats = letter[NUM_INTS * size :].view(np.float32).reshape(NUM_FLOATS, size)
        described = self._describe(decode)
        ints[:3, :n] = described[:3]
        ints[0, n:] = self.rows.scratch
        ints[1:3, n:] = 0
        ints[3] = np.arange(self._first_place, self._first_place + size)
        floats[:] = 0  # 1 / temperature = 0 is greedy

        def upload(params: np.ndarray) -> torch.Tensor:
            floats[:, :n] = params
            return bucket.params[:, :n]

        plan = self.sampler.prepare(described[0], described[1] - described[3], decode, upload)
        if plan.is_plain:
            bucket.sample()
            output = SamplerOutput(self._tokens[self._first_place : self._first_place + n], None)
        else:
            bucket.forward()
            output = self.sampler(bucket.logits[:n], plan, bucket.ints[0, :n], self.rows.last_tokens)  # type: ignore[index]
        self.mailbox.send()
        return output

    # ---------------------------------------------------------------- inside

    def _describe(self, decode: list[Sequence]) -> np.ndarray:
        """``[4, len(decode)]``: row, context length, last block, length of the prompt.

        Where the sequences are those of the step before, each one token on, only a new block is looked up.
        """
        contexts = np.array([s.num_computed_tokens for s in decode], np.int32)
        last, same_rows = self._last_ints, self._sampler_generation == self.sampler.generation
        if same_rows and decode == self._last_decode and np.array_equal(contexts, last[1] + 1):
            last[1] = contexts
            for i in np.flatnonzero((contexts - 1) % self.kv.shape.block_size == 0).tolist():
                last[2, i] = decode[i].block_table[-1]
            return last
        rows, last_blocks = [s.table_row for s in decode], [s.block_table[-1] for s in decode]
        self._last_ints = np.array([rows, contexts, last_blocks, [s.num_prompt_tokens for s in decode]], np.int32)
        self._last_decode, self._sampler_generation = list(decode), self.sampler.generation
        return self._last_ints

    def _make(self, size: int) -> _Bucket:
        words = NUM_WORDS * size
        ints, floats = self.mailbox.words[:words].split([NUM_INTS * size, NUM_FLOATS * size])
        params = floats.view(torch.float32).view(NUM_FLOATS, size)
        bucket = _Bucket(size, ints.view(NUM_INTS, size), params, lambda: None, lambda: None)

        def forward() -> None:
            self.mailbox.take(words)
            bucket.logits = self._forward(bucket)

        def sample() -> None:
            self.mailbox.take(words)
            self._sample(bucket)

        bucket.forward, bucket.sample = forward, sample
        if self.pool is not None:
            self._warm_up(bucket)
            bucket.sample = self._record(self.pool, sample)
            replay = cache(partial(self._record, self.pool, forward))  # at the first call
            bucket.forward = lambda: replay()()
            log.debug("captured a decode graph for batches up to %d", size)
        return bucket

    def _forward(self, bucket: _Bucket) -> torch.Tensor:
        size, all_ = bucket.size, self.inputs
        inputs = DecodeInputs(
            all_.input_ids[:size], all_.positions[:size], all_.slot_mapping[:size], all_.block_table[:size]
        )
        rows, context_lens, last_blocks, _ = bucket.ints
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
        return self.model.compute_logits(self.model.forward(inputs.input_ids, step), self.model.dtype)

    def _sample(self, bucket: _Bucket) -> None:
        rows, _, _, places = bucket.ints
        plan = SamplingPlan(bucket.params, search_width=self.sampler.vocab_size, any_min_p=True)  # whatever a row asks
        self.sampler(self._forward(bucket), plan, rows, self.rows.last_tokens, places, self._tokens)

    def _warm_up(self, bucket: _Bucket) -> None:
        """Run a step of nothing but padding: kernels compile, libraries allocate."""
        self.mailbox.letter()  # is never sent, so the next one asks the device which half has its turn
        self.mailbox.take(NUM_WORDS * bucket.size)
        bucket.params.zero_()
        bucket.ints[0].fill_(self.rows.scratch)
        bucket.ints[1:3].zero_()
        bucket.ints[3].fill_(len(self._tokens) - 1)
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            self._sample(bucket)
        torch.cuda.current_stream(self.device).wait_stream(side)

    @staticmethod
    def _record(pool: GraphPool, run: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # torch's capture changes the stream, and does not change it back where CUDA has ended the capture.
        here = torch.cuda.stream(torch.cuda.current_stream())
        with pool.capturing() as memory, here, torch.cuda.graph(graph, pool=memory):
            run()
        return graph.replay

    def capture_all(self) -> None:
        """Capture every size now, the largest first: the others fit into its memory."""
        for size in reversed(self.sizes):
            if size not in self._buckets:
                self._buckets[size] = self._make(size)

    def close(self) -> None:
        self._buckets.clear()
        self._last_decode = []
        del self.model, self.sampler, self.rows, self.inputs, self.mailbox
