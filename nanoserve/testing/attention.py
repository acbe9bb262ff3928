"""Conformance suite of attention backends, and the builders of its inputs (kernel benchmarks use them too).

A case is built from Python lists of lengths: random K and V of whole contexts are stored in a poisoned paged cache, in
shuffled blocks, and the metadata is filled in, device tensors and host twins, as an engine would. The oracle is dense
softmax attention in float64 over what the cache holds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanoserve.contracts.attention import (
    AttentionBackend,
    AttentionContext,
    AttentionSpec,
    DecodeMetadata,
    PrefillMetadata,
)
from nanoserve.contracts.capabilities import Phase, Requirements
from nanoserve.contracts.kvcache import KVCacheShape, KVCacheSpec, LayerCache
from nanoserve.registry import Registry
from nanoserve.testing.kvcache import huge_layer, snapshot, tensors
from nanoserve.testing.plugins import compute_capability, default_device, discover

#: (q, k, v, scale) → out, of one sequence: what a backend computes, in float64; see :func:`reference_attention`.
Reference = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]

#: Largest ‖out − reference‖ / ‖reference‖, per compute dtype; a single token may deviate three times as much.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 5e-3}


# -- builders ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CaseContext(AttentionContext):
    """A context around an allocated cache. num_blocks: all of its blocks, the scratch block included; no layout of
    a format tells it."""

    num_blocks: int


def poison(layer: LayerCache, value: float) -> None:
    """Fill a layer's storage: floating tensors with ``value`` (cut to what the dtype can hold), integers with 127."""
    for tensor in tensors(layer):
        if tensor.is_floating_point():
            tensor.fill_(min(value, torch.finfo(tensor.dtype).max))
        else:
            tensor.fill_(127)


def make_context(
    kv_spec: KVCacheSpec,
    *,
    num_q_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    block_size: int = 16,
    num_blocks: int = 64,
    num_layers: int = 1,
    scale: float | None = None,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 2048,
    max_model_len: int = 2048,
    poison_value: float = float("nan"),
    kv_options: Any = None,
) -> CaseContext:
    """The context of a backend around an allocated, poisoned cache of ``num_blocks`` blocks and the scratch block."""
    shape = KVCacheShape(num_layers, num_kv_heads, head_dim, block_size, dtype, torch.device(device))
    kv = kv_spec.factory(kv_spec.config() if kv_options is None else kv_options, shape)
    kv.allocate(num_blocks + 1)
    for layer in kv.layers:
        poison(layer, poison_value)
    return CaseContext(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5 if scale is None else scale,
        dtype=dtype,
        device=shape.device,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        kv=kv,
        num_blocks=num_blocks + 1,
    )


