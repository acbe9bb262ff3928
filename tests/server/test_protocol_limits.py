"""What the parsing of a body refuses, without a server: sizes, before anything is made of them, and what asks for
nothing."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from nanoserve import AsyncLLM, SamplingParams
from nanoserve.contracts.errors import CapacityError
from nanoserve.server.messages import Started
from nanoserve.server.protocol import (
    MAX_ENTRIES,
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    decode,
)


def refusal(kind: type[Any], **fields: Any) -> ApiError:
    """How a body is refused where the context has 100 tokens and the queue 8 places."""
    body = {"messages": [{"role": "user", "content": "x"}]} if kind is ChatRequest else {}
    body = {"prompt": "x"} if kind is CompletionRequest else body
    with pytest.raises(ApiError) as caught:
        request = decode(json.dumps({**body, **fields}).encode(), kind, max_model_len=100, max_prompts=8)
        request.sampling_params(SamplingParams())
        _ = request.prompts
    assert caught.value.status == 400
    return caught.value


def entries(name: str, count: int) -> Any:
    if name == "logit_bias":
        return {str(i): 1 for i in range(count)}
    return list(range(count)) if name == "stop_token_ids" else [f"s{i}" for i in range(count)]


@pytest.mark.parametrize("name", MAX_ENTRIES)
def test_lists_have_a_limit_that_is_named(name: str) -> None:
    limit = MAX_ENTRIES[name]
    decode(json.dumps({"prompt": "x", name: entries(name, limit)}).encode(), CompletionRequest)
    for kind in (CompletionRequest, ChatRequest):
        error = refusal(kind, **{name: entries(name, limit + 1)})
        assert error.param == name and f"{limit + 1} entries; at most {limit}" in error.message


def test_a_schema_that_is_too_large_is_not_walked_through() -> None:
    """The twin in it would be found later."""
    schema = '{"a": 1, "a": 1, "enum": [' + "0, " * 200_000 + "0]}"
    form = '{"type": "json_schema", "json_schema": {"schema": ' + schema + "}}"
    with pytest.raises(ApiError, match="response_format has more than 65536 characters"):
        decode(('{"prompt": "x", "response_format": ' + form + "}").encode(), CompletionRequest)


@pytest.mark.parametrize(
    ("kind", "fields", "param", "said"),
    [
        (CompletionRequest, {"prompt": [1] * 100}, "prompt", "100 tokens; max_model_len is 100"),
        (CompletionRequest, {"prompt": [[1], [None] * 100]}, "prompt[1]", "100 tokens"),  # the length comes first
        (CompletionRequest, {"prompt": ["x"] * 9}, "prompt", "9 prompts; at most 8"),
        (ChatRequest, {"messages": [{"role": "user", "content": "x"}] * 100}, "messages", "max_model_len is 100"),
        (TokenizeRequest, {"messages": [{"role": "user", "content": "x"}] * 100}, "messages", "max_model_len is 100"),
        (DetokenizeRequest, {"tokens": [1] * 101}, "tokens", "max_model_len is 100"),
    ],
)
def test_what_cannot_fit_is_refused_by_its_length(kind: type[Any], fields: Any, param: str, said: str) -> None:
    error = refusal(kind, **fields)
    assert error.param == param and said in error.message


def test_a_prompt_that_is_too_long_is_not_walked_through() -> None:
    """Its values are wrong as well, but nobody has looked at them."""
    llm = AsyncLLM("tiny", device="cpu")
    llm._started = Started(SimpleNamespace(max_model_len=100), 4096, None)  # type: ignore[arg-type]
    with pytest.raises(CapacityError, match="prompt 1: the prompt has 100 tokens; max_model_len is 100"):
        llm._tokenize([None] * 100, None, "prompt 1: ")  # type: ignore[list-item]


@pytest.mark.parametrize("prompt", [["x", ""], ["x", []], ["x", 1], [[1], [True]]])
def test_a_wrong_prompt_of_several_is_named(prompt: list[Any]) -> None:
    assert refusal(CompletionRequest, prompt=prompt).param == "prompt[1]"


@pytest.mark.parametrize("value", ["x", 1, ["x"]])
def test_a_field_of_a_message_that_no_prompt_shows_is_refused(value: Any) -> None:
    for name in ("name", "reasoning_content", "tool_calls", "tool_call_id", "refusal"):
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", name: value}]
        for kind in (ChatRequest, TokenizeRequest):
            error = refusal(kind, messages=messages)
            assert (error.param, error.code) == (f"messages[1].{name}", "unsupported_parameter")
    nothing = {"name": None, "reasoning_content": "", "tool_calls": [], "tool_call_id": None, "refusal": None}
    decode(json.dumps({"messages": [{"role": "user", "content": "x", **nothing}]}).encode(), ChatRequest)


@pytest.mark.parametrize(("name", "value"), [("best_of", True), ("best_of", 1.0), ("store", 0)])
def test_a_neutral_value_has_its_type(name: str, value: Any) -> None:
    error = refusal(CompletionRequest, **{name: value})
    assert (error.param, error.code) == (name, "unsupported_parameter")
