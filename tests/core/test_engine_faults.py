"""What goes wrong in an engine costs the requests that it concerns, and nothing else: no neighbour, no block."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace

import pytest

from nanoserve import SamplingParams
from nanoserve.contracts.errors import NanoserveError, PluginError
from nanoserve.contracts.scheduling import Schedule
from nanoserve.server.messages import Score
from nanoserve.server.scoring import Scorer
from tests.helpers.oracle import is_greedy
from tests.helpers.small_engine import GREEDY, make, random_prompt


def test_c41_a_nan_in_one_request_touches_no_neighbour(tiny_folder, rng):
    folder, oracle = tiny_folder
    prompts = [random_prompt(rng, 12) for _ in range(3)]
    prompts[1][5] = 77
    for prompt in (prompts[0], prompts[2]):
        prompt[:] = [t if t != 77 else 78 for t in prompt]
    with make(folder) as llm:
        model = llm.engine.runner.model
        model.lm_head = model.embed_tokens.clone()
        model.embed_tokens[77] = float("nan")
        outputs = llm.generate(prompts, replace(GREEDY, max_tokens=6, logit_bias={77: -1e9}))
        stats = llm.stats()
    assert outputs[1].finish_reason == "error" and "not finite" in outputs[1].outputs[0].error
    assert outputs[1].token_ids == []
    for i in (0, 2):
        assert outputs[i].finish_reason == "length" and is_greedy(oracle, prompts[i], outputs[i].token_ids)
    assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("scores", [True, False])
def test_blocks_that_held_a_nan_are_cleared_for_their_next_owner(tiny_folder, rng, overlap, scores):
    """Some kernels read rows past a context's end, times a probability of 0, and 0 · NaN is NaN."""
    options = {"overlap": overlap, "num_kv_blocks": 8, "block_size": 16, "enable_prefix_caching": False}
    with make(tiny_folder[0], **options) as llm:
        model, kv = llm.engine.runner.model, llm.engine.runner.kv
        row, model.lm_head = model.embed_tokens[77].clone(), model.embed_tokens.clone()
        model.embed_tokens[77] = float("nan")

        def num_spoiled():
            return int(kv.layers[-1].v.isnan().flatten(1).any(1).sum())

        assert llm.generate([[77, *random_prompt(rng, 40)]], GREEDY)[0].finish_reason == "error"
        assert num_spoiled() == 3
        model.embed_tokens[77] = row
        if scores:  # a prompt that samples nothing, whose blocks a later step must not clear
            Scorer(llm.engine).score([Score("a", random_prompt(rng, 5), 0)])
        else:
            output = llm.generate([random_prompt(rng, 5)], replace(GREEDY, max_tokens=4))[0]
            assert output.finish_reason == "length"
        assert num_spoiled() == 2


@pytest.mark.parametrize("overlap", [True, False])
def test_a_failing_step_ends_its_own_requests_and_the_engine_lives(tiny_folder, rng, overlap):
    folder, oracle = tiny_folder
    with make(folder, overlap=overlap, num_kv_blocks=20) as llm:
        launch, calls = llm.engine.runner.launch, iter(range(1000))

        def failing(schedule):
            if next(calls) == 3:
                raise RuntimeError("kernel exploded")
            return launch(schedule)

        synchronized = []
        llm.engine.runner.launch = failing
        llm.engine.runner.synchronize = lambda: synchronized.append(1)
        outputs = llm.generate([random_prompt(rng, 20) for _ in range(2)], GREEDY)
        assert [o.finish_reason for o in outputs] == ["error", "error"]
        assert "kernel exploded" in outputs[0].outputs[0].error
        assert synchronized == [1], "what it had launched may read buffers that the step after the next writes"
        stats = llm.stats()
        assert stats.num_free_blocks == stats.num_blocks
        good = random_prompt(rng, 20)
        assert is_greedy(oracle, good, llm.generate([good], GREEDY)[0].token_ids)


@pytest.mark.parametrize("limit", ["max_num_seqs", "max_num_batched_tokens"])
def test_a_scheduler_that_exceeds_a_limit_is_named(tiny_folder, rng, limit):
    """Kernels have scratch for so many sequences and tokens, and do not look where it ends."""
    with make(tiny_folder[0], num_kv_blocks=20) as llm:
        scheduler = llm.engine.scheduler
        schedule, limits = scheduler.schedule, scheduler.limits
        wide, narrow = limits, replace(limits, **{limit: 2})

        def unlimited():
            scheduler.limits = wide
            try:
                return schedule()
            finally:
                scheduler.limits = narrow

        scheduler.schedule = unlimited
        outputs = llm.generate([random_prompt(rng, 20) for _ in range(3)], GREEDY)
        number = {"max_num_seqs": "3 sequences", "max_num_batched_tokens": "60 tokens"}[limit]
        for output in outputs:
            assert f"'decode_first' chose {number} for one step, and {limit} is 2" in output.outputs[0].error
        assert llm.stats().num_free_blocks == 20