def slots_of(block_table: Sequence[int], positions: range, block_size: int) -> list[int]:
    return [block_table[p // block_size] * block_size + p % block_size for p in positions]


def prefill_metadata(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    device: torch.device,
) -> PrefillMetadata:
    """The last ``query_lens[i]`` tokens of each context are the queries. Tables may be of different lengths."""

    def on_device(values: Iterable[Any]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    starts_q, starts_k = [0], [0]
    slots: list[int] = []
    positions: list[int] = []
    seq_ids: list[int] = []
    for i, (num_q, num_k) in enumerate(zip(query_lens, context_lens, strict=True)):
        starts_q.append(starts_q[-1] + num_q)
        starts_k.append(starts_k[-1] + num_k)
        new = range(num_k - num_q, num_k)
        slots += slots_of(block_tables[i], new, block_size)
        positions += new
        seq_ids += [i] * num_q
    return PrefillMetadata(
        num_seqs=len(query_lens),
        num_tokens=starts_q[-1],
        cu_seqlens_q=on_device(starts_q),
        cu_seqlens_k=on_device(starts_k),
        context_lens=on_device(context_lens),
        block_table=on_device(_padded(block_tables)),
        slot_mapping=on_device(slots),
        seq_ids=on_device(seq_ids),
        query_positions=on_device(positions),
        cu_seqlens_q_cpu=tuple(starts_q),
        cu_seqlens_k_cpu=tuple(starts_k),
        max_seqlen_q=max(query_lens),
        max_seqlen_k=max(context_lens),
        has_prefix=any(k > q for q, k in zip(query_lens, context_lens, strict=True)),
    )


def decode_metadata(
    context_lens: Sequence[int], block_tables: Sequence[Sequence[int]], block_size: int, device: torch.device
) -> DecodeMetadata:
    """One query per sequence, the last token of its context; a context of 0 is a padding row (slot -1)."""

    def on_device(values: Iterable[Any]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    slots = [
        slots_of(table, range(n - 1, n), block_size)[0] if n else -1
        for table, n in zip(block_tables, context_lens, strict=True)
    ]
    return DecodeMetadata(
        num_seqs=len(context_lens),
        context_lens=on_device(context_lens),
        block_table=on_device(_padded(block_tables)),
        slot_mapping=on_device(slots),
        context_lens_cpu=tuple(context_lens),
        max_context_len=max(context_lens),
    )


def _padded(tables: Sequence[Sequence[int]]) -> list[list[int]]:
    """Rectangular, two columns wider than needed; the surplus holds block ids that belong to some other sequence."""
    width = max(map(len, tables)) + 2
    used = [block for table in tables for block in table]
    return [
        [*table, *(used[(7 * i + j) % len(used)] for j in range(width - len(table)))] for i, table in enumerate(tables)
    ]


@dataclass
class AttentionCase:
    """Inputs of one call. k, v ``[tokens, kv_heads, head_dim]``: a prefill's fresh ones, as the cache holds them.

    reference: the oracle; None is :func:`reference_attention`.
    """

    context: CaseContext
    phase: Phase
    query_lens: list[int]
    context_lens: list[int]
    block_tables: list[list[int]]
    q: torch.Tensor
    meta: Any
    k: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    v: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    reference: Reference | None = None

    def run(self, backend: AttentionBackend, layer: int = 0, fill: float = float("nan")) -> torch.Tensor:
        """Plan and attend; returns ``[tokens, q_heads, head_dim]``. ``fill`` is what the output buffer held before."""
        self.plan(backend)
        return self.attend(backend, layer, fill)

    def plan(self, backend: AttentionBackend) -> None:
        plan = backend.plan_prefill if self.phase == "prefill" else backend.plan_decode
        self.meta.plan = plan(self.meta)

    def attend(self, backend: AttentionBackend, layer: int = 0, fill: float = float("nan")) -> torch.Tensor:
        out = torch.full(self.q.shape, fill, dtype=self.q.dtype, device=self.q.device)
        cache = self.context.kv.layers[layer]
        if self.phase == "prefill":
            backend.prefill(self.q, self.k, self.v, cache, self.meta, out)
        else:
            backend.decode(self.q, cache, self.meta, out)
        return out

    def expected(self, layer: int = 0, sequences: Iterable[int] | None = None) -> torch.Tensor:
        """The oracle's float64 ``[tokens, q_heads, head_dim]`` of all sequences or some; padding rows are 0."""
        kv, device = self.context.kv, self.context.device
        starts, reference = _starts(self.query_lens), self.reference or reference_attention
        rows = []
        for i in range(len(self.query_lens)) if sequences is None else sequences:
            q = self.q[starts[i] : starts[i + 1]]
            slots = slots_of(self.block_tables[i], range(self.context_lens[i]), self.context.block_size)
            if slots:
                k, v = kv.gather(kv.layers[layer], torch.tensor(slots, device=device))
                rows.append(reference(q, k, v, self.context.scale))
            else:
                rows.append(torch.zeros_like(q, dtype=torch.float64))
        return torch.cat(rows)

    def chunk(self, starts: Sequence[int], query_lens: Sequence[int]) -> AttentionCase:
        """Of a one-pass prefill: the step that computes ``query_lens[i]`` tokens of sequence i from ``starts[i]``."""
        live = [i for i, n in enumerate(query_lens) if n]
        first = _starts(self.query_lens)
        rows = [first[i] + starts[i] + j for i in live for j in range(query_lens[i])]
        lens = [query_lens[i] for i in live]
        contexts = [starts[i] + query_lens[i] for i in live]
        tables = [self.block_tables[i] for i in live]
        return replace(
            self,
            query_lens=lens,
            context_lens=contexts,
            block_tables=tables,
            q=self.q[rows],
            k=self.k[rows],
            v=self.v[rows],
            meta=prefill_metadata(lens, contexts, tables, self.context.block_size, self.context.device),
        )

    def fused(self) -> AttentionCase:
        """The same values, as the engine hands them over: v a slice of the fused qkv tensor, q and k of a rotated one.

        Token strides are larger than the heads need, and v's is not k's.
        """
        hq, hkv = self.context.num_q_heads, self.context.num_kv_heads
        fresh = [self.k, self.v] if self.phase == "prefill" else [self.q[:, :hkv]] * 2
        q, k, _ = torch.cat([self.q, fresh[0], self.q[:, :1]], 1).split([hq, hkv, 1], 1)
        _, _, v = torch.cat([self.q, *fresh], 1).split([hq, hkv, hkv], 1)
        return replace(self, q=q, k=k, v=v)


def make_case(
    context: CaseContext,
    context_lens: Sequence[int],
    query_lens: Sequence[int] | None = None,
    *,
    seed: int = 0,
    blocks: Sequence[int] | None = None,
    reference: Reference | None = None,
) -> AttentionCase:
    """Store random K and V of whole contexts in every layer, in shuffled ``blocks`` (default: the pool), and ask for
    the last ``query_lens[i]`` tokens of each (prefill), or, without ``query_lens``, for the last one (decode).

    reference: what the oracle computes, if it is not attention to the whole context.
    """
    kv, block_size, device = context.kv, context.block_size, context.device
    generator = torch.Generator(device).manual_seed(seed)

    def normal(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(tokens, heads, context.head_dim, generator=generator, device=device, dtype=torch.float32).to(
            context.dtype
        )

    pool = list(range(context.num_blocks - 1)) if blocks is None else list(blocks)
    random.Random(seed).shuffle(pool)
    tables = []
    for length in context_lens:
        needed = max(1, -(-length // block_size))  # a padding row has a valid block id too
        if needed > len(pool):
            raise ValueError(f"contexts of {list(context_lens)} tokens need more blocks than there are")
        tables.append([pool.pop() for _ in range(needed)])
    slots = [slots_of(table, range(n), block_size) for table, n in zip(tables, context_lens, strict=True)]
    flat = torch.tensor([slot for row in slots for slot in row], dtype=torch.int64, device=device)
    for layer in kv.layers:
        kv.store(layer, normal(context.num_kv_heads, len(flat)), normal(context.num_kv_heads, len(flat)), flat)

    if query_lens is None:
        q = normal(context.num_q_heads, len(context_lens))
        ones = [1] * len(context_lens)
        meta = decode_metadata(context_lens, tables, block_size, device)
        return AttentionCase(context, "decode", ones, list(context_lens), tables, q, meta, reference=reference)
    q = normal(context.num_q_heads, sum(query_lens))
    prefill = prefill_metadata(query_lens, context_lens, tables, block_size, device)
    k, v = kv.gather(kv.layers[0], prefill.slot_mapping)
    case = AttentionCase(context, "prefill", list(query_lens), list(context_lens), tables, q, prefill)
    return replace(case, k=k.contiguous(), v=v.contiguous(), reference=reference)


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    visible: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Dense causal attention of one sequence in float64.

    q ``[n, q_heads, head_dim]`` are the last n of the context's tokens; k, v ``[context, kv_heads, head_dim]``.
    visible: (positions of queries ``[n, 1]``, of keys ``[context]``) → bool ``[n, context]``: which keys of its past a
    query sees, if not all.
    """
    n, num_q_heads, _ = q.shape
    context, num_kv_heads, _ = k.shape
    grouped = q.double().unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)  # [kv_heads, group, n, head_dim]
    keys, values = (x.double().transpose(0, 1).unsqueeze(1) for x in (k, v))  # [kv_heads, 1, context, head_dim]
    positions = torch.arange(context, device=q.device)
    queries = positions[context - n :, None]
    hidden = positions > queries
    if visible is not None:
        hidden = hidden | ~visible(queries, positions)
    scores = (grouped @ keys.transpose(-1, -2) * scale).masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ values).permute(2, 0, 1, 3).reshape(n, num_q_heads, -1)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """‖out − expected‖ / ‖expected‖ of the tensor, and the worst of its tokens (first axis). NaN counts as inf."""
    difference = (out.double() - expected).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=torch.inf)
    if not difference.isfinite().all():
        return float("inf"), float("inf")
    tokens = difference.flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    return float(difference.norm() / expected.norm()), float(tokens.max())


def assert_close(out: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str = "") -> None:
    """‖out − expected‖ / ‖expected‖ <= tolerance over everything, and three times that for each token."""
    total, worst = relative_error(out, expected)
    assert total <= tolerance and worst <= 3 * tolerance, (
        f"{what}: relative error {total:.2e} (worst token {worst:.2e}), allowed {tolerance:.0e} (3x per token)"
    )


def _starts(lens: Sequence[int]) -> list[int]:
    starts = [0]
    for n in lens:
        starts.append(starts[-1] + n)
    return starts


class NoScalarReads(TorchDispatchMode):
    """Fails on what would wait for a device: reading a scalar, or an output whose size depends on data (spec A2).

    ``tolist`` and ``cpu`` of a tensor on the CPU cannot be seen here; on a GPU, CUDA itself reports them.
    """

    FORBIDDEN = frozenset({"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero"})

    supports_higher_order_operators = True  # flex_attention is one

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What torch.compile makes of a backend is not looked into; under other modes it refuses to run."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch.compile passes a Python float as a float64 scalar on the host, and nothing else here is float64.
        number = func.name() == "aten::_local_scalar_dense" and args[0].dtype == torch.float64
        by_mask = func.name() == "aten::index.Tensor" and any(i is not None and i.dtype == torch.bool for i in args[1])
        assert number or not (by_mask or func.name() in self.FORBIDDEN), f"{func.name()} waits for the device"
        return func(*args, **(kwargs or {}))


# -- the suite --------------------------------------------------------------------------------------------------------


class AttentionBackendSuite:
    """Subclass with ``backend = "NAME"``; what the capabilities declare is tested, the rest is left out.

    Runs on the GPU if there is one and the backend takes it, else on the CPU (a Triton kernel with
    ``TRITON_INTERPRET=1``, on smaller inputs). plugins: modules with hooks that no entry point announces.
    options: the backend's options, other than the defaults. tolerances: overrides of TOLERANCES per dtype.

    A backend that computes something else than attention to the whole context overrides :meth:`reference`.
    """

    backend: str
    plugins: tuple[Any, ...] = ()
    options: dict[str, Any] = {}
    tolerances: dict[torch.dtype, float] = {}

    def reference(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """What the backend should compute for one sequence, in float64: the oracle of every test.

        q ``[n, q_heads, head_dim]`` are the last n of the context's tokens; k, v ``[context, kv_heads, head_dim]``.
        """
        return reference_attention(q, k, v, scale)

    # -- what is declared ---------------------------------------------------------------------------------------------

    @property
    def registry(self) -> Registry:
        return discover(self.plugins)

    @property
    def spec(self) -> AttentionSpec:
        return self.registry.get("attention", self.backend)

    @property
    def device(self) -> str:
        return default_device(self.spec.capabilities)

    @property
    def interpreted(self) -> bool:
        """Each kernel program is interpreted: hundreds of times slower, so inputs are kept small."""
        return self.device not in self.spec.capabilities.devices

    def declared_dtypes(self) -> list[str]:
        """Best test dtype first. The Triton interpreter computes wrong dots in bf16."""
        order = ["bfloat16", "float16", "float32"] if self.device == "cuda" else ["float32", "float16", "bfloat16"]
        if self.interpreted:
            order.remove("bfloat16")
        declared = self.spec.capabilities.dtypes
        return [name for name in order if declared is None or name in declared]

    def declared_formats(self) -> list[str]:
        declared = self.spec.capabilities.kv_formats
        if declared is None:
            return ["bf16", "int8"]
        return sorted(declared & set(self.registry.names("kvcache")))

    def declared_head_dims(self) -> list[int]:
        declared = self.spec.capabilities.head_dims
        usual = [32, 64, 128]
        if declared is None:
            return usual
        return [dim for dim in usual if dim in declared] or sorted(declared)[:2]

    def declared_gqa_ratios(self) -> list[int]:
        limit = self.spec.capabilities.max_gqa_ratio
        return [ratio for ratio in (1, 2, 4, 8) if limit is None or ratio <= limit]

    def declared_block_sizes(self) -> list[int]:
        multiple = self.spec.capabilities.block_size_multiple_of
        return [size for size in (16, 32, 64, 256) if size % multiple == 0] or [multiple]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        values: dict[str, Callable[[], list[Any]]] = {
            "phase": lambda: sorted(self.spec.capabilities.phases),
            "kv_format": self.declared_formats,
            "dtype": self.declared_dtypes,
            "head_dim": self.declared_head_dims,
            "gqa_ratio": self.declared_gqa_ratios,
            "block_size": self.declared_block_sizes,
        }
        for name in metafunc.fixturenames:
            if name in values:
                metafunc.parametrize(name, values[name]())

    # -- builders with the suite's defaults ---------------------------------------------------------------------------

    def make_context(self, kv_format: str, **kwargs: Any) -> CaseContext:
        """As the function of this name, on the backend's device in its best dtype; skips what the backend refuses."""
        dtypes = self.declared_dtypes()
        if not dtypes:
            pytest.skip(f"{self.backend} supports no dtype that {self.device} can test")
        kwargs.setdefault("dtype", getattr(torch, dtypes[0]))
        kwargs.setdefault("num_q_heads", 4)
        kwargs.setdefault("num_kv_heads", 2)
        kwargs.setdefault("head_dim", self.declared_head_dims()[0])
        kwargs.setdefault("block_size", self.declared_block_sizes()[0])
        need = Requirements(
            num_q_heads=kwargs["num_q_heads"],
            num_kv_heads=kwargs["num_kv_heads"],
            head_dim=kwargs["head_dim"],
            dtype=str(kwargs["dtype"]).removeprefix("torch."),
            device=self.device,
            compute_capability=compute_capability(self.device),
            block_size=kwargs["block_size"],
            kv_format=kv_format,
        )
        reasons = self.spec.capabilities.refusals(need)
        if reasons:
            pytest.skip(f"{self.backend} {'; '.join(reasons)}")
        finite_only = self.spec.capabilities.needs_finite_cache
        kwargs.setdefault("poison_value", 1e4 if finite_only else float("nan"))
        return make_context(self.registry.get("kvcache", kv_format), device=self.device, **kwargs)

    def build(self, context: AttentionContext) -> AttentionBackend:
        return self.spec.factory(context, self.registry.make_options("attention", self.spec, self.options))

    def make_case(
        self, context: CaseContext, phase: Phase, lens: Sequence[tuple[int, int]], **kwargs: Any
    ) -> AttentionCase:
        """lens: (query length, context length) per sequence; decode takes the contexts only."""
        queries = [q for q, _ in lens] if phase == "prefill" else None
        return make_case(context, [k for _, k in lens], queries, reference=self.reference, **kwargs)

    def check(self, case: AttentionCase, backend: AttentionBackend | None = None, what: str = "") -> torch.Tensor:
        """Run, compare with the oracle, return the output."""
        out = case.run(backend or self.build(case.context))
        self.assert_right(out, case.expected(), what)
        return out

    def assert_right(self, out: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
        tolerance = self.tolerances.get(out.dtype, TOLERANCES[out.dtype])
        assert_close(out, expected, tolerance, what)

    @property
    def mixed(self) -> list[tuple[int, int]]:
        """A batch with fresh sequences, prefixes, a single token, and contexts that end inside a block."""
        lens = [(5, 5), (3, 20), (1, 1), (2, 37)]
        return lens if self.interpreted else [*lens, (5, 5), (5, 5), (40, 40), (16, 50)]

    # -- right values -------------------------------------------------------------------------------------------------

    def test_block_edges(self, phase: Phase, kv_format: str, block_size: int) -> None:
        """Context 1 and contexts one short of, at and one past a block edge; fresh, and with all but a few cached."""
        edges = [1, block_size - 1, block_size, block_size + 1, 2 * block_size]
        lens = [(min(n, 1 + i % 3), n) for i, n in enumerate(edges)]
        if phase == "prefill" and (block_size == self.declared_block_sizes()[0] or not self.interpreted):
            lens += [(n, n) for n in edges]
        context = self.make_context(kv_format, block_size=block_size)
        self.check(self.make_case(context, phase, lens))

    def test_gqa_ratios(self, phase: Phase, kv_format: str, gqa_ratio: int) -> None:
        """Query head h reads KV head h // ratio."""
        for num_kv_heads in (1, 2):
            context = self.make_context(kv_format, num_q_heads=num_kv_heads * gqa_ratio, num_kv_heads=num_kv_heads)
            self.check(self.make_case(context, phase, [(3, 19), (4, 4)]), what=f"{num_kv_heads} KV heads")

    def test_head_dims(self, phase: Phase, kv_format: str, head_dim: int) -> None:
        context = self.make_context(kv_format, head_dim=head_dim)
        self.check(self.make_case(context, phase, self.mixed))

    def test_dtypes(self, phase: Phase, kv_format: str, dtype: str) -> None:
        context = self.make_context(kv_format, dtype=getattr(torch, dtype))
        self.check(self.make_case(context, phase, self.mixed))

    def test_scale_is_the_contexts(self, phase: Phase, kv_format: str) -> None:
        context = self.make_context(kv_format, scale=0.3)
        self.check(self.make_case(context, phase, self.mixed))

    @pytest.mark.parametrize("seed", range(8))
    def test_random_ragged_batches(self, phase: Phase, kv_format: str, seed: int) -> None:
        rng = random.Random(seed)
        num_kv_heads = rng.choice([1, 2] if self.interpreted else [1, 2, 4])
        context = self.make_context(
            kv_format,
            num_q_heads=num_kv_heads * rng.choice(self.declared_gqa_ratios()),
            num_kv_heads=num_kv_heads,
            head_dim=rng.choice(self.declared_head_dims()),
            block_size=rng.choice(self.declared_block_sizes()),
            num_blocks=300,
        )
        longest = 50 if self.interpreted else 200
        lens = []
        for _ in range(rng.randint(1, 4 if self.interpreted else 10)):
            num_k = rng.randint(1, longest)
            fresh = num_k <= 16 or not self.interpreted
            num_q = num_k if fresh and rng.random() < 0.5 else rng.randint(1, min(num_k, 6))
            lens.append((num_q, num_k))
        self.check(self.make_case(context, phase, lens, seed=seed), what=f"lengths {lens}")

    def test_chunks_equal_one_pass(self, kv_format: str) -> None:
        """A prompt computed in two or three chunks, with others joining and ending, is the prompt in one pass."""
        if "prefill" not in self.spec.capabilities.phases:
            pytest.skip("decode only")
        context = self.make_context(kv_format)
        backend = self.build(context)
        lens = [19, 8, 5]
        whole = self.make_case(context, "prefill", [(n, n) for n in lens])
        expected = whole.expected()
        one_pass = whole.run(backend)
        self.assert_right(one_pass, expected, "one pass")
        rows = _starts(lens)
        chunked = torch.full_like(one_pass, torch.nan)
        done = [0, 0, 0]
        for step in ([6, 8, 0], [8, 0, 2], [5, 0, 3]):
            out = whole.chunk(done, step).run(backend)
            for i, n in enumerate(step):
                chunked[rows[i] + done[i] : rows[i] + done[i] + n] = out[:n]
                out = out[n:]
                done[i] += n
        assert done == lens
        self.assert_right(chunked, expected, "chunks")

    def test_padding_rows_leave_others_right(self, kv_format: str) -> None:
        """Rows of context 0 (a padded CUDA-graph batch) may hold anything; live rows are as without them."""
        if "decode" not in self.spec.capabilities.phases:
            pytest.skip("prefill only")
        context = self.make_context(kv_format)
        contexts = [20, 0, 1, 0, 33, 0, 0]
        case = self.make_case(context, "decode", [(1, n) for n in contexts])
        out, expected = case.run(self.build(context)), case.expected()
        live = [i for i, n in enumerate(contexts) if n]
        self.assert_right(out[live], expected[live])
        padding = make_case(context, [0, 0])
        padding.run(self.build(context))  # nothing but padding is no error either

    def test_strided_inputs(self, phase: Phase, kv_format: str) -> None:
        """q, k, v may be slices of the projection's fused output."""
        context = self.make_context(kv_format)
        self.check(self.make_case(context, phase, self.mixed).fused())

    # -- what may not matter ------------------------------------------------------------------------------------------

    def test_unwritten_slots_do_not_matter(self, phase: Phase, kv_format: str) -> None:
        """C20: the rest of the pool and the tail of the last block hold zeros, NaN or huge numbers: same output."""
        finite_only = self.spec.capabilities.needs_finite_cache
        outputs = []
        for value in (0.0, 1e4) if finite_only else (0.0, float("nan"), 1e30):
            context = self.make_context(kv_format, poison_value=value)
            outputs.append(self.check(self.make_case(context, phase, [(1, 1), (3, 15), (5, 17), (2, 33)])))
        for out in outputs[1:]:
            assert torch.equal(out, outputs[0])

    @pytest.mark.parametrize("spoilt", ["q", "k", "v"])
    def test_a_nan_stays_in_its_sequence(self, phase: Phase, kv_format: str, spoilt: str) -> None:
        """NaN in all queries, keys or values of one sequence: the others' output is as without. Mind that 0 · NaN is
        NaN where several sequences are packed behind one mask."""
        context, sick = self.make_context(kv_format), 1
        backend, kv, layer = self.build(context), context.kv, context.kv.layers[0]
        case = self.make_case(context, phase, self.mixed)
        if self.spec.capabilities.needs_finite_cache:  # behind its own blocks a table must not name those of the sick
            table = case.meta.block_table
            for i, blocks in enumerate(case.block_tables):
                table[i, len(blocks) :] = blocks[0]
        starts = _starts(case.query_lens)
        rows = slice(starts[sick], starts[sick + 1])
        expected = case.run(backend)
        q, k, v = case.q.clone(), case.k.clone(), case.v.clone()
        if spoilt == "q":
            q[rows] = torch.nan
        else:
            slots = slots_of(case.block_tables[sick], range(case.context_lens[sick]), context.block_size)
            where = torch.tensor(slots, device=context.device)
            cached = dict(zip("kv", kv.gather(layer, where), strict=True))
            cached[spoilt] = torch.full_like(cached[spoilt], torch.nan)
            kv.store(layer, cached["k"].contiguous(), cached["v"].contiguous(), where)
            if phase == "prefill":
                {"k": k, "v": v}[spoilt][rows] = torch.nan
        out = replace(case, q=q, k=k, v=v).run(backend)
        healthy = [i for i in range(len(out)) if not rows.start <= i < rows.stop]
        assert torch.equal(out[healthy], expected[healthy]), f"NaN in {spoilt} of one sequence shows in others"

    def test_a_nan_in_a_query_shows(self, phase: Phase, kv_format: str) -> None:
        """One element that is NaN, of one head of one token: that head's output is NaN, and nothing else's."""
        context = self.make_context(kv_format)
        backend = self.build(context)
        case = self.make_case(context, phase, self.mixed)
        expected, token, head = case.run(backend), _starts(case.query_lens)[1], context.num_q_heads - 1
        q = case.q.clone()
        q[token, head, context.head_dim // 2] = torch.nan
        out = replace(case, q=q).run(backend)
        assert out[token, head].isnan().all(), "a NaN in q does not reach the output"
        out[token, head] = expected[token, head]
        assert torch.equal(out, expected), "a NaN in one head of q shows in others"

    def test_is_deterministic_and_writes_all_of_out(self, phase: Phase, kv_format: str) -> None:
        context = self.make_context(kv_format)
        backend = self.build(context)
        case = self.make_case(context, phase, self.mixed)
        assert torch.equal(case.run(backend, fill=float("nan")), case.run(backend, fill=7.0))

    def test_layers_share_one_plan_and_the_cache_is_only_read(self, phase: Phase, kv_format: str) -> None:
        context = self.make_context(kv_format, num_layers=3)
        backend = self.build(context)
        case = self.make_case(context, phase, self.mixed)
        before = [snapshot(layer) for layer in context.kv.layers]
        case.plan(backend)
        for layer in (1, 0):
            kv = context.kv
            if phase == "prefill":
                k, v = kv.gather(kv.layers[layer], case.meta.slot_mapping)
                case = replace(case, k=k, v=v)
            self.assert_right(case.attend(backend, layer), case.expected(layer), f"layer {layer}")
        for layer, (was, cache) in enumerate(zip(before, context.kv.layers, strict=True)):
            assert all(map(torch.equal, was, snapshot(cache))), f"layer {layer} of the cache was written"

    def test_steps_leave_nothing_behind(self, phase: Phase, kv_format: str) -> None:
        """A backend serves large and small steps in turn; scratch of one must not show in the next."""
        context = self.make_context(kv_format)
        backend = self.build(context)
        large = self.make_case(context, phase, self.mixed, blocks=range(32))
        small = self.make_case(context, phase, [(1, 1), (2, 18)], blocks=range(32, 64), seed=1)
        first = self.check(large, backend)
        self.check(small, backend)
        assert torch.equal(large.run(backend), first)

    def test_reads_no_scalar_back(self, phase: Phase, kv_format: str) -> None:
        """Spec A2: host twins drive the launches, nothing waits for the device."""
        context = self.make_context(kv_format)
        backend = self.build(context)
        case = self.make_case(context, phase, self.mixed)
        case.run(backend)  # compiles kernels, which may synchronise
        if self.device == "cuda":
            mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                case.run(backend)
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        else:
            with NoScalarReads():
                case.run(backend)

    def test_high_block_ids(self, phase: Phase, kv_format: str) -> None:
        """C22: element offsets past 2^31. The pool is virtual memory; only the blocks in use are ever touched."""
        dtype = torch.float16 if "float16" in self.declared_dtypes() else torch.float32
        context = self.make_context(kv_format, block_size=self.declared_block_sizes()[-1], num_blocks=1, dtype=dtype)
        small = context.kv.layers[0]
        first = 2**31 // (small.k.numel() // context.num_blocks) + 1
        context.kv.layers = [huge_layer(small, context.num_blocks, first + 4)]
        blocks = list(range(first, first + 4))
        for tensor in (t for t in tensors(context.kv.layers[0]) if t.is_floating_point()):
            tensor[tensor.shape[0] // (first + 4) * first :].fill_(
                1e4 if self.spec.capabilities.needs_finite_cache else torch.nan
            )
        self.check(self.make_case(context, phase, [(3, 19), (1, 40)], blocks=blocks))

    # -- CUDA graphs --------------------------------------------------------------------------------------------------

    def test_host_lengths_are_bounds_under_a_graph(self, kv_format: str) -> None:
        """A backend that declares cuda_graph reads lengths on the device; the host twins are those of the capture."""
        if not self.spec.capabilities.cuda_graph:
            pytest.skip("does not declare cuda_graph")
        context = self.make_context(kv_format, max_model_len=256)
        backend = self.build(context)
        contexts = [20, 0, 1, 33, 0]
        case = self.make_case(context, "decode", [(1, n) for n in contexts])
        case.meta.context_lens_cpu, case.meta.max_context_len = (256,) * len(contexts), 256
        live = [i for i, n in enumerate(contexts) if n]
        self.assert_right(case.run(backend)[live], case.expected()[live])

    def test_captured_decode_follows_the_device(self, kv_format: str) -> None:
        """One captured graph serves other contexts, tables and queries than those it was captured with (C50)."""
        if self.device != "cuda":
            pytest.skip("needs a CUDA device")
        if not self.spec.capabilities.cuda_graph:
            pytest.skip("does not declare cuda_graph")
        context = self.make_context(kv_format, max_model_len=512, num_blocks=128)
        backend = self.build(context)
        static = make_case(context, [1] * 8)
        static.meta.context_lens_cpu, static.meta.max_context_len = (512,) * 8, 512
        static.meta.block_table = torch.zeros(8, 512 // context.block_size, dtype=torch.int32, device="cuda")
        out = torch.empty_like(static.q)

        def step() -> None:
            static.plan(backend)
            backend.decode(static.q, context.kv.layers[0], static.meta, out)

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for contexts in ([5, 0, 300, 17, 1, 0, 0, 64], [400, 2, 16, 15, 31, 90, 1, 1], [1, 1, 0, 0, 0, 0, 0, 0]):
            case = self.make_case(context, "decode", [(1, n) for n in contexts], seed=len(contexts) + contexts[0])
            width = min(case.meta.block_table.shape[1], static.meta.block_table.shape[1])
            static.q.copy_(case.q)
            static.meta.context_lens.copy_(case.meta.context_lens)
            static.meta.block_table[:, :width].copy_(case.meta.block_table[:, :width])
            out.fill_(torch.nan)
            graph.replay()
            live = [i for i, n in enumerate(contexts) if n]
            self.assert_right(out[live], case.expected()[live], f"contexts {contexts}")
