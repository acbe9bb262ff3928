"""The engine end to end on tiny checkpoints: what a request gets, whatever happens around it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from nanoserve import LLM, CapacityError, ConfigError, RequestError, SamplingParams
from nanoserve.contracts.scheduling import Schedule
from tests.helpers.oracle import greedy, is_greedy
from tests.helpers.small_engine import GREEDY, make, random_prompt
from tests.helpers.tiny_model import build_tiny_model


def solo(folder, prompt: list[int], params: SamplingParams) -> list[int]:
    """The same request alone, on a fresh engine with a large pool and no prefix cache."""
    with make(folder, enable_prefix_caching=False, num_kv_blocks=64) as llm:
        return llm.generate([prompt], params)[0].token_ids


# ------------------------------------------------------------------------------------------- admission


@pytest.mark.parametrize("length", [127, 128, 129, 150])
def test_c01_request_larger_than_the_pool_is_refused_and_others_run(tiny_folder, rng, length):
    folder, oracle = tiny_folder
    with make(folder, num_kv_blocks=8) as llm:
        prompt = random_prompt(rng, length)
        if length > 128:
            with pytest.raises(CapacityError, match=f"{length} tokens.*128.*num_kv_blocks"):
                llm.generate([prompt], GREEDY)
        else:
            output = llm.generate([prompt], GREEDY)[0]
            assert len(output.token_ids) == min(8, 129 - length)  # the last token's KV is never stored
            assert output.finish_reason == "length"
            assert is_greedy(oracle, prompt, output.token_ids)
        short = random_prompt(rng, 10)
        assert is_greedy(oracle, short, llm.generate([short], GREEDY)[0].token_ids)


@pytest.mark.parametrize("length", [63, 64, 65, 1000])
def test_c03_prompts_around_max_model_len(tiny_folder, rng, length):
    folder, oracle = tiny_folder
    with make(folder, max_model_len=64) as llm:
        prompt = random_prompt(rng, length)
        if length >= 64:
            with pytest.raises(CapacityError, match="max_model_len is 64"):
                llm.generate([prompt], GREEDY)
        else:
            assert is_greedy(oracle, prompt, llm.generate([prompt], GREEDY)[0].token_ids)
        good = random_prompt(rng, 10)
        assert is_greedy(oracle, good, llm.generate([good], GREEDY)[0].token_ids)


def test_c03_max_model_len_above_the_position_table_is_refused(tiny_folder):
    with pytest.raises(ConfigError, match="max_position_embeddings=256"):
        make(tiny_folder[0], max_model_len=257)


@pytest.mark.parametrize("bad", [[5, 512], [-1], [2**40], [], [1.0], [True]])
def test_c34_prompt_ids_outside_the_model_are_refused_by_value(tiny_folder, bad):
    folder, _ = tiny_folder
    with make(folder) as llm:
        with pytest.raises(RequestError):
            llm.generate([bad], GREEDY)
        assert len(llm.generate([[5, 400]], GREEDY)[0].token_ids) == 8  # an id beyond the tokenizer is legal


def test_generate_names_the_bad_prompt_and_starts_nothing(tiny_folder):
    with make(tiny_folder[0]) as llm:
        with pytest.raises(RequestError, match="prompt 1"):
            llm.generate([[1], []], GREEDY)
        assert llm.stats().prompt_tokens == 0 and not llm.engine.has_work


# ------------------------------------------------------------------------------------------- scheduling


def test_c05_prompt_longer_than_the_token_budget_is_chunked(tiny_folder, rng):
    folder, oracle = tiny_folder
    prompts = [random_prompt(rng, n) for n in (100, 5, 5, 5)]
    with make(folder, max_num_batched_tokens=32) as llm:
        sizes = record_step_sizes(llm)
        outputs = llm.generate(prompts, GREEDY)
        assert max(sizes) <= 32
        assert all(is_greedy(oracle, p, o.token_ids) for p, o in zip(prompts, outputs, strict=True))


def record_step_sizes(llm: LLM) -> list[int]:
    sizes: list[int] = []
    schedule = llm.engine.scheduler.schedule

    def recording() -> Schedule:
        plan = schedule()
        sizes.append(len(plan.decode) + sum(n for _, n in plan.prefill))
        return plan

    llm.engine.scheduler.schedule = recording  # type: ignore[method-assign]
    return sizes


@pytest.mark.parametrize("budget", [512, 24])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_c07_preempted_requests_lose_and_repeat_nothing(tiny_folder, rng, budget, prefix_cache, overlap):
    folder, oracle = tiny_folder
    prefix = random_prompt(rng, 32)
    prompts = [prefix + random_prompt(rng, 8) for _ in range(4)]
    params = replace(GREEDY, max_tokens=60)
    with make(
        folder,
        num_kv_blocks=12,
        max_num_batched_tokens=budget,
        enable_prefix_caching=prefix_cache,
        overlap=overlap,
    ) as llm:
        streams = [llm.stream(p, params) for p in prompts]
        outputs = [list(stream) for stream in streams]
        stats = llm.stats()
    assert stats.preemptions >= 1
    assert stats.num_free_blocks == stats.num_blocks == 12
    for prompt, deltas in zip(prompts, outputs, strict=True):
        ids = [t for d in deltas for t in d.token_ids]
        assert len(ids) == 60 and is_greedy(oracle, prompt, ids)
        assert deltas[-1].finished and deltas[-1].finish_reason == "length"
        assert "".join(d.text for d in deltas) == llm.tokenizer.decode(ids)


def test_c09_results_in_input_order_and_never_more_than_max_num_seqs(tiny_folder, rng):
    folder, oracle = tiny_folder
    prompts = [random_prompt(rng, 5 + i % 3) for i in range(25)]
    params = [replace(GREEDY, max_tokens=i % 7 + 1) for i in range(25)]
    with make(folder, max_num_seqs=3) as llm:
        sizes = record_step_sizes(llm)
        outputs = llm.generate(prompts, params)
        assert sizes
    for prompt, p, output in zip(prompts, params, outputs, strict=True):
        assert output.prompt_token_ids == prompt and len(output.token_ids) == p.max_tokens
        assert is_greedy(oracle, prompt, output.token_ids)


@pytest.mark.parametrize("overlap", [True, False])
def test_c10_abort_at_any_moment(tiny_folder, rng, overlap):
    folder, oracle = tiny_folder
    shared = random_prompt(rng, 32)
    with make(folder, num_kv_blocks=10, max_num_batched_tokens=32, overlap=overlap) as llm:
        engine = llm.engine
        for round_ in range(200):
            survivor = shared + random_prompt(rng, 6)
            engine.add_request("survivor", survivor, GREEDY)
            engine.add_request("sharing", shared + [1, 2], GREEDY)
            engine.add_request("long", random_prompt(rng, 100), GREEDY)
            engine.add_request("waiting", random_prompt(rng, 10), GREEDY)
            if round_ % 2:
                assert engine.abort("waiting")
            outputs = []
            abort_at = {rng.randrange(0, 12): name for name in ("sharing", "long", "waiting")}
            steps = 0
            while engine.has_work:
                if steps in abort_at:
                    engine.abort(abort_at[steps])
                outputs += engine.step()
                steps += 1
                assert steps < 500
            assert not engine.abort("survivor") and not engine.abort("never existed")  # ended, unknown: no-ops
            done = {o.request_id: o for o in outputs}
            assert len(done) == len(outputs) == 4, "every request is reported once"
            assert is_greedy(oracle, survivor, done["survivor"].token_ids)
            stats = engine.stats()
            assert stats.num_free_blocks == 10
        nine_blocks = random_prompt(rng, 140)
        assert is_greedy(oracle, nine_blocks, llm.generate([nine_blocks], GREEDY)[0].token_ids)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("steps", [0, 2])
def test_c44_a_request_id_is_refused_while_it_lives_and_free_afterwards(tiny_folder, overlap, steps):
    with make(tiny_folder[0], overlap=overlap) as llm:
        engine = llm.engine
        engine.add_request("a", [1, 2, 3], GREEDY)
        with pytest.raises(RequestError, match="'a' is in use"):
            engine.add_request("a", [4, 5], GREEDY)
        for _ in range(steps):
            assert not engine.step()
        engine.abort("a")
        engine.add_request("a", [4, 5], replace(GREEDY, max_tokens=1))  # may end before the abort is told
        reports = []
        while engine.has_work:
            reports += engine.step()
        assert [r.finish_reason for r in reports] == ["abort", "length"]


# ------------------------------------------------------------------------------------------- prefix cache


def test_c11_fully_cached_prompts(tiny_folder, rng):
    folder, oracle = tiny_folder
    with make(folder) as llm:
        for length, cached in ((16, 0), (32, 16), (33, 32), (48, 32)):
            prompt = random_prompt(rng, length)
            first, second = (llm.generate([prompt], replace(GREEDY, logprobs=0))[0] for _ in range(2))
            assert first.token_ids == second.token_ids and is_greedy(oracle, prompt, first.token_ids)
            assert (first.num_cached_tokens, second.num_cached_tokens) == (0, cached)
            assert [list(d.values())[0] for d in first.logprobs] == pytest.approx(
                [list(d.values())[0] for d in second.logprobs], abs=1e-4
            )


def test_c13_no_foreign_kv_under_constant_reuse(tiny_folder):
    folder, oracle = tiny_folder
    rng = random.Random(5)
    with make(folder, block_size=4, num_kv_blocks=20) as llm:
        for _ in range(200):
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 70))]
            params = replace(GREEDY, max_tokens=3)
            assert is_greedy(oracle, prompt, llm.generate([prompt], params)[0].token_ids)
        stats = llm.stats()
        assert stats.prefix_hits and stats.cache_evictions


def test_c13_multi_turn_hits_only_computed_tokens(tiny_folder, rng):
    folder, oracle = tiny_folder
    with make(folder) as llm:
        prompt = random_prompt(rng, 20)
        answer = llm.generate([prompt], replace(GREEDY, max_tokens=12))[0].token_ids
        again = prompt + answer + random_prompt(rng, 5)
        output = llm.generate([again], GREEDY)[0]
        assert output.num_cached_tokens == 16  # the 32nd token was sampled, its KV never computed
        assert is_greedy(oracle, again, output.token_ids)


def test_c14_a_hash_collision_shares_no_kv(tiny_folder, rng, monkeypatch):
    folder, oracle = tiny_folder
    monkeypatch.setattr("nanoserve.engine.block_manager.hash_block", lambda parent, tokens: 1)
    prompts = [random_prompt(rng, 40) for _ in range(5)]
    with make(folder) as llm:
        for prompt in prompts:
            assert is_greedy(oracle, prompt, llm.generate([prompt], GREEDY)[0].token_ids)


# ------------------------------------------------------------------------------------------- KV formats


def test_c18_int8_kv_is_right_from_the_first_request(tiny_folder, rng):
    folder, oracle = tiny_folder
    prompt = random_prompt(rng, 100)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    with make(folder, kv="int8", enable_prefix_caching=False) as llm:
        outputs = [llm.generate([prompt], params)[0] for _ in range(2)]
        outputs += llm.generate([prompt] * 8, params)
        engine_bytes = llm.engine.runner.kv.bytes_per_block()
    with make(folder, kv={"name": "bf16", "dtype": "bfloat16"}) as llm:
        bf16_bytes = llm.engine.runner.kv.bytes_per_block()
    with torch.no_grad():
        expected = oracle(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    for output in outputs:
        assert output.logprobs[0] == pytest.approx(outputs[0].logprobs[0], abs=1e-4)
        errors = [abs(value - float(expected[token])) for token, value in output.logprobs[0].items()]
        assert sum(errors) / len(errors) < 0.1
    assert engine_bytes / bf16_bytes == pytest.approx((32 + 2) / 64)


def test_c16_all_zero_values_under_int8_kv(tmp_path, rng):
    """Every V of layer 0 is a zero vector: its scale underflows to 0 in fp16, and 0 · 0 must stay 0."""
    oracle = build_tiny_model(tmp_path)
    with torch.no_grad():
        oracle.model.layers[0].self_attn.v_proj.weight.zero_()
    oracle.save_pretrained(tmp_path)
    prompt = random_prompt(rng, 40)
    with make(tmp_path, kv="int8") as llm:
        output = llm.generate([prompt], replace(GREEDY, max_tokens=10, logprobs=20))[0]
        assert not llm.engine.runner.kv.layers[0].v.any() and llm.engine.runner.kv.layers[1].v.any()
    with torch.no_grad():
        expected = oracle(torch.tensor([prompt + output.token_ids])).logits[0].log_softmax(-1)
    errors = [
        abs(value - float(expected[len(prompt) - 1 + i, token]))
        for i, row in enumerate(output.logprobs)
        for token, value in row.items()
    ]
    assert sum(errors) / len(errors) < 0.1  # a NaN would fail as well


def largest(tensor: torch.Tensor, value: float) -> float:
    """``value``, or the nearest to it that ``tensor`` can hold."""
    if tensor.is_floating_point():
        return value if value != value else min(value, torch.finfo(tensor.dtype).max)
    return 0 if value == 0 else torch.iinfo(tensor.dtype).max


@pytest.mark.parametrize("kv", ["bf16", "int8"])
@pytest.mark.parametrize("poison", [float("nan"), 1e30])
def test_c20_unwritten_cache_is_never_read(tiny_folder, rng, kv, poison):
    folder, _ = tiny_folder
    prompts = [random_prompt(rng, n) for n in (1, 15, 17, 33)]
    params = replace(GREEDY, logprobs=0)
    runs = []
    for value in (0.0, poison):
        with make(folder, kv=kv, num_kv_blocks=12) as llm:
            for layer in llm.engine.runner.kv.layers:
                for tensor in (layer.k, layer.v, layer.k_scale, layer.v_scale):
                    if tensor is not None:
                        tensor.fill_(largest(tensor, value))
            runs.append([(o.token_ids, o.logprobs) for o in llm.generate(prompts, params)])
    assert runs[0] == runs[1]


# ------------------------------------------------------------------------------------------- sampling


def test_c23_tiny_temperatures_are_greedy(tiny_folder, rng):
    folder, oracle = tiny_folder
    prompt = random_prompt(rng, 20)
    temperatures = [0, 1e-12, 1e-6, 1e-5, 1e-4, 1e-3]
    params = [replace(GREEDY, temperature=t, logprobs=1) for t in temperatures] + [replace(GREEDY, temperature=1.0)]
    with make(folder) as llm:
        outputs = llm.generate([prompt] * 7, params)
    for output in outputs[:6]:
        assert is_greedy(oracle, prompt, output.token_ids)
        assert all(-1e4 < v <= 0 for d in output.logprobs for v in d.values())


def test_c25_a_seeded_request_does_not_depend_on_its_neighbours(tiny_folder, rng):
    folder, _ = tiny_folder
    prompt = random_prompt(rng, 20)
    seeded = SamplingParams(temperature=0.9, seed=42, max_tokens=20, ignore_eos=True)
    neighbours = [GREEDY, replace(seeded, seed=7), replace(seeded, seed=None), replace(seeded, seed=0)]
    others = [random_prompt(rng, 9 + i) for i in range(4)]
    with make(folder) as llm:
        alone = llm.generate([prompt], seeded)[0].token_ids
        for place in (0, 2, 4):
            prompts, params = list(others), list(neighbours)
            prompts.insert(place, prompt)
            params.insert(place, seeded)
            assert llm.generate(prompts, params)[place].token_ids == alone
        assert [o.token_ids for o in llm.generate([prompt] * 2, seeded)] == [alone] * 2
        four = [llm.generate([prompt], replace(seeded, n=4))[0].outputs for _ in range(2)]
        assert [o.token_ids for o in four[0]] == [o.token_ids for o in four[1]]
        assert [o.index for o in four[0]] == [0, 1, 2, 3]
        assert len({tuple(o.token_ids) for o in four[0]}) > 1
    with make(folder, overlap=True, num_kv_blocks=7, max_num_batched_tokens=16) as llm:
        assert llm.generate([prompt, *others], [seeded, *neighbours])[0].token_ids == alone


def test_c26_repetition_penalty_equals_transformers(tiny_folder, rng):
    folder, oracle = tiny_folder
    prompt = random_prompt(rng, 30)
    with make(folder, overlap=True) as llm:
        output = llm.generate([prompt], replace(GREEDY, repetition_penalty=1.3, max_tokens=16))[0]
    expected = oracle.generate(
        torch.tensor([prompt]), do_sample=False, repetition_penalty=1.3, max_new_tokens=16, pad_token_id=0
    )[0, 30:]
    assert output.token_ids == expected.tolist()


# ------------------------------------------------------------------------------------------- ends


def test_c28_max_tokens_at_its_edges(tiny_folder, rng):
    folder, _ = tiny_folder
    prompt = random_prompt(rng, 50)
    with make(folder, max_model_len=64) as llm:
        lengths = [len(llm.generate([prompt], replace(GREEDY, max_tokens=n))[0].token_ids) for n in (1, 14, 15, 10**9)]
        assert lengths == [1, 14, 14, 14]
        output = llm.generate([prompt], replace(GREEDY, max_tokens=None))[0]
        assert len(output.token_ids) == 14 and output.finish_reason == "length"


def test_c28_c33_eos_as_first_and_as_last_allowed_token(tiny_folder, rng):
    folder, oracle = tiny_folder
    prompt = random_prompt(rng, 20)
    trajectory = greedy(oracle, prompt, 24)
    with make(folder) as llm:
        llm.engine.eos_token_ids = frozenset({trajectory[0]})
        free = replace(GREEDY, ignore_eos=False)
        first = llm.generate([prompt], free)[0]
        assert (first.text, first.finish_reason, first.token_ids) == ("", "stop", trajectory[:1])
        deltas = list(llm.stream(prompt, free))
        assert deltas[-1].finished and deltas[-1].finish_reason == "stop" and deltas[-1].text == ""

        llm.engine.eos_token_ids = frozenset({trajectory[4], 511})
        end = trajectory.index(trajectory[4])
        last = llm.generate([prompt], replace(free, max_tokens=end + 1))[0]
        assert (last.finish_reason, last.token_ids) == ("stop", trajectory[: end + 1])
        ignored = llm.generate([prompt], replace(free, ignore_eos=True, max_tokens=24))[0]
        assert (ignored.finish_reason, ignored.token_ids) == ("length", trajectory)

        llm.engine.eos_token_ids = frozenset({trajectory[0]})
        held = llm.generate([prompt], replace(free, min_tokens=4))[0]
        assert trajectory[0] not in held.token_ids[:4] and len(held.token_ids) >= 4


def test_stop_token_ids_are_named_as_stop_reason(tiny_folder, rng):
    folder, oracle = tiny_folder
    prompt = random_prompt(rng, 20)
    trajectory = greedy(oracle, prompt, 6)
    with make(folder) as llm:
        output = llm.generate([prompt], replace(GREEDY, stop_token_ids=[trajectory[3]]))[0]
    assert output.outputs[0].stop_reason == trajectory[3] and output.finish_reason == "stop"
    assert output.token_ids == trajectory[: trajectory.index(trajectory[3]) + 1]


def test_c31_stop_strings_end_generation_at_that_step_streamed_or_not(tiny_folder):
    folder, oracle = tiny_folder
    with make(folder) as llm:
        forced = llm.tokenizer.encode("The quick brown fox")
        params = SamplingParams(temperature=0, max_tokens=50, stop=["own fox"])

        def force(*inputs, _original=llm.engine.runner.sampler):
            output = _original(*inputs)
            seqs = [s for r in llm.engine.requests.values() for s in r.sequences]
            output.token_ids[0] = forced[seqs[0].num_output_tokens]
            return output

        sampler = llm.engine.runner.sampler
        force.set_row, force.prepare = sampler.set_row, sampler.prepare
        llm.engine.runner.sampler = force
        output = llm.generate(["own fox? "], params)[0]
        assert (output.text, output.finish_reason) == ("The quick br", "stop")
        assert output.outputs[0].stop_reason == "own fox"
        assert len(output.token_ids) == len(forced)
        deltas = list(llm.stream("own fox? ", params))
        assert "".join(d.text for d in deltas) == "The quick br"
        assert "".join(d.text for d in deltas[:-1]) in "The quick br"


# ------------------------------------------------------------------------------------------- reporting


def test_streamed_deltas_add_up_to_the_result(tiny_folder, rng):
    folder, _ = tiny_folder
    prompt = random_prompt(rng, 20)
    params = SamplingParams(temperature=0.8, seed=3, n=3, max_tokens=12, logprobs=2, ignore_eos=True)
    with make(folder) as llm:
        whole = llm.generate([prompt], params)[0]
        deltas = list(llm.stream(prompt, params))
    for i, expected in enumerate(whole.outputs):
        mine = [o for d in deltas for o in d.outputs if o.index == i]
        assert [t for o in mine for t in o.token_ids] == expected.token_ids
        assert "".join(o.text for o in mine) == expected.text
        assert [x for o in mine for x in o.logprobs] == expected.logprobs
        assert [o.finish_reason for o in mine][:-1] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == "length"
        assert expected.cumulative_logprob == pytest.approx(
            sum(d[t] for d, t in zip(expected.logprobs, expected.token_ids, strict=True))
        )


@pytest.mark.parametrize("overlap", [True, False])
def test_columns_and_outputs_add_up_to_the_result_however_rarely_one_asks(tiny_folder, rng, overlap):
    """Tokens of a plain stream that goes on come as columns; what says more, and its beginning and end, as outputs."""
    params = SamplingParams(max_tokens=30, seed=3, ignore_eos=True)
    wanted = {
        "plain": params,
        "choices": replace(params, n=2),
        "logprobs": replace(params, logprobs=1),
        "stop": replace(params, stop="no such text"),
    }
    prompt = random_prompt(rng, 20)
    with make(tiny_folder[0], overlap=overlap) as llm:
        whole = {name: llm.generate([prompt], own)[0] for name, own in wanted.items()}
        engine = llm.engine
        for name, own in wanted.items():
            engine.add_request(name, prompt, own, stream=True)
        got = {(name, i): ([], []) for name, own in wanted.items() for i in range(own.n)}
        in_columns, ended = 0, set()
        while engine.has_work:
            for _ in range(rng.randrange(5)):
                engine.advance()
            deltas, outputs = engine.report_columns()
            for columns in deltas:
                assert columns.request_ids == ["plain"] and got["plain", 0][0] and "plain" not in ended
                got["plain", 0][0].extend(columns.token_ids)
                got["plain", 0][1].extend(columns.texts)
                in_columns += 1
            for output in outputs:
                for completion in output.outputs:
                    tokens, texts = got[output.request_id, completion.index]
                    tokens.extend(completion.token_ids)
                    texts.append(completion.text)
                if output.finished:
                    ended.add(output.request_id)
        assert ended == set(wanted) and in_columns > 10
        for (name, i), (tokens, texts) in got.items():
            assert (tokens, "".join(texts)) == (whole[name].outputs[i].token_ids, whole[name].outputs[i].text), name


def test_leaving_a_stream_aborts_its_request(tiny_folder):
    with make(tiny_folder[0], num_kv_blocks=8) as llm:
        for delta in llm.stream([1, 2, 3], replace(GREEDY, max_tokens=100)):
            assert not delta.finished
            break
        del delta
        llm.generate([[1]], GREEDY)
        stats = llm.stats()
        assert stats.requests_aborted == 1 and stats.num_free_blocks == 8


def test_c51_counters_count_each_token_once(tiny_folder, rng):
    folder, _ = tiny_folder
    with make(folder, num_kv_blocks=12) as llm:
        llm.generate([random_prompt(rng, 40) for _ in range(4)], replace(GREEDY, max_tokens=60))
        stats = llm.stats()
        assert stats.preemptions >= 1
        assert (stats.prompt_tokens, stats.generation_tokens) == (160, 240)
        assert stats.prefix_hits == 0
        same = random_prompt(rng, 40)
        for i in range(10):
            llm.generate([same], GREEDY)
            now = llm.stats()
            assert now.prefix_hits == 32 * i and now.prefix_queries == 160 + 40 * (i + 1)
        assert now.running == now.waiting == 0 and now.requests_finished == 14


def test_two_engines_live_in_one_process(tiny_folder, rng):
    folder, oracle = tiny_folder
    prompt = random_prompt(rng, 10)
    with make(folder) as one, make(folder, kv="int8", block_size=4) as two:
        first = one.stream(prompt, GREEDY)
        next(first)
        assert len(two.generate([prompt], GREEDY)[0].token_ids) == 8
        rest = [t for d in first for t in d.token_ids]
        assert rest == greedy(oracle, prompt, 8)[1:]


def test_close_is_idempotent_and_a_closed_engine_says_so(tiny_folder):
    llm = make(tiny_folder[0])
    llm.engine.add_request("x", [1, 2], GREEDY)
    llm.close()
    llm.close()
    with pytest.raises(Exception, match="closed"):
        llm.generate([[1]], GREEDY)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_stream_that_never_started_is_aborted_when_it_is_forgotten(tiny_folder, overlap):
    with make(tiny_folder[0], num_kv_blocks=8, overlap=overlap) as llm:
        stream = llm.stream([1, 2, 3], GREEDY)
        del stream
        closed = llm.stream([1, 2, 3], GREEDY)
        closed.close()
        assert list(closed) == []
        assert not llm.engine.requests and not llm._inbox and llm.stats().requests_aborted == 2
        assert not llm.engine.scheduler.has_unfinished


def test_nothing_stays_in_flight_after_the_last_request(tiny_folder, rng):
    """With overlap a sequence ends while its next step is in flight; its blocks come back all the same."""
    folder, oracle = tiny_folder
    prompt = random_prompt(rng, 20)
    third = greedy(oracle, prompt, 3)[2]
    with make(folder, num_kv_blocks=8, overlap=True) as llm:
        llm.generate([prompt], replace(GREEDY, stop_token_ids=[third]))
        assert llm.stats().num_free_blocks == 8
        stream = llm.stream(prompt, replace(GREEDY, max_tokens=50))
        next(stream), next(stream)
        del stream
        assert llm.stats().num_free_blocks == 8 and not llm._inbox


@pytest.mark.parametrize("params", [{"n": 2}, [{"n": 2}], "greedy", 3])
def test_params_of_another_type_are_refused(tiny_folder, params):
    with make(tiny_folder[0]) as llm, pytest.raises(RequestError, match="SamplingParams"):
        llm.generate([[1]], params)


def test_numpy_token_ids_are_token_ids(tiny_folder):
    import numpy as np

    with make(tiny_folder[0]) as llm:
        expected = llm.generate([[1, 2, 3]], GREEDY)[0].token_ids
        for prompt in (np.array([1, 2, 3]), [np.array([1, 2, 3])], [[np.int64(1), 2, 3]], np.array([[1, 2, 3]])):
            assert llm.generate(prompt, GREEDY)[0].token_ids == expected


def test_a_pool_that_cannot_be_allocated_is_named(tiny_folder):
    with pytest.raises(ConfigError, match=r"engine.num_kv_blocks=1000000000: .* GiB"):
        make(tiny_folder[0], num_kv_blocks=10**9)