def test_a_scheduler_that_grants_nothing_is_named(tiny_folder):
    with make(tiny_folder[0]) as llm:
        scheduler = llm.engine.scheduler
        scheduler.schedule = lambda: Schedule(prefill=[(seq, 1) for seq in scheduler.waiting])
        (output,) = llm.generate([[1, 2, 3]], GREEDY)
        assert output.outputs[0].error == (
            "scheduler 'decode_first' chose a sequence that it had not granted tokens (Blocks.grant)"
        )


def test_a_scheduler_that_schedules_nothing_is_an_error_not_a_hang(tiny_folder):
    with make(tiny_folder[0]) as llm:
        llm.engine.scheduler.schedule = Schedule
        output = llm.generate([[1, 2, 3]], GREEDY)[0]
        assert output.finish_reason == "error" and "scheduled nothing" in output.outputs[0].error


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("fault", ["raises", "twice", "none", "no count"])
def test_a_scheduler_that_breaks_a_rule_is_named_and_costs_no_block(tiny_folder, rng, overlap, fault):
    folder, oracle = tiny_folder
    with make(folder, num_kv_blocks=20, overlap=overlap) as llm:
        schedule, calls = llm.engine.scheduler.schedule, iter(range(10**6))

        def broken():
            plan = schedule()
            if next(calls) != 3:
                return plan
            if fault == "raises":
                raise KeyError("step 3")
            wrong = {"twice": Schedule(decode=plan.decode * 2), "no count": Schedule(prefill=[(plan.decode[0], None)])}
            return wrong.get(fault)

        llm.engine.scheduler.schedule = broken
        outputs = llm.generate([random_prompt(rng, 20) for _ in range(3)], GREEDY)
        says = {"raises": "raised KeyError: 'step 3'", "twice": "twice in one step", "none": "returned NoneType"}
        says = says.get(fault, "raised TypeError")
        for output in outputs:
            assert output.finish_reason == "error" and "scheduler 'decode_first'" in output.outputs[0].error
            assert says in output.outputs[0].error
        assert llm.stats().num_free_blocks == 20
        good = random_prompt(rng, 20)
        assert is_greedy(oracle, good, llm.generate([good], GREEDY)[0].token_ids)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("half_done", [False, True])
@pytest.mark.parametrize("method, at", [("commit", 2), ("abort", 0), ("add", 2), ("add", 3)])
def test_a_scheduler_that_raises_elsewhere_is_named_and_costs_no_block(
    tiny_folder, rng, overlap, n, method, at, half_done
):
    """Once, and in everything that it is told, before or after it has done it; the fourth sequence that is added is a
    sibling whose first has its first token."""
    folder, oracle = tiny_folder
    prompts = [random_prompt(rng, 20) for _ in range(3)]
    params = SamplingParams(n=n, max_tokens=8, ignore_eos=True, seed=1)
    with make(folder, num_kv_blocks=40, overlap=overlap) as llm:
        engine, scheduler = llm.engine, llm.engine.scheduler
        original, calls = getattr(scheduler, method), iter(range(10**6))

        def broken(*args):
            late = next(calls) == at
            if late and not half_done:
                raise KeyError("boom")
            original(*args)
            if late:
                raise KeyError("boom")

        setattr(scheduler, method, broken)
        outputs, refused = [], 0
        for i, prompt in enumerate(prompts):
            try:
                engine.add_request(str(i), prompt, params)
            except PluginError as error:
                assert "raised KeyError: 'boom'" in str(error)
                refused += 1
        for step in range(100):
            if step == 2 and method == "abort":
                engine.abort("1")
            outputs += engine.step()
            if not engine.has_work:
                break
        assert len(outputs) + refused == 3 and not engine.requests and engine.num_unfinished == 0
        reasons = {c.finish_reason for output in outputs for c in output.outputs}
        assert reasons <= {"length", "error", "abort"}
        if not refused and not (method == "add" and n == 1):
            assert "error" in reasons
        errors = [c.error for output in outputs for c in output.outputs if c.finish_reason == "error"]
        assert all("scheduler 'decode_first' raised KeyError: 'boom'" in error for error in errors)
        assert llm.stats().num_free_blocks == 40
        setattr(scheduler, method, original)
        good = random_prompt(rng, 20)
        assert is_greedy(oracle, good, llm.generate([good], GREEDY)[0].token_ids)


