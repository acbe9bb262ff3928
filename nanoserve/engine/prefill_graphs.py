"""Steps with prompts as piecewise CUDA graphs: everything between two attentions is one replay.

A prompt of a few hundred tokens keeps a GPU busy for a millisecond or two, and launching its kernels one by one takes
the host longer. Attention is not captured, because the shape of its work changes with every step; the rest depends on
the number of tokens alone. So a step is padded to a bucket of tokens and runs as

    piece 0 (embedding … K/V store of layer 0), attention 0, piece 1 (output projection … store of layer 1), …

Padding tokens store to no slot, and no attention reads them. All pieces of all buckets share one memory pool: what a
piece leaves for the attention that follows may be overwritten by later pieces, which run after it has been read.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from nanoserve.contracts.kvcache import KVCacheFormat
from nanoserve.engine.attention import AttentionStep, KVWriter
from nanoserve.engine.batch import Batch
from nanoserve.engine.capture import GraphPool
from nanoserve.models.qwen3 import Qwen3ForCausalLM

log = logging.getLogger("nanoserve")

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v: [tokens, heads, head_dim]


def token_buckets(max_tokens: int) -> list[int]:
    """Captured numbers of tokens: powers of two from 16 on and the numbers halfway between them, up to the limit."""
    sizes = [size for power in range(4, max_tokens.bit_length()) for size in (2**power, 3 * 2 ** (power - 1))]
    return [size for size in sizes if size < max_tokens] + [max_tokens]


class _Pieces:
    """The model's view of a padded step: layer i's piece ends where ``between(i, (q, k, v))`` is called."""

    def __init__(self, writer: KVWriter, out: torch.Tensor, between: Callable[[int, Heads], None]) -> None:
        self.writer = writer
        self.out = out
        self.between = between

    def attend(self, layer_index: int, qkv: torch.Tensor, *norm_and_rope: Any) -> torch.Tensor:
        self.between(layer_index, self.writer.write(self.writer.kv.layers[layer_index], qkv, *norm_and_rope))
        return self.out.view(qkv.shape[0], -1)


@dataclass(slots=True)
class _Bucket:
    """heads: what attention i reads once ``pieces[i]`` has run. hidden: what the last piece leaves."""

    pieces: list[torch.cuda.CUDAGraph] = field(default_factory=list)
    heads: list[Heads] = field(default_factory=list)
    hidden: torch.Tensor | None = None


class PrefillGraphs:
    """Runs the model over steps of up to ``max_tokens`` tokens; a bucket is captured when first met.

    pool: None runs the same code on the same buffers without a graph, which is how it is tested without a GPU.
    """

    def __init__(self, model: Qwen3ForCausalLM, kv: KVCacheFormat, max_tokens: int, pool: GraphPool | None) -> None:
        self.model = model
        self.kv = kv
        self.max_tokens = max_tokens
        self.pool = pool
        self.sizes = token_buckets(max_tokens)
        self._buckets: dict[int, _Bucket] = {}
        device = kv.shape.device
        self._inputs = torch.zeros(3, max_tokens, dtype=torch.int32, device=device)  # token ids, positions, slots
        self._out = torch.zeros(max_tokens, model.num_q_heads, kv.shape.head_dim, dtype=model.dtype, device=device)

    def forward(self, batch: Batch, step: AttentionStep) -> torch.Tensor:
        """Hidden states ``[tokens, hidden_size]``, valid until the next step. ``batch.input_ids`` must be complete."""
        n = batch.num_decode + batch.num_prefill
        size = next(s for s in self.sizes if s >= n)
        for target, values in zip(self._inputs, (batch.input_ids, batch.positions, batch.slot_mapping), strict=True):
            target[:n].copy_(values)
        self._inputs[2, n:size].fill_(-1)
        out = self._out[:n]
        shortened: dict[int, tuple[Heads, Heads]] = {}  # layers mostly share their buffers

        def attend(layer_index: int, heads: Heads) -> None:
            if id(heads) not in shortened:
                q, k, v = heads
                shortened[id(heads)] = (q[:n], k[:n], v[:n]), heads
            step.read(layer_index, *shortened[id(heads)][0], out)

        if self.pool is None:
            return self._run(size, attend)[:n]
        bucket = self._buckets.get(size) or self._record(size, self.pool)
        for i, heads in enumerate(bucket.heads):
            bucket.pieces[i].replay()
            attend(i, heads)
        bucket.pieces[-1].replay()
        return bucket.hidden[:n]  # type: ignore[index]

    def capture_all(self) -> None:
        """Capture every bucket now, the largest first: the others fit into its memory."""
        assert self.pool is not None
        for size in reversed(self.sizes):
            if size not in self._buckets:
                self._record(size, self.pool)

    def close(self) -> None:
        self._buckets.clear()
        del self.model, self.kv, self._inputs, self._out

    # ---------------------------------------------------------------- inside

    def _run(self, size: int, between: Callable[[int, Heads], None]) -> torch.Tensor:
        ids, positions, slots = self._inputs[:, :size]
        writer = KVWriter(self.kv, self.model.num_q_heads, positions, slots)
        return self.model.forward(ids, _Pieces(writer, self._out[:size], between))

    def _record(self, size: int, pool: GraphPool) -> _Bucket:
        bucket = _Bucket()
        left: list[tuple[_Address, _Address, _Address]] = []
        slots = self._inputs[2].clone()

        def begin(memory: Any) -> None:
            bucket.pieces.append(torch.cuda.CUDAGraph())
            bucket.pieces[-1].capture_begin(pool=memory)

        def cut(layer_index: int, heads: Heads) -> None:
            bucket.pieces[-1].capture_end()
            q, k, v = heads
            left.append((_Address.of(q), _Address.of(k), _Address.of(v)))
            begin(pool.handle)

        self._inputs[2].fill_(-1)
        self._run(size, lambda layer_index, heads: None)  # kernels compile, libraries allocate
        torch.cuda.synchronize(self.kv.shape.device)
        torch.cuda.empty_cache()  # the graphs will hold as much for themselves
        with pool.capturing() as memory, torch.cuda.stream(torch.cuda.Stream(self.kv.shape.device)):
            try:
                begin(memory)
                hidden = self._run(size, cut)
                bucket.pieces[-1].capture_end()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # nothing else could be captured afterwards
                    bucket.pieces[-1].capture_end()
                raise
        self._inputs[2].copy_(slots)
        seen: dict[tuple[_Address, ...], Heads] = {}
        for q, k, v in left:
            if (q, k, v) not in seen:
                seen[q, k, v] = q.tensor(), k.tensor(), v.tensor()
            bucket.heads.append(seen[q, k, v])
        bucket.hidden = _Address.of(hidden).tensor()
        self._buckets[size] = bucket
        log.debug("captured the pieces of steps of up to %d tokens", size)
        return bucket


@dataclass(frozen=True, slots=True)
class _Address:
    """Where a tensor lies on the GPU. ``tensor`` makes one there that does not keep the memory from being used again,
    as a reference to the captured tensor would."""

    data_ptr: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: torch.Tensor) -> _Address:
        return cls(x.data_ptr(), tuple(x.shape), x.stride(), x.dtype)

    def tensor(self) -> torch.Tensor:
        span = 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        memory = _Memory(self.data_ptr, span * self.dtype.itemsize)
        return torch.as_tensor(memory, device="cuda").view(self.dtype).as_strided(self.shape, self.stride)


class _Memory:
    """Bytes on the GPU, as torch takes them from other libraries."""

    def __init__(self, data_ptr: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (data_ptr, False),
            "version": 2,
        }
