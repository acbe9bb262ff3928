"""Prefill and store kernels on a GPU: compile in parallel, check against float64, time beside torch's kernels.

    python tests/gpu/prefill_bench.py compile check time store     # any of the stages, in this order

Times are medians of CUDA-graph replays, all candidates of a shape in turn, so that clocks and heat are the same for
all. Shapes are Qwen3-0.6B's: 16 query heads, 8 KV heads, head size 128, bf16 unless said.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

os.environ.pop("TRITON_INTERPRET", None)

import torch
import torch.nn.functional as F
from nanoserve_plugins.attention import hopper_flash, triton_flash, triton_varlen
from nanoserve_plugins.attention.hopper_flash import HopperFlashBackend, HopperFlashConfig, Variant
from nanoserve_plugins.attention.triton_flash import Tile, TritonFlashBackend, TritonFlashConfig
from nanoserve_plugins.attention.triton_varlen import TritonVarlenBackend, TritonVarlenConfig
from nanoserve_plugins.kvcache import _kernels
from nanoserve_plugins.kvcache.bf16 import BF16Config, BF16KVCache
from nanoserve_plugins.kvcache.int8 import Int8Config, Int8KVCache
from torch.nn.attention import SDPBackend, sdpa_kernel

from nanoserve.contracts.capabilities import Capabilities
from nanoserve.contracts.kvcache import KVCacheSpec
from nanoserve.testing.attention import make_case, make_context, relative_error

FORMATS = {
    "bf16": KVCacheSpec("bf16", "", Capabilities(), BF16Config, BF16KVCache),
    "int8": KVCacheSpec("int8", "", Capabilities(), Int8Config, Int8KVCache),
}
SM90 = (9, 0)

# -- candidates: name → (paged?, function(context) → function(case) → None) --------------------------------------------

TILES = {
    "64x32w4s2": Tile(64, 32, 4, 2),
    "64x32w4s3": Tile(64, 32, 4, 3),
    "64x64w4s2": Tile(64, 64, 4, 2),
    "64x64w4s3": Tile(64, 64, 4, 3),
    "128x64w8s3": Tile(128, 64, 8, 3),
    "128x128w8s2": Tile(128, 128, 8, 2),
    "128x128w8s3": Tile(128, 128, 8, 3),
}
VARIANTS = {
    "n128": Variant(128, 2, 2, False, False),
    "n128pp": Variant(128, 2, 2, False, True),
    "n128q1": Variant(128, 2, 1, False, False),
    "n64": Variant(64, 4, 1, True, False),
    "n64pp": Variant(64, 4, 1, True, True),
    "n64s5": Variant(64, 5, 1, True, False),
}


def backend_of(kind, context):
    if kind == "varlen":
        return TritonVarlenBackend(context, TritonVarlenConfig())
    if kind == "flash":
        return TritonFlashBackend(context, TritonFlashConfig(), SM90)
    backend = HopperFlashBackend(context, HopperFlashConfig(), SM90)
    backend.num_programs = 132
    return backend


def planned(kind, name, case):
    """A function that runs one layer of ``case`` with a fixed tile or variant ("auto": the backend's choice)."""
    backend = backend_of(kind, case.context)
    meta = case.meta
    if kind == "varlen":
        plan = None
    elif name == "auto":
        plan = backend.plan_prefill(meta)
    elif kind == "flash":
        plan = backend.plan(meta, TILES[name])
    else:
        name, _, dynamic = name.partition("/")
        plan = backend.plan(meta, VARIANTS[name])
        if dynamic:
            backend.num_programs = 1 << 30
    meta = replace(meta, plan=plan)
    out = torch.empty_like(case.q)
    return functools.partial(backend.prefill, case.q, case.k, case.v, case.context.kv.layers[0], meta, out), out


def build(lens, *, page=256, kv="bf16", paged=False, device="cuda", dtype=torch.bfloat16, heads=(16, 8), dim=128, seed=0,
          poison=1e4, max_model_len=32768):
    """lens: (query, context) per sequence. paged: read a fresh prompt from the cache too."""
    blocks = sum(-(-k // page) for _, k in lens) + 4
    context = make_context(FORMATS[kv], num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=dim, dtype=dtype,
                           device=device, block_size=page, num_blocks=blocks, max_model_len=max_model_len,
                           poison_value=poison)
    case = make_case(context, [k for _, k in lens], [q for q, _ in lens], seed=seed).fused()
    if paged:
        case.meta.has_prefix = True
    return case


# -- compile ----------------------------------------------------------------------------------------------------------

TIMED = [  # (kind, name, page or 0 for dense)
    *(("flash", name, page) for name in TILES for page in (0, 256)),
    *(("flash", name, 16) for name in ("64x32w4s2", "64x32w4s3", "64x64w4s3", "128x64w8s3")),
    *(("hopper", name, page) for name in VARIANTS for page in (0, 256)),
    *(("hopper", name, 16) for name in ("n128", "n64")),
    ("hopper", "n128", 64),
]
CHECKED = [  # kind, name, page, kv, dtype, heads, dim
    ("varlen", "auto", 16, "bf16", "bfloat16", (16, 8), 128),
    ("varlen", "auto", 16, "int8", "bfloat16", (16, 8), 128),
    ("flash", "auto", 16, "bf16", "bfloat16", (16, 8), 128),
    ("flash", "auto", 256, "int8", "bfloat16", (16, 8), 128),
    ("flash", "auto", 16, "int8", "float16", (16, 8), 128),
    ("flash", "auto", 64, "bf16", "float16", (6, 2), 96),
    ("flash", "auto", 32, "bf16", "bfloat16", (8, 1), 256),
    ("flash", "auto", 32, "bf16", "bfloat16", (4, 4), 64),
    ("hopper", "n128", 256, "bf16", "bfloat16", (16, 8), 128),
    ("hopper", "n128pp", 16, "bf16", "bfloat16", (16, 8), 128),
    ("hopper", "n64", 16, "bf16", "bfloat16", (16, 8), 128),
    ("hopper", "n64", 48, "bf16", "float16", (8, 2), 64),
    ("hopper", "n128", 64, "bf16", "float16", (6, 2), 128),
    ("hopper", "n128", 16, "int8", "bfloat16", (16, 8), 128),
    ("hopper", "n64", 256, "int8", "float16", (5, 5), 64),
]


def compile_job(job):
    """Launch ``job`` on the CPU with a stand-in driver, where a launch only compiles; the real launch finds the cache."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    class Driver:
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device=None: 0)

    triton.runtime.driver.set_active(Driver())
    if not hasattr(JITFunction, "really_run"):
        JITFunction.really_run = JITFunction.run
        JITFunction.run = lambda self, *a, grid, warmup, **k: self.really_run(*a, grid=grid, warmup=True, **k)
    torch.set_num_threads(1)
    start = time.time()
    kind, name, page, kv, dtype, heads, dim = job
    lens = {True: [(160, 160)], False: [(160, 200)]}
    for fresh in (True, False) if name == "auto" else (page == 0,):
        case = build(lens[fresh], page=page or 16, kv=kv, device="cpu", dtype=getattr(torch, dtype), heads=heads, dim=dim,
                     poison=0.0, max_model_len=4096)
        planned(kind, name, case)[0]()
    return job, time.time() - start


def compile_all():
    jobs = [(kind, name, page, "bf16", "bfloat16", (16, 8), 128) for kind, name, page in TIMED]
    jobs += CHECKED + [(*job[:2], 0, *job[3:]) for job in CHECKED if job[0] == "hopper"]
    jobs += [("flash", "auto", 256, "bf16", "bfloat16", (16, 8), 128), ("flash", "auto", 16, "int8", "bfloat16", (16, 8), 128)]
    start = time.time()
    with ProcessPoolExecutor(int(os.environ.get("JOBS", os.cpu_count()))) as pool:
        slowest = sorted(((seconds, job) for job, seconds in pool.map(compile_job, dict.fromkeys(jobs))), key=lambda x: x[0])
    print(f"compiled {len(jobs)} in {time.time() - start:.0f} s, slowest {slowest[-1]}")


# -- check ------------------------------------------------------------------------------------------------------------


def check(kinds=("varlen", "flash", "hopper")):
    rng = random.Random(0)
    worst = {}
    for kind, name, page, kv, dtype, heads, dim in CHECKED:
        if kind not in kinds:
            continue
        errors = []
        for trial in range(12):
            longest = 130 if kind == "varlen" else rng.choice([40, 300, 1500])
            lens = []
            for _ in range(rng.randint(1, 6)):
                num_k = rng.randint(1, longest)
                lens.append((num_k if trial % 3 == 0 else rng.randint(1, num_k), num_k))
            poison = 1e4 if kind == "hopper" else float("nan")
            case = build(lens, page=page, kv=kv, dtype=getattr(torch, dtype), heads=heads, dim=dim, seed=trial,
                         poison=poison, paged=trial % 2 == 1, max_model_len=2048)
            function, out = planned(kind, name, case)
            for _ in range(2):
                out.fill_(float("nan"))
                function()
            total, token = relative_error(out, case.expected())
            errors.append((total, token, lens))
        bad = max(errors, key=lambda e: e[0])
        worst[kind] = max(worst.get(kind, 0), bad[0])
        print(f"{kind:7}{name:8} page {page:3} {kv} {dtype:9}{str(heads):8} d{dim:3}: error {bad[0]:.2e} "
              f"(token {max(e[1] for e in errors):.1e})" + ("" if bad[0] < 5e-3 else f"  WRONG at {bad[2]}"), flush=True)


# -- time -------------------------------------------------------------------------------------------------------------


def graph_of(function, calls):
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    return graph


def medians(functions, budget_us=6000, rounds=6):
    """name → microseconds per call: median over rounds in which every candidate is replayed once."""
    graphs = {}
    for name, function in functions.items():
        try:
            function()
            torch.cuda.synchronize()
            start = time.perf_counter()
            function()
            torch.cuda.synchronize()
            calls = max(2, min(20, int(budget_us * 1e-6 / (time.perf_counter() - start))))
            graphs[name] = graph_of(function, calls), calls
        except Exception as error:
            print(f"    {name}: {type(error).__name__}: {str(error)[:120]}")
    times = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, (graph, calls) in graphs.items():
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            graph.replay()
            last.record()
            last.synchronize()
            times[name].append(first.elapsed_time(last) * 1000 / calls)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def torch_candidates(case):
    """cuDNN and flash on dense tensors of equal sequences, ``varlen_attn`` on ragged ones."""
    lens, scale = case.query_lens, case.context.scale
    q, k, v = case.q.contiguous(), case.k.contiguous(), case.v.contiguous()
    found = {}
    if len(set(lens)) == 1 and case.context_lens == lens:
        q, k, v = (x.unflatten(0, (len(lens), -1)).transpose(1, 2) for x in (q, k, v))

        def attend(backend):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)

        found["cudnn"] = functools.partial(attend, SDPBackend.CUDNN_ATTENTION)
        found["torch flash"] = functools.partial(attend, SDPBackend.FLASH_ATTENTION)
    else:
        from torch.nn.attention.varlen import varlen_attn

        group = q.shape[1] // k.shape[1]
        gathered = case.context.kv.gather(case.context.kv.layers[0], flat_slots(case)) if case.meta.has_prefix else (k, v)
        k, v = (x.repeat_interleave(group, 1).contiguous() for x in gathered)
        meta = case.meta
        found["varlen_attn"] = functools.partial(
            varlen_attn, q, k, v, meta.cu_seqlens_q, meta.cu_seqlens_k, meta.max_seqlen_q, meta.max_seqlen_k,
            window_size=(-1, 0), scale=scale,
        )
    return found


def flat_slots(case):
    page = case.context.block_size
    slots = [t[p // page] * page + p % page for t, n in zip(case.block_tables, case.context_lens) for p in range(n)]
    return torch.tensor(slots, device=case.q.device)


def flops(case):
    heads, dim = case.q.shape[1:]
    return sum(4 * heads * dim * (q * (k - q) + q * (q + 1) / 2) for q, k in zip(case.query_lens, case.context_lens))


RAGGED = [(n, n) for n in (random.Random(1).randint(16, 2048) for _ in range(64))]
CHUNKED = [(512, 512 + n) for n in (7000, 7400, 7700, 7900)]
SHAPES = {
    "8x32": [(32, 32)] * 8,
    "8x128": [(128, 128)] * 8,
    "8x256": [(256, 256)] * 8,
    "8x512": [(512, 512)] * 8,
    "8x1024": [(1024, 1024)] * 8,
    "16x1024": [(1024, 1024)] * 16,
    "4x4096": [(4096, 4096)] * 4,
    "1x16384": [(16384, 16384)],
    "ragged64": RAGGED,
    "4x512@7.5k": CHUNKED,
}


def time_shapes(names, wanted=None):
    for shape in names:
        lens = SHAPES[shape]
        cases = {page: build(lens, page=page, paged=True) for page in (16, 64, 256)}
        dense = build(lens, page=256)
        dense.meta.has_prefix = any(k > q for q, k in lens)
        functions = torch_candidates(dense)
        if max(q for q, _ in lens) <= 256:
            functions["varlen p16"] = planned("varlen", "", cases[16])[0]
        for kind, name, page in wanted or TIMED:
            if page == 0 and dense.meta.has_prefix:
                continue
            case = dense if page == 0 else cases[page]
            functions[f"{kind[0]} {name} {'dense' if page == 0 else f'p{page}'}"] = planned(kind, name, case)[0]
            if kind == "hopper" and name == "n128" and page in (0, 256):
                functions[f"h {name}/dyn p{page}"] = planned(kind, name + "/dyn", case)[0]
        for page in (16, 256):
            functions[f"f auto p{page}"] = planned("flash", "auto", cases[page])[0]
            functions[f"h auto p{page}"] = planned("hopper", "auto", cases[page])[0]
        functions["h auto"] = planned("hopper", "auto", dense)[0]
        functions["f auto"] = planned("flash", "auto", dense)[0]
        if max(k for _, k in lens) > max(q for q, _ in lens):
            quantized = build(lens, page=16, kv="int8")
            functions["h auto int8"] = planned("hopper", "auto", quantized)[0]
            functions["f auto int8"] = planned("flash", "auto", quantized)[0]
        result = medians(functions)
        best = min((t for n, t in result.items() if n in ("cudnn", "torch flash", "varlen_attn")), default=float("nan"))
        print(f"== {shape}: " + " | ".join(f"{n} {result[n]:.1f}" for n in ("cudnn", "torch flash", "varlen_attn") if n in result))
        ours = sorted((t, n) for n, t in result.items() if n[:2] in ("f ", "h ", "va"))
        line = [f"{n} {t:.1f} ({best / t:.2f} {flops(dense) / t * 1e-6:.0f})" for t, n in ours]
        for i in range(0, len(line), 5):
            print("   " + " | ".join(line[i : i + 5]))
        sys.stdout.flush()


# -- store ------------------------------------------------------------------------------------------------------------


def store_kernels():
    big = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(big)
    copy = 2 * big.numel() / medians({"copy": lambda: other.copy_(big)})["copy"] * 1e-6
    print(f"copy {copy:.2f} TB/s")
    del big, other
    for kv, spec in FORMATS.items():
        for tokens in (1, 32, 256, 2048, 16384):
            sets = max(1, min(8, 65536 // tokens))
            context = make_context(spec, num_q_heads=16, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16, device="cuda",
                                   block_size=16, num_blocks=sets * tokens // 16 + 2, poison_value=0.0)
            layer = context.kv.layers[0]
            qkv = [torch.randn(tokens, 32 * 128, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
            slots = torch.randperm(sets * tokens, device="cuda", dtype=torch.int32).view(sets, tokens)
            weight = torch.ones(128, device="cuda", dtype=torch.bfloat16)
            cos_sin = torch.randn(32768, 128, device="cuda")
            positions = torch.randint(0, 32768, (tokens,), device="cuda", dtype=torch.int32)
            turn = itertools.count()

            def store():
                i = next(turn) % sets
                heads = qkv[i].view(tokens, 32, 128)
                _kernels.store(layer, heads[:, 16:24], heads[:, 24:], slots[i])

            def fused():
                i = next(turn) % sets
                _kernels.norm_rope_store(layer, qkv[i], weight, weight, 1e-6, cos_sin, positions, slots[i])

            times = medians({"store": store, "fused": fused})
            written = 2 * tokens * 8 * (256 if kv == "bf16" else 130)
            moved = {"store": 2 * tokens * 8 * 256 + written,
                     "fused": tokens * (32 * 256 + 24 * 256 + (8 * 256 if kv == "int8" else 0) + 512) + written}
            print(f"{kv} {tokens:6} tokens: " + "  ".join(
                f"{n} {t:.1f} us {moved[n] / t * 1e-6:.2f} TB/s ({moved[n] / t * 1e-6 / copy:.0%})" for n, t in times.items()))


if __name__ == "__main__":
    for stage in sys.argv[1:]:
        start = time.time()
        stage, _, argument = stage.partition("=")
        if stage == "compile":
            compile_all()
        elif stage == "check":
            check(argument.split(",") if argument else ("varlen", "flash", "hopper"))
        elif stage == "time":
            time_shapes(argument.split(",") if argument else SHAPES)
        elif stage == "store":
            store_kernels()
        print(f"-- {stage} {argument}: {time.time() - start:.0f} s", flush=True)
