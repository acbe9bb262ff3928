"""``task=bench_kernels``: what it times, what it counts, and that a wrong kernel is never the best."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

from nanoserve.config import EngineConfig
from nanoserve.contracts.attention import AttentionBackend, AttentionSpec
from nanoserve.contracts.capabilities import Capabilities
from nanoserve.contracts.errors import ConfigError
from nanoserve.hookspecs import hookimpl
from nanoserve.registry import Registry
from nanoserve.tasks.bench_kernels import NO_MEMORY, figures, measure
from nanoserve.tasks.kernels.measure import Bench, Effort, Heads, out_of_memory
from nanoserve.tasks.kernels.shapes import TABLE, KernelShape, parse_all
from tests.tasks.conftest import Cli

HEADS = Heads(4, 2, 32)
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU does not interpret")


class Zeros(AttentionBackend):
    def prefill(self, q, k, v, layer, meta, out):
        out.zero_()

    decode = lambda self, q, layer, meta, out: out.zero_()  # noqa: E731


class Lazy(AttentionBackend):
    """Writes nothing at all, which is fastest."""

    def decode(self, q, layer, meta, out):
        pass


class Failing(AttentionBackend):
    def decode(self, q, layer, meta, out):
        raise RuntimeError("no such luck")


class Plugin:
    __name__ = "faulty"

    @hookimpl
    def nanoserve_attention(self, register):
        from dataclasses import make_dataclass

        for name, factory in (("zeros", Zeros), ("lazy", Lazy), ("failing", Failing)):
            can = Capabilities(phases=frozenset({"decode"}))
            register(AttentionSpec(name, "", can, make_dataclass("Config", []), factory))


def bench(kv: str = "bf16", extra: tuple = (), **engine) -> Bench:
    config = EngineConfig.from_kwargs(device="cpu", kv=kv, **engine)
    return Bench(config, Registry.discover(extra=extra), HEADS, kv, Effort(rounds=1))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("kv", ["bf16", "int8"])
@pytest.mark.parametrize("block_size", [16, 256])
@INTERPRETED
def test_every_backend_that_can_is_timed_and_right(phase, kv, block_size):
    """On ragged lengths, and in prefill behind a prefix, over shuffled blocks."""
    one = bench(kv, block_size=block_size)
    names = one.candidates[phase]
    assert len(names) > 1
    for shape in ("ragged3x40", "2x5+19" if phase == "prefill" else "2x17"):
        timings = one.measure(KernelShape.parse(shape, phase), names)
        for name in names:
            assert timings[name].valid and timings[name].error < 1e-5, (shape, name, timings[name])


def test_a_wrong_kernel_is_marked_and_never_the_best():
    one = bench(extra=(Plugin(),))
    results = list(measure(one, KernelShape.parse("2x9", "decode"), ("lazy", "zeros", "failing", "sdpa")))
    by_name = {result.name: result.timing for result in results}
    assert by_name["zeros"].wrong and by_name["zeros"].error == pytest.approx(1)
    assert by_name["lazy"].wrong and by_name["lazy"].error == float("inf")
    assert by_name["failing"].failed == "RuntimeError: no such luck" and by_name["failing"].us is None
    assert {result.name for result in results[:2]} == {"sdpa", "torch sdpa"}
    found = figures({"decode": results})
    assert found == {"decode 2x9 µs": round(by_name["sdpa"].us, 2)}


def test_rates_are_those_of_the_work_that_cannot_be_avoided():
    prefill = KernelShape.parse("2x3+5", "prefill")
    pairs = 2 * (6 + 7 + 8)  # the keys that each query sees
    assert prefill.flops(4, 32) == 2 * 2 * 4 * 32 * pairs
    for kv, per_token in (("bf16", 2 * 2 * 32 * 4), ("int8", 2 * 2 * (32 + 2))):  # float32 on the CPU
        one = bench(kv)
        (result, *_) = measure(one, KernelShape.parse("3x7", "decode"), ("sdpa",), with_torch=False)
        assert result.rate == pytest.approx(3 * 7 * per_token / result.timing.us / 1e6)
        assert result.of_ceiling == pytest.approx(result.rate / one.ceilings.copy)


def test_names_of_shapes():
    assert KernelShape.parse("2x3+5", "prefill").context_lens == (8, 8)
    assert KernelShape.parse("2x3", "decode").query_lens == (1, 1)
    ragged = KernelShape.parse("ragged64", "decode")
    assert ragged.batch == 64 and min(ragged.context_lens) >= 16 and 1500 < max(ragged.context_lens) <= 2048
    for name in ("8", "8x", "x8", "0x3", "3x0", "-1x3", "ragged", "ragged0", "8x3+"):
        with pytest.raises(ConfigError, match="shape"):
            KernelShape.parse(name, "prefill")
    with pytest.raises(ConfigError, match="no prefix"):
        KernelShape.parse("8x3+4", "decode")
    for phase, names in TABLE.items():
        assert len(parse_all(names, phase)) >= 9


def test_the_command(cli: Cli):
    outcome = cli("task=bench_kernels", "engine.device=cpu", "shapes=[2x9]", "backends=[sdpa]", "output=kernels.json")
    assert outcome.code == 0 and "torch sdpa" in outcome.out and "say nothing about a GPU" in outcome.out
    record = json.loads(Path("kernels.json").read_text())
    assert {(r["phase"], r["kernel"]) for r in record["results"]} == {
        (phase, kernel) for phase in ("prefill", "decode") for kernel in ("sdpa", "torch sdpa")
    }
    assert all(r["us"] > 0 and r["error"] < 1e-5 for r in record["results"])
    assert record["kv_options"] == {"dtype": "auto"}


@pytest.mark.parametrize(
    "failure, lacks",
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", True),
        ("ShapeOutOfMemoryError: 31.2 GiB of 22.6", True),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried", True),
        ("AcceleratorError: CUDA error: an illegal memory access was encountered", False),
        ("OutOfResources: out of resource: shared memory, Required: 300000", False),
    ],
)
def test_only_the_allocators_lack_memory(failure, lacks):
    assert out_of_memory(failure) == lacks


def test_a_wrong_kernel_ends_the_command_with_an_error_after_everything_else(cli: Cli, monkeypatch):
    """So does one that raises; torch's are only there to compare with."""
    plain = Registry.discover
    monkeypatch.setattr(Registry, "discover", lambda: plain(extra=(Plugin(),)))
    words = ("task=bench_kernels", "engine.device=cpu", "shapes=[2x9,2x5]", "output=kernels.json")
    outcome = cli(*words, "backends=[zeros,lazy,failing,sdpa]")
    assert outcome.code == 1
    assert outcome.out.count("WRONG") == 4 and "no such luck" in outcome.out and "say nothing about" in outcome.out
    assert len(json.loads(Path("kernels.json").read_text())["results"]) == 2 * 2 + 2 * 5  # torch's is one of them
    (line,) = outcome.err.splitlines()
    wrong, _, failed = line.partition(". failed, at ")
    assert wrong.startswith("nanoserve: error: WRONG results, relative error above 1e-05")
    shapes = wrong.partition(", at ")[2].split("; ")
    assert [(shape[:10], {*shape[12:].split(", ")}) for shape in shapes] == [
        ("decode 2x9", {"zeros", "lazy"}), ("decode 2x5", {"zeros", "lazy"}),
    ]  # fmt: skip
    assert failed == "decode 2x9: failing; decode 2x5: failing"
    assert cli(*words, "backends=[failing,sdpa]").code == 1 and cli(*words, "backends=[sdpa]").code == 0

    sweep = ("shapes=[2x9]", "phase=decode", "backends=[zeros,sdpa]", "hydra.sweep.dir=sweep")
    assert cli("-m", *words[:2], *sweep).code == 1
    (row,) = csv.DictReader(Path("sweep/sweep.csv").read_text(encoding="utf-8").splitlines())
    assert float(row["decode 2x9 µs"]) > 0 and row["error"].startswith("WRONG results")


