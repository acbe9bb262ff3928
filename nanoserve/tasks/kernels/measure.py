"""Attention backends at one shape, as an engine would call them, beside torch's kernels on dense tensors.

Every layer of a small cache holds random K and V in shuffled blocks, and a timed step goes through all of its layers,
so that no call finds its K and V in the GPU's cache. What a backend plans in decode is part of the step if it is
captured with it, and not if it runs on the host. Prefill plans run on the host, once per step for all layers of a
model, and are left out. Each result is compared with float64 on a few tokens.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from nanoserve.config import EngineConfig
from nanoserve.contracts.attention import AttentionBackend, AttentionContext, DecodeMetadata, PrefillMetadata
from nanoserve.contracts.capabilities import Requirements
from nanoserve.contracts.errors import ConfigError
from nanoserve.contracts.kvcache import KVCacheFormat, KVCacheShape
from nanoserve.engine.build import resolve_device, stored_dtype
from nanoserve.engine.selection import candidates_for, make_builder
from nanoserve.tasks.kernels.shapes import KernelShape
from nanoserve.tasks.kernels.timing import ClockTimer, GraphTimer, Timer, copy_bandwidth, interleaved, matmul_rate, once

if TYPE_CHECKING:
    from nanoserve.registry import Registry

#: Largest ‖out − reference‖ / ‖reference‖ of the sampled tokens, by compute dtype.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 5e-3}
MAX_LAYERS = 28
STORED_AT_ONCE = 1 << 16  # tokens
#: A candidate this many times slower than the fastest, and slower than a millisecond, is timed by one plain call.
HOPELESS = 4.0


@dataclass(frozen=True)
class Heads:
    num_q: int = 16
    num_kv: int = 8
    dim: int = 128

    def __post_init__(self) -> None:
        for key, value in (("num_q_heads", self.num_q), ("num_kv_heads", self.num_kv), ("head_dim", self.dim)):
            if value < 1:
                raise ConfigError(f"{key} must be at least 1, not {value}")
        if self.num_q % self.num_kv:
            raise ConfigError(f"num_q_heads={self.num_q} must be a multiple of num_kv_heads={self.num_kv}")


@dataclass(frozen=True)
class Effort:
    """rounds: replays of each candidate. milliseconds: that one replay should last. gigabytes: of K, V, queries and
    outputs that the layers of a shape may fill (two layers always)."""

    rounds: int = 9
    milliseconds: float = 4.0
    gigabytes: float = 2.0


class ShapeOutOfMemoryError(torch.OutOfMemoryError):
    """Known before anything is allocated; says what the shape takes, and of how much."""


def out_of_memory(failure: str) -> bool:
    """Whether an error, written as type and message, is that of a GPU's allocator or of the CPU's."""
    return failure.partition(":")[0].endswith("OutOfMemoryError") or "can't allocate memory" in failure


def available_on_cpu() -> float:
    """Bytes that may still be taken: Linux promises more, and ends whoever claims it. Elsewhere all that the machine
    has, infinite where nobody says."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        pass
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return math.inf


@dataclass
class Timing:
    """One candidate at one shape. us: microseconds of a layer. error: relative, against float64. plain: timed by a
    single call, launch included. failed: why there is no time."""

    us: float | None = None
    error: float | None = None
    plain: bool = False
    wrong: bool = False
    failed: str | None = None

    @property
    def valid(self) -> bool:
        return self.us is not None and not self.wrong


@dataclass(frozen=True)
class Ceilings:
    """Of the device, measured: TB/s of a copy, TFLOP/s of a matrix product."""

    copy: float
    matmul: float


