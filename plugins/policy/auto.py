"""Selection policy ``auto``: the first row of a threshold table that matches the shape names the backends, best first.

The table is configuration (``conf/policy/*.yaml``), so that what was measured on a device is data, not code::

    table:
      - {phase: prefill, when: {max_seqlen_q: {max: 128}, kv_format: [bf16]}, use: [triton_varlen, sdpa]}
      - {phase: prefill, use: [sdpa]}                                            # no conditions: always matches
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Literal

from nanoserve.contracts.capabilities import PHASES, Phase
from nanoserve.contracts.policy import PolicySpec, SelectionPolicy, SelectionShape
from nanoserve.hookspecs import hookimpl


@dataclass(frozen=True)
class Bounds:
    """Inclusive; null is unbounded."""

    min: int | None = None
    max: int | None = None

    def __post_init__(self) -> None:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}, so no step would match")


@dataclass(frozen=True)
class CapabilityBounds:
    """Inclusive (major, minor) compute capabilities, written [9, 0]; the CPU is outside any bounds."""

    min: tuple[int, int] = (0, 0)
    max: tuple[int, int] = (999, 999)


@dataclass(frozen=True)
class When:
    """Conditions on a SelectionShape; all that are given must hold. gpu: whether the step runs on a GPU.

    captured: whether the choice is for a CUDA graph. It does not know the context then, so a row with a bound on
    max_context is only right for other steps; where the context matters, rows for the graphs come before it.
    """

    batch: Bounds | None = None
    num_tokens: Bounds | None = None
    max_seqlen_q: Bounds | None = None
    max_context: Bounds | None = None
    kv_format: tuple[str, ...] | None = None
    compute_capability: CapabilityBounds | None = None
    has_prefix: bool | None = None
    captured: bool | None = None
    gpu: bool | None = None


@dataclass(frozen=True)
class Row:
    """use: backends by preference. A row whose backends are all unavailable is passed over."""

    phase: Literal["prefill", "decode"]
    use: tuple[str, ...]
    when: When = When()

    def __post_init__(self) -> None:
        if not self.use:
            raise ValueError("use: name at least one backend")


@dataclass(frozen=True)
class AutoConfig:
    """table: rows in order, which name all backends that are considered, unless none of them can serve. Where none
    applies, the first candidate runs."""

    table: tuple[Row, ...] = field(default=())


class AutoPolicy(SelectionPolicy):
    def __init__(self, options: AutoConfig) -> None:
        self._kv_formats = frozenset(name for row in options.table for name in row.when.kv_format or ())
        self._rows: dict[Phase, list[tuple[list[Callable[[SelectionShape], bool]], tuple[str, ...]]]] = {
            phase: [(_conditions(row.when), row.use) for row in options.table if row.phase == phase] for phase in PHASES
        }

    def considers(self, phase: Phase) -> frozenset[str] | None:
        """Those of the table: nobody's backend runs only because it has been installed."""
        return frozenset(name for _, use in self._rows[phase] for name in use) or None

    def kv_formats(self) -> frozenset[str]:
        return self._kv_formats

    def select(self, phase: Phase, shape: SelectionShape, candidates: tuple[str, ...]) -> str:
        for conditions, use in self._rows[phase]:
            for holds in conditions:
                if not holds(shape):
                    break
            else:
                for name in use:
                    if name in candidates:
                        return name
        return candidates[0]


def _conditions(when: When) -> list[Callable[[SelectionShape], bool]]:
    return [_condition(f.name, wanted) for f in fields(when) if (wanted := getattr(when, f.name)) is not None]


def _condition(name: str, wanted: Any) -> Callable[[SelectionShape], bool]:
    if name == "gpu":
        return lambda shape: (shape.compute_capability is not None) is wanted
    value = attrgetter(name)
    if isinstance(wanted, Bounds):
        low = 0 if wanted.min is None else wanted.min
        high = sys.maxsize if wanted.max is None else wanted.max
        return lambda shape: low <= value(shape) <= high
    if isinstance(wanted, CapabilityBounds):
        return lambda shape: value(shape) is not None and wanted.min <= value(shape) <= wanted.max
    if isinstance(wanted, tuple):
        return lambda shape: value(shape) in wanted
    return lambda shape: value(shape) == wanted


@hookimpl
def nanoserve_policy(register) -> None:
    register(
        PolicySpec(
            name="auto",
            summary="threshold table over phase, lengths, batch, KV format and compute capability",
            config=AutoConfig,
            factory=AutoPolicy,
        )
    )
