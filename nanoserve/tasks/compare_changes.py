"""How a metric of ``task=bench`` changed from one record to another."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from nanoserve.metrics import better, percentile


@dataclass(frozen=True)
class Sample:
    """One metric of one record. values: its repeats; empty if it is undefined."""

    values: list[float] = field(default_factory=list)

    def quantile(self, q: float) -> float | None:
        return percentile(self.values, q)

    def __str__(self) -> str:
        if not self.values:
            return "–"
        middle, low, high = (number(self.quantile(q)) for q in (50, 25, 75))
        return middle if len(self.values) == 1 else f"{middle} ({low} … {high})"


@dataclass(frozen=True)
class Change:
    """base, new: the metric in both records. limit: None if it is not gated."""

    name: str
    base: Sample
    new: Sample
    limit: float | None

    @property
    def ratio(self) -> float | None:
        """Median of new over median of base."""
        base, new = self.base.quantile(50), self.new.quantile(50)
        if base is None or new is None:
            return None
        return new / base if base else (1.0 if new == 0 else None)

    @property
    def loss(self) -> float | None:
        """Share of the base's value by which it got worse, negative if better; infinite from 0 or into nothing."""
        base, new = self.base.quantile(50), self.new.quantile(50)
        if base is None:
            return None
        if new is None:
            return math.inf
        worse = base - new if better(self.name) == "higher" else new - base
        return worse / abs(base) if base else math.copysign(math.inf, worse) if worse else 0.0

    @property
    def verdict(self) -> Literal["fell", "noise", "worse", "better", "same", ""]:
        loss = self.loss
        if loss is None:
            return ""
        if not self.base.values or not self.new.values:
            apart = True
        else:
            (b1, b3), (n1, n3) = [(s.quantile(25), s.quantile(75)) for s in (self.base, self.new)]
            apart = n1 > b3 or n3 < b1  # type: ignore[operator]  # neither is empty
        if loss == 0:
            return "same"
        if not apart:
            return "noise"
        if loss < 0:
            return "better"
        return "fell" if self.limit is not None and loss > self.limit else "worse"


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