class Bench:
    """Times candidates with the heads, dtype, device and block size of an engine configuration.

    kv: name of the KV format. Raises ConfigError or PluginError for what cannot work.
    """

    def __init__(
        self, config: EngineConfig, registry: Registry, heads: Heads, kv: str, effort: Effort | None = None
    ) -> None:
        self.registry, self.config, self.heads, self.kv = registry, config, heads, kv
        self.effort = effort or Effort()
        self.device = resolve_device(config.engine.device)
        gpu = self.device.type == "cuda"
        name = config.engine.dtype if config.engine.dtype != "auto" else "bfloat16" if gpu else "float32"
        self.dtype: torch.dtype = getattr(torch, name)
        self.capability = torch.cuda.get_device_capability(self.device) if gpu else None
        self.block_size = config.engine.block_size
        self.spec = registry.get("kvcache", kv)
        given = config.kv.options if kv == config.kv.name else {}
        self.kv_options = registry.make_options("kvcache", self.spec, given)
        self.need = Requirements(
            num_q_heads=heads.num_q,
            num_kv_heads=heads.num_kv,
            head_dim=heads.dim,
            dtype=name,
            device=self.device.type,
            compute_capability=self.capability,
            block_size=self.block_size,
            kv_format=kv,
            kv_dtype=stored_dtype(self.kv_options),
        )
        if reasons := self.spec.capabilities.refusals(self.need):
            raise ConfigError(f"kv={kv} cannot be used here: {'; '.join(reasons)}")
        self.candidates = candidates_for(registry, config.attention, self.need)

    def measured(self) -> dict[str, Any]:
        """What figures are of, beside the shape."""
        return {
            "kv": self.kv,
            "kv_options": asdict(self.kv_options),
            "block_size": self.block_size,
            "dtype": self.need.dtype,
            "heads": asdict(self.heads),
        }

    def capturable(self, name: str) -> bool:
        """Whether decode by this backend may be part of a CUDA graph."""
        capabilities = self.registry.get("attention", name).capabilities
        return not capabilities.refusals(replace(self.need, cuda_graph=True), "decode")

    def _attends_to_all(self, name: str) -> bool:
        """False for a window and the like, whose results the reference does not know."""
        if name not in self.registry.names("attention"):  # torch's
            return True
        full: bool = self.registry.get("attention", name).capabilities.full_attention
        return full

    def cache(self, num_layers: int) -> KVCacheFormat:
        shape = KVCacheShape(num_layers, self.heads.num_kv, self.heads.dim, self.block_size, self.dtype, self.device)
        cache: KVCacheFormat = self.spec.factory(self.kv_options, shape)
        return cache

    @functools.cached_property
    def bytes_per_token(self) -> float:
        """Of K and V in one layer."""
        return self.cache(1).bytes_per_block() / self.block_size

    @functools.cached_property
    def ceilings(self) -> Ceilings:
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            found = Ceilings(copy_bandwidth(self.device, min(4.0, free / 2**33)), matmul_rate(self.device, self.dtype))
            torch.cuda.empty_cache()
            return found
        return Ceilings(copy_bandwidth(self.device, 1 / 16), matmul_rate(self.device, self.dtype, 512))

    def measure(self, shape: KernelShape, backends: Sequence[str], with_torch: bool = True) -> dict[str, Timing]:
        """Times of ``backends`` and of torch's kernels at ``shape``, in that order.

        Raises torch.OutOfMemoryError when the device cannot hold two layers of it.
        """
        try:
            return self._measure(shape, backends, with_torch)
        finally:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    @torch.inference_mode()
    def _measure(self, shape: KernelShape, backends: Sequence[str], with_torch: bool) -> dict[str, Timing]:
        step = _Step(self, shape, with_torch)
        makers: dict[str, Callable[[], _Candidate]] = {
            name: functools.partial(step.candidate, name) for name in backends
        }
        if with_torch:
            makers |= step.torch_candidates()
        timings: dict[str, Timing] = {}
        ready: dict[str, tuple[_Candidate, float]] = {}
        for name, make in makers.items():
            try:
                candidate = make()
                error = step.error(candidate)
                plain = once(candidate.calls[-1], self.device)
                ready[name] = candidate, plain
                wrong = not error <= TOLERANCES[self.dtype] and self._attends_to_all(name)
                timings[name] = Timing(plain, error, plain=True, wrong=wrong)
            except Exception as failure:  # a backend of somebody else's may raise anything; the others are still timed
                reason = str(failure).strip().partition("\n")[0]
                timings[name] = Timing(failed=f"{type(failure).__name__}: {reason}")
        best = min((plain for name, (_, plain) in ready.items() if not timings[name].wrong), default=0.0)
        timers: dict[str, Timer] = {}
        for name, (candidate, plain) in ready.items():
            if plain > max(HOPELESS * best, 1000.0):
                continue
            try:
                timers[name] = self._timer(candidate, plain)
            except Exception as failure:
                timings[name] = Timing(failed=f"{type(failure).__name__}: {failure}")
        for name, us in interleaved(timers, self.effort.rounds).items():
            timings[name].us, timings[name].plain = us, False
        return timings

    def _timer(self, candidate: _Candidate, plain: float) -> Timer:
        calls = candidate.calls[: max(1, min(len(candidate.calls), int(1e3 * self.effort.milliseconds / plain)))]
        if self.device.type != "cuda":
            return ClockTimer(calls, candidate.prepare)
        return GraphTimer(calls, candidate.prepare)


