"""Grammars of structured output: compiled on first use, remembered by what they say."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from nanoserve.contracts.errors import PluginError, RequestError
from nanoserve.contracts.grammar import GrammarCompiler, Matcher, StructuredOutput

if TYPE_CHECKING:
    import torch

log = logging.getLogger("nanoserve")

MAX_REMEMBERED = 64
BUG = "the plugin "  # how messages about bugs begin


class Grammars:
    """The compiled grammars of an engine. Any thread may compile, so that an engine's thread need not.

    make: builds the compiler, when the first grammar is wanted or when ``build`` is called.
    """

    def __init__(self, make: Callable[[], GrammarCompiler]) -> None:
        self._make = make
        self._compiler: GrammarCompiler | None = None
        self._compiled: OrderedDict[tuple[str, str], Callable[[], Matcher]] = OrderedDict()
        self._lock = threading.Lock()
        self._building = threading.Lock()  # another one, since ``find`` must not wait for a compiler to be built

    def build(self) -> None:
        """Build the compiler now: reading the vocabulary takes long. What it raises, ``compile`` will raise again."""
        try:
            self._built()
        except Exception as error:
            log.info("structured output is not possible here: %s", error)

    def find(self, spec: StructuredOutput) -> Callable[[], Matcher] | None:
        """What ``compile`` returns, if it is remembered; never waits."""
        key = spec.field, spec.text
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
            return self._compiled.get(key)

    def compile(self, spec: StructuredOutput) -> Callable[[], Matcher]:
        """A factory of matchers.

        Raises RequestError, which names the field of ``spec``, for a form that cannot be had, and PluginError, which
        names the plugin, for a bug of it. The factory raises PluginError too.
        """
        if (known := self.find(spec)) is not None:
            return known
        try:
            compiler = self._built()
        except PluginError as error:
            if error.__cause__ is not None and not isinstance(error.__cause__, ImportError):
                raise  # the factory failed, and not for want of a library
            raise RequestError(f"structured.{spec.field} is not possible here: {error}") from error
        plugin = compiler.plugin or type(compiler).__name__
        try:
            start = compiler.compile(spec)
        except ValueError as error:
            raise RequestError(f"structured.{spec.field}: {error}") from error
        except Exception as error:
            raise bug(plugin, "compile", error) from error
        guarded = partial(_start, plugin, start)
        with self._lock:
            self._compiled[spec.field, spec.text] = guarded
            while len(self._compiled) > MAX_REMEMBERED:
                self._compiled.popitem(last=False)
        return guarded

    def _built(self) -> GrammarCompiler:
        with self._building:
            if self._compiler is None:
                self._compiler = self._make()
            return self._compiler


class GuardedMatcher(Matcher):
    """A plugin's matcher, whose bugs end its own request, by the plugin's name, and no other."""

    is_terminated = False  # as it was after the last token
    fault: str | None = None  # why no token can be chosen any more

    def __init__(self, plugin: str, matcher: Matcher) -> None:
        self._plugin = plugin
        self._matcher = matcher

    def fill_bitmask(self, row: torch.Tensor) -> None:
        try:
            self._matcher.fill_bitmask(row)
        except Exception as error:  # here it would end every request of the step
            self.fault = str(bug(self._plugin, "fill_bitmask", error))
            log.error("%s", self.fault, exc_info=error)
            row.zero_()

    def accept(self, token_id: int) -> None:
        """Raises ValueError as the plugin does, PluginError for anything else."""
        try:
            self._matcher.accept(token_id)
        except ValueError:
            raise
        except Exception as error:
            raise bug(self._plugin, "accept", error) from error
        try:
            self.is_terminated = bool(self._matcher.is_terminated)
        except Exception as error:
            raise bug(self._plugin, "is_terminated", error) from error


def _start(plugin: str, start: Callable[[], Matcher]) -> Matcher:
    try:
        return GuardedMatcher(plugin, start())
    except Exception as error:
        raise bug(plugin, "the factory of matchers", error) from error


def bug(plugin: str, where: str, error: Exception) -> PluginError:
    return PluginError(f"{BUG}{plugin} failed in {where}: {type(error).__name__}: {error}")
