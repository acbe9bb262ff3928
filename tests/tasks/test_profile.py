"""``task=profile``: traces, spans and bounds by hand, then the real thing on a CPU."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nanoserve import LLM, SamplingParams
from nanoserve.tasks import Job
from nanoserve.tasks.profile import Measured, Timed, make_figures, what_next
from nanoserve.tasks.profile.roofline import Ceilings, Work, least_work
from nanoserve.tasks.profile.spans import PARTS, Stopwatch, instrumented
from nanoserve.tasks.profile.trace import classify, read, union
from tests.tasks.conftest import Cli

REAL_LLM = Job.llm
NORMS = "norms, rope, activations, cache"


def event(name: str, cat: str, ts: float, dur: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "tid": tid}


#: Two steps, 100 … 200 and 200 … 300 µs. Kernels: 80 … 130 (begun before the marks), 140 … 180 and, beside it,
#: 150 … 190, then a copy 250 … 260, and a kernel 295 … 400 that goes on beyond them.
ON_GPU = {
    "traceEvents": [
        event("decode", "user_annotation", 100, 100),
        event("decode", "user_annotation", 200, 100),
        event("warm-up", "user_annotation", 0, 90),
        event("capture_kernel", "kernel", 10, 50, tid=7),
        event("nvjet_tst_128x8", "kernel", 80, 50, tid=7),
        event("paged_v2_split_kernel", "kernel", 140, 40, tid=7),
        event("pick_kernel", "kernel", 150, 40, tid=8),
        event("Memcpy DtoH", "gpu_memcpy", 250, 10, tid=7),
        event("nvjet_tst_128x8", "kernel", 295, 105, tid=7),
        event("cudaGraphLaunch", "cuda_runtime", 110, 5),
        event("cudaGraphLaunch", "cuda_runtime", 210, 5),
        event("cudaMemcpyAsync", "cuda_runtime", 220, 2),
        event("cudaEventSynchronize", "cuda_runtime", 230, 20),
        event("cudaDeviceSynchronize", "cuda_runtime", 300, 20),
        {"ph": "M", "name": "process_name"},
    ]
}


def test_idle_share_of_a_gpu_by_hand() -> None:
    """Busy: 100 … 130, 140 … 190, 250 … 260 and 295 … 300 of 200 µs. What lies outside of the marks does not count."""
    phase = read(ON_GPU, "decode")
    assert phase.on_gpu and (phase.steps, phase.span, phase.busy) == (2, 200, 30 + 50 + 10 + 5)
    assert phase.idle_share == pytest.approx(1 - 95 / 200)
    assert phase.launches == Counter(cudaGraphLaunch=2, cudaMemcpyAsync=1)
    assert phase.syncs == Counter(cudaEventSynchronize=1)
    assert phase.by("kind") == {
        "matrix products": (1, 77.5), "attention": (0.5, 20), "sampling": (0.5, 20), "copies": (0.5, 5),
    }  # fmt: skip
    with pytest.raises(ValueError, match="no step marked 'prefill'"):
        read(ON_GPU, "prefill")


def test_operations_of_a_cpu_by_hand() -> None:
    """Each without those it calls; inside a span of attention all is attention; other threads do not count."""
    events = [
        event("decode", "user_annotation", 0, 100),
        event("aten::rms_norm", "cpu_op", 10, 30),
        event("aten::mul", "cpu_op", 15, 10),
        event("aten::view", "cpu_op", 16, 4),
        event("attention", "user_annotation", 50, 40),
        event("aten::index_select", "cpu_op", 55, 5),
        event("aten::bmm", "cpu_op", 60, 25),
        event("aten::mm", "cpu_op", 20, 20, tid=2),
        event("aten::mm", "cpu_op", 110, 20),
    ]
    phase = read({"traceEvents": events}, "decode")
    assert not phase.on_gpu and phase.busy == 30 + 5 + 25 and phase.idle_share == pytest.approx(0.4)
    assert phase.by("kind") == {NORMS: (3, 20 + 6 + 4), "attention": (2, 30)}
    assert phase.by("name")["aten::rms_norm"] == (1, 20)


def test_union() -> None:
    assert union([]) == 0 and union([(0, 4), (1, 2), (3, 6), (8, 9)]) == 7


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_tst_64x8_64x16_4x2_v_bz_TNT", "matrix products"), ("skinny_kernel", "matrix products"),
        ("wgmma_kernel", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16>", "matrix products"), ("flash_kernel", "attention"),
        ("hopper_decode_kernel", "attention"), ("_merge", "attention"), ("norm_rope_store_kernel", NORMS),
        ("rms_norm_kernel", NORMS), ("silu_and_mul_kernel", NORMS),
        ("void at::native::vectorized_elementwise_kernel<4>", NORMS),
        ("chunk_kernel", "sampling"), ("take_kernel", "copies"), ("mystery", "other"),
    ],
)  # fmt: skip
def test_classes(kernel: str, kind: str) -> None:
    assert classify(kernel) == kind


# --- spans ---------------------------------------------------------------------------------------------------------


def test_a_stopwatch_counts_every_second_once() -> None:
    times = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0, 100.0, 101.0])
    watch = Stopwatch(lambda: next(times))
    with watch("step"), watch("launch"), watch("build"):
        pass  # 1 in step, 2 in launch, 3 in build, 4 in launch, 5 in step
    assert watch.lap() == {"step": 6, "launch": 6, "build": 3}
    with watch("step"):
        pass
    assert watch.lap() == {"step": 1}


@pytest.fixture(scope="module")
def llm(tiny_checkpoint: Path) -> Any:
    with LLM(str(tiny_checkpoint), num_kv_blocks=64) as made:
        yield made


def test_every_part_of_a_step_is_inside_its_span_and_the_engine_is_as_before(llm: LLM) -> None:
    engine = llm.engine
    before = dict(vars(engine)), dict(vars(engine.runner.sampler))  # type: ignore[attr-defined]
    watch = Stopwatch()
    expected = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=3))[0].token_ids
    with instrumented(engine, watch, attention=True):
        assert llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=3))[0].token_ids == expected
    assert set(watch.seconds) == {*PARTS, "attention"} and min(watch.seconds.values()) > 0
    assert engine.runner is before[0]["runner"]
    watch.lap()
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=3))
    assert not watch.seconds


@pytest.mark.parametrize("overlap", [False, True])
def test_every_step_is_committed_inside_its_span(llm: LLM, monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    spans: Counter[str] = Counter()

    @contextmanager
    def count(name: str) -> Iterator[None]:
        spans[name] += 1
        yield

    monkeypatch.setattr(llm.engine, "overlap", overlap)
    with instrumented(llm.engine, count):
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    assert spans["commit"] == spans["wait"] >= 5


# --- bounds --------------------------------------------------------------------------------------------------------


def test_least_work_by_hand(llm: LLM) -> None:
    """Two sequences: one of 10 tokens that are all new, one of 20 tokens that decodes one."""
    engine: Any = llm.engine
    config, kv = engine.runner.model.config, engine.runner.kv
    work = least_work(engine, [10, 20], [10, 1])
    per_token = kv.bytes_per_block() / kv.shape.block_size
    width = config.num_attention_heads * config.head_dim
    layers = config.num_hidden_layers
    assert work["attention"].num_bytes == 30 * per_token + 2 * layers * width * 11 * 4
    assert work["attention"].flops == 4 * layers * width * (55 + 20)
    k_and_v = 2 * config.num_key_value_heads * config.head_dim
    weights = layers * config.hidden_size * (2 * width + k_and_v + 3 * config.intermediate_size)
    assert work["matrix products"].flops == 2 * (11 * weights + 2 * config.vocab_size * config.hidden_size)
    assert work["sampling"] == Work(2 * config.vocab_size * 4, 0)


def test_verdicts() -> None:
    """10 GB/s and 1 TFLOP/s: 1 GB take 0.1 s, 50 GFLOP 0.05 s."""
    device, work = Ceilings(10e9, 1e12), Work(1e9, 50e9)
    assert work.seconds(device) == pytest.approx(0.1)
    assert work.verdict(0.2, device) == "memory-bound: 50% of the memory bandwidth"
    assert work.verdict(1.0, device) == "neither: 10% of the memory bandwidth"
    assert Work(1e9, 200e9).verdict(0.4, device) == "compute-bound: 50% of the matrix rate"


def test_the_ranked_list_and_the_figures() -> None:
    """A step of 200 µs without the profiler, of which the kernels take 47.5: the device waits most of the time."""
    timed = Timed.of([{"schedule": 30e-6, "launch": 60e-6, "wait": 110e-6}] * 3)
    phase = Measured("decode", 8, timed, {"attention": Work(100, 0)}, read(ON_GPU, "decode"))
    ranked = what_next([phase], Ceilings(10e6, 1e12))  # 100 bytes take 10 µs
    assert [round(gain, 4) for gain, _ in ranked] == [0.7625, 0.3875, 0.1, 0.05, 0.025]
    assert ranked[0][1].startswith("decode: the device waits for the host") and "launch (60 µs)" in ranked[0][1]
    assert ranked[3][1].startswith("decode: attention") and "paged_v2_split_kernel" in ranked[3][1]
    figures = make_figures([phase])
    assert figures["decode ms"] == pytest.approx(0.2) and figures["decode host ms"] == pytest.approx(0.09)
    assert figures["decode idle share, timed"] == pytest.approx(1 - 47.5 / 200)
    assert (figures["decode launches"], figures["decode syncs"]) == (1.5, 0.5)


# --- the real thing ------------------------------------------------------------------------------------------------


def test_the_command(cli: Cli, monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path) -> None:
    monkeypatch.setattr(Job, "llm", REAL_LLM)
    run = cli(
        "task=profile", f"model.path={tiny_checkpoint}", "engine.num_kv_blocks=64", "batch=3", "context=8", "steps=4"
    )
    assert run.code == 0, run.err
    assert "Host time per step by part" in run.out and "matrix products" in run.out and "1. " in run.out
    record = json.loads(Path("profile/profile.json").read_text())
    prefill, decode = record["phases"]
    assert (prefill["tokens"], decode["tokens"], decode["traced_steps"]) == (24, 3, 4)
    assert set(decode["host_s"]) == {*PARTS, "other"}
    assert sum(decode["host_s"].values()) == pytest.approx(decode["step_s"], rel=0.5)
    assert 0 < record["figures"]["decode idle share"] < 1 and record["figures"]["decode syncs"] == 0
    assert {"matrix products", "attention"} <= set(decode["classes"])
    trace = json.loads(gzip.decompress(Path("profile/decode.json.gz").read_bytes()))
    names = Counter(e["name"] for e in trace["traceEvents"] if e.get("cat") == "user_annotation")
    assert names["decode"] == 4 and names["schedule"] == 4 + 6  # warm-up steps are in the trace, but not marked
    page = Path("profile/profile.md").read_text()
    assert page.startswith("# Profile of ") and "## What to optimise next\n\n1. " in page and "| decode |" in page
    assert "; policy auto (policy/auto.yaml)" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["batch=0"], "batch must be at least 1"),
        (["context=40", "engine.max_num_batched_tokens=39"], "more than engine.max_num_batched_tokens=39"),
        (["batch=3", "engine.max_num_seqs=2"], "engine.max_num_seqs=2: lower batch"),
        (["batch=3", "context=8", "engine.num_kv_blocks=8"], "8 blocks"),
        (["steps=4000"], "lower batch, context or steps"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(Job, "llm", REAL_LLM)
    run = cli("task=profile", f"model.path={tiny_checkpoint}", "output=null", *arguments)
    assert run.code == 2 and message in run.err and run.err.count("\n") == 1
