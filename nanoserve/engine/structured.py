"""Grammars of structured output: compiled on first use, remembered by what they say."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from nanoserve.contracts.errors import PluginError, RequestError
from nanoserve.contracts.grammar import GrammarCompiler, Matcher, StructuredOutput

MAX_REMEMBERED = 64


class Grammars:
    """The compiled grammars of an engine. Any thread may compile, so that an engine's thread need not.

    make: builds the compiler, when the first grammar is wanted; what it raises refuses that request.
    """

    def __init__(self, make: Callable[[], GrammarCompiler]) -> None:
        self._make = make
        self._compiler: GrammarCompiler | None = None
        self._compiled: OrderedDict[tuple[str, str], Callable[[], Matcher]] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, spec: StructuredOutput) -> Callable[[], Matcher]:
        """A factory of matchers. Raises RequestError, which names the field of ``spec``."""
        key = spec.field, spec.text
        try:
            with self._lock:
                if key in self._compiled:
                    self._compiled.move_to_end(key)
                    return self._compiled[key]
                if self._compiler is None:
                    self._compiler = self._make()
            start = self._compiler.compile(spec)
        except PluginError as error:
            raise RequestError(f"structured.{spec.field} is not possible here: {error}") from error
        except ValueError as error:
            raise RequestError(f"structured.{spec.field}: {error}") from error
        with self._lock:
            self._compiled[key] = start
            while len(self._compiled) > MAX_REMEMBERED:
                self._compiled.popitem(last=False)
        return start
