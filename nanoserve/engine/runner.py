"""Runs one step on the device: batch → model → sampler, and starts the one copy back.

The runner never sees a queue. ``launch`` returns at once on a GPU; ``InFlight.wait`` is the only place that blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from nanoserve.contracts.attention import AttentionBackend
from nanoserve.contracts.kvcache import KVCacheFormat
from nanoserve.contracts.policy import SelectionShape
from nanoserve.contracts.scheduling import Schedule
from nanoserve.engine.attention import AttentionStep
from nanoserve.engine.batch import Batch, BatchBuilder
from nanoserve.engine.capture import GraphPool
from nanoserve.engine.decode_graphs import DecodeGraphs
from nanoserve.engine.prefill_graphs import PrefillGraphs
from nanoserve.engine.sampler import Sampler, SamplerOutput
from nanoserve.engine.selection import AttentionSelector
from nanoserve.engine.sequence import Sequence
from nanoserve.models.qwen3 import Qwen3ForCausalLM


@dataclass(slots=True)
class SampledTokens:
    """Results of a step, aligned with ``InFlight.sampled``. A token id < 0 marks a row whose logits were not finite.

    logprobs: chosen logprob per row; top: per row the (token id, logprob) pairs of the most likely tokens.
    """

    token_ids: list[int]
    logprobs: list[float] | None = None
    top: list[list[tuple[int, float]]] | None = None


class InFlight(Protocol):
    """A launched step. sampled: sequences that get a token; chunks: those whose prompt goes on."""

    sampled: list[Sequence]
    chunks: list[Sequence]

    def wait(self) -> SampledTokens:
        """Block until the step's tokens are on the host."""
        ...


class Runner(Protocol):
    """What the engine needs of a runner; tests and benchmarks bring their own."""

    def launch(self, schedule: Schedule) -> InFlight: ...

    def synchronize(self) -> None:
        """Return when nothing of any step runs any more, also of one that failed while it was launched."""
        ...

    def close(self) -> None: ...


