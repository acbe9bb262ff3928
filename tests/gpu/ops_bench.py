"""The ops of a decode step on a GPU: right against float64, then timed in graphs beside torch and cuBLAS.

    python tests/gpu/ops_bench.py compile check sweep chain elementwise sample    # any of the stages, in this order

Shapes are Qwen3-0.6B's. Products are timed over 28 layers of weights, so that nothing is found in the L2. ``sweep``
tries tiles; ``chain`` runs with the best of them, or without a sweep with those of ``tile_for``. JSON goes to
$OUT/ops.json.
"""
# ruff: noqa: B023 (a timer calls its functions when it is made, and never again)

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F

from nanoserve.engine.sampler import SamplingPlan, sample_reference
from nanoserve.ops import _elementwise, _skinny, linear
from nanoserve.ops import sample as sample_module
from nanoserve.ops._skinny import Tile, skinny_linear
from nanoserve.ops.activation import silu_and_mul, silu_and_mul_reference
from nanoserve.ops.decode_inputs import DecodeInputs, decode_inputs, decode_inputs_reference
from nanoserve.ops.norm import add_rms_norm, rms_norm, rms_norm_reference
from nanoserve.tasks.kernels.timing import GraphTimer, copy_bandwidth, interleaved

BF16 = torch.bfloat16
EPS = 1e-6
LAYERS, HIDDEN, VOCAB = 28, 1024, 151936
SHAPES = {
    "qkv": (4096, 1024),
    "o": (1024, 2048),
    "gate_up": (6144, 1024),
    "down": (1024, 3072),
    "lm_head": (VOCAB, 1024),
}
MODULES = (_elementwise, _skinny, sample_module)
#: CHUNK, CHUNKS and CHUNK_WARPS of ``nanoserve.ops.sample`` to try.
CHUNKINGS = [(1024, 4, 8), (1024, 4, 4), (1024, 8, 8), (512, 8, 4), (256, 16, 8), (256, 16, 4), (256, 8, 2)]
#: Temperature, top_p, min_p, top_k.
SAMPLINGS = {
    "temperature": (0.7, 1, 0, VOCAB),
    "top_k 20, top_p .95": (0.6, 0.95, 0, 20),
    "top_k 200": (1, 1, 0, 200),
    "min_p .05": (1, 1, 0.05, VOCAB),
    "top_p .9": (0.7, 0.9, 0, VOCAB),
    "top_p .9, hot": (20, 0.9, 0, VOCAB),
}


def sampling(batch, temperature=0.7, top_p=1.0, min_p=0.0, top_k=VOCAB):
    """``SamplingPlan.params`` with random numbers."""
    params = torch.tensor([1 / temperature, top_p, min_p, top_k, 0.5], device="cuda")[:, None].repeat(1, batch)
    params[4].uniform_(1e-6, 1 - 1e-6)
    return params


def chunking(values):
    return mock.patch.multiple(sample_module, **dict(zip(("CHUNK", "CHUNKS", "CHUNK_WARPS"), values, strict=True)))


def pdl(value):
    """Patches for programmatic dependent launch on or off."""
    return [mock.patch.object(module, "supports_pdl", lambda x: value) for module in MODULES]


# -- tiles to try -----------------------------------------------------------------------------------------------------