def test_a_shape_that_memory_cannot_hold_is_a_row_that_says_so(cli: Cli, monkeypatch):
    def refuse(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 409600000000 bytes.")

    monkeypatch.setattr(Bench, "measure", refuse)
    outcome = cli("task=bench_kernels", "phase=decode", "shapes=[9x90]", "backends=[sdpa]", "engine.device=cpu")
    assert outcome.code == 0 and "not enough memory" in outcome.out
    monkeypatch.undo()
    monkeypatch.setattr("nanoserve.tasks.kernels.measure.available_on_cpu", lambda: 2.0**20)
    (row,) = measure(bench(), KernelShape.parse("2x999999", "decode"), ("sdpa",))
    assert (row.name, row.timing.failed) == ("all", f"{NO_MEMORY}: 7.63 GiB of 0.000977")


@pytest.mark.parametrize(
    "words, complaint",
    [
        (["backends=[paged_v9]"], "paged_v9"),
        (["backends=[hopper_flash]"], "does not run on cpu (it runs on cuda)"),
        (["backends=[triton_flash]", "phase=decode"], "implements decode"),
        (["shapes=[8by3]"], "shape '8by3'"),
        (["num_q_heads=5"], "multiple of num_kv_heads"),
        (["rounds=0"], "rounds"),
        (["kv=int8", "head_dim=0"], "head_dim"),
        (["shapes=2x16"], "expected a list of str or null, got '2x16'; one entry is written [2x16]"),
        (["model=qwen3_32b"], "does not use model (it has num_q_heads, num_kv_heads and head_dim)"),
        (["scheduler=prefill_first"], "task=bench_kernels does not use scheduler; leave it out"),
        (["backends=[paged_v1]", "engine.dtype=bfloat16"], "Triton's interpreter multiplies bfloat16 matrices wrongly"),
    ],
)
def test_what_cannot_work_is_refused_in_words(cli: Cli, monkeypatch, words, complaint):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    outcome = cli("task=bench_kernels", "engine.device=cpu", *words)
    assert outcome.code == 2 and complaint in outcome.err
