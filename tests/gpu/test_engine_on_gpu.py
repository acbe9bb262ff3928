"""The engine on a GPU, captured and overlapped: every backend against eager `sdpa`, `auto` against the oracle."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from nanoserve import LLM, SamplingParams
from nanoserve.tasks.profile import Options, decode
from tests.helpers.oracle import is_greedy
from tests.helpers.tiny_model import build_tiny_model

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
TEXTS = ["def read_json(path):\n", "import json\n", "class Stack:\n", "for name in names:\n    "] * 4


def prompts_of(seed: int, count: int, longest: int = 100) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(512) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("scheduler", ["decode_first", "prefill_first"])
@pytest.mark.parametrize("pool", [14, 400])
def test_fp32_tokens_equal_transformers(tmp_path, scheduler, pool):
    """With graphs, overlap, prefix hits and preemption; batches grow and shrink through several captured sizes."""
    oracle = build_tiny_model(tmp_path)
    shared = prompts_of(0, 1)[0][:32]
    prompts = [(shared if i % 2 else []) + p for i, p in enumerate(prompts_of(1, 20, 40))]
    with LLM(
        str(tmp_path),
        dtype="float32",
        device="cuda",
        num_kv_blocks=pool,
        scheduler=scheduler,
        max_num_seqs=9,
        max_num_batched_tokens=64,
        debug=True,
    ) as llm:
        runner = llm.engine.runner
        assert llm.engine.overlap and runner.decode_graphs is not None and runner.prefill_graphs is not None
        for _ in range(2):
            params = [replace(GREEDY, max_tokens=5 + i % 20) for i in range(len(prompts))]
            outputs = llm.generate(prompts, params)
            for prompt, output in zip(prompts, outputs, strict=True):
                assert is_greedy(oracle, prompt, output.token_ids)
        stats = llm.stats()
    assert stats.num_free_blocks == pool
    assert stats.preemptions or pool == 400


@pytest.mark.parametrize("kv", ["bf16", "int8"])
@pytest.mark.parametrize(
    "attention",
    [
        "auto",
        "triton_varlen",
        "triton_flash",
        "hopper_flash",
        "paged_v1",
        "paged_v2",
        "paged_v2_split",
        "hopper_decode",
    ],
)
def test_every_backend_equals_eager_sdpa_on_the_embedded_checkpoint(attention, kv):
    """Teacher-forced: both score the same tokens, so a near-tie cannot send them apart."""
    if attention.startswith("hopper") and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    if (attention, kv) == ("paged_v1", "int8"):
        attention = "int8_fused"
    logprobs = []
    for options in ({"attention": "sdpa", "enforce_eager": True, "overlap": False}, {"attention": attention}):
        with LLM("tiny", kv=kv, device="cuda", dtype="bfloat16", num_kv_blocks=2000, **options) as llm:
            runner = llm.engine.runner
            captures = runner.prefill_graphs is not None and runner.decode_graphs is not None
            assert captures != ("enforce_eager" in options)
            encoded = [llm.tokenizer.encode(t) for t in TEXTS]
            if not logprobs:
                outputs = llm.generate(encoded, GREEDY)
                scored = [ids + o.token_ids for ids, o in zip(encoded, outputs, strict=True)]
                rows = [full[:cut] for full in scored for cut in range(len(full) - 20, len(full))]
            one = replace(GREEDY, max_tokens=2, logprobs=5)
            logprobs.append([o.logprobs for o in llm.generate(rows, one)])
    errors, flips = [], 0
    for expected, got in zip(*logprobs, strict=True):
        same = max(expected[0], key=expected[0].get) == max(got[0], key=got[0].get)
        flips += not same
        for i in (0, 1) if same else (0,):  # the second token is decoded, from the same context if the first agrees
            errors += [abs(expected[i][t] - got[i][t]) for t in expected[i].keys() & got[i].keys()]
    assert sum(errors) / len(errors) < 0.02 and max(errors) < 0.3
    assert flips <= 0.03 * len(rows)


def calls_of(steps: Callable[[], None]) -> dict[str, int]:
    """How often ``steps()`` calls each of torch's operations and of the CUDA runtime; fails if it waits for the GPU."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        steps()
    counts = {e.key: e.count for e in trace.key_averages()}
    assert counts.get("aten::_local_scalar_dense", 0) == 0
    assert counts.get("cudaStreamSynchronize", 0) == 0
    assert counts.get("cudaDeviceSynchronize", 0) <= 1  # the profiler's own, when it stops
    return counts


