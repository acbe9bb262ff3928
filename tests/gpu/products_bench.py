"""Tiles of the products of 33 to 256 tokens (``nanoserve/ops/_wgmma.py``), each in its place in a whole layer.

    python tests/gpu/products_bench.py [tokens …]

What a product costs depends on the kernels around it: which of its programs find room beside those of the one before,
and which weights arrive early. So every candidate is timed in a graph of 28 layers (o + residual, gate_up + SwiGLU,
down + residual, qkv, and a copy in attention's place), with the tiles of ``tile_for`` for the other three products, in
random order and rounds. All are compiled in parallel and checked against float64 first.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import triton
import triton.language as tl

from nanoserve.ops._wgmma import Tile, Weighted, tile_for, wgmma_linear
from nanoserve.ops.activation import silu_and_mul_reference
from nanoserve.ops.norm import rms_norm_reference

BF16, EPS, LAYERS, ROUNDS, REPLAYS = torch.bfloat16, 1e-6, 28, 7, 8
HIDDEN, ATTENTION, WIDE = 1024, 2048, 3072
SHAPES = {"o": (HIDDEN, ATTENTION), "gate_up": (2 * WIDE, HIDDEN), "down": (HIDDEN, WIDE), "qkv": (4096, HIDDEN)}
CANDIDATES = {
    "o": [Tile(64, 64, 128, 6, 6, first, split=2) for first in (2, 3, 6)]
    + [Tile(64, 64, 128, 5, 8, 3, split=2), Tile(64, 64, 256, 3, 4, 4, split=2), Tile(64, 64, 128, 6, 6, 6, split=4)],
    "gate_up": [Tile(64, 64, 128, 3, 5, 5), Tile(64, 64, 64, 4, 5, 3), Tile(64, 128, 64, 4, 5, 3)]
    + [Tile(128, 32, 64, 6, 8, 3), Tile(128, 64, 64, 5, 7, 3), Tile(128, 64, 64, 6, 6, 3), Tile(128, 64, 64, 6, 6, 6)],
    "qkv": [Tile(64, 64, 128, 5, 8, 8), Tile(64, 64, 128, 6, 6, 3), Tile(64, 64, 128, 6, 6, 6)]
    + [Tile(64, 128, 64, 7, 7, 3), Tile(128, 64, 64, 5, 8, 3), Tile(128, 64, 64, 5, 8, 8)],
}
CANDIDATES["down"] = CANDIDATES["o"]

Tiles = dict[str, Tile]
Weights = dict[str, torch.Tensor]


def chosen(tokens: int) -> Tiles:
    tiles = {name: tile_for(tokens, *shape, name == "gate_up") for name, shape in SHAPES.items()}
    return {name: tile for name, tile in tiles.items() if tile is not None}


def layer(w: Weights, tiles: Tiles, attention: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor):
    """What follows attention, up to the next layer's qkv; adds to ``residual``."""
    tokens = attention.shape[0]
    between = Weighted.of(residual, norm, EPS, tiles["o"])
    wgmma_linear(attention, w["o"], residual, tiles["o"], add=True, weighted=between)
    x = wgmma_linear(
        between.x, w["gate_up"], attention.new_empty(tokens, WIDE), tiles["gate_up"], swiglu=True, norm=between
    )
    following = Weighted.of(residual, norm, EPS, tiles["down"])
    wgmma_linear(x, w["down"], residual, tiles["down"], add=True, weighted=following)
    return wgmma_linear(following.x, w["qkv"], attention.new_empty(tokens, 4096), tiles["qkv"], norm=following)


def error_of(w: Weights, tiles: Tiles, attention: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor) -> float:
    """‖qkv − reference‖ / ‖reference‖ of one layer."""
    o, gate_up, down, qkv = (w[name].double().T for name in SHAPES)
    h = residual.double() + attention.double() @ o
    h = h + silu_and_mul_reference(rms_norm_reference(h, norm.double(), EPS) @ gate_up) @ down
    reference = rms_norm_reference(h, norm.double(), EPS) @ qkv
    ours = layer(w, tiles, attention, residual.clone(), norm).double()
    return ((ours - reference).norm() / reference.norm()).item()


def weights(device: str) -> Weights:
    return {name: torch.randn(*shape, device=device).mul_(0.02).to(BF16) for name, shape in SHAPES.items()}


@triton.jit(do_not_specialize=["count"])
def copy_kernel(qkv, out, count, WIDTH: tl.constexpr, QKV_WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    tl.extra.cuda.gdc_wait()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(qkv + i // WIDTH * QKV_WIDTH + i % WIDTH, mask=i < count)
    tl.store(out + i, x, mask=i < count)


def in_attentions_place(qkv: torch.Tensor) -> torch.Tensor:
    out = qkv.new_empty(qkv.shape[0], ATTENTION)
    grid = (triton.cdiv(out.numel(), 2048),)
    copy_kernel[grid](qkv, out, out.numel(), WIDTH=ATTENTION, QKV_WIDTH=4096, BLOCK=2048, launch_pdl=True)
    return out


def compile_job(tiles: Tiles) -> list[str]:
    """In a worker: what the launches will find in Triton's cache. Returns complaints."""
    from helpers.triton_compile import compile_launches

    attention, residual, norm = (torch.zeros(shape, dtype=BF16) for shape in ((64, ATTENTION), (64, HIDDEN), HIDDEN))
    try:
        kernels = compile_launches(lambda: layer(weights("cpu"), tiles, attention, residual, norm), 90)
    except Exception as error:
        return [f"{tiles}: {type(error).__name__} {str(error)[:200]}"]
    return [str(kernel) for kernel in kernels if kernel.stack]


def measure(tokens: int, variants: dict[str, Tiles]) -> dict[str, float]:
    """µs of a layer: medians of rounds."""
    device = "cuda"
    layers, norm = [weights(device) for _ in range(LAYERS)], torch.ones(HIDDEN, dtype=BF16, device=device)
    first = torch.randn(tokens, 4096, device=device).to(BF16)
    attention, residual = in_attentions_place(first), torch.randn(tokens, HIDDEN, device=device).to(BF16)
    graphs, times = {}, {name: [] for name in variants}
    for name, tiles in variants.items():
        error = error_of(layers[0], tiles, attention, residual, norm)
        assert error < 6e-3, f"{name}: error {error}"
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            qkv, h = first, residual.clone()
            for w in layers:
                qkv = layer(w, tiles, in_attentions_place(qkv), h, norm)
    for _ in range(ROUNDS):
        for name in random.sample(list(graphs), len(graphs)):
            graphs[name].replay()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(REPLAYS):
                graphs[name].replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / REPLAYS / LAYERS)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    counts = [int(word) for word in sys.argv[1:]] or [48, 64, 96, 128, 192, 256]
    variants = {
        tokens: {"as chosen": chosen(tokens)}
        | {f"{name} {tile}": chosen(tokens) | {name: tile} for name in SHAPES for tile in CANDIDATES[name]}
        for tokens in counts
    }
    with ProcessPoolExecutor(min(len(os.sched_getaffinity(0)), 16)) as pool:
        for complaints in pool.map(compile_job, [tiles for group in variants.values() for tiles in group.values()]):
            for complaint in complaints:
                print(complaint)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__, "| µs a layer")
    for tokens, group in variants.items():
        for name, us in measure(tokens, group).items():
            print(f"{tokens:4d} {us:7.2f}  {name}", flush=True)


if __name__ == "__main__":
    main()
