"""Conformance suite of grammar compilers: what their masks allow is walked at random, and judged by somebody else."""

from __future__ import annotations

import functools
import importlib.resources
import json
import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from nanoserve.contracts.grammar import FIELDS, GrammarCompiler, GrammarContext, Matcher, StructuredOutput
from nanoserve.testing.plugins import discover
from nanoserve.tokenizer import Tokenizer

NUM_WALKS, LONGEST_WALK = 12, 600
EXTRA_IDS = 37  # columns of the logits beyond the tokenizer's, so that the last word of a mask is not full


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(str(importlib.resources.files("nanoserve.assets.tiny")))


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A JSON schema whose instances are short."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "pattern"]
    kind = rng.choice(kinds + (["object", "array", "anyOf"] * 3 if depth else []))
    if kind == "string":
        return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 9)}
    if kind in ("integer", "number"):
        low = rng.randint(-50, 50)
        return {"type": kind, "minimum": low, "maximum": low + rng.randint(0, 1000)} | (
            {} if kind == "integer" else {"multipleOf": 0.25}
        )
    if kind == "enum":
        return {"enum": rng.sample(["red", 'qu"ote', "é€😀", 3, True, None, [1, 2], "a\nb"], rng.randint(1, 4))}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[A-Z]{2}[0-9]{1,4}$", "^(ab|cd){1,3}$"])}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    if kind == "array":
        low = rng.randint(0, 2)
        items = random_schema(rng, depth - 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randint(0, 2)}
    if kind == "object":
        names = rng.sample(["a", "key", "ü", "with space", 'q"', "n_1"], rng.randint(0, 4))
        return {
            "type": "object",
            "properties": {name: random_schema(rng, depth - 1) for name in names},
            "required": [name for name in names if rng.random() < 0.6],
            "additionalProperties": False,
        }
    return {"type": kind}


def random_regex(rng: random.Random, depth: int = 3) -> str:
    """A regular expression that Python's ``re`` understands in the same way, of bounded length."""
    if not depth or rng.random() < 0.3:
        return rng.choice(["a", "Zz", r"\.", r"[a-f]", r"[^\n\"x]", r"[0-9]", "é", r"\{", "return ", "[A-Z_]"])
    inner = random_regex(rng, depth - 1)
    how = rng.randrange(4)
    if how == 0:
        return inner + random_regex(rng, depth - 1)
    if how == 1:
        return f"({inner}|{random_regex(rng, depth - 1)})"
    return f"({inner})" + ("?" if how == 2 else f"{{{rng.randint(0, 1)},{rng.randint(1, 3)}}}")


