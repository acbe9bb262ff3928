"""The application without a socket, around an engine that the command line would not build."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from nanoserve import AsyncLLM, SamplingParams
from nanoserve.server import guard
from nanoserve.server.app import Serving, build_app
from tests.helpers.tiny_model import TINY

DUMMY = {"name": "dummy", "config": {**TINY, "model_type": "qwen3", "rms_norm_eps": 1e-6}}


def test_a_model_without_a_tokenizer() -> None:
    """Token ids go in and counts come out; what needs text is refused by name."""

    async def ask() -> None:
        async with AsyncLLM(model=DUMMY, load_format="dummy", device="cpu", num_kv_blocks=32) as llm:
            app = build_app(Serving(llm, "dummy", SamplingParams(max_tokens=None), max_queue=10))
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                body = {"prompt": [1, 2, 3], "max_tokens": 3}
                answer = (await client.post("/v1/completions", json={**body, "logprobs": 1, "echo": True})).json()
                assert answer["choices"][0]["text"] == "" and answer["usage"]["completion_tokens"] == 3
                assert answer["choices"][0]["logprobs"]["tokens"][:3] == ["token_id:1", "token_id:2", "token_id:3"]
                text = (await client.post("/v1/completions", json={**body, "stream": True})).text
                events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
                assert events[-1]["choices"][0]["finish_reason"] == "length"
                for path, wrong, param in (
                    ("/v1/completions", {"prompt": "a"}, "prompt"),
                    ("/v1/completions", {**body, "stop": "a"}, "stop"),
                    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "messages"),
                    ("/tokenize", {"prompt": "a"}, "prompt"),
                    ("/detokenize", {"tokens": [1]}, "tokens"),
                ):
                    refused = await client.post(path, json=wrong)
                    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)

    asyncio.run(ask())


def test_what_nobody_foresaw_is_a_500_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the request's id, its line in the log has the status, and nothing passes on to the HTTP server, which
    would close the connection under the client's next request."""
    lines: list[Any] = []
    monkeypatch.setattr(guard.log, "error", lambda *args, **more: None)
    monkeypatch.setattr(guard.log, "isEnabledFor", lambda level: True)
    monkeypatch.setattr(guard.log, "log", lambda level, message, extra: lines.append(extra["fields"]))
    monkeypatch.setattr(Serving, "admit", lambda self, n: 1 / 0)

    async def ask() -> httpx.Response:
        app = build_app(Serving(AsyncLLM("tiny"), "tiny", SamplingParams(), max_queue=10))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "mine"})

    response = asyncio.run(ask())
    assert (response.status_code, response.headers["x-request-id"]) == (500, "mine")
    assert response.json()["error"]["code"] == "internal_error" and "zero" not in response.text
    assert [(line["request_id"], line["status"], line["error"]) for line in lines] == [
        ("mine", 500, "ZeroDivisionError")
    ]