def candidates(op, tokens):
    """Tiles for a bucket of ``tokens``, in the order of what was fastest."""
    k = SHAPES[op][1]
    if op == "lm_head":
        pairs = [(16, 2), (16, 4), (32, 4), (32, 8)]
    else:
        pairs = [(16, 8), (16, 4), (16, 16), (32, 8), (32, 16)][: 3 if tokens == 64 else 5]
    tiles = []
    for rows, warps in pairs:
        block_k = min(2048 // rows, 128 if tokens <= 16 else 64)
        while k % (warps * block_k):
            block_k //= 2
        registers = rows * block_k // 64  # of one chunk of W
        tiles.append(Tile(rows, warps, block_k, max(1, 112 // registers), 3 if tokens < 32 else 1))
    own = _skinny.tile_for(tokens, *SHAPES[op])
    return tiles if own is None or own in tiles else [own, *tiles]


def flags(op, norm=True):
    return {"qkv": {"norm": norm}, "gate_up": {"norm": norm, "swiglu": True}, "lm_head": {}}.get(op, {"add": True})


def products():
    """(op, bucket of tokens, with norm) that are tuned."""
    for tokens in (8, 16, 32, 64):
        for op in SHAPES:
            norms = (False,)
            if op in ("qkv", "gate_up"):
                norms = (True, False) if tokens <= 32 else (False,)
            for norm in norms:
                yield op, tokens, norm


def out_shape(op, tokens):
    n = SHAPES[op][0]
    return tokens, n // 2 if op == "gate_up" else n


def call_product(op, x, weight, out, tile, norm_weight, norm):
    options = dict(flags(op, norm))
    options["norm"] = (norm_weight, EPS) if options.pop("norm", False) else None
    return skinny_linear(x, weight, out, tile, **options)


# -- compile ----------------------------------------------------------------------------------------------------------


def compile_job(job):
    """In a worker: what the real launch will find in Triton's cache."""
    from helpers.triton_compile import compile_launches

    kind, *args = job
    for patch in pdl(True):
        patch.start()
    if kind == "product":
        op, tokens, norm, tile = args
        n, k = SHAPES[op]
        out = torch.empty(out_shape(op, tokens), dtype=torch.float32 if op == "lm_head" else BF16)
        x, weight, norm_weight = (
            torch.empty(tokens, k, dtype=BF16),
            torch.empty(n, k, dtype=BF16),
            torch.empty(k, dtype=BF16),
        )

        def call():
            call_product(op, x, weight, out, tile, norm_weight, norm)
    elif kind == "check":
        dtype, tokens, n, k, function = args
        inputs = [torch.empty(shape, dtype=dtype) for shape in ((tokens, k), (n, k), (n,), (k,))]

        def call():
            call_check(function, *inputs, torch.empty(tokens, n, dtype=wide(dtype)))
    else:
        logits = torch.empty(8, VOCAB, dtype=args[0])
        chunking(args[1] if args[1:] else CHUNKINGS[0]).start()
        vectors = [torch.empty(8, dtype=torch.int32) for _ in range(2)]
        call = {
            "sample": lambda: sample_module.sample(logits, torch.empty(5, 8), *vectors),
            "norm": lambda: _elementwise.rms_norm(logits[:, :HIDDEN], logits[0, :HIDDEN], EPS, logits[:, :HIDDEN]),
        }[kind]
    try:
        return f"{job}: " + "; ".join(map(str, compile_launches(call, 90)))
    except Exception as error:
        return f"{job}: {type(error).__name__} {str(error)[:300]}"


def compile_stage(stages):
    """What the other ``stages`` need."""
    start, jobs = time.time(), []
    if {"sweep", "chain"} & {*stages}:
        jobs += [("product", op, t, norm, tile) for op, t, norm in products() for tile in candidates(op, t)]
    if "check" in stages:
        jobs += [("check", *case) for case in check_cases()]
    jobs += [("sample", dtype, values) for dtype in (BF16, torch.float32) for values in CHUNKINGS]
    with ProcessPoolExecutor(min(len(os.sched_getaffinity(0)), 16)) as pool:
        for line in pool.map(compile_job, jobs):
            if " 0 B stack" not in line or "Error" in line:
                print(line)
    print(f"compiled {len(jobs)} in {time.time() - start:.0f} s", flush=True)


# -- check ------------------------------------------------------------------------------------------------------------


def error_of(ours, reference):
    if not ours.isfinite().all():
        return float("inf")
    return ((ours.double() - reference).norm() / reference.norm()).item()


def randn(*shape, scale=1.0, dtype=BF16):
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def expected_product(op, x, weight, residual, norm_weight, norm):
    h = x.double()
    if flags(op, norm).get("norm"):
        h = rms_norm_reference(h, norm_weight.double(), EPS)
    y = h @ weight.double().T
    if op == "gate_up":
        return silu_and_mul_reference(y)
    return y + residual.double() if flags(op).get("add") else y


def wide(dtype):
    return torch.float32 if dtype == torch.float16 else dtype


def check_cases():
    """dtype, tokens, shape of W with odd tails, function."""
    for n, k in ((2560, 2568), (1000, 40)):
        for tokens in (3, 16, 33):
            for function in ("fp32", "add", "norm", "swiglu"):
                yield BF16, tokens, n, k, function
    for function in ("fp32", "add", "swiglu"):
        yield torch.float16, 9, 1000, 40, function


def call_check(function, x, weight, bias, norm_weight, residual):
    """fp16 without norms, which the model does not fuse there."""
    tile = Tile(16, 8, 64)
    norm = (norm_weight, EPS) if x.dtype == BF16 else None
    n = weight.shape[0]
    if function == "add":
        return skinny_linear(x, weight, residual, tile, bias=bias, add=True)
    if function == "swiglu":
        return skinny_linear(x, weight, poisoned(x, n // 2, x.dtype), tile, norm=norm, swiglu=True)
    out = poisoned(x, n, torch.float32 if function == "fp32" else x.dtype)
    return skinny_linear(x, weight, out, tile, bias=bias, norm=norm if function == "norm" else None)


def poisoned(x, width, dtype):
    return torch.full((x.shape[0], width), float("nan"), dtype=dtype, device=x.device)


def check_stage(report):
    torch.manual_seed(1)
    errors = {}
    for tokens in (1, 31, 300, 5000):
        x, residual, weight = randn(tokens, HIDDEN), randn(tokens, HIDDEN), randn(HIDDEN)
        total = (x.float() + residual.float()).to(BF16)
        errors[f"norm {tokens}"] = error_of(
            rms_norm(x, weight, EPS), rms_norm_reference(x.double(), weight.double(), EPS)
        )
        normed, residual = add_rms_norm(x, residual, weight, EPS)
        assert torch.equal(residual, total)
        errors[f"add {tokens}"] = error_of(normed, rms_norm_reference(total.double(), weight.double(), EPS))
        gate_up = randn(tokens, 6144)
        errors[f"silu {tokens}"] = error_of(silu_and_mul(gate_up), silu_and_mul_reference(gate_up.double()))
    for case in check_cases():
        dtype, tokens, n, k, function = case
        x, weight, bias = randn(tokens, k, dtype=dtype), randn(n, k, scale=k**-0.5, dtype=dtype), randn(n, dtype=dtype)
        norm_weight, residual = randn(k, dtype=dtype), randn(tokens, n, dtype=wide(dtype))
        h = x.double() if dtype != BF16 else rms_norm_reference(x.double(), norm_weight.double(), EPS)
        plain, normed = x.double() @ weight.double().T, h @ weight.double().T
        expected = {
            "fp32": plain + bias.double(),
            "add": plain + bias.double() + residual.double(),
            "norm": normed + bias.double(),
            "swiglu": silu_and_mul_reference(normed),
        }[function]
        errors[str(case)] = error_of(call_check(function, x, weight, bias, norm_weight, residual), expected)
    worst = sorted(errors.items(), key=lambda item: -item[1])[:4]
    print(f"check: {len(errors)} results, worst", "; ".join(f"{name} {error:.2e}" for name, error in worst))

    for batch in (1, 7, 256):
        context = torch.randint(0, 4000, (batch,), device="cuda", dtype=torch.int32)
        rows = torch.randperm(300, device="cuda")[:batch].int()
        table = torch.randint(0, 9999, (300, 256), device="cuda", dtype=torch.int32)
        last_tokens = torch.randint(0, VOCAB, (300,), device="cuda", dtype=torch.int32)
        states = []
        for function in (decode_inputs, decode_inputs_reference):
            mine, out = table.clone(), DecodeInputs.empty(batch, 256, torch.device("cuda"))
            function(rows, context, context + 7, mine, last_tokens, 16, out)
            states.append([out.input_ids, out.positions, out.slot_mapping, out.block_table, mine])
        assert all(map(torch.equal, *states)), f"decode_inputs {batch}"

    different = 0
    params = torch.cat([sampling(8, *values) for values in SAMPLINGS.values()], 1)
    params[0, ::8] = 0
    batch = params.shape[1]
    rows, last = torch.arange(batch, device="cuda").int(), torch.zeros(batch, device="cuda", dtype=torch.int32)
    for dtype in (BF16, torch.float32):
        logits = randn(batch, VOCAB, scale=3, dtype=dtype)
        logits[3, 5], logits[4, VOCAB - 1], logits[5] = float("nan"), float("inf"), float("-inf")
        plan = SamplingPlan(params.cpu(), VOCAB, any_min_p=True)
        expected = sample_reference(logits.cpu(), plan).cuda()
        for values in CHUNKINGS:
            with chunking(values):
                ours = sample_module.sample(logits, params, rows, last)
            assert ours[3:6].tolist() == [-1] * 3
            assert torch.equal(ours[::8], expected[::8])
            different += int((ours != expected).sum())
        assert torch.equal(sample_module.sample(logits).cpu(), sample_reference(logits.cpu(), SamplingPlan(None)))
    tried = 2 * batch * len(CHUNKINGS)
    print("check: decode_inputs equal; sampled tokens that rounding changed:", different, "of", tried, flush=True)
    report["check"] = errors


# -- sweep ------------------------------------------------------------------------------------------------------------


def make_weights():
    weights = {op: randn(LAYERS, *shape, scale=shape[1] ** -0.5) for op, shape in SHAPES.items() if op != "lm_head"}
    weights["lm_head"] = randn(1, *SHAPES["lm_head"], scale=SHAPES["lm_head"][1] ** -0.5)
    return weights


def sweep_stage(report, weights):
    torch.manual_seed(2)
    best, table = {}, {}
    for op, tokens, norm in products():
        n, k = SHAPES[op]
        stack = weights[op]
        x, norm_weight = randn(tokens, k), 1 + randn(k, scale=0.2)
        out = randn(*out_shape(op, tokens), dtype=torch.float32 if op == "lm_head" else BF16)
        expected = expected_product(op, x, stack[0], out, norm_weight, norm)
        timers, errors = {}, {}
        for tile in candidates(op, tokens):
            y = out.clone() if flags(op).get("add") else torch.full_like(out, float("nan"))
            try:
                errors[tile] = error_of(call_product(op, x, stack[0], y, tile, norm_weight, norm), expected)
                timers[tile] = GraphTimer(
                    [lambda w=w, tile=tile: call_product(op, x, w, y, tile, norm_weight, norm) for w in stack]
                )
            except Exception as error:
                print(op, tokens, tile, type(error).__name__, str(error)[:200])
        timers["cublas"] = GraphTimer([lambda w=w: F.linear(x, w) for w in stack])
        times = interleaved(timers, 9)
        order = sorted((t for t in timers if t != "cublas"), key=times.get)
        if order:
            best[op, tokens, norm] = order[0]
        table[f"{op} {tokens}{' norm' if norm else ''}"] = {str(t): [times[t], errors.get(t)] for t in timers}
        print(
            f"{op:8} {tokens:3} {'norm' if norm else '':4} cublas {times['cublas']:6.2f} | "
            + " ".join(f"{t.rows}x{t.warps}x{t.block_k} {times[t]:.2f}" for t in order)
            + f" | error {max(errors.values()):.1e}",
            flush=True,
        )
    report["sweep"] = table
    return best


# -- chain ------------------------------------------------------------------------------------------------------------


class Chain:
    """A decode step without attention, for which an elementwise kernel stands in."""

    def __init__(self, weights, num_tokens):
        self.weights = weights
        self.tokens = randn(num_tokens, HIDDEN)
        self.norms = 1 + randn(2 * LAYERS + 1, HIDDEN, scale=0.1)
        self.params = sampling(num_tokens)

    def fused(self, logits_dtype=torch.float32):
        residual = self.tokens.clone()
        norm = linear.Norm(residual, self.norms[0], EPS)
        for i in range(LAYERS):
            qkv = linear.norm_linear(norm, self.weights["qkv"][i])
            o, down = self.weights["o"][i], self.weights["down"][i]
            norm = linear.linear_add_norm_(residual, silu_and_mul(qkv), o, None, self.norms[2 * i + 1], EPS)
            x = linear.norm_swiglu(norm, self.weights["gate_up"][i])
            norm = linear.linear_add_norm_(residual, x, down, None, self.norms[2 * i + 2], EPS)
        logits = linear.linear(norm(), self.weights["lm_head"][0], out_dtype=logits_dtype)
        return residual, sample_module.sample(logits, self.params)

    def separate(self):
        """Our elementwise kernels around cuBLAS, the residual added by the norm."""
        residual = self.tokens.clone()
        x = rms_norm(residual, self.norms[0], EPS)
        for i in range(LAYERS):
            x = F.linear(silu_and_mul(F.linear(x, self.weights["qkv"][i])), self.weights["o"][i])
            x, residual = add_rms_norm(x, residual, self.norms[2 * i + 1], EPS)
            x = F.linear(silu_and_mul(F.linear(x, self.weights["gate_up"][i])), self.weights["down"][i])
            x, residual = add_rms_norm(x, residual, self.norms[2 * i + 2], EPS)
        logits = linear.linear(x, self.weights["lm_head"][0], out_dtype=torch.float32)
        return residual, sample_module.sample(logits, self.params)

    def torch(self):
        residual = self.tokens.clone()
        x = rms_norm_reference(residual, self.norms[0], EPS)
        for i in range(LAYERS):
            x = silu_and_mul_reference(F.linear(x, self.weights["qkv"][i]))
            residual.add_(F.linear(x, self.weights["o"][i]))
            x = rms_norm_reference(residual, self.norms[2 * i + 1], EPS)
            x = silu_and_mul_reference(F.linear(x, self.weights["gate_up"][i]))
            residual.add_(F.linear(x, self.weights["down"][i]))
            x = rms_norm_reference(residual, self.norms[2 * i + 2], EPS)
        return residual, F.linear(x, self.weights["lm_head"][0]).argmax(-1)


def chain_stage(report, weights, best):
    torch.manual_seed(3)
    table = {}
    shapes, own_tile_for = {shape: op for op, shape in SHAPES.items()}, _skinny.tile_for

    def variant(name, fused_norm):
        def tile_for(tokens, n, k):
            bucket = max(8, 1 << (tokens - 1).bit_length())
            op = shapes[n, k]
            norm = fused_norm and op in ("qkv", "gate_up")
            return best[op, bucket, norm] if best else own_tile_for(tokens, n, k)

        return [
            mock.patch.object(_skinny, "tile_for", tile_for),
            mock.patch.object(linear, "MAX_FUSED_NORM_TOKENS", 64 if fused_norm else 0),
            mock.patch.object(linear, "MAX_SKINNY_TOKENS", 0 if "cublas" in name else 64),
            mock.patch.object(linear, "MAX_WGMMA_TOKENS", 0),
            *pdl("no pdl" not in name),
        ]

    for num_tokens in (1, 8, 16, 32, 64, 256):
        chain, timers, outputs = Chain(weights, num_tokens), {}, {}
        calls = {"torch": chain.torch, "cublas, add+norm": chain.separate, "cublas, addmm": chain.fused}
        if num_tokens <= 64:
            calls["skinny"] = chain.fused
        if num_tokens <= 32:
            calls["skinny, norm fused"] = chain.fused
        if num_tokens == 1:
            calls["skinny, norm fused, no pdl"] = chain.fused
        if num_tokens >= 32:
            kind = "skinny" if num_tokens <= 64 else "cublas, addmm"
            calls[f"{kind}, bf16 logits"] = lambda chain=chain: chain.fused(BF16)
        for name, call in calls.items():
            patches = variant(name, "norm fused" in name)
            try:
                for patch in patches:
                    patch.start()
                outputs[name] = call()[0].double()
                timers[name] = GraphTimer([call])
            except Exception:
                traceback.print_exc()
            finally:
                for patch in patches:
                    patch.stop()
        times = interleaved(timers, 9)
        errors = {name: error_of(x, outputs["torch"]) for name, x in outputs.items()}
        table[num_tokens] = {name: [times[name], errors[name]] for name in timers}
        print(
            f"chain {num_tokens:3}: "
            + " | ".join(f"{name} {times[name]:.0f}" for name in timers)
            + f" | difference {max(errors.values()):.1e}",
            flush=True,
        )
    report["chain"] = table


# -- elementwise, sampling --------------------------------------------------------------------------------------------


def elementwise_stage(report, bandwidth):
    table = {}
    for tokens in (1, 32, 256, 2048, 16384):
        copies = max(2, min(28, 2**28 // (tokens * 6144)))
        x, residual = randn(copies, tokens, HIDDEN), randn(copies, tokens, HIDDEN)
        gate_up, weight = randn(copies, tokens, 6144), randn(HIDDEN)
        timers = {
            "norm": GraphTimer([lambda a=a: rms_norm(a, weight, EPS) for a in x]),
            "torch norm": GraphTimer([lambda a=a: rms_norm_reference(a, weight, EPS) for a in x]),
            "add norm": GraphTimer(
                [lambda a=a, b=b: add_rms_norm(a, b, weight, EPS) for a, b in zip(x, residual, strict=True)]
            ),
            "silu": GraphTimer([lambda a=a: silu_and_mul(a) for a in gate_up]),
            "torch silu": GraphTimer([lambda a=a: silu_and_mul_reference(a) for a in gate_up]),
        }
        times = interleaved(timers, 7)
        size = tokens * HIDDEN * 2
        floor = {"norm": 2 * size, "add norm": 4 * size, "silu": 9 * size}
        table[tokens] = times
        print(
            f"elementwise {tokens:5}: "
            + " | ".join(
                f"{name} {t:.2f}" + (f" ({floor[name] / bandwidth / 1e6 / t:.0%})" if name in floor else "")
                for name, t in times.items()
            ),
            flush=True,
        )
        del x, residual, gate_up, timers
    report["elementwise"] = table


def sample_stage(report):
    table = {}
    for batch in (1, 32, 256):
        logits = [randn(batch, VOCAB, scale=3) for _ in range(max(1, 256 // batch // 4))]
        wide = [x.float() for x in logits[:8]]
        rows = torch.arange(batch, device="cuda", dtype=torch.int32)
        last = torch.zeros(batch, device="cuda", dtype=torch.int32)
        block_table = torch.zeros(batch, 2560, device="cuda", dtype=torch.int32)
        inputs = DecodeInputs.empty(batch, 2560, torch.device("cuda"))
        context = torch.full((batch,), 1024, device="cuda", dtype=torch.int32)

        def timer(params, xs=logits):
            return GraphTimer([lambda x=x: sample_module.sample(x, params, rows, last) for x in xs])

        timers = {"greedy": GraphTimer([lambda x=x: sample_module.sample(x) for x in logits])}
        for name, values in SAMPLINGS.items():
            timers[name] = timer(sampling(batch, *values))
            timers[f"{name}, fp32"] = timer(sampling(batch, *values), wide)
        for values in CHUNKINGS:
            with chunking(values):
                for name in ("temperature", "top_k 20, top_p .95"):
                    timers[f"{name} {values}"] = timer(sampling(batch, *SAMPLINGS[name]))
        timers["decode_inputs"] = GraphTimer(
            [lambda: decode_inputs(rows, context, rows, block_table, last, 16, inputs) for _ in range(20)]
        )
        table[batch] = times = interleaved(timers, 7)
        print(f"sample {batch:3}: " + " | ".join(f"{name} {t:.2f}" for name, t in times.items()), flush=True)
    report["sample"] = table


def main(stages):
    report = {}
    start = time.time()
    if "compile" in stages:
        compile_stage(stages)
    report["device"] = torch.cuda.get_device_name()
    report["copy"] = bandwidth = copy_bandwidth()
    print(report["device"], torch.__version__, f"copy {bandwidth:.2f} TB/s", flush=True)
    weights = make_weights()
    best = {}

    runs = {
        "check": lambda: check_stage(report),
        "sweep": lambda: best.update(sweep_stage(report, weights)),
        "chain": lambda: chain_stage(report, weights, best),
        "elementwise": lambda: elementwise_stage(report, bandwidth),
        "sample": lambda: sample_stage(report),
    }
    for stage, run in runs.items():
        if stage in stages:
            try:
                with torch.inference_mode():
                    run()
            except Exception:
                traceback.print_exc()
            torch.cuda.empty_cache()
            print(f"[{stage} done at {time.time() - start:.0f} s]", flush=True)
            if "OUT" in os.environ:
                Path(os.environ["OUT"], "ops.json").write_text(json.dumps(report, indent=1, default=str))


if __name__ == "__main__":
    main(sys.argv[1:] or ["compile", "check", "sweep", "chain", "elementwise", "sample"])
