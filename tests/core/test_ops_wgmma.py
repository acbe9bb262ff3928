"""Products of 33 to 256 tokens on Hopper: compiled for a GPU that is not there; right, on one that is."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from itertools import product
from unittest import mock

import pytest
import torch

from nanoserve.ops import linear
from nanoserve.ops.activation import silu_and_mul_reference
from nanoserve.ops.linear import linear_add_norm_, norm_linear, norm_swiglu
from nanoserve.ops.norm import rms_norm_reference

SHAPES = {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)}


def test_tiles_fit_a_multiprocessor():
    """Whatever the shape: shared memory of at most 227 KiB, accumulators of at most 128 registers, clusters of 8."""
    pytest.importorskip("triton")
    from nanoserve.ops._wgmma import tile_for

    for tokens, (n, k), swiglu in product((33, 64, 65, 128, 129, 192, 193, 256), SHAPES.values(), (False, True)):
        tile = tile_for(tokens, n, k, swiglu)
        parts = 2 if swiglu else 1
        steps = tile.tokens * tile.x_stages + tile.rows * tile.w_stages * parts
        assert steps * tile.block_k * 2 + 8 * tile.split * tile.w_stages <= 227 * 1024
        assert parts * tile.rows <= 128
        assert tile.w_first <= tile.w_stages and tile.x_stages <= tile.w_stages
        assert tile.split <= 8
    for n, k in ((4096, 2048), (1024, 1028), (1000, 1024), (64, 8192), (3072, 2048)):
        assert tile_for(64, n, k, False) is None


def test_steps_are_padded_to_whole_tiles_where_there_are_any(monkeypatch):
    pytest.importorskip("triton")
    small, large = torch.empty(1024, 2048), torch.empty(4096, 4096, device="meta")
    assert linear.row_multiple(small) == 16
    monkeypatch.setattr(linear, "_has_wgmma", lambda device, dtype: True)
    assert linear.row_multiple(small) == 64 and linear.row_multiple(large) == 16


def compile_all():
    """In a subprocess: a report for every tile of Qwen3-0.6B's layer."""
    from nanoserve.ops._wgmma import Weighted, tile_for, wgmma_linear
    from tests.helpers.triton_compile import compile_launches

    def tensor(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype)

    reports, seen = {}, set()
    for tokens, (name, (n, k)) in product((64, 128, 192, 256), SHAPES.items()):
        swiglu, add = name == "gate_up", name in ("o", "down")
        tile = tile_for(tokens, n, k, swiglu)
        if (name, tile) in seen:
            continue
        seen.add((name, tile))
        dtype = torch.float16 if name == "o" else torch.bfloat16
        out = tensor(tokens, n // 2 if swiglu else n, dtype=torch.float32 if name == "o" else dtype)
        bias = tensor(n, dtype=dtype) if name == "qkv" else None
        x, weight = tensor(tokens, k, dtype=dtype), tensor(n, k, dtype=dtype)
        options = {"bias": bias, "swiglu": swiglu, "add": add}
        if name == "down":
            options["weighted"] = Weighted.of(out, tensor(n), 1e-6, tile)
        elif name != "o":
            options["norm"] = Weighted.of(x, tensor(k), 1e-6, tile)
        kernels = compile_launches(
            lambda x=x, weight=weight, out=out, tile=tile, options=options: wgmma_linear(
                x, weight, out, tile, **options
            ),
            90,
        )
        for kernel in kernels:
            sass = kernel.sass()
            panels = 2 * tile.block_k // 64 if swiglu else 1
            reports[f"{name} {tokens}"] = {
                "stack": kernel.stack,
                "wgmma": sum("HGMMA" in line for line in sass),
                "wait": next(i for i, line in enumerate(sass) if "ACQBULK" in line),
                "loads": [i for i, line in enumerate(sass) if "UTMALDG" in line],
                "w_first": min(tile.w_first, -(-k // (tile.block_k * tile.split))) * panels,
            }
    return reports


def test_kernels_compile_without_spills():
    """The tensor cores' own instruction, and W requested, as far as the tile says, before the wait for the kernel
    ahead."""
    pytest.importorskip("triton")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = json.loads(done.stdout.splitlines()[-1])
    assert len(reports) == 11
    for name, report in reports.items():
        assert report["stack"] == 0, name
        assert report["wgmma"] > 0, name
        assert sum(i < report["wait"] for i in report["loads"]) == report["w_first"], name


# -- on a GPU ---------------------------------------------------------------------------------------------------------

#: dtype → (what is done with the product, n, k): tails of N and of K among them. Each is a kernel, or three.
PRODUCTS = {
    torch.bfloat16: [
        *(("plain", 4096, 1024), ("add", 1024, 3072), ("swiglu", 6144, 1024)),
        *((kind, 2064, 1032) for kind in ("plain", "add", "swiglu")),
        *((kind, 48, 72) for kind in ("add", "swiglu")),
    ],
    torch.float16: [("add", 1024, 3072), ("plain", 2064, 1032), ("swiglu", 2064, 1032)],
}
TOKENS = (33, 64, 65, 100, 129, 256)


def product_of(kind, x, weight, bias, out):
    """Our kernel; ``add`` has a bias too."""
    from nanoserve.ops._wgmma import tile_for, wgmma_linear

    tile = tile_for(x.shape[0], *weight.shape, kind == "swiglu")
    wgmma_linear(x, weight, out, tile, bias=bias if kind == "add" else None, swiglu=kind == "swiglu", add=kind == "add")


def compile_share(index, count):
    """In a subprocess: every ``count``-th kernel of the tests below, for Triton's cache."""
    from nanoserve.ops._wgmma import Weighted, tile_for, wgmma_linear
    from tests.helpers.triton_compile import compile_launches

    def tensor(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype)

    launches = {}
    for (dtype, products), tokens in product(PRODUCTS.items(), TOKENS):
        for kind, n, k in products:
            x, weight, bias = tensor(tokens, k, dtype=dtype), tensor(n, k, dtype=dtype), tensor(n, dtype=dtype)
            wide = torch.float32 if dtype == torch.float16 else dtype
            out = tensor(tokens, n // 2 if kind == "swiglu" else n, dtype=wide)
            key = dtype, kind, n, k, tile_for(tokens, n, k, kind == "swiglu")
            launches[key] = functools.partial(product_of, kind, x, weight, bias, out)
    for (name, (n, k)), tokens in product(SHAPES.items(), (64, 65, 128, 256)):
        swiglu, add = name == "gate_up", name in ("o", "down")
        tile = tile_for(tokens, n, k, swiglu)
        x, weight, out = tensor(tokens, k), tensor(n, k), tensor(tokens, n // 2 if swiglu else n)
        before = tile_for(tokens, 1024, 2048, False)
        options = {"weighted": Weighted.of(out, tensor(n), 1e-6, tile)} if add else {}
        if not add:
            options["norm"] = Weighted.of(x, tensor(k), 1e-6, before)
        call = functools.partial(wgmma_linear, x, weight, out, tile, swiglu=swiglu, add=add, **options)
        launches[name, tile] = call
    for call in list(launches.values())[index::count]:
        compile_launches(call, 90)


@pytest.fixture(scope="module")
def hopper():
    """Compiling the kernels one after the other would take minutes."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    count = min(16, os.cpu_count())
    shares = [
        subprocess.Popen([sys.executable, __file__, str(i), str(count)], env=environment, stderr=subprocess.PIPE)
        for i in range(count)
    ]
    for share in shares:
        _, errors = share.communicate()
        assert share.returncode == 0, errors.decode()[-3000:]


def randn(*shape, dtype, scale=1.0):
    return (scale * torch.randn(*shape, device="cuda")).to(dtype)


def relative_error(ours, reference):
    return ((ours.double() - reference).norm() / reference.norm()).item()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", PRODUCTS, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_products(tokens, dtype):
    """C50: tails of tokens, of N and of K; memory beyond x and W is NaN; fp16 adds to an fp32 residual."""
    torch.manual_seed(tokens)
    wide = torch.float32 if dtype == torch.float16 else dtype
    for kind, n, k in PRODUCTS[dtype]:
        padded = randn(tokens + 64, k, dtype=dtype)
        padded[tokens:] = float("nan")
        x, bias = padded[:tokens], randn(n, dtype=dtype)
        padded_weight = randn(n + 64, k, dtype=dtype, scale=k**-0.5)
        padded_weight[n:] = float("nan")
        weight = padded_weight[:n]
        residual = randn(tokens, n, dtype=wide)
        plain = x.double() @ weight.double().T
        expected = {
            "plain": plain,
            "add": residual.double() + plain + bias.double(),
            "swiglu": silu_and_mul_reference(plain),
        }[kind]
        guarded = torch.full((tokens + 64, expected.shape[1]), float("nan"), dtype=wide, device="cuda")
        out = guarded[:tokens]
        if kind == "add":
            out.copy_(residual)
        product_of(kind, x, weight, bias, out)
        assert relative_error(out, expected) < torch.finfo(dtype).eps, (kind, n, k)
        assert guarded[tokens:].isnan().all(), (kind, n, k)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("tokens", [40, 64, 65, 128, 200, 256])
def test_a_layer_in_a_graph(tokens, monkeypatch):
    """Our kernel serves a capture, norms included, and only that; replayed on other values, the graph is right."""
    from nanoserve.ops import _wgmma

    dtype, hidden, eps = torch.bfloat16, 1024, 1e-6
    torch.manual_seed(1)
    weights = {name: randn(*shape, dtype=dtype, scale=shape[1] ** -0.5) for name, shape in SHAPES.items()}
    norms = 1 + randn(2, hidden, dtype=dtype, scale=0.1)
    x, attended = randn(tokens, hidden, dtype=dtype), randn(tokens, 2048, dtype=dtype)
    spy = mock.Mock(side_effect=_wgmma.wgmma_linear)
    monkeypatch.setattr(_wgmma, "wgmma_linear", spy)

    def layer():
        residual = x.clone()
        norm = linear_add_norm_(residual, attended, weights["o"], None, norms[0], eps)
        after_o = residual.clone()
        inner = norm_swiglu(norm, weights["gate_up"])
        norm = linear_add_norm_(residual, inner, weights["down"], None, norms[1], eps)
        return after_o, inner, residual, norm_linear(norm, weights["qkv"]), norm()

    def reference():
        wide = {name: weight.double() for name, weight in weights.items()}
        after_o = x.double() + attended.double() @ wide["o"].T
        inner = silu_and_mul_reference(rms_norm_reference(after_o, norms[0].double(), eps) @ wide["gate_up"].T)
        residual = after_o + inner @ wide["down"].T
        normed = rms_norm_reference(residual, norms[1].double(), eps)
        return after_o, inner, residual, normed @ wide["qkv"].T, normed

    layer()
    torch.cuda.synchronize()
    assert spy.call_count == 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = layer()
    assert spy.call_count == 4
    assert sum(call.kwargs.get("norm") is not None for call in spy.call_args_list) == 2
    x.normal_()
    attended.normal_()
    graph.replay()
    for i, (ours, right) in enumerate(zip(outputs, reference(), strict=True)):
        assert relative_error(ours, right) < 2 * torch.finfo(dtype).eps, i


if __name__ == "__main__":
    if len(sys.argv) > 1:
        compile_share(*map(int, sys.argv[1:]))
    else:
        print(json.dumps(compile_all()))
