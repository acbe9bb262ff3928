"""Structured output by llguidance: masks are computed as they are needed, so nothing is compiled for seconds.

Chosen over xgrammar because its wheel has no dependencies (no torch of its own) and fits every Python from 3.9 on, it
compiles in about a millisecond where others enumerate automata, and it bounds what a hostile grammar may cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nanoserve.contracts.errors import PluginError
from nanoserve.contracts.grammar import GrammarCompiler, GrammarContext, GrammarSpec, Matcher, StructuredOutput
from nanoserve.hookspecs import hookimpl

#: Work on the regular expressions of a form. Without an error its masks go on costing what it allows: 0.05 s then, and
#: 0.5 s with the library's own limit, while no other request gets a token. What people write needs far less.
LEXER_FUEL = 100_000


@dataclass(frozen=True)
class LLGuidanceOptions:
    """flexible_whitespace: leave the white space of JSON to the model; off, it writes ``{"a": 1, "b": 2}``.

    A small model may fill its budget with blanks when it is on. max_grammar_size: symbols of the compiled grammar.
    """

    flexible_whitespace: bool = False
    max_grammar_size: int = 20_000


class LLGuidanceCompiler(GrammarCompiler):
    def __init__(self, options: LLGuidanceOptions, context: GrammarContext) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise PluginError("llguidance is not installed: pip install 'nanoserve[structured]'") from error
        self._llguidance: Any = llguidance
        self._limits = llguidance.LLParserLimits(
            max_grammar_size=options.max_grammar_size, initial_lexer_fuel=LEXER_FUEL, verbose_errors=False
        )
        self._json_style: dict[str, Any] = {"whitespace_flexible": options.flexible_whitespace}
        if not options.flexible_whitespace:
            self._json_style |= {"item_separator": ", ", "key_separator": ": "}
        # Holds the interpreter lock while it reads the vocabulary, 0.4 s for 150,000 tokens; compiling does not.
        self._tokenizer = llguidance.LLTokenizer(
            context.tokenizer_json, n_vocab=context.vocab_size, eos_token=list(context.eos_token_ids) or None
        )

    def compile(self, spec: StructuredOutput) -> Callable[[], Matcher]:
        llguidance = self._llguidance
        if spec.field in ("json_schema", "json_object"):
            schema = spec.text or '{"type": "object"}'
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=self._json_style)
        else:  # a grammar may be Lark's dialect or GBNF
            grammar = llguidance.grammar_from("ebnf" if spec.field == "grammar" else spec.field, spec.text)
        start = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        mask = int.from_bytes(start.compute_bitmask(), "little")  # warms what the copies share
        trial = start.deep_copy()
        if mask:  # most limits show only with the first token that is taken
            trial.consume_token((mask & -mask).bit_length() - 1)
            trial.compute_bitmask()
        for matcher in (start, trial):
            if matcher.is_error():
                raise ValueError(_first_lines(matcher.get_error()))
        return lambda: LLGuidanceMatcher(start.deep_copy())


class LLGuidanceMatcher(Matcher):
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fill_bitmask(self, row: torch.Tensor) -> None:
        self._matcher.unsafe_compute_mask_ptr(row.data_ptr(), row.numel() * row.element_size())
        if self._matcher.is_error():  # a limit of its own: it would offer the end of text, although the output is cut
            row.zero_()

    def accept(self, token_id: int) -> None:
        if not self._matcher.consume_token(token_id):
            raise ValueError(_first_lines(self._matcher.get_error()))

    @property
    def is_terminated(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()


def _first_lines(message: str) -> str:
    """A message in one line, without the copy of the grammar at its end."""
    if message.startswith("NoExtension"):
        return "no text has this form"
    return " ".join(message.replace("<non-verbose/>", "").split("\n   1 |")[0].split())


@hookimpl
def nanoserve_grammar(register) -> None:
    register(
        GrammarSpec(
            name="llguidance",
            summary="JSON schema, regular expressions, Lark or GBNF grammars and choices, by llguidance",
            config=LLGuidanceOptions,
            factory=LLGuidanceCompiler,
        )
    )
