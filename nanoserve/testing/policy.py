"""Conformance suite of selection policies."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

from nanoserve.contracts.capabilities import PHASES, Phase
from nanoserve.contracts.policy import SelectionPolicy, SelectionShape
from nanoserve.testing.plugins import discover

#: Every subset of these but the empty one is offered; "unheard_of" stands for somebody else's backend.
BACKENDS = ("paged_v1", "sdpa", "triton_flash", "unheard_of")


def shapes(phase: Phase) -> Iterator[SelectionShape]:
    """A sweep over batches, lengths, formats and devices, with edges of powers of two."""
    lengths = (1,) if phase == "decode" else (1, 127, 128, 129, 8192)
    for batch, query, context in itertools.product((1, 8, 256), lengths, (1, 511, 4096, 131072)):
        if context < query:
            continue
        for kv_format in ("bf16", "int8", "unheard_of"):
            for capability in (None, (8, 6), (9, 0), (12, 1)):
                yield SelectionShape(batch, batch * query, query, context, kv_format, capability, context > query)


class PolicySuite:
    """Subclass with ``policy = "NAME"``. plugins: modules with hooks that no entry point announces."""

    policy: str
    plugins: tuple[Any, ...] = ()
    options: dict[str, Any] = {}

    def build(self) -> SelectionPolicy:
        registry = discover(self.plugins)
        spec = registry.get("policy", self.policy)
        return spec.factory(registry.make_options("policy", spec, self.options))

    def test_answers_are_candidates_and_deterministic(self) -> None:
        policy, twin = self.build(), self.build()
        offers = [c for n in range(1, len(BACKENDS) + 1) for c in itertools.combinations(BACKENDS, n)]
        for phase in PHASES:
            forward = [(s, c, policy.select(phase, s, c)) for s in shapes(phase) for c in offers]
            for shape, candidates, answer in forward:
                assert answer in candidates, f"{phase} {shape}: {answer!r} is not one of {candidates}"
            # Neither the order of the calls nor their history may matter.
            for shape, candidates, answer in reversed(forward):
                assert twin.select(phase, shape, candidates) == answer, f"{phase} {shape} {candidates}"

    def test_is_cheap(self) -> None:
        """Called twice per step: a microsecond or two; a hundred is certainly a mistake."""
        policy, sweep = self.build(), list(shapes("prefill"))
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            for shape in sweep:
                policy.select("prefill", shape, BACKENDS)
            best = min(best, (time.perf_counter() - start) / len(sweep))
        assert best < 100e-6, f"{best * 1e6:.0f} µs per call"
