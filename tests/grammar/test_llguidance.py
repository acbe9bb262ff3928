from __future__ import annotations

import contextlib
import json
import random
import time

import pytest

from nanoserve.contracts.grammar import StructuredOutput
from nanoserve.testing import GrammarSuite


class TestLLGuidance(GrammarSuite):
    grammar = "llguidance"
    refused = (
        StructuredOutput(grammar="start: missing"),
        StructuredOutput(grammar="start: start"),  # no text has it
        StructuredOutput(json_schema={"not": {"type": "string"}}),
        StructuredOutput(json_schema={"type": "array", "uniqueItems": True}),
    )

    @pytest.mark.parametrize("grammar", ['start: "(" start ")" | "x"', 'root ::= "(" root ")" | "x"'])
    def test_lark_and_gbnf(self, grammar):
        start = self.build().compile(StructuredOutput(grammar=grammar))
        for seed in range(10):
            text = self.walk(random.Random(seed), start())
            depth = text.count("(")
            assert text == "(" * depth + "x" + ")" * depth

    @pytest.mark.parametrize("flexible", [False, True])
    def test_white_space_is_python_s_unless_it_is_the_model_s(self, flexible):
        self.options = {"flexible_whitespace": flexible}
        schema = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": [2, 3]}}, "required": ["a", "b"]}
        start = self.build().compile(StructuredOutput(json_schema=schema | {"additionalProperties": False}))
        texts = {self.walk(random.Random(seed), start()) for seed in range(5)}
        assert all(json.loads(text) == {"a": 1, "b": [2, 3]} for text in texts)
        assert (texts == {'{"a": 1, "b": [2, 3]}'}) is not flexible

    def test_a_hostile_form_costs_a_moment_or_is_refused(self):
        """What compiles takes a fraction of a second here."""
        compiler = self.build()
        many = {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(2200)}}
        forms = [
            StructuredOutput(regex="((a{1,500}b{1,500})|(c{1,500})){1,500}"),
            StructuredOutput(regex="(a|b)*a(a|b){200}"),
            StructuredOutput(regex="(.*x){60}"),
            StructuredOutput(regex="((((a{51}){100}){100}){100}){100}"),
            StructuredOutput(json_schema=many),
            StructuredOutput(json_schema={"type": "array", "minItems": 10**6, "items": {"type": "integer"}}),
            StructuredOutput(json_schema="{" + '"anyOf": [{' * 300 + "}]" * 300 + "}"),
        ]
        for form in forms:
            start = time.process_time()
            with contextlib.suppress(ValueError):
                self.allowed(compiler.compile(form)())
            assert time.process_time() - start < 2, form.text[:60]

    @pytest.mark.parametrize(
        "form",
        [
            StructuredOutput(regex="((((a{51}){100}){100}){100}){100}"),
            StructuredOutput(choice=[f"c{i}" for i in range(4000)]),
        ],
        ids=lambda form: form.field,
    )
    def test_what_its_first_token_would_show_shows_when_it_is_compiled(self, form):
        """Later it would be in the loop that steps, while the other requests wait."""
        with pytest.raises(ValueError, match="lexer error: too many|Current row has"):
            self.build().compile(form)

    def test_a_matcher_that_meets_a_limit_allows_nothing(self):
        """The library would offer the end of text, and a cut output would look like a complete one."""
        matcher = self.build().compile(StructuredOutput(regex="ab"))()
        with pytest.raises(ValueError):
            matcher.accept(5)
        assert self.allowed(matcher) == [] and not matcher.is_terminated
