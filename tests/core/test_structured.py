"""Structured output in the engine: what is constrained keeps its form, and nobody else notices."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanoserve import LLM, RequestError, SamplingParams, StructuredOutput
from nanoserve.contracts.grammar import MAX_CHARS, GrammarCompiler, GrammarSpec, Matcher
from nanoserve.engine.sampler import Sampler
from nanoserve.engine.sequence import Sequence
from nanoserve.engine.structured import MAX_REMEMBERED, Grammars
from nanoserve.hookspecs import hookimpl
from nanoserve.registry import Registry
from nanoserve.testing.grammar import random_regex, random_schema

jsonschema = pytest.importorskip("jsonschema")

PROMPTS = ["import json\n\nconfig = ", "class Stack:\n", "def main():\n    return ", "# a"]
#: Forms of bounded length, and how to judge a text.
WORD = StructuredOutput(regex="[a-z]{4,12}")


def make(model="tiny", **options) -> LLM:
    return LLM(str(model), device="cpu", **{"debug": True, "num_kv_blocks": 64, "max_model_len": 512} | options)


@pytest.fixture(scope="module")
def llm():
    with make() as llm:
        yield llm


def has_form(form: StructuredOutput, text: str) -> bool:
    if form.json_schema is not None:
        jsonschema.validate(json.loads(text), json.loads(form.text))
        return True
    return re.fullmatch(form.regex, text) is not None


def random_form(rng: random.Random) -> StructuredOutput:
    if rng.random() < 0.5:
        return StructuredOutput(json_schema=random_schema(rng))
    return StructuredOutput(regex=random_regex(rng) + "[0-9]?")  # not the empty text alone


# ------------------------------------------------------------------------------------------------- the form is kept


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("overlap", [True, False])
def test_every_output_has_its_form_under_preemption_and_in_mixed_batches(seed, overlap):
    """C07: a preempted sequence goes on in its grammar where it was; the unconstrained equal what they are alone."""
    rng = random.Random(seed)
    long = [StructuredOutput(regex=f"([a-z]{{3}} ){{{n},{n + 5}}}") for n in (30, 40, 50)]
    forms = long + [random_form(rng) for _ in range(10)]
    constrained = [
        SamplingParams(
            n=rng.choice([1, 1, 2]),
            temperature=rng.choice([0, 0.7, 1.5]),
            top_p=rng.choice([1.0, 0.9]),
            seed=i,
            max_tokens=400,
            min_tokens=rng.choice([0, 0, 8]),
            logprobs=rng.choice([None, 2]),
            frequency_penalty=rng.choice([0, 0, 0.5]),
            ignore_eos=rng.random() < 0.3,
            structured=form,
        )
        for i, form in enumerate(forms)
    ]
    free = [SamplingParams(temperature=0, max_tokens=80 + 20 * i, ignore_eos=True) for i in range(4)]
    params = constrained + free  # the last to come are preempted first, so the free ones go first
    prompts = [rng.choice(PROMPTS) for _ in params]
    with make(num_kv_blocks=26, overlap=overlap, max_num_batched_tokens=64) as llm:
        outputs = llm.generate(prompts[::-1], params[::-1])[::-1]
        stats = llm.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert sum(o.metrics.num_preemptions for o in outputs[: len(forms)]) > 0
        for output, form in zip(outputs, forms, strict=False):
            for completion in output.outputs:
                assert completion.finish_reason == "stop", (form, completion)
                assert has_form(form, completion.text), (form, completion.text)
    with make(overlap=overlap) as alone:
        for prompt, p, output in zip(prompts, params, outputs, strict=True):
            if p.greedy:  # a random draw may fall on either side of a boundary that rounding moves
                same = alone.generate(prompt, p)[0]
                assert [c.token_ids for c in same.outputs] == [c.token_ids for c in output.outputs]


def test_logits_wider_than_the_tokenizer_and_random_weights(tiny_folder):
    """C34: ids beyond the tokenizer decode to nothing, so a grammar never takes one."""
    with make(tiny_folder[0], max_model_len=256) as llm:
        params = SamplingParams(temperature=2, seed=1, n=8, max_tokens=30, structured=WORD)
        for completion in llm.generate([[5, 6, 7]], params)[0].outputs:
            assert completion.finish_reason == "stop" and re.fullmatch("[a-z]{4,12}", completion.text)
            assert all(t < 259 for t in completion.token_ids)


def test_streaming_equals_not_streaming(llm):
    params = SamplingParams(seed=4, max_tokens=200, structured=StructuredOutput(json_object=True))
    whole = llm.generate(PROMPTS[0], params)[0]
    deltas = list(llm.stream(PROMPTS[0], params))
    assert "".join(d.text for d in deltas) == whole.text and deltas[-1].finish_reason == whole.finish_reason == "stop"
    assert isinstance(json.loads(whole.text), dict)


def test_seeds_repeat_and_siblings_differ(llm):
    params = SamplingParams(n=6, seed=3, temperature=2, max_tokens=40, structured=StructuredOutput(regex="[a-z]{9}"))
    one, two = (llm.generate("x", params)[0].outputs for _ in range(2))
    assert [c.text for c in one] == [c.text for c in two]
    assert len({c.text for c in one}) > 1


# --------------------------------------------------------------------------------------------------- where it ends


@pytest.mark.parametrize(
    "options", [{}, {"min_tokens": 20}, {"ignore_eos": True}, {"min_tokens": 9, "ignore_eos": True}]
)
@pytest.mark.parametrize("form", [{"regex": "a{3}"}, {"json_schema": {"const": 7}}, {"choice": ["aaa"]}], ids=str)
def test_a_complete_form_ends_the_output_whatever_else_is_asked(llm, form, options):
    params = SamplingParams(temperature=0, max_tokens=30, structured=StructuredOutput(**form), **options)
    completion = llm.generate("x", params)[0].outputs[0]
    assert completion.text == {"json_schema": "7"}.get(next(iter(form)), "aaa")
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)


def test_min_tokens_holds_where_the_form_can_go_on(llm):
    form = StructuredOutput(regex="a*")
    completion = llm.generate("x", SamplingParams(temperature=0, min_tokens=12, max_tokens=40, structured=form))[0]
    assert len(completion.token_ids) >= 12 and set(completion.text) == {"a"}


def test_a_stop_token_that_the_form_needs_is_kept_until_min_tokens(llm):
    """min_tokens would leave no token at all here."""
    (a,) = llm.tokenizer.encode("a")
    params = SamplingParams(
        temperature=0, min_tokens=5, max_tokens=9, stop_token_ids=[a], structured=StructuredOutput(regex="[a]{1}")
    )
    assert llm.generate("x", params)[0].finish_reason == "stop"


def test_limits_and_stop_strings_cut(llm):
    form = StructuredOutput(regex="(ab){50}")
    cut = llm.generate("x", SamplingParams(temperature=0, max_tokens=7, structured=form))[0]
    assert cut.finish_reason == "length" and ("ab" * 50).startswith(cut.text)
    stopped = llm.generate("x", SamplingParams(temperature=0, max_tokens=90, stop="bab", structured=form))[0]
    assert stopped.finish_reason == "stop" and stopped.outputs[0].stop_reason == "bab" and stopped.text == "a"


def test_bias_cannot_leave_the_form_and_logprobs_are_the_model_s(llm):
    (z,) = llm.tokenizer.encode("z")
    free = llm.generate("x = ", SamplingParams(temperature=0, max_tokens=1, logprobs=5))[0].outputs[0]
    params = SamplingParams(
        temperature=0, max_tokens=8, logprobs=5, logit_bias={z: 1e9}, structured=StructuredOutput(regex="[a-y]{6}")
    )
    completion = llm.generate("x = ", params)[0].outputs[0]
    assert re.fullmatch("[a-y]{6}", completion.text)
    chosen = completion.token_ids[0]
    assert free.logprobs[0].items() <= completion.logprobs[0].items()
    assert completion.logprobs[0][chosen] < 0


# ------------------------------------------------------------------------------------------------------ the engine


def test_aborted_in_the_middle(llm):
    """C42, offline: blocks come back, and the same form starts from its beginning the next time."""
    params = SamplingParams(n=3, seed=1, max_tokens=200, structured=StructuredOutput(regex="[a-z ]{60}!"))
    stream = llm.stream("x", params)
    for _ in range(4):
        next(stream)
    stream.close()
    stats = llm.stats()
    assert stats.num_free_blocks == stats.num_blocks and not llm.engine.has_work
    assert all(re.fullmatch("[a-z ]{60}!", c.text) for c in llm.generate("x", params)[0].outputs)


def test_steps_overlap_again_once_the_constrained_request_has_ended():
    with make(overlap=True) as llm:
        llm.generate(PROMPTS[:2], [SamplingParams(structured=WORD, max_tokens=30), SamplingParams(max_tokens=4)])
        engine = llm.engine
        engine.add_request("free", [1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
        engine.step()
        engine.step()
        assert engine._in_flight is not None
        engine.abort("free")
        engine.drain()


@dataclass(frozen=True)
class NoOptions:
    """None."""


class Counting(Matcher):
    """Allows everything; fails or crashes at the third token, when told so."""

    def __init__(self, log: Counter, fail: str | None) -> None:
        self.log, self.fail, self.count = log, fail, 0

    def fill_bitmask(self, row: torch.Tensor) -> None:
        self.log["filled"] += 1
        self._crash("fill_bitmask")
        row.fill_(0 if self.fail == "mask" and self.count == 2 else -1)

    def accept(self, token_id: int) -> None:
        self._crash("accept")
        self.count += 1
        if self.fail == "accept" and self.count == 3:
            raise ValueError("lost the thread")

    @property
    def is_terminated(self) -> bool:
        self._crash("is_terminated")
        return False

    def _crash(self, where: str) -> None:
        if self.fail == f"{where} crashes" and self.count == 2:
            raise TypeError("oops")


def counting_plugin(log: Counter, fail: str | None = None) -> SimpleNamespace:
    class Compiler(GrammarCompiler):
        def __init__(self, options: NoOptions, context) -> None:
            log["built"] += 1
            if fail == "import":
                raise ImportError("counting is not installed")

        def compile(self, spec):
            log["compiled"] += 1
            return lambda: Counting(log, fail)

    @hookimpl
    def nanoserve_grammar(register):
        register(GrammarSpec("counting", "for tests", NoOptions, Compiler))

    return SimpleNamespace(nanoserve_grammar=nanoserve_grammar)


def counting(log: Counter, fail: str | None = None) -> LLM:
    return make(grammar="counting", registry=Registry.discover(extra=[counting_plugin(log, fail)]))


def test_it_costs_nothing_until_it_is_asked_for():
    log: Counter = Counter()
    with counting(log) as llm:
        llm.generate(PROMPTS, SamplingParams(max_tokens=4))
        assert not log
        params = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
        constrained = llm.generate(PROMPTS[:2], [params, replace(params, structured=WORD)])
        assert log == {"built": 1, "compiled": 1, "filled": 4}
        assert constrained[1].token_ids == llm.generate(PROMPTS[1], params)[0].token_ids, "a full mask changes nothing"
        assert log["filled"] == 4


def test_the_library_is_not_imported_until_it_is_asked_for():
    code = (
        "import sys; from nanoserve import LLM, SamplingParams\n"
        "with LLM('tiny', device='cpu') as llm: llm.generate('x', SamplingParams(max_tokens=2))\n"
        "assert 'llguidance' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        ("accept", "structured.regex: lost the thread"),
        ("mask", "the grammar"),
        ("fill_bitmask crashes", "the plugin grammar=counting of (inline) 1 failed in fill_bitmask: TypeError: oops"),
        ("accept crashes", "the plugin grammar=counting of (inline) 1 failed in accept: TypeError: oops"),
        ("is_terminated crashes", "the plugin grammar=counting of (inline) 1 failed in is_terminated: TypeError: oops"),
    ],
)
def test_a_failing_matcher_ends_its_own_request(fail, message):
    with counting(Counter(), fail) as llm:
        free = SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
        expected = llm.generate(PROMPTS[1], free)[0].token_ids
        broken, other = llm.generate(PROMPTS[:2], [replace(free, structured=WORD), free])
        assert broken.finish_reason == "error" and message in broken.outputs[0].error
        assert other.finish_reason == "length" and other.token_ids == expected
        assert llm.stats().num_free_blocks == 64


def test_a_library_that_is_not_installed_is_named():
    with counting(Counter(), "import") as llm:
        with pytest.raises(RequestError, match="counting is not installed"):
            llm.generate("x", SamplingParams(structured=WORD))
        assert llm.generate("x", SamplingParams(max_tokens=2))[0].finish_reason


def test_a_model_without_a_tokenizer_refuses(tiny_models):
    with make(tiny_models()[0], max_model_len=256) as llm, pytest.raises(RequestError, match="tokenizer"):
        llm.generate([[1, 2]], SamplingParams(structured=WORD))


def test_compiled_forms_are_remembered_up_to_a_limit():
    class Compiler(GrammarCompiler):
        compiled = 0

        def compile(self, spec):
            Compiler.compiled += 1
            return lambda: Counting(Counter(), None)

    grammars = Grammars(Compiler)
    for _ in range(3):
        grammars.compile(StructuredOutput(regex="a"))
    assert Compiler.compiled == 1
    for i in range(MAX_REMEMBERED):
        grammars.compile(StructuredOutput(regex=f"b{i}"))
        grammars.compile(StructuredOutput(regex="b0"))  # used again and again: it stays
    compiled = Compiler.compiled
    grammars.compile(StructuredOutput(regex="b0"))
    assert Compiler.compiled == compiled
    grammars.compile(StructuredOutput(regex="a"))
    assert Compiler.compiled == compiled + 1


# ------------------------------------------------------------------------------------------------------ the refusals


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({}, "none of them"),
        ({"regex": "a", "choice": ["a"]}, "regex.*choice"),
        ({"regex": ""}, "regex"),
        ({"regex": 3}, "regex"),
        ({"regex": "\ud800"}, "regex.*Unicode"),
        ({"regex": "a" * (MAX_CHARS + 1)}, f"regex has {MAX_CHARS + 1}"),
        ({"grammar": ["start"]}, "grammar"),
        ({"choice": []}, "choice"),
        ({"choice": "yes"}, "choice"),
        ({"choice": ["a", ""]}, "choice"),
        ({"json_object": 1}, "json_object"),
        ({"json_schema": "{"}, "json_schema is not JSON"),
        ({"json_schema": "[]"}, "json_schema must be a mapping"),
        ({"json_schema": {"const": float("nan")}}, "json_schema is not JSON"),
        ({"json_schema": {"const": {1}}}, "json_schema is not JSON"),
    ],
    ids=str,
)
def test_a_malformed_wish_is_refused_by_name(form, field):
    """C43: before an engine sees it."""
    with pytest.raises(RequestError, match=f"structured.*{field}"):
        StructuredOutput(**form)


@pytest.mark.parametrize("form", [{"regex": "("}, {"json_schema": {"type": "strin"}}, {"grammar": "start: x"}], ids=str)
def test_what_does_not_compile_is_refused_by_name_before_it_is_queued(llm, form):
    (field,) = form
    before = llm.stats().prompt_tokens
    with pytest.raises(RequestError, match=rf"prompt 1: structured\.{field}: \w"):
        llm.generate(["x", "y"], [SamplingParams(), SamplingParams(structured=StructuredOutput(**form))])
    with pytest.raises(RequestError, match=f"structured.{field}"):
        llm.engine.add_request("r", [1], SamplingParams(structured=StructuredOutput(**form)))
    assert llm.stats().prompt_tokens == before and not llm.engine.requests


def test_only_the_object_is_a_wish():
    with pytest.raises(RequestError, match="structured must be a StructuredOutput"):
        SamplingParams(structured={"regex": "a"})


# ------------------------------------------------------------------------------------------------------ the sampler


@pytest.mark.parametrize("vocab_size", [31, 32, 33, 100])
def test_every_bit_of_a_mask_decides_its_token(vocab_size):
    """The sign bit of a word is a bit like any other, and rows without a grammar keep their logits."""

    class Only(Matcher):
        is_terminated = False

        def __init__(self, token):
            self.token = token

        def fill_bitmask(self, row):
            words = np.zeros(row.numel(), np.uint32)
            words[self.token // 32] = np.uint32(1) << np.uint32(self.token % 32)
            row.copy_(torch.from_numpy(words.view(np.int32)))

        def accept(self, token_id): ...

    sampler = Sampler(vocab_size, "cpu")
    seqs = []
    for token in range(vocab_size):
        for params in (SamplingParams(temperature=0, structured=WORD), SamplingParams(temperature=0)):
            seqs.append(Sequence("r", [0], params, max_num_tokens=9, matcher=Only(token)))
            sampler.set_row(len(seqs) - 1, params, 0, seqs[-1])
    rows = np.arange(len(seqs), dtype=np.int32)
    plan = sampler.prepare(rows, np.zeros(len(seqs), np.int64), seqs)
    assert not plan.is_plain
    logits = torch.randn(len(seqs), vocab_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    tokens = sampler(logits, plan).token_ids
    assert tokens[::2].tolist() == list(range(vocab_size))
    assert torch.equal(tokens[1::2], logits[1::2].argmax(-1))


def test_a_grammar_refuses_to_guess_tokens_that_have_not_arrived():
    sampler = Sampler(64, "cpu")
    params = SamplingParams(structured=WORD)
    seq = Sequence("r", [0], params, max_num_tokens=9, matcher=Counting(Counter(), None))
    sampler.set_row(0, params, 0, seq)
    with pytest.raises(RuntimeError, match="before all its tokens have arrived"):
        sampler.prepare(np.array([0]), np.array([1]), [seq])