class GrammarSuite:
    """Subclass with ``grammar = "NAME"``. plugins: modules with hooks that no entry point announces."""

    grammar: str
    plugins: tuple[Any, ...] = ()
    options: dict[str, Any] = {}
    #: The forms that it knows, fields of StructuredOutput. ``choice`` is among them; it must refuse the others.
    forms: tuple[str, ...] = FIELDS
    #: Forms that must be refused, beyond those below: grammars in a notation of your own.
    refused: tuple[StructuredOutput, ...] = ()

    @functools.cached_property
    def vocab_size(self) -> int:
        return tokenizer().vocab_size + EXTRA_IDS

    def build(self) -> GrammarCompiler:
        registry = discover(self.plugins)
        spec = registry.get("grammar", self.grammar)
        eos = tokenizer().eos_token_id
        assert eos is not None
        context = GrammarContext(self.vocab_size, (eos,), tokenizer().to_json())
        return spec.factory(registry.make_options("grammar", spec, self.options), context)

    def allowed(self, matcher: Matcher) -> list[int]:
        row = torch.full((-(-self.vocab_size // 32),), 0x55555555, dtype=torch.int32)  # what was there must not matter
        matcher.fill_bitmask(row)
        bits = (row[:, None] >> torch.arange(32)) & 1
        ids = bits.flatten().nonzero().flatten().tolist()
        assert not ids or ids[-1] < tokenizer().vocab_size, f"token {ids[-1]} is beyond the tokenizer"
        return ids

    def walk(self, rng: random.Random, matcher: Matcher) -> str:
        """A random output: the text up to where the grammar, or the random choice of an end-of-text token, ends it."""
        ids: list[int] = []
        while not matcher.is_terminated:
            allowed = self.allowed(matcher)
            assert allowed, f"nothing may follow {tokenizer().decode(ids)!r}"
            token = rng.choice(allowed)
            if token == tokenizer().eos_token_id:
                break
            matcher.accept(token)
            ids.append(token)
            assert len(ids) < LONGEST_WALK
        return tokenizer().decode(ids, skip_special_tokens=False)

    def needs(self, form: str) -> None:
        if form not in self.forms:
            pytest.skip(f"it does not know {form}")

    @pytest.mark.parametrize("seed", range(NUM_WALKS))
    def test_every_walk_through_a_schema_is_an_instance(self, seed: int) -> None:
        self.needs("json_schema")
        import jsonschema

        rng = random.Random(seed)
        compiler = self.build()
        for _ in range(4):
            schema = random_schema(rng)
            for given in (schema, json.dumps(schema)):
                text = self.walk(rng, compiler.compile(StructuredOutput(json_schema=given))())
                jsonschema.validate(json.loads(text), schema)

    @pytest.mark.parametrize("seed", range(NUM_WALKS))
    def test_every_walk_through_a_regex_matches_all_of_it(self, seed: int) -> None:
        self.needs("regex")
        rng = random.Random(seed)
        compiler = self.build()
        for _ in range(6):
            regex = random_regex(rng)
            text = self.walk(rng, compiler.compile(StructuredOutput(regex=regex))())
            assert re.fullmatch(regex, text), (regex, text)

    def test_choices(self) -> None:
        choices = ["yes", "yesterday", 'with "quotes"\\', "é€😀", " leading\n"]
        start = self.build().compile(StructuredOutput(choice=choices))
        texts = {self.walk(random.Random(i), start()) for i in range(60)}
        assert texts == set(choices)

    def test_no_token_but_those_of_the_mask_is_accepted(self) -> None:
        start = self.build().compile(StructuredOutput(choice=["aa", "ab", "ba", "bab"]))
        allowed = self.allowed(start())
        rng = random.Random(0)
        for token in rng.sample(range(self.vocab_size), 100):
            if token in allowed:
                start().accept(token)
            else:
                with pytest.raises(ValueError):
                    start().accept(token)

    def test_the_end_is_allowed_exactly_where_the_output_may_end(self) -> None:
        matcher = self.build().compile(StructuredOutput(choice=["a", "ab", "ac", "abc"]))()
        eos, (a, b) = tokenizer().eos_token_id, tokenizer().encode("a") + tokenizer().encode("b")
        assert eos not in self.allowed(matcher)
        matcher.accept(a)
        assert eos in self.allowed(matcher) and b in self.allowed(matcher) and not matcher.is_terminated
        matcher.accept(tokenizer().encode("c")[0])
        assert matcher.is_terminated

    def test_matchers_are_independent(self) -> None:
        start = self.build().compile(StructuredOutput(choice=["independent", "individual", "pair", "pairs"]))
        first = self.allowed(start())
        one, other = start(), start()
        self.walk(random.Random(1), one)
        assert self.allowed(other) == self.allowed(start()) == first

    @pytest.mark.parametrize(
        "form",
        [
            {"regex": "("},
            {"regex": "(?<=a)b"},
            {"json_schema": {"type": "strin"}},
            {"json_schema": {"$ref": "#/$defs/missing"}},
            {"json_schema": {"$ref": "https://example.com/schema.json"}},
            {"json_schema": {"type": "string", "minLength": 3, "maxLength": 2}},
            {"json_schema": {"enum": []}},
            {"grammar": "}{"},
        ],
        ids=str,
    )
    def test_a_wrong_form_is_refused(self, form: dict[str, Any]) -> None:
        with pytest.raises(ValueError) as caught:
            self.build().compile(StructuredOutput(**form))
        assert str(caught.value).strip()

    @pytest.mark.parametrize(
        "form",
        [{"json_schema": {"type": "null"}}, {"json_object": True}, {"regex": "a"}, {"grammar": 'start: "a"'}],
        ids=str,
    )
    def test_a_form_that_it_does_not_know_is_refused(self, form: dict[str, Any]) -> None:
        if next(iter(form)) in self.forms:
            pytest.skip("it knows it")
        with pytest.raises(ValueError) as caught:
            self.build().compile(StructuredOutput(**form))
        assert str(caught.value).strip()

    def test_other_wrong_forms_are_refused(self) -> None:
        for form in self.refused:
            with pytest.raises(ValueError):
                self.build().compile(form)

    def test_threads_may_compile_at_once(self) -> None:
        compiler = self.build()

        def run(i: int) -> bool:
            start: Callable[[], Matcher] = compiler.compile(StructuredOutput(choice=[f"{'a' * i}-{i}", f"b-{i}"]))
            return self.walk(random.Random(i), start()).endswith(f"-{i}")

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(run, range(1, 33)))
