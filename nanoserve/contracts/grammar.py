"""Contract: a grammar compiler turns a wanted form of output into matchers, which say token by token what may follow.

The core does the rest: it keeps one matcher per sequence, uploads the bit masks, applies them before sampling, and
hands every sampled token back. Nothing of this is called before a request asks for it. A server builds the compiler
when it starts and compiles beside its loop, so that nobody else waits; elsewhere nothing is even imported before.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanoserve.contracts.errors import RequestError

if TYPE_CHECKING:
    import torch

FIELDS = ("json_schema", "json_object", "regex", "grammar", "choice")
MAX_CHARS = 65536  # what has to be compiled while others wait is bounded


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form that an output must have: exactly one of the fields. A wrong one raises RequestError, which names it.

    json_schema: the output is JSON that the schema (a mapping, or its JSON text) accepts. Stored as text.
    json_object: the output is any JSON object.
    regex: the whole output matches this regular expression.
    grammar: the output is a sentence of this context-free grammar, in the notation of the compiler that is chosen.
    choice: the output is one of these strings.
    """

    json_schema: dict[str, Any] | str | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None

    def __post_init__(self) -> None:
        given = [name for name in FIELDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise RequestError(
                f"structured must have exactly one of {', '.join(FIELDS)}, not {given or 'none of them'}"
            )
        value = getattr(self, self.field)
        if self.field == "json_schema":
            object.__setattr__(self, "json_schema", _schema_text(value))
        elif self.field == "json_object" and value is not True:
            raise RequestError(f"structured.json_object must be true or false, not {value!r}")
        elif self.field == "choice":
            if not isinstance(value, list | tuple) or not value or not all(isinstance(s, str) and s for s in value):
                raise RequestError(f"structured.choice must be a list of strings, none of them empty, not {value!r}")
            object.__setattr__(self, "choice", list(value))
        elif self.field in ("regex", "grammar") and not (isinstance(value, str) and value):
            raise RequestError(f"structured.{self.field} must be a text that is not empty, not {value!r}")
        if len(self.text) > MAX_CHARS:
            raise RequestError(f"structured.{self.field} has {len(self.text)} characters; {MAX_CHARS} are allowed")
        try:
            self.text.encode()
        except UnicodeEncodeError:
            raise RequestError(f"structured.{self.field} must be valid Unicode; it has unpaired surrogates") from None

    @property
    def field(self) -> str:
        """Name of the one field that is given."""
        return next(name for name in FIELDS if getattr(self, name) not in (None, False))

    @property
    def text(self) -> str:
        """What is given, as text: of choices a JSON list, of ``json_object`` nothing."""
        value = getattr(self, self.field)
        return value if isinstance(value, str) else "" if value is True else json.dumps(value, ensure_ascii=False)


class Matcher(ABC):
    """How far one sequence has come in its grammar. Used by one thread at a time."""

    @abstractmethod
    def fill_bitmask(self, row: torch.Tensor) -> None:
        """Overwrite ``row`` with what may follow: bit ``i`` of word ``w`` is set if token ``32 w + i`` may be next.

        row: int32 ``[ceil(vocab_size / 32)]`` on the CPU, contiguous. An end-of-text token may follow where the output
        may end, and nothing else where it must. All zeros where nothing may follow: the request ends with an error.
        """

    @abstractmethod
    def accept(self, token_id: int) -> None:
        """The sequence goes on with ``token_id``, which the mask allowed. Raises ValueError for any other token."""

    @property
    @abstractmethod
    def is_terminated(self) -> bool:
        """True when the output is complete and could not go on: the core then ends the sequence."""


class GrammarCompiler(ABC):
    """Compiles for one vocabulary. What must be made of the vocabulary is made when it is built, not when it compiles.

    An exception that is not foreseen here is a bug of the plugin: it ends its own request and names the plugin.
    """

    #: What messages call it, as ``grammar=NAME of DISTRIBUTION VERSION``; the registry sets it.
    plugin: str = ""

    @abstractmethod
    def compile(self, spec: StructuredOutput) -> Callable[[], Matcher]:
        """A factory of matchers, each at the start of its output and independent of the others.

        May be called by several threads at once, beside the one that steps: native code should not hold the
        interpreter lock. Raises ValueError with the reason for a form that is wrong, not supported, too large, or that
        no text has, also where only the first mask or the first token would show it: in the loop that steps, others
        wait. Bounds its own time, and that of every mask: hundredths of a second, not seconds.
        """


@dataclass(frozen=True)
class GrammarContext:
    """What there is to compile for.

    vocab_size: columns of the logits; a model may have more than its tokenizer. eos_token_ids: may be empty.
    tokenizer_json: the tokenizer as the text of a ``tokenizer.json``, added tokens included.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer_json: str


@dataclass(frozen=True)
class GrammarSpec:
    """Registers a grammar compiler. factory: ``(options, GrammarContext) -> GrammarCompiler``, called once, by a server
    when it starts and elsewhere on first use.

    A factory whose library is not installed raises PluginError, and the request is refused with its message.
    """

    name: str
    summary: str
    config: type
    factory: Callable[[Any, GrammarContext], GrammarCompiler]


def _schema_text(schema: Any) -> str:
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"structured.json_schema is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise RequestError(f"structured.json_schema must be a mapping, not {parsed!r}")
    return text
