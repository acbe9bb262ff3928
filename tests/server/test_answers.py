"""What a stream's events say, in the cases that are hard to bring about over a socket."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")

from nanoserve.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanoserve.sampling_params import SamplingParams
from nanoserve.server.answers import CompletionAnswer
from nanoserve.server.protocol import CompletionRequest


def answer() -> CompletionAnswer:
    stream: Any = SimpleNamespace(request_ids=["r"])
    tokens: Any = SimpleNamespace(has_text=True)
    request = CompletionRequest(prompt="a", stream=True)
    return CompletionAnswer(
        request, SamplingParams(n=2), id="1", model="m", prompts=[[1]], stream=stream, tokens=tokens, echo_texts=[],
        prompt_logprobs=None, tokenizer=None,
    )  # fmt: skip


def output(*completions: CompletionOutput) -> RequestOutput:
    return RequestOutput("r", None, [1], list(completions), False, 0, RequestMetrics(0.0))


def texts(events: bytes) -> list[tuple[int, str]]:
    found = [json.loads(line[6:]) for line in events.decode().splitlines() if line]
    assert all(choice.get("finish_reason") is None for event in found for choice in event["choices"])
    return [(choice["index"], choice["text"]) for event in found for choice in event["choices"]]


def test_text_that_came_before_an_error_is_told() -> None:
    """A slow reader gets both in one: the text, its sibling's text, then the error."""
    it = answer()
    failed = CompletionOutput(0, "ab", [5, 6], finish_reason="error", error="boom")
    assert texts(it.events(output(failed, CompletionOutput(1, "c", [7])))) == [(0, "ab"), (1, "c")]
    assert it.failure is not None and it.failure.status == 500
    assert it.completion_tokens == 3
    it = answer()
    assert it.events(output(CompletionOutput(0, finish_reason="abort"))) == b""
    assert it.failure is not None and it.failure.status == 503


def test_nothing_in_an_event_ends_its_line() -> None:
    """httpx splits where str.splitlines does; the first event and the frame of later ones."""
    it, text = answer(), "a\u2028b\u2029c\x85d\x0b\n\r\x1ce"
    for _ in range(2):
        assert texts(it.events(output(CompletionOutput(0, text, [5])))) == [(0, text)]
