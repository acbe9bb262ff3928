"""Prefill and store kernels on a GPU: compiled in parallel, checked against float64, timed beside torch's kernels.

    python tests/gpu/prefill_bench.py compile check time store host     # any of these stages, in this order
    python tests/gpu/prefill_bench.py time=8x1024,4x4096 tune=8x1024    # some shapes; tune: with other tiles too

Times are medians of CUDA-graph replays, all candidates of a shape in a new random order each round, so that clocks and
heat are the same for all. Shapes are Qwen3-0.6B's: 16 query heads, 8 KV heads, head size 128, bf16 unless said.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

os.environ.pop("TRITON_INTERPRET", None)

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from nanoserve.contracts.capabilities import Capabilities
from nanoserve.contracts.kvcache import KVCacheSpec
from nanoserve.ops.rope import qk_norm_rope
from nanoserve.tasks.kernels.timing import GraphTimer, copy_bandwidth
from nanoserve.testing.attention import make_case, make_context, relative_error
from nanoserve_plugins.attention.hopper_flash import HopperFlashBackend, HopperFlashConfig
from nanoserve_plugins.attention.triton_flash import Tile, TritonFlashBackend, TritonFlashConfig
from nanoserve_plugins.attention.triton_varlen import TritonVarlenBackend, TritonVarlenConfig
from nanoserve_plugins.kvcache import _kernels
from nanoserve_plugins.kvcache.bf16 import BF16Config, BF16KVCache
from nanoserve_plugins.kvcache.int8 import Int8Config, Int8KVCache

FORMATS = {
    "bf16": KVCacheSpec("bf16", "", Capabilities(), BF16Config, BF16KVCache),
    "int8": KVCacheSpec("int8", "", Capabilities(), Int8Config, Int8KVCache),
}
FIELDS = {"bf16": ("k", "v"), "int8": ("k", "v", "k_scale", "v_scale")}
SM90 = (9, 0)
TILES = {
    f"{m}x{n}w{w}s{s}": Tile(m, n, w, s)
    for m, n, w, s in [(64, 32, 4, 2), (64, 32, 4, 3), (64, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3)]
    + [(128, 128, 8, 2), (128, 128, 8, 3)]
}


@dataclass(frozen=True)
class Job:
    """One candidate. name: a tile of triton_flash, "kernel" (hopper_flash's own, also for short prompts) or "auto",
    with "/MiB" for another section size. page: 0 leaves it to the backend where a fresh prompt's K and V come from (the
    step or pages of 256); else it reads pages of this size."""

    kind: str
    name: str = "auto"
    page: int = 0
    kv: str = "bf16"
    dtype: str = "bfloat16"
    heads: tuple[int, int] = (16, 8)
    dim: int = 128

    def __str__(self):
        source = f"page {self.page}" if self.page else "fresh"
        return f"{self.kind} {self.name} {source}" + (" int8" if self.kv == "int8" else "")

    def case(self, lens, device="cuda", seed=0, poison=None, max_model_len=32768):
        page = self.page or 256
        if poison is None:
            poison = 1e4 if self.kind == "hopper" else float("nan")
        context = make_context(
            FORMATS[self.kv],
            num_q_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            head_dim=self.dim,
            dtype=getattr(torch, self.dtype),
            device=device,
            block_size=page,
            num_blocks=sum(-(-k // page) for _, k in lens) + 4,
            max_model_len=max_model_len,
            poison_value=poison,
        )
        case = make_case(context, [k for _, k in lens], [q for q, _ in lens], seed=seed).fused()
        case.meta.has_prefix |= self.page != 0
        return case

    def planned(self, case):
        """(function that runs one layer of ``case``, its output)."""
        name, _, section = self.name.partition("/")
        context, meta = case.context, case.meta
        if self.kind == "varlen":
            backend = TritonVarlenBackend(context, TritonVarlenConfig())
        elif self.kind == "flash":
            backend = TritonFlashBackend(context, TritonFlashConfig(), SM90)
        else:
            backend = HopperFlashBackend(context, HopperFlashConfig(), SM90)
        if section:
            backend.section = int(section) * (1 << 20) // (4 * context.num_kv_heads * context.head_dim)
        if name == "auto":
            plan = backend.plan_prefill(meta)
        else:
            plan = backend.plan(meta, TILES[name]) if self.kind == "flash" else backend.plan(meta)
        meta, out = replace(meta, plan=plan), torch.empty_like(case.q)
        return functools.partial(backend.prefill, case.q, case.k, case.v, context.kv.layers[0], meta, out), out


# -- compile ----------------------------------------------------------------------------------------------------------

CHECKED = [
    Job("varlen", "auto", 16),
    Job("varlen", "auto", 16, "int8"),
    Job("flash", "auto", 16),
    Job("flash", "auto", 256, "int8"),
    Job("flash", "auto", 16, "int8", "float16"),
    Job("flash", "auto", 64, "bf16", "float16", (6, 2), 96),
    Job("flash", "auto", 32, heads=(8, 1), dim=256),
    Job("flash", "auto", 32, heads=(4, 4), dim=64),
    Job("hopper", "kernel", 256),
    Job("hopper", "kernel", 16),
    Job("hopper", "kernel", 48, "bf16", "float16", (8, 2), 64),
    Job("hopper", "kernel", 64, "bf16", "float16", (6, 2)),
    Job("hopper", "kernel", 16, "int8"),
    Job("hopper", "kernel", 256, "int8", "float16", (5, 5), 64),
]
CANDIDATES = [Job(kind, "auto", page) for kind in ("hopper", "flash") for page in (0, 256, 16)]
TUNED = [Job("hopper", f"kernel/{mib}") for mib in (4, 16, 64)] + [Job("flash", tile) for tile in TILES]
INT8 = [Job(kind, "auto", page, "int8") for kind in ("hopper", "flash") for page in (0, 16, 256)]
INT8_TUNED = [Job("flash", tile, 256, "int8") for tile in TILES]


def compile_job(job):
    """Launch on the CPU with a stand-in driver, where a launch only compiles; the real launch finds the cache."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    class Driver:
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device=None: 0)

    triton.runtime.driver.set_active(Driver())
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        run(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = compile_only
    torch.set_num_threads(1)
    start = time.time()
    lengths = [[(160, 160)], [(160, 200)], [(40, 100)], [(300, 300)]] if job.name == "auto" else [[(160, 200)]]
    for lens in lengths if job.page else [[(q, q) for q, _ in lens] for lens in lengths]:
        job.planned(job.case(lens, device="cpu", poison=0.0))[0]()
    JITFunction.run = run
    return time.time() - start


def compile_all():
    jobs = CHECKED + [replace(job, page=0) for job in CHECKED if job.kind == "hopper"]
    jobs = list(dict.fromkeys(jobs + CANDIDATES + TUNED + INT8 + INT8_TUNED))
    start = time.time()
    with ProcessPoolExecutor(int(os.environ.get("JOBS", os.cpu_count()))) as pool:
        slowest = max(pool.map(compile_job, jobs))
    print(f"compiled {len(jobs)} jobs in {time.time() - start:.0f} s, the slowest took {slowest:.0f} s")


# -- check ------------------------------------------------------------------------------------------------------------


def check(trials=34):
    """Random ragged batches; outputs are NaN before, stale cache rows NaN (1e4 where TMA cannot mask them)."""
    rng = random.Random(0)
    for job in CHECKED:
        worst, token = 0.0, 0.0
        for trial in range(trials):
            longest = 130 if job.kind == "varlen" else rng.choice([40, 300, 300, 900])
            contexts = [rng.randint(1, longest) for _ in range(rng.randint(1, 5))]
            lens = [(n if trial % 3 == 0 else rng.randint(1, n), n) for n in contexts]
            case = job.case(lens, seed=trial, max_model_len=2048)
            if trial % 2:
                case.meta.has_prefix = any(q < k for q, k in lens)
            function, out = job.planned(case)
            out.fill_(float("nan"))
            function()
            errors = relative_error(out, case.expected())
            worst, token = max(worst, errors[0]), max(token, errors[1])
        verdict = "" if worst < 5e-3 else "  WRONG"
        print(f"{job} {job.dtype} {job.heads} d{job.dim}: error {worst:.2e} (token {token:.1e}){verdict}", flush=True)


def check_store():
    """The kernels' INT8 equals the reference's to the bit; the fused launch equals its parts."""
    for kv, spec in FORMATS.items():
        context = make_context(spec, num_q_heads=16, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16, device="cuda",
                               block_size=16, num_blocks=4096, num_layers=2, poison_value=0.0)  # fmt: skip
        cache, tokens = context.kv, 65000
        mine, theirs = cache.layers
        k, v = (
            torch.randn(2, tokens, 8, 128, device="cuda")
            .mul_(torch.rand(2, tokens, 8, 1, device="cuda").exp2())
            .to(torch.bfloat16)
        )
        slots = torch.randperm(65536, device="cuda")[:tokens]
        slots[::7] = -1
        _kernels.store(mine, k, v, slots)
        # On the CPU: on a GPU torch divides by a number with its reciprocal, which is not always IEEE's quotient.
        theirs = replace(theirs, **{name: getattr(theirs, name).cpu() for name in FIELDS[kv]})
        cache._store_torch(theirs, k.cpu(), v.cpu(), slots.cpu())
        same = [torch.equal(getattr(mine, name).cpu(), getattr(theirs, name)) for name in FIELDS[kv]]
        qkv = torch.randn(4096, 32 * 128, device="cuda", dtype=torch.bfloat16)
        weights = torch.rand(2, 128, device="cuda", dtype=torch.bfloat16)
        cos_sin, positions = torch.randn(32768, 128, device="cuda"), torch.randint(0, 32768, (4096,), device="cuda")
        q, k, v = _kernels.norm_rope_store(mine, qkv, *weights, 1e-6, cos_sin, positions, slots[:4096], True)
        expected = qk_norm_rope(qkv, *weights, 1e-6, cos_sin, positions, 16, 8, 128)
        errors = [f"{relative_error(x, y.double())[0]:.1e}" for x, y in zip((q, k, v), expected, strict=True)]
        live = slots[:4096] >= 0
        cached = cache.gather(mine, slots[:4096][live])
        exact = [torch.equal(x[live], y) for x, y in zip((k, v), cached, strict=True)]
        print(f"store {kv}: bits equal {same}; fused q, k, v off by {errors}, equal to the cache {exact}", flush=True)


# -- time -------------------------------------------------------------------------------------------------------------


def timers(functions, milliseconds=4.0):
    found = {}
    for name, function in functions.items():
        try:
            function()
            torch.cuda.synchronize()
            start = time.perf_counter()
            function()
            torch.cuda.synchronize()
            calls = max(1, min(20, int(milliseconds * 1e-3 / (time.perf_counter() - start))))
            found[name] = GraphTimer([function] * calls)
        except Exception as error:
            print(f"    {name}: {type(error).__name__}: {str(error)[:150]}")
    return found


def medians(functions, rounds=11):
    candidates = timers(functions)
    order = list(candidates)
    for round_ in range(rounds):
        random.Random(round_).shuffle(order)
        for name in order:
            candidates[name].replay()
    return {name: timer.microseconds() for name, timer in candidates.items()}


def torch_candidates(case):
    """cuDNN and flash on dense tensors of equal sequences, ``varlen_attn`` on ragged ones and prefixes."""
    lens, scale, context = case.query_lens, case.context.scale, case.context
    q, k, v = case.q.contiguous(), case.k.contiguous(), case.v.contiguous()
    if len(set(lens)) == 1 and case.context_lens == lens:
        q, k, v = (x.unflatten(0, (len(lens), -1)).transpose(1, 2).contiguous() for x in (q, k, v))

        def attend(backend):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)

        return {
            "cudnn": functools.partial(attend, SDPBackend.CUDNN_ATTENTION),
            "torch flash": functools.partial(attend, SDPBackend.FLASH_ATTENTION),
        }
    from torch.nn.attention.varlen import varlen_attn

    if case.context_lens != lens:
        slots = [
            table[p // context.block_size] * context.block_size + p % context.block_size
            for table, n in zip(case.block_tables, case.context_lens, strict=True)
            for p in range(n)
        ]
        k, v = context.kv.gather(context.kv.layers[0], torch.tensor(slots, device=q.device))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1).contiguous() for x in (k, v))
    meta = case.meta
    bounds = (meta.cu_seqlens_q, meta.cu_seqlens_k, meta.max_seqlen_q, meta.max_seqlen_k)
    return {"varlen_attn": functools.partial(varlen_attn, q, k, v, *bounds, window_size=(-1, 0), scale=scale)}


