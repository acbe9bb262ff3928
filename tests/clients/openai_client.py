"""The real ``openai`` client against a server: ``python openai_client.py http://127.0.0.1:8000``. Silence is success.

The model is the embedded one, which writes Python and little else: what is asked for is the protocol.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
import urllib.request

import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

PROMPT = "import json\n\ndef read_json(path):\n"
CHAT = [{"role": "user", "content": "Complete this function:\n\ndef add(a, b):"}]
SEEDED = {"temperature": 0.8, "seed": 7, "max_tokens": 24}


def completions(client: OpenAI, model: str) -> None:
    whole = client.completions.create(model=model, prompt=PROMPT, n=2, logprobs=3, **SEEDED)
    again = client.completions.create(model=model, prompt=PROMPT, n=2, logprobs=3, **SEEDED)
    assert [c.text for c in whole.choices] == [c.text for c in again.choices]
    assert whole.choices[0].text != whole.choices[1].text
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    for choice in whole.choices:
        logprobs = choice.logprobs
        assert "".join(logprobs.tokens) == choice.text
        assert all(3 <= len(top) <= 4 for top in logprobs.top_logprobs)
        assert all(value <= 0 for value in logprobs.token_logprobs)
        assert choice.finish_reason in ("stop", "length")

    chunks = list(
        client.completions.create(
            model=model, prompt=PROMPT, n=2, stream=True, stream_options={"include_usage": True}, **SEEDED
        )
    )
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [c.text for c in whole.choices]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens

    echoed = client.completions.create(model=model, prompt=PROMPT, echo=True, max_tokens=1, logprobs=1, temperature=0)
    assert echoed.choices[0].text.startswith(PROMPT) and echoed.choices[0].logprobs.token_logprobs[0] is None
    several = client.completions.create(model=model, prompt=["a = ", "b = "], max_tokens=4, temperature=0)
    assert [c.index for c in several.choices] == [0, 1]
    stopped = client.completions.create(model=model, prompt=PROMPT, stop=["\n"], max_tokens=64, temperature=0)
    assert "\n" not in stopped.choices[0].text and stopped.choices[0].finish_reason == "stop"


def chat(client: OpenAI, model: str) -> None:
    asked = {"model": model, "messages": CHAT, "max_completion_tokens": 24, "temperature": 0.8, "seed": 3}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    message = whole.choices[0].message
    assert message.role == "assistant"
    assert "".join(t.token for t in whole.choices[0].logprobs.content) == message.content
    assert all(len(t.top_logprobs) == 2 for t in whole.choices[0].logprobs.content)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert len(client.chat.completions.create(**asked, n=3).choices) == 3


def structured(client: OpenAI, model: str) -> None:
    class Point(BaseModel):
        name: str
        x: int
        y: bool

    asked = {"model": model, "messages": CHAT, "seed": 1}
    parsed = client.chat.completions.parse(**asked, response_format=Point, max_tokens=400)
    assert isinstance(parsed.choices[0].message.parsed, Point)
    form = {"type": "json_object"}
    choices = client.chat.completions.create(**asked, response_format=form, max_tokens=300, n=8).choices
    complete = [json.loads(c.message.content) for c in choices if c.finish_reason == "stop"]
    assert complete and all(isinstance(value, dict) for value in complete)
    coloured = client.completions.create(
        model=model, prompt="x = ", max_tokens=20, extra_body={"guided_regex": "#[0-9a-f]{6}", "top_k": 50}
    )
    assert re.fullmatch("#[0-9a-f]{6}", coloured.choices[0].text)
    assert_error(
        openai.BadRequestError, "response_format", client.chat.completions.create, **asked,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "strin"}}},
    )  # fmt: skip


def assert_error(kind: type[openai.APIStatusError], param: str, call: object, **arguments: object) -> None:
    try:
        call(**arguments)  # type: ignore[operator]
    except kind as error:
        assert error.body["message"] and error.body["param"] == param, error.body
    else:
        raise AssertionError(f"{kind.__name__} was expected")


def errors(client: OpenAI, model: str) -> None:
    create = client.completions.create
    assert_error(openai.NotFoundError, "model", create, model="nobody", prompt="x")
    for stream in (False, True):
        asked = {"model": model, "prompt": "x", "stream": stream}
        assert_error(openai.BadRequestError, "temperature", create, **asked, temperature=-1)
        assert_error(openai.BadRequestError, "n", create, **asked, n=0)
        assert_error(openai.BadRequestError, "max_tokens", create, **asked, max_tokens=0)
        assert_error(openai.BadRequestError, "no_such_thing", create, **asked, extra_body={"no_such_thing": 1})
    assert create(model=model, prompt="x", max_tokens=1).choices


async def many(url: str, model: str) -> None:
    """Fifty streams at once, half of them left early: all blocks come back."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        async def one(i: int) -> int:
            stream = await client.completions.create(
                model=model, prompt=f"x{i} = ", stream=True, max_tokens=60, extra_body={"ignore_eos": True}
            )
            count = 0
            async for _ in stream:
                count += 1
                if i % 2 and count == 3:
                    await stream.close()
                    break
            return count

        counts = await asyncio.gather(*(one(i) for i in range(50)))
    assert all(count == 3 for count in counts[1::2]) and all(count > 3 for count in counts[::2])


def idle(url: str) -> None:
    """Wait until the server has nothing to do; its pool must be whole then."""
    for _ in range(100):
        with urllib.request.urlopen(f"{url}/stats") as response:
            stats = json.load(response)
        if not stats["running"] and not stats["waiting"]:
            break
        time.sleep(0.1)
    assert stats["num_free_blocks"] == stats["num_blocks"], stats


def main(url: str) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        (model,) = (card.id for card in client.models.list())
        assert client.models.retrieve(model).id == model
        for check in (completions, chat, structured, errors):
            check(client, model)
    asyncio.run(many(url, model))
    idle(url)


if __name__ == "__main__":
    main(sys.argv[1])
