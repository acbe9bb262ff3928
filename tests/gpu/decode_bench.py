"""Decode kernels on a GPU: compile in parallel, check against float64, time beside torch's cuDNN on dense tensors.

    python tests/gpu/decode_bench.py compile check fuzz time     # any of the stages, in this order

Shapes are Qwen3-0.6B's: 16 query heads, 8 KV heads, head size 128. A time is that of one layer, in a graph of several
layers on disjoint random blocks that begins with the step's plan.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
from gpu.timing import GraphTimer, copy_bandwidth, interleaved
from torch.nn.attention import SDPBackend, sdpa_kernel

from nanoserve.contracts.attention import AttentionContext, DecodeMetadata
from nanoserve.contracts.capabilities import Capabilities
from nanoserve.contracts.kvcache import KVCacheShape, KVCacheSpec, LayerCache
from nanoserve.testing.attention import make_case, make_context, relative_error
from nanoserve_plugins.attention import _kernels, hopper_decode, int8_fused, paged_v1, paged_v2, paged_v2_split
from nanoserve_plugins.kvcache.bf16 import BF16Config, BF16KVCache
from nanoserve_plugins.kvcache.int8 import Int8Config, Int8KVCache

FORMATS = {
    "bf16": KVCacheSpec("bf16", "", Capabilities(), BF16Config, BF16KVCache),
    "int8": KVCacheSpec("int8", "", Capabilities(), Int8Config, Int8KVCache),
}
HQ, HKV, D = 16, 8, 128
SMS = 132


# -- candidates -------------------------------------------------------------------------------------------------------


def make_backend(name, context):
    """``v1``, ``v2``, ``fused``, ``split[:programs:merge]``, ``hopper[:warps:programs:merge]``; merge: 1 in the kernel,
    0 in a second one."""
    kind, *args = name.split(":")
    if kind == "v1":
        return paged_v1.PagedV1Backend(context, paged_v1.PagedV1Config())
    if kind == "fused":
        return int8_fused.Int8FusedBackend(context, int8_fused.Int8FusedConfig())
    if kind == "v2":
        return paged_v2.PagedV2Backend(context, paged_v2.PagedV2Config())
    *numbers, merge = [int(arg) for arg in args] or [0]
    if kind == "split":
        backend = paged_v2_split.PagedV2SplitBackend(context, paged_v2_split.PagedV2SplitConfig())
    else:
        backend = hopper_decode.HopperDecodeBackend(context, hopper_decode.HopperDecodeConfig())
    if numbers:
        backend.launch = lambda num_seqs: (*numbers, bool(merge))
        backend.work = _kernels.WorkList(context, backend.work.partial.shape[-1], numbers[-1], backend.work.min_steps)
    return backend


# -- compile ----------------------------------------------------------------------------------------------------------


def compile_job(job):
    """Compile what ``job`` = (candidate, format, block size, batch, heads) launches, so that a launch finds it."""
    from helpers.triton_compile import compile_launches

    name, fmt, block_size, batch, (hq, hkv, d, dtype) = job
    cpu = torch.device("cpu")
    kv = FORMATS[fmt].factory(FORMATS[fmt].config(), KVCacheShape(1, hkv, d, block_size, dtype, cpu))
    kv.allocate(4)
    context = AttentionContext(hq, hkv, d, d**-0.5, dtype, cpu, block_size, 256, 1, 1, kv)
    _kernels.GPU.of = lambda device: _kernels.GPU(SMS, (9, 0))
    backend = make_backend(name, context)
    q = torch.zeros(batch, hq, d, dtype=dtype)
    table = torch.zeros(batch, 64, dtype=torch.int32)
    meta = DecodeMetadata(batch, torch.zeros(batch, dtype=torch.int32), table, table[:, 0], (), 0)

    def launch():
        meta.plan = backend.plan_decode(meta)
        backend.decode(q, kv.layers[0], meta, torch.empty_like(q))

    try:
        return f"{fmt} {name} {job[2:]}: " + "; ".join(
            str(kernel) for kernel in compile_launches(launch, 90) if kernel.name not in ("_plan", "_merge")
        )
    except Exception as error:
        return f"{fmt} {name} {job[2:]}: {type(error).__name__} {str(error)[:300]}"


def compile_stage(jobs):
    start = time.time()
    with ProcessPoolExecutor(min(len(os.sched_getaffinity(0)), 16)) as pool:
        for line in pool.map(compile_job, jobs):
            if line.endswith(": ") or "Error" in line or " 0 B stack" not in line or os.environ.get("VERBOSE"):
                print(line)
    print(f"compiled {len(jobs)} in {time.time() - start:.0f} s", flush=True)


# -- check ------------------------------------------------------------------------------------------------------------


def check_stage(candidates, seeds=4):
    """‖out − ref‖ / ‖ref‖ over ragged batches in NaN-poisoned caches; twice, since the second step reuses scratch."""
    for fmt, names in candidates.items():
        worst = dict.fromkeys(names, 0.0)
        for seed in range(seeds):
            rng = random.Random(seed)
            block_size = (16, 64, 256, 32)[seed % 4]
            longest = (300, 3000, 1000, 40)[seed % 4]
            lens = [rng.randint(0, longest) for _ in range((1, 5, 40, 130)[seed % 4])]
            lens[0] = longest
            blocks = sum(-(-n // block_size) + 1 for n in lens)
            context = make_context(
                FORMATS[fmt],
                num_q_heads=HQ,
                num_kv_heads=HKV,
                head_dim=D,
                dtype=torch.bfloat16,
                device="cuda",
                block_size=block_size,
                num_blocks=blocks,
                max_num_seqs=256,
            )
            case = make_case(context, lens, seed=seed)
            live = [i for i, n in enumerate(lens) if n]
            expected = case.expected()[live]
            for name in names:
                backend = make_backend(name, context)
                for _ in range(2):
                    total, token = relative_error(case.run(backend)[live], expected)
                    worst[name] = max(worst[name], total, token / 3)
        print(fmt, " ".join(f"{name}={error:.4f}" for name, error in worst.items()), flush=True)


HEADS = [  # query heads, KV heads, head size, dtype
    (16, 8, 128, torch.bfloat16),
    (32, 8, 128, torch.float16),
    (8, 1, 128, torch.bfloat16),
    (6, 2, 64, torch.float16),
    (4, 4, 64, torch.bfloat16),
    (4, 2, 96, torch.bfloat16),
    (4, 2, 256, torch.bfloat16),
    (10, 5, 32, torch.float16),
]


def fuzz_jobs(name):
    return [(HEADS[i], (16, 64, 256, 48)[i % 4]) for i in range(5 if name == "hopper" else 8)]


def fuzz_stage(per_heads=28):
    """Random ragged batches, 28 for each of the kernel's kinds of heads, at default settings; NaN-poisoned caches."""
    for fmt, names in FUZZ.items():
        for name in names:
            worst, count = 0.0, 0
            for heads, block_size in fuzz_jobs(name):
                rng = random.Random(str((fmt, name, heads)))
                hq, hkv, d, dtype = heads
                context = make_context(
                    FORMATS[fmt],
                    num_q_heads=hq,
                    num_kv_heads=hkv,
                    head_dim=d,
                    dtype=dtype,
                    device="cuda",
                    block_size=block_size,
                    num_blocks=16000 // block_size,
                    max_num_seqs=64,
                )
                backend = make_backend(name, context)
                for seed in range(per_heads):
                    longest = rng.choice([20, 200, 700, 3000])
                    lens = [rng.randint(0, longest) for _ in range(rng.randint(1, min(40, 8000 // longest)))]
                    lens[-1] = longest
                    case = make_case(context, lens, seed=seed)
                    if seed % 2:
                        case = case.fused()
                    live = [i for i, n in enumerate(lens) if n]
                    total, token = relative_error(case.run(backend)[live], case.expected()[live])
                    worst, count = max(worst, total, token / 3), count + 1
            print(f"fuzz {fmt} {name}: {count} shapes, error {worst:.4f}", flush=True)


# -- time -------------------------------------------------------------------------------------------------------------


class Pool:
    """Random K and V of ``gigabytes``, seen through any block size; layers are disjoint random sets of its blocks."""

    def __init__(self, gigabytes, fmt):
        self.fmt, self.rows = fmt, int(gigabytes * 2**30) // (2 * D * (1 if fmt == "int8" else 2))
        self.rows -= self.rows % (256 * HKV)
        if fmt == "int8":
            self.data = [torch.empty(self.rows, D, dtype=torch.int8, device="cuda").random_(-127, 128) for _ in "kv"]
            self.scales = [torch.rand(self.rows, device="cuda").add_(0.5).mul_(0.016).half() for _ in "kv"]
        else:
            self.data = [torch.empty(self.rows, D, dtype=torch.bfloat16, device="cuda").normal_() for _ in "kv"]
            self.scales = []

    def context_and_layers(self, lens, block_size):
        """The engine's context, then (layer, metadata, q, out) per layer."""
        layer = LayerCache(
            self.fmt,
            *(x.view(-1, HKV, block_size, D) for x in self.data),
            *(x.view(-1, HKV, block_size) for x in self.scales),
        )
        kv = FORMATS[self.fmt].factory(
            FORMATS[self.fmt].config(), KVCacheShape(1, HKV, D, block_size, torch.bfloat16, torch.device("cuda"))
        )
        kv.layers = [layer]
        context = AttentionContext(
            HQ, HKV, D, D**-0.5, torch.bfloat16, torch.device("cuda"), block_size, 512, 512, 65536, kv
        )
        needed = [-(-n // block_size) for n in lens]
        num_blocks = layer.k.shape[0]
        num_layers = max(2, min(28, num_blocks // sum(needed)))
        ids = torch.randperm(num_blocks, device="cuda", dtype=torch.int64).int()
        cuts = torch.tensor([0, *needed]).cumsum(0).tolist()
        columns = torch.arange(max(needed), device="cuda")
        lengths = torch.tensor(lens, dtype=torch.int32, device="cuda")
        index = (torch.tensor(cuts[:-1], device="cuda")[:, None] + columns).clamp_max_(cuts[-1] - 1)
        steps = []
        for i in range(num_layers):
            table = ids[(i * cuts[-1]) % (num_blocks - cuts[-1] + 1) :][index].contiguous()
            meta = DecodeMetadata(len(lens), lengths, table, table[:, 0], tuple(lens), max(lens))
            q = torch.randn(len(lens), HQ, D, device="cuda", dtype=torch.bfloat16)
            steps.append((layer, meta, q, torch.empty_like(q)))
        return context, steps


def timer_of(name, context, steps):
    backend = make_backend(name, context)

    def prepare():
        plan = backend.plan_decode(steps[0][1])
        for _, meta, _, _ in steps:
            meta.plan = plan

    return GraphTimer(
        [functools.partial(backend.decode, q, layer, meta, out) for layer, meta, q, out in steps], prepare
    )


def cudnn_timer(pool, batch, context_len):
    size = batch * HKV * context_len
    layers = max(2, min(28, pool.rows // size))
    q = torch.randn(batch, HQ, 1, D, device="cuda", dtype=torch.bfloat16)
    views = [
        [x[(i * size) % (pool.rows - size + 1) :][:size].view(batch, HKV, context_len, D) for x in pool.data]
        for i in range(layers)
    ]

    def call(k, v):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return GraphTimer([functools.partial(call, k, v) for k, v in views])


def ragged(n):
    rng = random.Random(n)
    return [rng.randint(16, 2048) for _ in range(n)]


SHAPES = {
    "1x1024": [1024],
    "8x511": [511] * 8,
    "1x4096": [4096],
    "1x32768": [32768],
    "16x1024": [1024] * 16,
    "32x1024": [1024] * 32,
    "32x4096": [4096] * 32,
    "64x1024": [1024] * 64,
    "256x1024": [1024] * 256,
    "64x8192": [8192] * 64,
    "128x1024": [1024] * 128,
    "ragged32": ragged(32),
    "ragged64": ragged(64),
    "ragged256": ragged(256),
}


def time_stage(plans, gigabytes=8.0, rounds=9):
    """plans: (format, block size, shape, candidates). Prints microseconds, and TB/s of the fastest."""
    copy = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {copy:.3f} TB/s", flush=True)
    results = []
    pools = {}
    for fmt, block_size, shape, names in plans:
        if fmt not in pools:
            pools.clear()
            torch.cuda.empty_cache()
            pools[fmt] = Pool(gigabytes, fmt)
        lens = SHAPES[shape]
        context, steps = pools[fmt].context_and_layers(lens, block_size)
        timers = {}
        for name in names:
            try:
                if name == "cudnn":
                    timers[name] = cudnn_timer(pools[fmt], len(lens), lens[0])
                else:
                    timers[name] = timer_of(name, context, steps)
            except Exception as error:
                print(fmt, shape, name, type(error).__name__, str(error)[:200])
        times = interleaved(timers, rounds)
        size = sum(lens) * HKV * 2 * (D + 2 if fmt == "int8" else 2 * D)
        best = min(time for name, time in times.items() if name != "cudnn")
        row = " ".join(f"{name}={time:.1f}" for name, time in times.items())
        print(
            f"{fmt} bs{block_size} {shape} [{size / best / 1e6:.2f} TB/s, {size / best / 1e6 / copy:.0%}]: {row}",
            flush=True,
        )
        results.append({"format": fmt, "block_size": block_size, "shape": shape, "copy": copy, "us": times})
        for timer in timers.values():
            timer.graph.reset()
        del timers, steps, context
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "decode.json").write_text(json.dumps(results))


CUDNN = {"1x1024", "8x511", "1x4096", "1x32768", "32x1024", "32x4096", "256x1024", "64x8192"}
PLANS = [("bf16", 16, shape, ["cudnn"] * (shape in CUDNN) + ["v2", "split", "hopper"]) for shape in SHAPES]
PLANS += [("bf16", 256, shape, ["split", "hopper"]) for shape in ("1x1024", "8x511", "32x1024", "256x1024")]
PLANS += [("int8", 16, shape, ["v2", "split", "hopper"]) for shape in SHAPES]
PLANS += [("int8", 256, shape, ["split", "hopper"]) for shape in ("1x1024", "8x511", "32x1024", "256x1024")]
CHECKS = {
    "bf16": [
        "v1",
        "v2",
        "split",
        "split:33:0",
        "split:33:1",
        "hopper",
        "hopper:4:33:0",
        "hopper:4:33:1",
        "hopper:1:198:1",
    ],
    "int8": ["fused", "v2", "split", "split:88:0", "split:88:1", "hopper", "hopper:2:132:0", "hopper:2:132:1"],
}
FUZZ = {"bf16": ("v1", "v2", "split", "hopper"), "int8": ("fused", "v2", "split", "hopper")}

if __name__ == "__main__":
    stages = sys.argv[1:]
    if "compile" in stages:
        jobs = {(name, fmt, bs, len(SHAPES[shape]), HEADS[0]) for fmt, bs, shape, names in PLANS for name in names}
        for fmt, names in CHECKS.items():
            jobs |= {
                (name, fmt, bs, b, HEADS[0]) for name in names for bs in (16, 32, 64, 256) for b in (1, 5, 40, 130)
            }
        for fmt, names in FUZZ.items():
            jobs |= {
                (name, fmt, bs, b, heads) for name in names for heads, bs in fuzz_jobs(name) for b in (1, 5, 10, 20)
            }
        compile_stage(sorted((job for job in jobs if job[0] != "cudnn"), key=str))
    if "check" in stages:
        check_stage(CHECKS)
    if "fuzz" in stages:
        fuzz_stage()
    if "time" in stages:
        time_stage(PLANS)
