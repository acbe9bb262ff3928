"""C50: steps on fixed buffers equal eager ones, and padding harms nobody. The replay itself needs a GPU."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import types
from dataclasses import dataclass, replace

import pytest
import torch

from nanoserve import LLM, SamplingParams, StructuredOutput
from nanoserve.contracts.attention import AttentionBackend, AttentionSpec
from nanoserve.contracts.capabilities import Capabilities
from nanoserve.engine.capture import GraphPool
from nanoserve.engine.decode_graphs import DecodeGraphs, buckets_up_to
from nanoserve.engine.prefill_graphs import PrefillGraphs, token_buckets
from nanoserve.hookspecs import hookimpl
from nanoserve.registry import Registry
from tests.helpers.oracle import is_greedy

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@dataclass(frozen=True)
class NoOptions:
    """None."""


class DeviceLengths(AttentionBackend):
    """Decode that looks at nothing but device tensors, as a captured kernel must."""

    def decode(self, q, layer, meta, out):
        size, kv = self.context.block_size, self.context.kv
        t = torch.arange(meta.block_table.shape[1] * size)
        slots = meta.block_table[:, t // size] * size + t % size
        seen = t < meta.context_lens[:, None]
        k, v = kv.gather(layer, slots.where(seen, meta.block_table[:, :1] * size))
        grouped = q.view(len(q), k.shape[2], -1, q.shape[-1])
        scores = torch.einsum("bhgd,bnhd->bhgn", grouped, k) * self.context.scale
        weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
        out.copy_(torch.einsum("bhgn,bnhd->bhgd", weights, v).reshape(out.shape))


class Plugin:
    @hookimpl
    def nanoserve_attention(self, register):
        can = Capabilities(phases=frozenset({"decode"}), cuda_graph=True)
        register(AttentionSpec("device_lengths", "for tests", can, NoOptions, DeviceLengths))


def make(folder, **options) -> LLM:
    """An engine that runs on fixed buffers, without capturing."""
    registry = Registry.discover(extra=[Plugin()])
    options = {"block_size": 16, "num_kv_blocks": 40, "debug": True, "max_num_seqs": 8} | options
    llm = LLM(str(folder), attention="device_lengths", registry=registry, device="cpu", **options)
    runner = llm.engine.runner
    assert runner.decode_graphs is None, "a CPU engine has no use for fixed buffers"
    runner.decode_graphs = DecodeGraphs(
        runner.model,
        runner.kv,
        runner.sampler,
        runner.rows,
        runner._captured_backend,
        runner.max_num_seqs,
        runner.max_model_len,
        None,
    )
    runner.prefill_graphs = PrefillGraphs(runner.model, runner.kv, 100, None)
    return llm


def prompts_of(rng: random.Random, count: int) -> list[list[int]]:
    return [[rng.randrange(512) for _ in range(rng.randint(1, 40))] for _ in range(count)]


@pytest.mark.parametrize("multiple", [16, 64])
@pytest.mark.parametrize("max_num_seqs", [1, 3, 8, 60, 65, 256, 300])
def test_buckets_end_at_the_limit_and_never_exceed_it(max_num_seqs, multiple):
    sizes = buckets_up_to(max_num_seqs, multiple)
    assert sizes == sorted(set(sizes)) and sizes[-1] == max_num_seqs and sizes[0] == 1
    assert all(size % multiple == 0 for size in sizes[:-1] if 64 < size <= 256)


@pytest.mark.parametrize("max_tokens", [1, 16, 17, 100, 2048])
def test_token_buckets_end_at_the_limit_and_waste_less_than_half(max_tokens):
    sizes = token_buckets(max_tokens)
    assert sizes == sorted(set(sizes)) and sizes[-1] == max_tokens
    assert all(b <= 1.5 * a for a, b in zip(sizes, sizes[1:], strict=False))


@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_collected_while_a_graph_is_captured(monkeypatch, collects):
    """Dead graphs lie in cycles, and CUDA forbids to destroy one meanwhile. Memory of a failed capture is lost."""
    handles = itertools.count()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(gc, "isenabled", lambda: collects)
    calls = []
    monkeypatch.setattr(gc, "disable", lambda: calls.append("off"))
    monkeypatch.setattr(gc, "enable", lambda: calls.append("on"))
    pool = GraphPool()
    with pool.capturing() as memory:
        assert (memory, calls) == (0, ["off"])
    with pytest.raises(RuntimeError, match="invalidated"), pool.capturing() as memory:
        assert memory == 0
        raise RuntimeError("capture invalidated")
    assert calls == (["off", "on", "off", "on"] if collects else ["off", "off"])
    with pool.capturing() as memory:
        assert memory == 1


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_batches_of_every_size_equal_eager(tiny_folder, overlap, kv):
    folder, oracle = tiny_folder
    rng = random.Random(1)
    with make(folder, overlap=overlap, kv=kv) as llm, LLM(str(folder), device="cpu", kv=kv, num_kv_blocks=40) as eager:
        for count in (3, 5, 7, 8, 3, 8, 1):
            prompts = prompts_of(rng, count)
            params = [replace(GREEDY, max_tokens=rng.randint(1, 12)) for _ in prompts]  # the batch shrinks as they end
            ours, theirs = llm.generate(prompts, params), eager.generate(prompts, params)
            assert [o.token_ids for o in ours] == [o.token_ids for o in theirs]
            if kv == "bf16":
                assert all(is_greedy(oracle, p, o.token_ids) for p, o in zip(prompts, ours, strict=True))
        assert set(llm.engine.runner.decode_graphs._buckets) == {1, 2, 4, 8}


def test_more_sequences_than_any_captured_size_run_eagerly(tiny_folder):
    folder, oracle = tiny_folder
    prompts = prompts_of(random.Random(2), 6)
    with make(folder, max_num_seqs=6) as llm:
        llm.engine.runner.max_num_seqs = 4
        outputs = llm.generate(prompts, GREEDY)
    assert all(is_greedy(oracle, p, o.token_ids) for p, o in zip(prompts, outputs, strict=True))


def test_logits_of_mixed_steps_have_the_sizes_of_captured_ones(tiny_folder, monkeypatch):
    """Whatever the batch: for a size that it has not met, a library loads kernels, and waits for the GPU to do so."""
    folder, _ = tiny_folder
    prompts = prompts_of(random.Random(3), 8)
    with make(folder, max_num_batched_tokens=32) as llm:
        model, rows = llm.engine.runner.model, []
        compute_logits = model.compute_logits
        monkeypatch.setattr(
            model, "compute_logits", lambda hidden, dtype: rows.append(len(hidden)) or compute_logits(hidden, dtype)
        )
        monkeypatch.setattr(llm.engine.runner.decode_graphs, "sizes", [4, 8])
        outputs = llm.generate(prompts, GREEDY)
    assert set(rows) == {4, 8}
    with make(folder) as llm:
        assert [o.token_ids for o in outputs] == [o.token_ids for o in llm.generate(prompts, GREEDY)]


def test_a_prompt_that_fills_the_context(tiny_folder):
    folder, oracle = tiny_folder
    prompt = [random.Random(3).randrange(512) for _ in range(254)]
    with make(folder) as llm:
        output = llm.generate([prompt], GREEDY)[0]
    assert len(output.token_ids) == 2 and is_greedy(oracle, prompt, output.token_ids)


def test_prompts_beyond_the_largest_bucket_run_eagerly_and_others_on_fixed_buffers(tiny_folder, monkeypatch):
    folder, oracle = tiny_folder
    sizes = []
    forward = PrefillGraphs.forward
    monkeypatch.setattr(
        PrefillGraphs,
        "forward",
        lambda self, batch, step: sizes.append(batch.num_prefill) or forward(self, batch, step),
    )
    rng = random.Random(8)
    prompts = [[rng.randrange(512) for _ in range(n)] for n in (100, 101, 3)]
    with make(folder) as llm:
        outputs = [llm.generate([p], GREEDY)[0] for p in prompts]
    assert sizes == [100, 3]
    assert all(is_greedy(oracle, p, o.token_ids) for p, o in zip(prompts, outputs, strict=True))


@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_padding_writes_to_no_block(tiny_folder, kv):
    """Three sequences in a bucket of four, one owning block 0 and one the last slot of the last block."""
    folder, _ = tiny_folder
    with make(folder, kv=kv, num_kv_blocks=6, enable_prefix_caching=False) as llm:
        tensors = [t for x in llm.engine.runner.kv.layers for t in (x.k, x.v, x.k_scale, x.v_scale) if t is not None]
        engine = llm.engine
        for i, length in enumerate((20, 28, 30)):
            engine.add_request(str(i), list(range(length)), replace(GREEDY, max_tokens=3))
        engine.step()  # the prompts
        owned = {b for seq in engine.scheduler.running for b in seq.block_table}
        assert owned == set(range(6))
        written = {
            (seq.block_table[p // 16], p % 16) for seq in engine.scheduler.running for p in range(seq.num_tokens)
        }
        before = [t.clone() for t in tensors]
        while engine.has_work:
            engine.step()
        for old, new in zip(before, tensors, strict=True):
            for block in range(7):  # the scratch block included
                for offset in range(16):
                    if (block, offset) not in written and (block, offset - 1) not in written:
                        assert torch.equal(old[block, :, offset], new[block, :, offset]), (block, offset)


def test_batches_that_need_logits_leave_the_captured_sampler_and_restricted_ones_do_not(tiny_folder):
    folder, _ = tiny_folder
    prompts = prompts_of(random.Random(4), 4)
    base = SamplingParams(temperature=0.8, seed=5, max_tokens=20, ignore_eos=True)
    restricted = [base, replace(base, top_k=5), replace(base, top_p=0.7, top_k=9), replace(base, min_p=0.02)]
    params = [base, replace(base, top_k=5, logprobs=2), replace(base, presence_penalty=1.0, logit_bias={3: 4.0})]
    params.append(replace(base, structured=StructuredOutput(regex="[a-z]{8}")))
    with make(folder) as llm, LLM(str(folder), device="cpu", num_kv_blocks=40) as eager:
        for chosen, needs_logits in ((params, True), ([base] * 4, False), (restricted, False)):
            for bucket in llm.engine.runner.decode_graphs._buckets.values():
                bucket.logits = None
            ours, theirs = llm.generate(prompts, chosen), eager.generate(prompts, chosen)
            assert [o.token_ids for o in ours] == [o.token_ids for o in theirs]
            buckets = llm.engine.runner.decode_graphs._buckets
            assert any(bucket.logits is not None for bucket in buckets.values()) == needs_logits


@pytest.mark.parametrize("at_start", [True, False])
def test_a_bucket_is_made_ready_without_upsetting_the_next_step(tiny_folder, monkeypatch, at_start):
    """Its warm-up takes what nobody has sent. With a graph that is no more than what it would run."""
    folder, _ = tiny_folder
    prompts = prompts_of(random.Random(8), 6)
    params = [replace(GREEDY, max_tokens=3 * n) for n in range(1, 7)]  # a smaller bucket now and then
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(DecodeGraphs, "_record", staticmethod(lambda pool, run: run))
    with make(folder) as llm, LLM(str(folder), device="cpu", num_kv_blocks=40) as eager:
        graphs = llm.engine.runner.decode_graphs
        graphs.pool = object()
        expected = [o.token_ids for o in eager.generate(prompts, params)]
        if at_start:
            with torch.inference_mode():
                graphs.capture_all()
        for _ in range(2):
            assert [o.token_ids for o in llm.generate(prompts, params)] == expected
        assert len(graphs._buckets) > 2


def test_a_step_that_fails_does_not_upset_the_next(tiny_folder, monkeypatch):
    """Its inputs may have been taken or not: see ``Mailbox``."""
    folder, _ = tiny_folder
    prompts = prompts_of(random.Random(8), 3)
    with make(folder) as llm, LLM(str(folder), device="cpu", num_kv_blocks=40) as eager:
        expected = [o.token_ids for o in eager.generate(prompts, GREEDY)]
        sampler = type(llm.engine.runner.sampler)
        prepare = sampler.prepare
        for owner, name in ((DeviceLengths, "decode"), (sampler, "prepare")):
            right = getattr(owner, name)

            def fails(*args, right=right, **kwargs):
                if right is prepare and len(args) < 5:  # of a prompt: no letter is written
                    return right(*args, **kwargs)
                raise RuntimeError("once")

            monkeypatch.setattr(owner, name, fails)
            assert {o.finish_reason for o in llm.generate(prompts, GREEDY)} == {"error"}
            monkeypatch.setattr(owner, name, right)
            assert [o.token_ids for o in llm.generate(prompts, GREEDY)] == expected


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_fused_stores_serve_every_kind_of_step(tiny_folder, monkeypatch, kv, fixed):
    """On a GPU the formats normalise, rotate and store in one launch: here in the interpreter, with decoding sequences
    beside prompts and alone. Only alone does nobody need k and v."""
    from nanoserve_plugins.kvcache import _kernels
    from nanoserve_plugins.kvcache.bf16 import BF16KVCache
    from nanoserve_plugins.kvcache.int8 import Int8KVCache

    folder, _ = tiny_folder
    rng = random.Random(3)
    prompts = prompts_of(rng, 6)
    params = [replace(GREEDY, max_tokens=rng.randint(2, 8)) for _ in prompts]
    options = {"kv": kv, "num_kv_blocks": 40, "max_num_seqs": 8, "max_num_batched_tokens": 32, "block_size": 16}
    with LLM(str(folder), device="cpu", **options) as llm:
        expected = [o.token_ids for o in llm.generate(prompts, params)]
    needed = set()

    def fused(*step):
        needed.add(step[-1])
        return _kernels.norm_rope_store(*step)

    for cache in (BF16KVCache, Int8KVCache):
        monkeypatch.setattr(cache, "norm_rope_store", lambda self: fused)
    with make(folder, **options) if fixed else LLM(str(folder), device="cpu", **options) as llm:
        assert [o.token_ids for o in llm.generate(prompts, params)] == expected
    assert needed == {True, False}


def test_the_block_table_may_move(tiny_folder):
    folder, oracle = tiny_folder
    prompts = prompts_of(random.Random(6), 5)
    with make(folder) as llm:
        rows = llm.engine.runner.rows
        first = llm.generate(prompts[:2], GREEDY)
        rows.reserve(rows.scratch + 1)
        second = llm.generate(prompts[2:], GREEDY)
    assert all(is_greedy(oracle, p, o.token_ids) for p, o in zip(prompts, first + second, strict=True))
