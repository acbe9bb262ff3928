"""Conformance suite of observers."""

from __future__ import annotations

import time
from typing import Any

from nanoserve.contracts.observer import EngineInfo, Observer
from nanoserve.testing.plugins import discover

INFO = EngineInfo(
    model="tiny",
    attention={"prefill": "sdpa", "decode": "sdpa"},
    kv="bf16",
    scheduler="decode_first",
    policy="auto",
    block_size=16,
    num_blocks=64,
    max_model_len=1024,
)


class ObserverSuite:
    """Subclass with ``observer = ITS_CLASS``. plugins: modules with hooks that no entry point announces."""

    observer: type[Observer]
    plugins: tuple[Any, ...] = ()

    def build(self, info: EngineInfo = INFO) -> Any:
        """The observer that the plugin gives an engine."""
        found = [o for o in discover(self.plugins).observers(info) if type(o) is self.observer]
        assert len(found) == 1, f"{len(found)} plugins returned a {self.observer.__name__} from nanoserve_observer"
        return found[0]

    @staticmethod
    def play(observer: Observer, requests: int = 3) -> int:
        """What an engine tells: requests that end, one that is aborted before its first token; the number of events."""
        ends = [*["length"] * requests, "abort"]
        events: list[tuple[Any, ...]] = [("request_added", f"r{i}", 5 + i, 1.0 + i) for i in range(len(ends))]
        events.append(("step", 0, 8, 60, 10.0))
        events += [("first_token", f"r{i}", 11.0) for i in range(requests)]
        events += [("step", requests, 0, 60 - i, 12.0 + i) for i in range(3)]
        events += [("request_finished", f"r{i}", end, 4 * (end != "abort"), 20.0) for i, end in enumerate(ends)]
        for event, *arguments in events:
            getattr(observer, event)(*arguments)
        return len(events)

    def test_hears_everything_without_raising(self) -> None:
        self.play(self.build())

    def test_two_engines_share_nothing(self) -> None:
        """The same ids are in use in both."""
        first, second = self.build(), self.build()
        assert first is not second
        self.play(first)
        self.play(second)

    def test_returns_at_once(self) -> None:
        """It runs between the steps of an engine: a microsecond or two; a millisecond is certainly a mistake."""
        observer = self.build()
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            events = self.play(observer, requests=50)
            best = min(best, (time.perf_counter() - start) / events)
        assert best < 1e-3, f"{best * 1e3:.1f} ms per event"