def flops(case):
    heads, dim = case.q.shape[1:]
    pairs = sum(q * (k - q) + q * (q + 1) / 2 for q, k in zip(case.query_lens, case.context_lens, strict=True))
    return 4 * heads * dim * pairs


lengths = random.Random(1)
SHAPES = {
    "8x32": [(32, 32)] * 8,
    "8x128": [(128, 128)] * 8,
    "8x256": [(256, 256)] * 8,
    "8x512": [(512, 512)] * 8,
    "8x1024": [(1024, 1024)] * 8,
    "16x1024": [(1024, 1024)] * 16,
    "4x4096": [(4096, 4096)] * 4,
    "1x16384": [(16384, 16384)],
    "ragged": [(n, n) for n in (lengths.randint(16, 2048) for _ in range(64))],
    "chunks": [(512, 512 + n) for n in (7000, 7400, 7700, 7900)],
    "suffix": [(100, 4000)] * 8,
}


def time_shapes(names, tune=False):
    for shape in names:
        lens = SHAPES[shape]
        prefix = any(q < k for q, k in lens)
        jobs = CANDIDATES + INT8 + (TUNED if tune else []) + (INT8_TUNED if tune and prefix else [])
        if max(q for q, _ in lens) <= 256 and not prefix:
            jobs = [*jobs, Job("varlen", "auto", 16)]
        jobs = [job for job in jobs if (job.page if prefix else not job.page or job.kv == "bf16")]
        cases = {key: Job("hopper", "", *key).case(lens, poison=0.0) for key in {(job.page, job.kv) for job in jobs}}
        reference = cases[256, "bf16"]
        functions = torch_candidates(reference)
        theirs = list(functions)
        for job in jobs:
            functions[str(job)] = job.planned(cases[job.page, job.kv])[0]
        result = medians(functions)
        best = min(result[name] for name in theirs if name in result)
        shares = []
        for page in (256, 16) if prefix else (0,):
            ours = {kv: min(result.get(str(j), 1e9) for j in jobs if (j.page, j.kv) == (page, kv)) for kv in FORMATS}
            source = f"context in pages of {page}" if page else "fresh"
            shares.append(f"{source} {ours['bf16'] / ours['int8']:.2f}")
        print(f"== {shape}: " + " | ".join(f"{name} {result.pop(name):.1f}" for name in theirs if name in result))
        line = [
            f"{name} {t:.1f} ({best / t:.2f} {flops(reference) / t * 1e-6:.0f})"
            for name, t in sorted(result.items(), key=lambda item: item[1])
        ]
        for i in range(0, len(line), 5):
            print("   " + " | ".join(line[i : i + 5]))
        print(f"   int8, times as fast as our bf16: {', '.join(shares)}")
        sys.stdout.flush()