@dataclass
class _Candidate:
    """calls: one per layer. prepare: what a step does once before them. packed: a call's result as
    ``[tokens, q_heads, head_dim]``."""

    calls: Sequence[Callable[[], torch.Tensor]]
    prepare: Callable[[], object] = lambda: None
    packed: Callable[[torch.Tensor], torch.Tensor] = lambda out: out


@dataclass
class _Step:
    """A step of ``shape`` on random data: metadata, a filled cache, queries and outputs of every layer.

    Raises ShapeOutOfMemoryError, before it takes any, when a CPU has not the memory for it.
    """

    bench: Bench
    shape: KernelShape
    with_torch: bool
    kv: KVCacheFormat = field(init=False)

    def __post_init__(self) -> None:
        bench, shape = self.bench, self.shape
        heads, size, device = bench.heads, bench.block_size, bench.device
        self.needed = np.array([-(-n // size) for n in shape.context_lens])
        num_blocks = int(self.needed.sum())
        fresh = 2 * (heads.num_q + heads.num_kv * (shape.phase == "prefill")) * heads.dim * bench.dtype.itemsize
        per_layer = num_blocks * size * bench.bytes_per_token + shape.num_tokens * fresh
        most = MAX_LAYERS if device.type == "cuda" else 2
        num_layers = max(2, min(most, int(bench.effort.gigabytes * 2**30 / per_layer)))
        if device.type == "cpu":
            needed, there = num_layers * per_layer + self._beside(num_layers), available_on_cpu()
            if needed > there:
                raise ShapeOutOfMemoryError(f"{needed / 2**30:.3g} GiB of {there / 2**30:.3g}")

        self.kv = bench.cache(num_layers)
        self.kv.allocate(num_blocks)  # first, as it is the largest: what is planned on the host may not fit either
        generator = np.random.default_rng(0)
        ids, cuts = generator.permutation(num_blocks), np.cumsum(self.needed) - self.needed
        columns = cuts[:, None] + np.arange(self.needed.max())
        self.table = ids[np.minimum(columns, num_blocks - 1)].astype(np.int32)  # past its end, some other's block
        self.meta = self._metadata()

        self.generator = torch.Generator(device).manual_seed(0)
        for layer in self.kv.layers:
            for start in range(0, num_blocks * size, STORED_AT_ONCE):
                slots = torch.arange(start, min(num_blocks * size, start + STORED_AT_ONCE), device=device)
                k, v = (self._normal(len(slots), heads.num_kv) for _ in range(2))
                self.kv.store(layer, k, v, slots)
        self.q = [self._normal(shape.num_tokens, heads.num_q) for _ in self.kv.layers]
        self.out = [torch.empty_like(q) for q in self.q]
        self.fresh = []
        if isinstance(self.meta, PrefillMetadata):
            slots = self.meta.slot_mapping
            self.fresh = [tuple(x.contiguous() for x in self.kv.gather(layer, slots)) for layer in self.kv.layers]
        self.context = AttentionContext(
            num_q_heads=heads.num_q,
            num_kv_heads=heads.num_kv,
            head_dim=heads.dim,
            scale=heads.dim**-0.5,
            dtype=bench.dtype,
            device=device,
            block_size=size,
            max_num_seqs=shape.batch,
            max_num_batched_tokens=shape.num_tokens,
            max_model_len=max(shape.context_lens),
            kv=self.kv,
        )
        self.sampled = self._sample()

    def _beside(self, num_layers: int) -> float:
        """Bytes that a CPU needs beside the layers: the masks of ``sdpa``, and the most that is there at a time."""
        shape, heads, itemsize = self.shape, self.bench.heads, self.bench.dtype.itemsize
        numbers = heads.num_kv * heads.dim  # in a token's K, and in its V
        tokens, longest = sum(shape.context_lens), max(shape.context_lens)
        stored = 8 * itemsize * numbers * min(tokens, STORED_AT_ONCE)  # random, and what a format makes of them
        exact = 3 * 8 * numbers * longest  # float64 of both, and one of them laid out anew
        dense = 0
        if self.with_torch and self.torch_candidates():  # gathered, as a batch, and in one call for every query head
            queries = heads.num_q * heads.dim * shape.num_tokens
            copies = 2 * num_layers + heads.num_q // heads.num_kv
            dense = itemsize * (2 * numbers * tokens * copies + queries * (num_layers + 3))
        pairs = [q * k for q, k in zip(shape.query_lens, shape.context_lens, strict=True) if q < k]
        masks = sum(pairs) + 4 * max(pairs) if shape.phase == "prefill" and pairs else 0
        return masks + max(stored, exact, dense)

    def _normal(self, tokens: int, heads: int) -> torch.Tensor:
        bench = self.bench
        size = (tokens, heads, bench.heads.dim)
        return torch.randn(size, generator=self.generator, device=bench.device, dtype=bench.dtype)

    def _slots(self, sequence: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        size = self.bench.block_size
        slots = self.table[sequence, positions // size].astype(np.int64) * size + positions % size
        return torch.from_numpy(slots).to(self.bench.device)

    def _metadata(self) -> PrefillMetadata | DecodeMetadata:
        shape, device = self.shape, self.bench.device

        def on_device(values: Any) -> torch.Tensor:
            return torch.from_numpy(np.array(values, dtype=np.int32)).to(device)

        queries, contexts = np.array(shape.query_lens), np.array(shape.context_lens)
        starts_q, starts_k = (np.concatenate([[0], np.cumsum(lens)]) for lens in (queries, contexts))
        sequence = np.repeat(np.arange(shape.batch), queries)
        positions = np.arange(shape.num_tokens) - starts_q[sequence] + (contexts - queries)[sequence]
        slots = self._slots(sequence, positions).int()
        if shape.phase == "decode":
            return DecodeMetadata(
                num_seqs=shape.batch,
                context_lens=on_device(contexts),
                block_table=on_device(self.table),
                slot_mapping=slots,
                context_lens_cpu=shape.context_lens,
                max_context_len=max(shape.context_lens),
            )
        return PrefillMetadata(
            num_seqs=shape.batch,
            num_tokens=shape.num_tokens,
            cu_seqlens_q=on_device(starts_q),
            cu_seqlens_k=on_device(starts_k),
            context_lens=on_device(contexts),
            block_table=on_device(self.table),
            slot_mapping=slots,
            seq_ids=on_device(sequence),
            query_positions=on_device(positions),
            cu_seqlens_q_cpu=tuple(starts_q.tolist()),
            cu_seqlens_k_cpu=tuple(starts_k.tolist()),
            max_seqlen_q=max(shape.query_lens),
            max_seqlen_k=max(shape.context_lens),
            has_prefix=shape.has_prefix,
        )

    # ------------------------------------------------------------------ candidates

    def candidate(self, name: str) -> _Candidate:
        bench, meta = self.bench, replace(self.meta)
        backend: AttentionBackend = make_builder(bench.registry, bench.config.attention, self.context)(name)
        layers = list(zip(self.q, self.kv.layers, self.out, strict=True))
        calls: list[Callable[[], torch.Tensor]] = []
        if isinstance(meta, PrefillMetadata):
            meta.plan = backend.plan_prefill(meta)
            for (q, layer, out), (k, v) in zip(layers, self.fresh, strict=True):
                calls.append(functools.partial(_prefill, backend, q, k, v, layer, meta, out))
            return _Candidate(calls)

        def plan() -> None:
            meta.plan = backend.plan_decode(meta)

        plan()
        for q, layer, out in layers:
            calls.append(functools.partial(_decode, backend, q, layer, meta, out))
        return _Candidate(calls, plan) if bench.capturable(name) else _Candidate(calls)

    def torch_candidates(self) -> dict[str, Callable[[], _Candidate]]:
        """torch's kernels on what it takes dense: cuDNN and flash for batches of equal sequences, ``varlen_attn`` for
        every other prefill. On a CPU, what scaled_dot_product_attention chooses."""
        if self.shape.equal and (self.shape.phase == "decode" or not self.shape.has_prefix):
            if self.bench.device.type != "cuda":
                return {"torch sdpa": functools.partial(self._dense, None)}
            from torch.nn.attention import SDPBackend

            kinds = {"torch cudnn": SDPBackend.CUDNN_ATTENTION, "torch flash": SDPBackend.FLASH_ATTENTION}
            return {name: functools.partial(self._dense, kind) for name, kind in kinds.items()}
        if self.shape.phase == "prefill" and self.bench.device.type == "cuda":
            return {"torch varlen_attn": self._varlen}
        return {}

    @functools.cached_property
    def dense(self) -> list[tuple[torch.Tensor, ...]]:
        """K and V of all contexts, packed ``[tokens, kv_heads, head_dim]``, per layer."""
        contexts = np.array(self.shape.context_lens)
        sequence = np.repeat(np.arange(self.shape.batch), contexts)
        positions = np.arange(len(sequence)) - (np.cumsum(contexts) - contexts)[sequence]
        slots = self._slots(sequence, positions)
        return [self.kv.gather(layer, slots) for layer in self.kv.layers]

    @functools.cached_property
    def batched(self) -> list[tuple[torch.Tensor, ...]]:
        """q, K and V of equal sequences, ``[batch, heads, tokens, head_dim]``, per layer."""
        batch = self.shape.batch
        return [
            tuple(x.unflatten(0, (batch, -1)).transpose(1, 2).contiguous() for x in (q, *keys_values))
            for q, keys_values in zip(self.q, self.dense, strict=True)
        ]

    def _dense(self, kind: Any) -> _Candidate:
        from torch.nn.attention import sdpa_kernel

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            causal = self.shape.phase == "prefill"
            if kind is None:
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
            with sdpa_kernel(kind):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

        calls = [functools.partial(attend, *tensors) for tensors in self.batched]
        return _Candidate(calls, packed=lambda out: out.transpose(1, 2).flatten(0, 1))

    def _varlen(self) -> _Candidate:
        """K and V are repeated for all query heads beforehand: not every version of torch groups them."""
        from torch.nn.attention.varlen import varlen_attn

        meta: Any = self.meta
        group = self.bench.heads.num_q // self.bench.heads.num_kv

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            lens = (meta.cu_seqlens_q, meta.cu_seqlens_k, meta.max_seqlen_q, meta.max_seqlen_k)
            out: Any = varlen_attn(q, k, v, *lens, window_size=(-1, 0), scale=self.context.scale)
            return out

        calls = []
        for q, (k, v) in zip(self.q[:4], self.dense, strict=False):
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            calls.append(functools.partial(attend, q, k, v))
        return _Candidate(calls)

    # ------------------------------------------------------------------ correctness

    def _sample(self) -> list[tuple[int, int, int]]:
        """(row, sequence, keys that it sees) of up to 8 query tokens: the first and the last, and others between."""
        lens = np.array(self.shape.query_lens)
        rows = np.unique(np.linspace(0, self.shape.num_tokens - 1, 8).astype(int))
        starts = np.cumsum(lens) - lens
        sequences = np.searchsorted(starts, rows, "right") - 1
        hidden = np.array(self.shape.context_lens) - lens
        return [
            (int(row), int(i), int(row - starts[i] + hidden[i] + 1)) for row, i in zip(rows, sequences, strict=True)
        ]

    @functools.cached_property
    def expected(self) -> torch.Tensor:
        """float64 ``[sampled, q_heads, head_dim]`` of layer 0, over what ``gather`` returns of the cache."""
        return torch.stack([self._exact(*one) for one in self.sampled])

    def _exact(self, row: int, i: int, visible: int) -> torch.Tensor:
        slots = self._slots(np.full(visible, i), np.arange(visible))
        k, v = (x.double() for x in self.kv.gather(self.kv.layers[0], slots))  # [visible, kv_heads, head_dim]
        q = self.q[0][row].double().unflatten(0, (k.shape[1], -1))  # [kv_heads, group, head_dim]
        weights = (torch.einsum("hgd,nhd->hgn", q, k) * self.context.scale).softmax(-1)
        return torch.einsum("hgn,nhd->hgd", weights, v).flatten(0, 1)

    def error(self, candidate: _Candidate) -> float:
        """Run layer 0 into an output of NaN; infinite if any of it is left."""
        self.out[0].fill_(float("nan"))
        candidate.prepare()
        out = candidate.packed(candidate.calls[0]())
        if not out.isfinite().all():
            return float("inf")
        rows = torch.tensor([row for row, _, _ in self.sampled], device=out.device)
        return float((out[rows].double() - self.expected).norm() / self.expected.norm())


def _prefill(
    backend: AttentionBackend, q: Any, k: Any, v: Any, layer: Any, meta: PrefillMetadata, out: torch.Tensor
) -> torch.Tensor:
    backend.prefill(q, k, v, layer, meta, out)
    return out


def _decode(backend: AttentionBackend, q: Any, layer: Any, meta: DecodeMetadata, out: torch.Tensor) -> torch.Tensor:
    backend.decode(q, layer, meta, out)
    return out


def fastest(timings: dict[str, Timing], names: Iterable[str]) -> str | None:
    """Of ``names``, the one with the least time among those that are right."""
    valid = [name for name in names if name in timings and timings[name].valid]
    return min(valid, key=lambda name: timings[name].us or 0.0, default=None)
