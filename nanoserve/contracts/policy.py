"""Contract: a selection policy names the attention backend for a phase and a shape. Host integers in, a name out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nanoserve.contracts.capabilities import Phase


@dataclass(frozen=True, slots=True)
class SelectionShape:
    """The shape of one phase of one step.

    batch: sequences. num_tokens: query tokens. max_seqlen_q: longest query (1 in decode). max_context: longest
    context in tokens, new tokens included. kv_format: name. compute_capability: (major, minor), None on the CPU.
    has_prefix: True when some sequence already has computed tokens in the cache. captured: the choice goes into a CUDA
    graph that serves every context, and max_context is the longest there can be.
    """

    batch: int
    num_tokens: int
    max_seqlen_q: int
    max_context: int
    kv_format: str
    compute_capability: tuple[int, int] | None
    has_prefix: bool = False
    captured: bool = False


class SelectionPolicy(ABC):
    """Chooses among the backends that have already accepted the engine's requirements."""

    #: What messages call it, as ``policy=NAME of DISTRIBUTION VERSION``; the registry sets it.
    plugin: str = ""

    def considers(self, phase: Phase) -> frozenset[str] | None:
        """Names of the backends that it may choose; only these are imported and offered to ``select``, unless none of
        them can serve. None: any that is installed. Asked when an engine is built."""
        return None

    def kv_formats(self) -> frozenset[str]:
        """Names of the KV formats that it tells apart; one that is not installed is warned of. Asked when an engine is
        built."""
        return frozenset()

    @abstractmethod
    def select(self, phase: Phase, shape: SelectionShape, candidates: tuple[str, ...]) -> str:
        """Name of the backend to run. ``candidates`` is never empty and the answer must be in it.

        Called once per phase and step, so it must be cheap (a microsecond or two), deterministic and free of I/O.
        """


@dataclass(frozen=True)
class PolicySpec:
    """Registers a selection policy. factory: ``(options) -> SelectionPolicy``."""

    name: str
    summary: str
    config: type
    factory: Callable[[Any], SelectionPolicy]