# -- store ------------------------------------------------------------------------------------------------------------


def time_store():
    copy = copy_bandwidth()
    print(f"copy {copy:.2f} TB/s")
    for kv, spec in FORMATS.items():
        for tokens in (16384, 2048, 256, 32, 1):  # the first of a process is measured too long if it is short
            sets = max(1, min(8, 65536 // tokens))
            size = {"num_q_heads": 16, "num_kv_heads": 8, "head_dim": 128, "num_blocks": sets * tokens // 16 + 2}
            context = make_context(spec, dtype=torch.bfloat16, device="cuda", poison_value=0.0, **size)
            layer = context.kv.layers[0]
            qkv = [torch.randn(tokens, 32 * 128, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
            slots = torch.randperm(sets * tokens, device="cuda", dtype=torch.int32).view(sets, tokens)
            weight = torch.ones(128, device="cuda", dtype=torch.bfloat16)
            cos_sin = torch.randn(32768, 128, device="cuda")
            positions = torch.randint(0, 32768, (tokens,), device="cuda", dtype=torch.int32)
            written = 2 * tokens * 8 * (256 if kv == "bf16" else 130)
            fused_heads = 24 if kv == "bf16" else 32
            moved = {"store": 2 * tokens * 8 * 256 + written}
            functions = {"store": store_call(layer, qkv, slots, tokens)}
            functions["fused"] = fused_call(layer, qkv, slots, weight, cos_sin, positions)
            moved["fused"] = tokens * (32 * 256 + fused_heads * 256 + 512) + written
            times = medians(functions)
            parts = [f"{n} {t:.1f} ({moved[n] / t * 1e-6:.2f})" for n, t in times.items()]
            print(f"{kv} {tokens:6} tokens, us (TB/s): " + "  ".join(parts), flush=True)


def store_call(layer, qkv, slots, tokens):
    turn = itertools.cycle(range(len(qkv)))

    def call():
        i = next(turn)
        heads = qkv[i].view(tokens, 32, 128)
        _kernels.store(layer, heads[:, 16:24], heads[:, 24:], slots[i])

    return call


def fused_call(layer, qkv, slots, weight, cos_sin, positions):
    turn = itertools.cycle(range(len(qkv)))

    def call():
        i = next(turn)
        _kernels.norm_rope_store(layer, qkv[i], weight, weight, 1e-6, cos_sin, positions, slots[i], True)

    return call


# -- host -------------------------------------------------------------------------------------------------------------


def time_host():
    """Microseconds of host time of one plan and of one layer's call."""
    for shape in ("8x32", "8x1024", "ragged", "chunks"):
        for job in (Job("hopper", "auto", 256), Job("flash", "auto", 256), Job("hopper", "auto", 256, "int8")):
            case = job.case(SHAPES[shape])
            backend = (HopperFlashBackend if job.kind == "hopper" else TritonFlashBackend)(
                case.context, HopperFlashConfig() if job.kind == "hopper" else TritonFlashConfig()
            )
            case.meta.plan = backend.plan_prefill(case.meta)
            out, results = torch.empty_like(case.q), []
            for function in (
                lambda b=backend, c=case: b.plan_prefill(c.meta),
                lambda b=backend, c=case, o=out: b.prefill(c.q, c.k, c.v, c.context.kv.layers[0], c.meta, o),
            ):
                function()
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(20):
                    function()
                results.append((time.perf_counter() - start) * 1e6 / 20)
                torch.cuda.synchronize()
            print(f"{shape} {job}: plan {results[0]:.0f} us, call {results[1]:.0f} us", flush=True)


if __name__ == "__main__":
    for stage in sys.argv[1:]:
        start = time.time()
        name, _, argument = stage.partition("=")
        if name == "compile":
            compile_all()
        elif name == "check":
            check_store()
            check()
        elif name in ("time", "tune"):
            time_shapes(argument.split(",") if argument else SHAPES, tune=name == "tune")
        elif name == "store":
            time_store()
        elif name == "host":
            time_host()
        print(f"-- {stage}: {time.time() - start:.0f} s", flush=True)