class _Launched:
    """done: recorded here, and free for another step once this one has been waited for; None where nothing runs on."""

    def __init__(
        self,
        sampled: list[Sequence],
        chunks: list[Sequence],
        output: SamplerOutput | None,
        done: torch.cuda.Event | None,
    ) -> None:
        self.sampled = sampled
        self.chunks = chunks
        self._tokens = self._logprobs = None
        self._done = done
        if output is not None:
            self._tokens = self._start_copy(output.token_ids)
            if output.logprobs is not None:
                self._logprobs = [self._start_copy(t) for t in output.logprobs]
        if done is not None:
            done.record()

    @staticmethod
    def _start_copy(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cuda:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def wait(self) -> SampledTokens:
        if self._done is not None:
            self._done.synchronize()
        token_ids = [] if self._tokens is None else self._tokens.tolist()
        if self._logprobs is None:
            return SampledTokens(token_ids)
        chosen, top_ids, top_values = (t.tolist() for t in self._logprobs)
        top = [list(zip(ids, values, strict=True)) for ids, values in zip(top_ids, top_values, strict=True)]
        return SampledTokens(token_ids, chosen, top)


class ModelRunner:
    """The runner of a real model on one device.

    decode_graphs: replay decode-only steps as CUDA graphs. prefill_graphs: replay the rest of the model between two
    attentions in steps with prompts of up to so many tokens; 0: never.
    """

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        kv: KVCacheFormat,
        selector: AttentionSelector,
        builder: BatchBuilder,
        sampler: Sampler,
        compute_capability: tuple[int, int] | None,
        max_num_seqs: int,
        max_model_len: int,
        *,
        decode_graphs: bool = False,
        prefill_graphs: int = 0,
    ) -> None:
        self.model = model
        self.kv = kv
        self.selector = selector
        self.builder = builder
        self.rows = builder.rows
        self.sampler = sampler
        self.compute_capability = compute_capability
        self.device = kv.shape.device
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        # At most two steps are in flight: this one, and the one that is waited for next.
        self._events = [torch.cuda.Event() if self.device.type == "cuda" else None for _ in range(2)]
        self.decode_graphs: DecodeGraphs | None = None
        self.prefill_graphs: PrefillGraphs | None = None
        pool = GraphPool() if decode_graphs or prefill_graphs else None
        if decode_graphs:
            self.decode_graphs = DecodeGraphs(
                model,
                kv,
                sampler,
                self.rows,
                self._captured_backend,
                max_num_seqs,
                max_model_len,
                pool,
            )
        if prefill_graphs:
            self.prefill_graphs = PrefillGraphs(model, kv, prefill_graphs, pool)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every graph now instead of when it is first needed."""
        for graphs in (self.prefill_graphs, self.decode_graphs):
            if graphs is not None:
                graphs.capture_all()

    @torch.inference_mode()
    def launch(self, schedule: Schedule) -> InFlight:
        for seq in self._take_blocks():
            self.sampler.set_row(seq.table_row, seq.params, seq.seed, seq)
        if self.decode_graphs is not None and not schedule.prefill and len(schedule.decode) <= self.max_num_seqs:
            # A decoding sequence gets at most its last block, which travels by itself.
            self.builder.blocks.take_table_updates()
            decode: list[Sequence] = schedule.decode  # type: ignore[assignment]
            return self._launched(decode, [], self.decode_graphs.launch(decode))
        # Logits of other sizes than the graphs' are other kernels of cuBLAS, to be loaded while the GPU waits.
        batch = self.builder.build(schedule, self.decode_graphs.size_for if self.decode_graphs else None)
        plan = self.sampler.prepare(batch.sampled_rows_cpu, batch.sample_positions_cpu, batch.sampled)
        if batch.num_decode:
            # Decoding sequences feed on what was sampled last, on the device: the host may not know the value yet.
            decoded = self.rows.last_tokens.index_select(0, batch.sampled_rows[: batch.num_decode])
            if batch.num_prefill:
                batch.input_ids[: batch.num_decode] = decoded
            else:
                batch.input_ids = decoded
        hidden = self._forward(batch)
        if not batch.sampled:  # unfinished chunks only
            return self._launched([], batch.chunks, None)
        if batch.logits_index is not None:
            hidden = hidden.index_select(0, batch.logits_index)
        logits = self.model.compute_logits(hidden, self.model.dtype)  # as graphs do, whatever the neighbours ask for
        output = self.sampler(logits[: len(batch.sampled)], plan, batch.sampled_rows, self.rows.last_tokens)
        return self._launched(batch.sampled, batch.chunks, output)

    def _launched(self, sampled: list[Sequence], chunks: list[Sequence], output: SamplerOutput | None) -> _Launched:
        self._events.reverse()
        return _Launched(sampled, chunks, output, self._events[0])

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def prompt_logits(self, schedule: Schedule) -> torch.Tensor:
        """Logits ``[tokens, vocab_size]`` fp32, on the device, after every token of ``schedule.prefill``.

        For scoring: the step runs as ``launch`` runs it, through the KV cache, but samples nothing.
        """
        self._take_blocks()  # no row samples
        batch = self.builder.build(schedule)
        return self.model.compute_logits(self._forward(batch))

    def _take_blocks(self) -> list[Sequence]:
        """Make what the schedule has granted ready to be written; the sequences that were given a row."""
        blocks = self.builder.blocks
        self.rows.reserve(blocks.num_rows)
        if spoiled := blocks.take_spoiled():
            self.kv.clear_blocks(spoiled)
        return blocks.take_new_rows()

    def _forward(self, batch: Batch) -> torch.Tensor:
        step, graphs = self._attention_step(batch), self.prefill_graphs
        if graphs is not None and batch.num_prefill and batch.num_decode + batch.num_prefill <= graphs.max_tokens:
            return graphs.forward(batch, step)
        return self.model.forward(batch.input_ids, step)

    def _attention_step(self, batch: Batch) -> AttentionStep:
        prefill = decode = None
        if batch.prefill is not None:
            meta = batch.prefill
            prefill = self.selector.select(
                "prefill",
                SelectionShape(
                    batch=meta.num_seqs,
                    num_tokens=meta.num_tokens,
                    max_seqlen_q=meta.max_seqlen_q,
                    max_context=meta.max_seqlen_k,
                    kv_format=self.kv.name,
                    compute_capability=self.compute_capability,
                    has_prefix=meta.has_prefix,
                ),
            )
        if batch.decode is not None:
            shape = self._decode_shape(batch.decode.num_seqs, batch.decode.max_context_len)
            decode = self.selector.select("decode", shape)
        return AttentionStep(batch, self.kv, self.model.num_q_heads, prefill, decode)

    def _captured_backend(self, batch_size: int) -> AttentionBackend:
        shape = self._decode_shape(batch_size, self.max_model_len, captured=True)
        return self.selector.select("decode", shape, captured=True)

    def _decode_shape(self, num_seqs: int, max_context: int, captured: bool = False) -> SelectionShape:
        return SelectionShape(
            batch=num_seqs,
            num_tokens=num_seqs,
            max_seqlen_q=1,
            max_context=max_context,
            kv_format=self.kv.name,
            compute_capability=self.compute_capability,
            has_prefix=True,
            captured=captured,
        )

    def close(self) -> None:
        """Give all device memory back; the runner cannot be used afterwards."""
        for graphs in (self.decode_graphs, self.prefill_graphs):
            if graphs is not None:
                graphs.close()
        self.selector.close()
        self.kv.close()
        del self.model, self.builder, self.sampler, self.rows
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
