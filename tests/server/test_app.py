"""The application without a socket, around an engine that the command line would not build."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest

from nanoserve import AsyncLLM, SamplingParams
from nanoserve.server import guard, protocol
from nanoserve.server.app import LARGE_BODY, Serving, build_app
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


def test_the_queue_holds_no_more_when_many_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are tokenized in threads, so all may have found room in the queue before the first takes it."""

    async def ask() -> None:
        options = {"load_format": "dummy", "device": "cpu", "num_kv_blocks": 32, "max_num_seqs": 1}
        async with AsyncLLM(model=DUMMY, **options) as llm:
            app = build_app(Serving(llm, "dummy", SamplingParams(), max_queue=2))
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
                for more in ({}, {"echo": True, "logprobs": 1}):
                    arrived, all_there = [], asyncio.Event()

                    async def encode(text: str, arrived=arrived, all_there=all_there) -> list[int]:
                        arrived.append(text)
                        if len(arrived) == 8:
                            all_there.set()
                        await all_there.wait()
                        return [1, 2, 3]

                    monkeypatch.setattr(llm, "encode", encode)
                    body = {"prompt": "a", "max_tokens": 50, "ignore_eos": True, **more}
                    answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(8)))
                    assert sorted(answer.status_code for answer in answers) == [200] * 3 + [429] * 5
                    assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 429)

    asyncio.run(ask())


def test_large_bodies_are_parsed_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    decode = protocol.decode

    def spy(body: bytes, kind: type[Any]) -> Any:
        threads.append(threading.current_thread())
        return decode(body, kind)

    monkeypatch.setattr(protocol, "decode", spy)

    async def ask() -> None:
        app = build_app(Serving(AsyncLLM("tiny"), "tiny", SamplingParams(), max_queue=10))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            for size in (1, LARGE_BODY):
                assert (await client.post("/v1/completions", json={"prompt": "a" * size})).status_code == 503

    asyncio.run(ask())
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


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