def test_a_decode_step_reads_nothing_back_but_its_tokens():
    def steps() -> None:
        for _ in range(10):
            llm.engine.step()

    with LLM("tiny", device="cuda", dtype="bfloat16", num_kv_blocks=2000) as llm:
        llm.generate(TEXTS, GREEDY)
        for i, text in enumerate(TEXTS):
            llm.engine.add_request(str(i), llm.tokenizer.encode(text), replace(GREEDY, max_tokens=64))
        for _ in range(6):
            llm.engine.step()
        counts = calls_of(steps)
    assert counts.get("cudaGraphLaunch", 0) == 10  # model and sampler are one graph


@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_a_step_of_decode_and_prompts_reads_nothing_back_but_its_tokens(kv):
    """A request arrives before every step, and less and less of a step is left for its prompt. All steps run twice:
    the first time they compile and capture, the second time they are traced."""
    params = replace(GREEDY, max_tokens=64)
    prompt = list(range(60))
    launched: list[tuple[int, list[int]]] = []  # decoding sequences, tokens of each prompt

    def arrive() -> None:
        for i in range(10):
            llm.engine.add_request(f"new {i}", prompt, replace(params, temperature=i % 2, seed=i))
            llm.engine.step()

    with LLM(
        "tiny",
        device="cuda",
        dtype="bfloat16",
        kv=kv,
        num_kv_blocks=2000,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
    ) as llm:
        runner = llm.engine.runner
        launch = runner.launch

        def noted(schedule):
            launched.append((len(schedule.decode), [count for _, count in schedule.prefill]))
            return launch(schedule)

        runner.launch = noted
        rounds = []
        counts: dict[str, int] = {}
        for run in (arrive, lambda: counts.update(calls_of(arrive))):
            launched.clear()
            for i in range(4):
                llm.engine.add_request(str(i), prompt, params)
            for _ in range(8):
                llm.engine.step()
            run()
            rounds.append(launched[:])
            for request_id in list(llm.engine.requests):
                llm.engine.abort(request_id)
            while llm.engine.has_work:
                llm.engine.step()
        num_layers = runner.model.config.num_hidden_layers
    assert rounds[0] == rounds[1] and len(rounds[1]) == 8 + 10
    traced = rounds[1][8:]
    assert all(num_decode and prompts for num_decode, prompts in traced)
    assert any(len(prompts) > 1 for _, prompts in traced)  # the end of one and the beginning of another
    assert counts.get("cudaGraphLaunch", 0) == 10 * (num_layers + 1)  # all but the attentions


def test_the_gpu_is_hardly_ever_idle_while_a_large_batch_decodes():
    """Steps of some milliseconds, in which the host prepares the next one with time to spare."""
    with LLM("qwen3_0_6b", load_format="dummy", device="cuda", kv="bf16", num_kv_blocks=6000) as llm:
        trace = decode(llm, Options(batch=128, context=512), None, lambda what: None).trace
    assert trace.on_gpu and trace.steps == 20
    assert trace.idle_share <= 0.05, f"{trace.idle_share:.1%} of {trace.span / trace.steps / 1e3:.2f} ms a step"


def test_graphs_are_captured_while_dead_ones_wait_for_the_collector():
    """The dead ones are those of a block table that has grown, or of another engine."""
    thresholds = gc.get_threshold()
    with LLM("tiny", device="cuda", dtype="bfloat16", num_kv_blocks=2000) as llm:
        expected = [o.token_ids for o in llm.generate(TEXTS, GREEDY)]
        runner = llm.engine.runner
        runner.rows.generation += 1
        runner.prefill_graphs._buckets.clear()
        gc.set_threshold(1)
        try:
            got = [o.token_ids for o in llm.generate(TEXTS, GREEDY)]
        finally:
            gc.set_threshold(*thresholds)
    assert got == expected


def test_a_kernel_that_cannot_be_captured_fails_its_step_and_no_other(monkeypatch):
    with LLM("tiny", device="cuda", dtype="bfloat16", num_kv_blocks=2000) as llm:
        attention = type(llm.engine.runner._captured_backend(1))
        decode = attention.decode

        def synchronising(self, q, layer, meta, out):
            decode(self, q, layer, meta, out)
            if torch.cuda.is_current_stream_capturing():
                torch.cuda.synchronize()

        monkeypatch.setattr(attention, "decode", synchronising)
        stream = torch.cuda.current_stream()
        assert llm.generate(TEXTS[:1], GREEDY)[0].finish_reason == "error"
        assert torch.cuda.current_stream() == stream
        monkeypatch.undo()
        for output in llm.generate([TEXTS[0], 10 * TEXTS[1]], GREEDY):  # two graphs of prompts, two of decode
            assert output.finish_reason == "length"


def test_close_gives_the_memory_back():
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        llm = LLM("tiny", device="cuda", dtype="bfloat16", gpu_memory_utilization=0.5)
        llm.generate(TEXTS[:2], GREEDY)
        held = torch.cuda.memory_allocated() - before
        llm.close()
        del llm
        assert held > 2**30
        assert torch.cuda.memory_allocated() - before < 64 * 2**20
