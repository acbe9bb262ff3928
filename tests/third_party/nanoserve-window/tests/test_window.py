"""The backend against its own oracle: dense attention in float64 that sees sinks and window only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nanoserve.contracts.errors import ConfigError
from nanoserve.testing import AttentionBackendSuite
from nanoserve.testing.attention import reference_attention

WINDOW, SINKS = 9, 3


class TestTorch(AttentionBackendSuite):
    """A window of 9 and 3 sinks: the suite's contexts are shorter, longer, and have sinks inside the window."""

    backend = "window"
    options: dict[str, Any] = {"window": WINDOW, "sinks": SINKS, "kernel": "torch"}

    def reference(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        return reference_attention(q, k, v, scale, lambda query, key: (key > query - WINDOW) | (key < SINKS))


class TestTriton(TestTorch):
    options = TestTorch.options | {"kernel": "triton"}

    @property
    def interpreted(self) -> bool:
        return self.device == "cpu"

    def declared_formats(self) -> list[str]:
        return ["bf16"]


class TestWideWindow(AttentionBackendSuite):
    """Contexts that fit into the window: full attention, the suite's own oracle."""

    backend = "window"
    options = {"window": 4096}

    def declared_formats(self) -> list[str]:
        return ["bf16"]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_window_matters(phase: Any) -> None:
    """The oracle of the small window is not the full one in disguise."""
    suite = TestTorch()
    context = suite.make_context("bf16")
    case = suite.make_case(context, phase, [(1, 40), (5, 60)])
    full = TestWideWindow().make_case(context, phase, [(1, 40), (5, 60)])
    assert (case.expected() - full.expected()).norm() > 0.1 * full.expected().norm()


@pytest.mark.parametrize(("kernel", "kv"), [("triton", "int8")])
def test_a_kernel_that_cannot_read_the_format_says_so(kernel: str, kv: str) -> None:
    suite = TestTorch()
    suite.options = {"kernel": kernel}
    with pytest.raises(ConfigError, match="reads kv=bf16, not kv=int8; use attention.kernel=torch"):
        suite.build(suite.make_context(kv))


def test_wrong_options_are_named() -> None:
    suite = TestTorch()
    for options, message in (
        ({"window": 0}, "attention.window must be at least 1"),
        ({"sinks": -1}, "attention.sinks"),
    ):
        suite.options = options
        with pytest.raises(ConfigError, match=message):
            suite.build(suite.make_context("bf16"))
