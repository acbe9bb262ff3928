"""Decode kernels on a GPU, in the variants that no option chooses too: compile in parallel, check against float64.

    python tests/gpu/decode_bench.py compile check fuzz time     # any of the stages, in this order
    python tests/gpu/decode_bench.py time small int8             # shapes and variants of SWEEPS, compiled first
    python tests/gpu/decode_bench.py time names=v2,split,split:33:1

``nanoserve task=bench_kernels phase=decode`` times every backend as it is.
"""

from __future__ import annotations

import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from nanoserve.contracts.attention import AttentionContext, DecodeMetadata
from nanoserve.contracts.capabilities import Capabilities
from nanoserve.contracts.kvcache import KVCacheShape, KVCacheSpec
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
    """``v1``, ``v2``, ``fused``, ``split``, ``hopper[:warps:programs:merge]``, ``split:programs:merge``,
    ``piece:programs:merge`` (split, a program per piece); merge: 1 in the kernel, 0 in a second one. After the numbers
    of split and piece, fields of ``Launch`` to set: ``piece:66:1:num_stages=2:max_registers=0``."""
    kind, *args = name.split(":")
    if kind == "v1":
        return paged_v1.PagedV1Backend(context, paged_v1.PagedV1Config())
    if kind == "fused":
        return int8_fused.Int8FusedBackend(context, int8_fused.Int8FusedConfig())
    if kind == "v2":
        return paged_v2.PagedV2Backend(context, paged_v2.PagedV2Config())
    fields = {key: int(value) or None for key, _, value in (arg.partition("=") for arg in args if "=" in arg)}
    numbers = [int(arg) for arg in args if "=" not in arg]
    if kind == "hopper":
        backend = hopper_decode.HopperDecodeBackend(context, hopper_decode.HopperDecodeConfig())
        if numbers:
            backend.launch = lambda num_seqs: (*numbers[:2], bool(numbers[2]))
    else:
        backend = paged_v2_split.PagedV2SplitBackend(context, paged_v2_split.PagedV2SplitConfig())
        if numbers:
            by_piece, fused_merge = kind == "piece", bool(numbers[1])
            num_stages, max_registers = (1, 176) if backend.quantized else (3, 168 if by_piece else None)
            launch = paged_v2_split.Launch(numbers[0], by_piece, fused_merge, num_stages, max_registers)
            launch = launch._replace(**fields)
            backend.launch = lambda num_seqs: (
                launch if by_piece else launch._replace(programs=_kernels.even_programs(numbers[0], num_seqs))
            )
    if numbers:
        width, programs = backend.work.partial.shape[-1], numbers[-2]
        backend.work = _kernels.WorkList(context, width, programs)
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
            str(kernel)
            for kernel in compile_launches(launch, 90)
            if kernel.name not in ("_plan", "_plan_pieces", "_merge")
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


def time_stage(fmt, shapes, names, rounds=15):
    """µs of a layer, as ``task=bench_kernels`` measures them: the plan and every merge included, K and V cold."""
    from nanoserve.config import EngineConfig
    from nanoserve.registry import Registry
    from nanoserve.tasks.kernels import measure
    from nanoserve.tasks.kernels.shapes import KernelShape

    config = EngineConfig.from_kwargs(device="cuda", dtype="bfloat16", kv=fmt)
    bench = measure.Bench(config, Registry.discover(), measure.Heads(HQ, HKV, D), fmt, measure.Effort(rounds, 2.0))
    bench.capturable = bench._attends_to_all = lambda name: True
    measure.make_builder = lambda registry, settings, context: lambda name: make_backend(name, context)
    print(fmt, *(f"{i}: {name}" for i, name in enumerate(names)), sep="\n")
    print("shape      ", *(f"{i:>8}" for i in range(len(names))))
    for shape in shapes:
        timings = bench.measure(KernelShape.parse(shape, "decode"), names, with_torch=False)
        cells = ["wrong" if t.wrong else t.failed or f"{t.us:.1f}" for t in timings.values()]
        print(f"{shape:11}", *(f"{cell:>8}" for cell in cells), flush=True)


def sweep_jobs(fmt, shapes, names):
    batches = {int(shape.removeprefix("ragged").partition("x")[0]) for shape in shapes}
    return {(name, fmt, 16, batch, HEADS[0]) for name in names for batch in batches}


# -- stages ------------------------------------------------------------------------------------------------------------

CHECKS = {
    "bf16": [
        *("v1", "v2", "split", "split:33:0", "split:33:1", "piece:49:1", "piece:66:1:num_stages=2:max_registers=0"),
        *("hopper", "hopper:4:33:0", "hopper:4:33:1", "hopper:1:198:1"),
    ],
    "int8": [
        *("fused", "v2", "split", "split:88:0", "split:88:1", "piece:88:1"),
        *("hopper", "hopper:2:132:0", "hopper:2:132:1"),
    ],
}
FUZZ = {"bf16": ("v1", "v2", "split", "hopper"), "int8": ("fused", "v2", "split", "hopper")}

SWEEPS = {  # paged_v2_split as it is, which is one of the others at every batch
    "time": (
        "bf16",
        [
            *("16x1024", "32x1024", "64x1024", "96x1024", "128x1024", "256x1024", "32x4096", "64x8192"),
            *("ragged32", "ragged64", "ragged256"),
        ],
        ["v2", "split", "split:33:1", "piece:49:1", "piece:66:1:num_stages=2:max_registers=0"],
    ),
    "small": (
        "bf16",
        ["1x1024", "8x511", "1x4096", "1x32768", "4x4096", "16x1024", "ragged8", "ragged16"],
        ["v2", "split", "split:33:0", "split:33:1", "piece:33:0"],
    ),
    "int8": (
        "int8",
        [
            *("1x32768", "8x511", "16x1024", "32x1024", "32x4096", "64x1024", "128x1024", "256x1024", "64x8192"),
            *("ragged32", "ragged64", "ragged256"),
        ],
        ["v2", "split", "split:181:0", "piece:181:1", "piece:363:1"],
    ),
}

if __name__ == "__main__":
    stages = sys.argv[1:]
    only = [name for stage in stages if stage.startswith("names=") for name in stage[6:].split(",")]
    sweeps = [SWEEPS[stage] for stage in stages if stage in SWEEPS]
    sweeps = [(fmt, shapes, only or names) for fmt, shapes, names in sweeps]
    if sweeps:
        compile_stage(sorted(set().union(*(sweep_jobs(*sweep) for sweep in sweeps)), key=str))
    if "compile" in stages:
        jobs = set()
        for fmt, names in CHECKS.items():
            jobs |= {
                (name, fmt, bs, b, HEADS[0]) for name in names for bs in (16, 32, 64, 256) for b in (1, 5, 40, 130)
            }
        for fmt, names in FUZZ.items():
            jobs |= {
                (name, fmt, bs, b, heads) for name in names for heads, bs in fuzz_jobs(name) for b in (1, 5, 10, 20)
            }
        compile_stage(sorted(jobs, key=str))
    if "check" in stages:
        check_stage(CHECKS)
    if "fuzz" in stages:
        fuzz_stage()
    for sweep in sweeps:
        time_stage(*sweep)