@pytest.mark.parametrize("overlap", [True, False])
def test_ctrl_c_anywhere_costs_the_requests_of_that_moment_and_no_block(tiny_folder, rng, overlap):
    """At the k-th begin or end of a function of the loop, for k all over what a batch takes."""
    folder, oracle = tiny_folder
    prompts = [random_prompt(rng, length) for length in (40, 20, 7)]
    params = [replace(GREEDY, n=2, temperature=1, seed=3), GREEDY, replace(GREEDY, logprobs=2)]
    with make(folder, num_kv_blocks=20, overlap=overlap, max_num_batched_tokens=32) as llm:
        engine = llm.engine
        calls, at = 0, -1

        def interrupt(frame, event, argument):
            nonlocal calls
            code = frame.f_code
            inside = "/nanoserve/engine/" in code.co_filename or code.co_name in ("_step", "_deliver", "_alone")
            if event in ("call", "return") and inside:
                calls += 1
                if calls == at:
                    raise KeyboardInterrupt

        def run():
            nonlocal calls
            calls = 0
            sys.setprofile(interrupt)
            try:
                return llm.generate(prompts, params)
            finally:
                sys.setprofile(None)

        alone = [[c.token_ids for c in output.outputs] for output in run()]
        assert all(is_greedy(oracle, prompts[i], alone[i][0]) for i in (1, 2))
        for at in range(1, calls, 1 + calls // 150):
            other = llm.stream(random_prompt(rng, 5), GREEDY)
            with pytest.raises(KeyboardInterrupt):
                run()
            with suppress(NanoserveError):  # it says so in either way, or brings all of its tokens
                assert list(other)[-1].finish_reason in ("error", "length"), at
            assert not engine.requests and engine.num_unfinished == 0 and not engine.has_work
            engine.blocks.audit()
            assert llm.stats().num_free_blocks == 20, at
            assert [[c.token_ids for c in output.outputs] for output in llm.generate(prompts, params)] == alone, at


@pytest.mark.parametrize("overlap", [True, False])
def test_ctrl_c_twice_is_as_once(tiny_folder, rng, overlap):
    """The second one while the engine puts things in order after the first."""
    prompts = [random_prompt(rng, length) for length in (40, 20)]
    with make(tiny_folder[0], num_kv_blocks=20, overlap=overlap) as llm:
        expected = [output.token_ids for output in llm.generate(prompts, GREEDY)]
        calls, at, done = 0, 0, False

        def interrupt(frame, event, argument):
            nonlocal calls, done
            if frame.f_code.co_name == "_start_anew" and event == "return":
                done = done or calls < at
            if calls or frame.f_code.co_name == "_start_anew":
                calls += event in ("call", "c_return")
                if calls == at and event in ("call", "c_return"):
                    raise KeyboardInterrupt

        launch = llm.engine.runner.launch
        while not done:
            calls, at = 0, at + 1
            launches = iter(range(100))

            def first(schedule, launches=launches):
                if next(launches) == 3:
                    raise KeyboardInterrupt
                return launch(schedule)

            llm.engine.runner.launch = first
            other = llm.stream(random_prompt(rng, 5), GREEDY)
            sys.setprofile(interrupt)
            try:
                with pytest.raises(KeyboardInterrupt):
                    llm.generate(prompts, GREEDY)
            finally:
                sys.setprofile(None)
            llm.engine.runner.launch = launch
            with suppress(NanoserveError):
                assert list(other)[-1].finish_reason in ("error", "length"), at
            assert [output.token_ids for output in llm.generate(prompts, GREEDY)] == expected, at
            llm.engine.blocks.audit()
            assert llm.stats().num_free_blocks == 20 and llm.engine.num_unfinished == 0, at
        assert at > 20


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("n", [2, 3])
def test_siblings_end_with_a_first_one_that_has_no_token(tiny_folder, rng, overlap, n):
    """One with nothing to choose from, and one whose first step fails: once each, and neighbours go on."""
    folder, oracle = tiny_folder
    prompt = random_prompt(rng, 20)
    impossible = SamplingParams(n=n, max_tokens=4, min_tokens=1, stop_token_ids=list(range(512)), ignore_eos=True)
    with make(folder, num_kv_blocks=20, overlap=overlap) as llm:
        bad, good = llm.generate([random_prompt(rng, 20), prompt], [impossible, GREEDY])
        assert [c.finish_reason for c in bad.outputs] == ["error"] * n
        assert is_greedy(oracle, prompt, good.token_ids)
        launch = llm.engine.runner.launch
        llm.engine.runner.launch = lambda schedule: 1 / 0
        (bad,) = llm.generate([prompt], replace(GREEDY, n=n, temperature=1))
        assert [c.finish_reason for c in bad.outputs] == ["error"] * n
        llm.engine.runner.launch = launch
        assert llm.stats().num_free_blocks == 20 and not llm.engine.requests
        assert is_greedy(oracle, prompt, llm.generate([prompt], GREEDY)[0].token_ids)
