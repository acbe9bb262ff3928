"""OpenAI's API over a real socket: what is answered, what is refused, and that streaming changes nothing."""

from __future__ import annotations

import json
import math
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.serving import Server, finish_reasons, text_of

PROMPT = "import json\n"
EOS = 4072


def status(server: Server, **body: Any) -> tuple[int, Any]:
    response = server.post("/v1/completions", **body)
    return response.status_code, response.json().get("error", {}).get("param")


# --- streaming equals not streaming --------------------------------------------------------------------------------

PARAMS = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 7},
    "several": {"temperature": 1.0, "seed": 0, "n": 3},
    "hot": {"temperature": 5.0, "top_k": 0, "top_p": 1.0, "seed": 3, "max_tokens": 60},  # broken UTF-8 (C29)
    "penalties": {"temperature": 1.0, "seed": -1, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "stop": {"temperature": 0, "stop": ["new"], "max_tokens": 40},
    "stop kept": {"temperature": 0, "stop": "new", "include_stop_str_in_output": True, "max_tokens": 40},
    "logprobs": {"temperature": 1.0, "seed": 5, "logprobs": 3},
    "echo": {"temperature": 1.0, "seed": 5, "logprobs": 1, "echo": True},
    "eos first": {"logit_bias": {str(EOS): 100.0}},
}


@pytest.mark.parametrize("name", PARAMS)
def test_a_completion_is_the_same_streamed_and_not(server: Server, name: str) -> None:
    """C25, C29, C31: same text, finish reasons, logprobs and usage; a seed repeats itself and ``n`` differ."""
    body = {"prompt": PROMPT, "max_tokens": 20, **PARAMS[name]}
    whole, again = server.complete(**body), server.complete(**body)
    assert whole["choices"] == again["choices"]
    events = server.events("/v1/completions", **body, stream_options={"include_usage": True})
    choices = whole["choices"]
    assert [text_of(events, i) for i in range(len(choices))] == [c["text"] for c in choices]
    assert finish_reasons(events) == {c["index"]: c["finish_reason"] for c in choices}
    assert events[-1]["usage"] | {"prompt_tokens_details": None} == whole["usage"] | {"prompt_tokens_details": None}
    if "logprobs" in body:
        parts = [c["logprobs"] for e in events for c in e["choices"]]
        merged = {key: [x for part in parts for x in part[key]] for key in parts[0]}
        assert merged == choices[0]["logprobs"]
    if name == "several":
        assert len({c["text"] for c in choices}) > 1


@pytest.mark.parametrize("name", ["greedy", "several", "stop", "eos first"])
def test_a_chat_is_the_same_streamed_and_not(server: Server, name: str) -> None:
    body = {"messages": [{"role": "user", "content": "def add(a, b):"}], "max_tokens": 20, **PARAMS[name]}
    server.post("/v1/chat/completions", **body)  # so that both find the same prefix: it moves logprobs by 1e-6
    whole = server.post("/v1/chat/completions", **body, logprobs=True, top_logprobs=2).json()
    events = server.events("/v1/chat/completions", **body, logprobs=True, top_logprobs=2)
    for choice in whole["choices"]:
        mine = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert text_of(events, choice["index"]) == choice["message"]["content"]
        assert [entry for c in mine if c["logprobs"] for entry in c["logprobs"]["content"]] == choice["logprobs"][
            "content"
        ]
        assert mine[0]["delta"]["role"] == "assistant" and not any("role" in c["delta"] for c in mine[1:])
    assert finish_reasons(events) == {c["index"]: c["finish_reason"] for c in whole["choices"]}


def test_usage_in_every_event(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.events("/v1/completions", prompt=PROMPT, max_tokens=10, ignore_eos=True, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == counts[-2] == 10 and counts[0] < 10


# --- what a request can ask ----------------------------------------------------------------------------------------


def test_prompts_and_choices_keep_their_order(server: Server) -> None:
    """C09: index = prompt * n + k, each choice equals its solo run, every prompt is counted once."""
    prompts = ["import ", "def f(", "class A", "for i in "]
    params = {"max_tokens": 9, "temperature": 0.9, "seed": 11, "n": 2}
    together = server.complete(prompt=prompts, **params)
    alone = [server.complete(prompt=prompt, **params) for prompt in prompts]
    assert [c["index"] for c in together["choices"]] == list(range(8))
    assert [c["text"] for c in together["choices"]] == [c["text"] for one in alone for c in one["choices"]]
    assert together["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone)
    events = server.events("/v1/completions", prompt=prompts, **params)
    assert [text_of(events, i) for i in range(8)] == [c["text"] for c in together["choices"]]
    ids = [server.post("/tokenize", prompt=prompt).json()["tokens"] for prompt in prompts]
    assert server.complete(prompt=ids, **params)["choices"] == together["choices"]


def test_the_end_of_the_text(server: Server) -> None:
    """C28, C33: EOS as first token is an empty text, as the last allowed one still "stop"; ignore_eos runs on."""
    force = {"prompt": PROMPT, "logit_bias": {str(EOS): 100.0}, "temperature": 0}
    first = server.complete(**force, max_tokens=5)
    assert first["choices"][0]["text"] == "" and first["choices"][0]["finish_reason"] == "stop"
    fifth = server.complete(**force, max_tokens=5, min_tokens=4)
    assert fifth["choices"][0]["finish_reason"] == "stop" and fifth["usage"]["completion_tokens"] == 5
    ignored = server.complete(**force, max_tokens=5, ignore_eos=True)
    assert ignored["choices"][0]["finish_reason"] == "length" and ignored["usage"]["completion_tokens"] == 5
    named = server.complete(prompt=PROMPT, temperature=0, stop_token_ids=list(range(4000)), max_tokens=5)
    assert named["choices"][0]["finish_reason"] == "stop" and isinstance(named["choices"][0]["stop_reason"], int)


def test_how_many_tokens(server: Server) -> None:
    """C28: one means one; more than there is room for is cropped; null is OpenAI's 16, in chats all the room."""
    body = {"prompt": PROMPT, "ignore_eos": True}
    count = server.complete(prompt=PROMPT)["usage"]["prompt_tokens"]
    for max_tokens, expected in ((1, 1), (None, 16), (10**6, 256 - count)):
        answer = server.complete(**body, max_tokens=max_tokens)
        assert answer["usage"]["completion_tokens"] == expected
        assert answer["choices"][0]["finish_reason"] == "length"
    for key in ("max_tokens", "max_completion_tokens"):
        assert server.chat("hi", ignore_eos=True, **{key: 3})["usage"]["completion_tokens"] == 3
    usage = server.chat("hi", ignore_eos=True)["usage"]
    assert usage["total_tokens"] == 256


def test_stop_strings(server: Server) -> None:
    """C31: nothing after the match, the earliest wins, generation stops there, the prompt never matches."""
    free = server.complete(prompt=PROMPT, temperature=0, max_tokens=40)["choices"][0]["text"]
    stop = free[7:10]
    cut = server.complete(prompt=PROMPT, temperature=0, max_tokens=40, stop=["never", stop, free[9:12]])
    assert cut["choices"][0]["text"] == free[: free.index(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop" and cut["choices"][0]["stop_reason"] == stop
    assert cut["usage"]["completion_tokens"] < 40
    unmatched = server.complete(prompt=PROMPT, temperature=0, max_tokens=8, stop="import json")
    assert free.startswith(unmatched["choices"][0]["text"]) and unmatched["choices"][0]["finish_reason"] == "length"


def test_logprobs_of_a_prompt_are_those_of_its_generation(server: Server) -> None:
    """C11: echo scores what generating reported, with a cold and with a warm prefix cache."""
    ids = server.post("/tokenize", prompt=PROMPT + "import os\nimport sys\nimport re\n").json()["tokens"]
    made = server.complete(prompt=ids, temperature=0, max_tokens=20, logprobs=2, ignore_eos=True)["choices"][0]
    strings = made["logprobs"]["tokens"]
    assert len(strings) == len(made["logprobs"]["token_logprobs"]) == 20
    tokens = server.post("/tokenize", prompt=made["text"]).json()["tokens"]
    prompt = [*ids, *tokens]
    echoed = [
        server.complete(prompt=prompt, max_tokens=0, echo=True, logprobs=2)["choices"][0]["logprobs"] for _ in range(2)
    ]
    assert echoed[0] == echoed[1]
    assert echoed[0]["token_logprobs"][0] is echoed[0]["top_logprobs"][0] is None
    if tokens == [*tokens] and echoed[0]["tokens"][len(ids) :] == strings:  # the text has no other tokens than before
        for a, b in zip(echoed[0]["token_logprobs"][len(ids) :], made["logprobs"]["token_logprobs"], strict=True):
            assert math.isclose(a, b, abs_tol=1e-3)
    text = server.post("/detokenize", tokens=prompt).json()["prompt"]
    for token, offset in zip(echoed[0]["tokens"], echoed[0]["text_offset"], strict=True):
        assert text[offset : offset + len(token)] == token


def test_scoring_as_lm_eval_does_it(server: Server) -> None:
    """echo with one token more: prompt and output in one row; the greedy token's logprob is the largest."""
    ids = server.post("/tokenize", prompt="for i in range(10):\n    print(i)\n").json()["tokens"]
    answer = server.complete(prompt=[ids, ids[:5]], max_tokens=1, temperature=0, echo=True, logprobs=1, seed=1)
    for prompt, choice in zip((ids, ids[:5]), answer["choices"], strict=True):
        rows = choice["logprobs"]
        assert len(rows["tokens"]) == len(prompt) + 1 == len(rows["token_logprobs"]) == len(rows["top_logprobs"])
        for own, top in zip(rows["token_logprobs"][1:], rows["top_logprobs"][1:], strict=True):
            assert own <= max(top.values()) and own in top.values()
        assert rows["token_logprobs"][-1] == max(rows["top_logprobs"][-1].values())
    assert answer["usage"]["completion_tokens"] == 2


def test_a_token_that_is_a_part_of_a_character(server: Server) -> None:
    """Logprobs name it by its bytes, so that it can be told from others, and offsets stay on characters."""
    answer = server.complete(prompt="x = 'é世😀'\n", max_tokens=0, echo=True, logprobs=0)["choices"][0]
    rows = answer["logprobs"]
    assert any(token.startswith("bytes:\\x") for token in rows["tokens"])
    whole = b"".join(
        bytes.fromhex(token[6:].replace("\\x", "")) if token.startswith("bytes:") else token.encode()
        for token in rows["tokens"]
    )
    assert whole.decode() == answer["text"] and max(rows["text_offset"]) < len(answer["text"])


def test_the_chat_template_gets_its_variables(server: Server) -> None:
    """C35: a variable the template reads changes the prompt, one it does not read is refused, parts equal text."""

    def count(**more: Any) -> int:
        return server.chat("hi", max_tokens=1, **more)["usage"]["prompt_tokens"]

    assert count(chat_template_kwargs={"enable_thinking": False}) > count(
        chat_template_kwargs={"enable_thinking": True}
    )
    assert count(chat_template_kwargs={"enable_thinking": True}) == count()
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert server.chat(parts, max_tokens=1)["usage"]["prompt_tokens"] == count()
    for name in ("thinking", "messages", "tools", "chat_template", "tokenize"):
        response = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}],
                               chat_template_kwargs={name: "x"})  # fmt: skip
        assert response.status_code == 400
        assert response.json()["error"]["param"] == f"chat_template_kwargs.{name}"
    for wrong in ("false", 0, None):
        response = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}],
                               chat_template_kwargs={"enable_thinking": wrong})  # fmt: skip
        assert response.status_code == 400 and "true or false" in response.json()["error"]["message"]
        assert response.json()["error"]["param"] == "chat_template_kwargs.enable_thinking"
    response = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], prompt="x")
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt"


def test_tokenize_and_detokenize(server: Server) -> None:
    answer = server.post("/tokenize", prompt="def é():", return_token_strs=True).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 256 == server.http.get("/v1/models").json()["data"][0]["max_model_len"]
    assert server.post("/detokenize", tokens=answer["tokens"]).json() == {"prompt": "def é():"}
    chat = server.post("/tokenize", messages=[{"role": "user", "content": "hi"}]).json()
    assert chat["count"] == server.chat("hi", max_tokens=1)["usage"]["prompt_tokens"]


def test_the_openai_client(server: Server) -> None:
    """The client that everybody has, both endpoints, streamed and not, and its exceptions."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        model = client.models.list().data[0].id
        messages: Any = [{"role": "user", "content": "def add(a, b):"}]
        whole = client.chat.completions.create(model=model, messages=messages, max_tokens=12, seed=1, user="me")
        stream = client.chat.completions.create(model=model, messages=messages, max_tokens=12, seed=1, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole.choices[0].message.content
        text = client.completions.create(model=model, prompt=PROMPT, max_tokens=3, logprobs=1)
        assert len(text.choices[0].logprobs.tokens) == 3
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.completions.create(model="gpt-4", prompt=PROMPT)
        with pytest.raises(openai.BadRequestError, match="tools is not supported"):
            client.chat.completions.create(
                model=model, messages=messages, tools=[{"type": "function", "function": {"name": "f"}}]
            )


def test_offsets_of_what_is_echoed(server: Server) -> None:
    """Special tokens of a text stay in its echo; a character that stays unfinished is one U+FFFD of its own."""
    params = {"max_tokens": 0, "echo": True, "logprobs": 0}
    for prompt, text, offsets in (
        ("<|im_start|>ab", "<|im_start|>ab", [0, 12]),
        ([4071, 64, 65], "ab", [0, 0, 1]),
        ([172, 253, 64], "\ufffda", [0, 0, 1]),
    ):
        choice = server.complete(prompt=prompt, **params)["choices"][0]
        assert (choice["text"], choice["logprobs"]["text_offset"]) == (text, offsets)


# --- what is refused -----------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str | None]] = {
    "empty prompt": ({"prompt": ""}, "prompt"),
    "one empty prompt of two": ({"prompt": ["a", ""]}, "prompt[1]"),
    "no prompts": ({"prompt": []}, "prompt"),
    "null prompt": ({"prompt": None}, "prompt"),
    "mixed prompts": ({"prompt": ["a", 1]}, "prompt[1]"),
    "token 4096 of 4096": ({"prompt": [1, 4096]}, "prompt[1]"),
    "token -1": ({"prompt": [[1], [1, -1]]}, "prompt[1][1]"),
    "token 2^40": ({"prompt": [2**40]}, "prompt[0]"),
    "token 2^70": ({"prompt": [2**70]}, "prompt[0]"),
    "too long": ({"prompt": [5] * 256}, "prompt"),
    "far too long": ({"prompt": [5] * 5000}, "prompt"),
    "second too long": ({"prompt": [[5], [5] * 256]}, "prompt[1]"),
    "temperature -1": ({"temperature": -1}, "temperature"),
    "temperature hot": ({"temperature": "hot"}, "temperature"),
    "top_p 0": ({"top_p": 0}, "top_p"),
    "top_p 7": ({"top_p": 7}, "top_p"),
    "n 0": ({"n": 0}, "n"),
    "n -1": ({"n": -1}, "n"),
    "n a million": ({"n": 10**6}, "n"),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens"),
    "max_tokens -1": ({"max_tokens": -1}, "max_tokens"),
    "max_tokens 1.5": ({"max_tokens": 1.5}, "max_tokens"),
    "logprobs -1": ({"logprobs": -1}, "logprobs"),
    "logprobs a million": ({"logprobs": 10**6}, "logprobs"),
    "max_tokens 2^64": ({"max_tokens": 2**64}, "max_tokens"),
    "min_tokens 10^30": ({"max_tokens": None, "min_tokens": 10**30}, "min_tokens"),
    "top_k 2^64": ({"top_k": 2**64}, "top_k"),
    "seed 2^64": ({"seed": 2**64}, "seed"),
    "stop empty": ({"stop": ["a", ""]}, "stop[1]"),
    "stop no text": ({"stop": ["a", 1]}, "stop[1]"),
    "stop id": ({"stop_token_ids": [5, 4096]}, "stop_token_ids[1]"),
    "stop id -1": ({"stop_token_ids": [5, -1]}, "stop_token_ids[1]"),
    "bias id": ({"logit_bias": {"4096": 1}}, 'logit_bias["4096"]'),
    "bias no number": ({"logit_bias": {"123": 1, "124": "x"}}, 'logit_bias["124"]'),
    "bias 10^10": ({"logit_bias": {"123": 10**10}}, 'logit_bias["123"]'),
    "bias id in two ways": ({"logit_bias": {"5": 1, "05": 2}}, 'logit_bias["05"]'),
    "stop id 10^30": ({"stop_token_ids": [10**30]}, "stop_token_ids[0]"),
    "bias id 10^30": ({"logit_bias": {str(10**30): 1}}, f'logit_bias["{10**30}"]'),
    "bias id of 5000 digits": ({"logit_bias": {"1" * 5000: 1}}, f'logit_bias["{"1" * 40}…"]'),
    "bias no id": ({"logit_bias": {"x y": 1}}, 'logit_bias["x y"]'),
    "priority": ({"priority": 1}, "priority"),
    "priority 2^63": ({"priority": 2**63}, "priority"),
    "unknown field": ({"top_q": 1}, "top_q"),
    "suffix": ({"suffix": "end"}, "suffix"),
    "best_of": ({"best_of": 2}, "best_of"),
    "stream_options alone": ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
    "stream option": ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_a_malformed_completion_is_refused_by_name(server: Server, name: str, stream: bool) -> None:
    """C03, C25, C28, C34, C43: status 400, in a stream too, naming the field; the next request is served."""
    body, param = REFUSED[name]
    response = server.post("/v1/completions", **{"prompt": PROMPT, "stream": stream, **body})
    assert response.status_code == 400 and response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert error["message"] and error["type"] == "invalid_request_error" and error["param"] == param
    assert server.stats()["running"] == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "alien", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"priority": -1}, "priority"),
        ({"messages": [{"role": "user", "content": "hi", "mood": "good"}]}, "messages[0].mood"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"tools": [{}]}, "tools"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
    ],
)  # fmt: skip
def test_a_malformed_chat_is_refused_by_name(server: Server, body: dict[str, Any], param: str) -> None:
    """C43."""
    full = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, **body}
    for stream in (False, True):
        response = server.post("/v1/chat/completions", **full, stream=stream)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"prompt": NaN}', b'{"prompt": "a", "temperature": Infinity}', b'{"prompt": "\xff"}',
     b'{"prompt": "\\ud800"}', b'{"prompt": "a", "temperature": 1e999}', b"[" * 100_000],
)  # fmt: skip
def test_a_body_that_is_not_a_request(server: Server, content: bytes) -> None:
    """C43: malformed JSON, wrong UTF-8, NaN: 400 and the connection goes on."""
    response = server.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["message"]


def test_a_form_that_is_too_much_is_the_requests_fault(server: Server) -> None:
    """Some limits of a grammar show only on the way; 400 and the request's own field, not 500."""
    pytest.importorskip("llguidance")
    assert status(server, prompt=PROMPT, guided_regex="a{1000000000}") == (400, "guided_regex")
    assert status(server, prompt=[PROMPT, PROMPT], guided_regex="(") == (400, "guided_regex")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"prompt": "a", "seed": 1, "seed": 2}', "seed"),
        ('{"prompt": "a", "logit_bias": {"5": 1, "6": 1, "5": 1}}', 'logit_bias["5"]'),
        ('{"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": '
         '{"anyOf": [{}, {"type": "string", "type": "string"}]}}}}',
         "response_format.json_schema.schema.anyOf[1].type"),
    ],
)  # fmt: skip
def test_a_key_that_is_given_twice(server: Server, body: str, param: str) -> None:
    """Whichever value counted, the other would be ignored."""
    response = server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and error["message"].startswith(f"{param} is given")


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"content-type": "application/json; charset=latin-1"}, 415),
        ({"content-type": 'Application/JSON; charset="UTF-8"'}, 200),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415),
        ({"content-type": "application/json", "content-encoding": "identity"}, 200),
        ({"content-type": "text/plain"}, 415),
    ],
)
def test_a_body_in_another_encoding_is_refused_by_name(server: Server, headers: dict[str, str], code: int) -> None:
    response = server.http.post("/v1/completions", content='{"prompt": "a", "max_tokens": 1}', headers=headers)
    assert response.status_code == code
    if code == 415:
        name, value = list(headers.items())[-1]
        message = response.json()["error"]["message"]
        assert message.lower().startswith(name) and value.rpartition("=")[2] in message


def test_other_refusals_have_the_same_shape(server: Server) -> None:
    assert status(server, prompt=PROMPT, model="other") == (404, "model")
    for method, path, code in (
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("GET", "/v1/models/x", 404),
    ):
        response = server.http.request(method, path)
        assert response.status_code == code and response.json()["error"]["message"]
    form = server.http.post("/v1/completions", data={"prompt": "a"})
    assert form.status_code == 415
    azure = server.http.post("/v1/completions?api-version=2024-10-21", json={"prompt": "a", "max_tokens": 1})
    assert azure.status_code == 200
    query = server.http.post("/v1/completions?n=2", json={"prompt": "a", "max_tokens": 1})
    assert query.status_code == 400 and query.json()["error"]["param"] == "n"


def test_fields_that_ask_for_nothing_are_no_fault(server: Server) -> None:
    """Null, or OpenAI's neutral value, of what is not supported."""
    server.complete(
        prompt=PROMPT, max_tokens=1, suffix=None, best_of=1, store=False, metadata={}, logit_bias=None, priority=0
    )
    server.chat(
        "hi", max_tokens=1, tools=None, tool_choice="none", response_format={"type": "text"}, modalities=["text"]
    )


# --- operation -----------------------------------------------------------------------------------------------------


def test_request_ids(server: Server) -> None:
    """C44: two requests with one id live side by side, both answered rightly and with their id."""

    def ask(prompt: str) -> Any:
        return server.http.post("/v1/completions", json={"prompt": prompt, "temperature": 0, "max_tokens": 30},
                                headers={"x-request-id": "same"})  # fmt: skip

    prompts = ["import os\n", "def main():\n"] * 2
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, prompts))
    assert [a.headers["x-request-id"] for a in answers] == ["same"] * 4
    alone = [server.complete(prompt=prompt, temperature=0, max_tokens=30)["choices"] for prompt in prompts]
    assert [a.json()["choices"] for a in answers] == alone
    assert len(server.http.get("/version").headers["x-request-id"]) == 32
    spoilt = server.http.get("/version", headers={"x-request-id": "x" * 200})
    assert len(spoilt.headers["x-request-id"]) == 32


def samples(server: Server) -> dict[str, float]:
    text = server.http.get("/metrics").text
    return {
        sample.name + sample.labels.get("finished_reason", ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }


def test_metrics_count_what_was_delivered(server: Server) -> None:
    """C51: prompts once, tokens as delivered, hits within queries, one TTFT per request, gauges back at 0."""
    before = samples(server)
    prompt = list(range(1000, 1040))
    tokens = 0
    for i in range(10):
        answer = server.complete(prompt=prompt, max_tokens=3, ignore_eos=True, stream=False)
        tokens += answer["usage"]["completion_tokens"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == (32 if i else 0)
    for _ in range(3):
        assert status(server, prompt=[9999])[0] == 400
    server.events("/v1/completions", prompt=prompt, max_tokens=4, ignore_eos=True)
    server.wait_idle()
    after = samples(server)
    grown = {name: after[name] - before[name] for name in after}
    assert grown["vllm:prompt_tokens_total"] == grown["vllm:prefix_cache_queries_total"] == 11 * 40
    assert grown["vllm:prefix_cache_hits_total"] == 10 * 32
    assert grown["vllm:generation_tokens_total"] == tokens + 4
    assert grown["vllm:time_to_first_token_seconds_count"] == 11 == grown["vllm:request_success_totallength"]
    assert grown["vllm:inter_token_latency_seconds_count"] == 10 * 2 + 3
    assert grown["vllm:request_generation_tokens_sum"] == tokens + 4
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    assert after["vllm:kv_cache_usage_perc"] == 0
    assert all(value >= 0 for name, value in grown.items() if not name.endswith(("running", "waiting", "perc")))


def test_each_choice_is_a_request_of_the_metrics(server: Server) -> None:
    """As in vLLM: prompt and look-up, first token, gaps and end of every choice count, streamed or not."""
    for ask in (server.complete, lambda **body: server.events("/v1/completions", **body)):
        before = samples(server)
        ask(prompt=list(range(2000, 2040)), n=3, max_tokens=5, ignore_eos=True, seed=1)
        server.wait_idle()
        grown = {name: value - before[name] for name, value in samples(server).items()}
        assert grown["vllm:prompt_tokens_total"] == grown["vllm:prefix_cache_queries_total"] == 3 * 40
        assert grown["vllm:time_to_first_token_seconds_count"] == 3 == grown["vllm:request_success_totallength"]
        assert grown["vllm:inter_token_latency_seconds_count"] == 3 * 4
        assert grown["vllm:request_time_per_output_token_seconds_count"] == 3
        assert grown["vllm:request_generation_tokens_sum"] == grown["vllm:generation_tokens_total"] == 15


def test_whatever_can_be_got_may_be_asked_for_its_head(server: Server) -> None:
    paths = ("/", "/health", "/ready", "/version", "/metrics", "/stats", "/composition", "/openapi.json", "/v1/models")
    for path in (*paths, "/v1/models/tiny", "/v1/models/none"):
        head, whole = server.http.head(path), server.http.get(path)
        assert (head.status_code, head.content) == (whole.status_code, b"")
        assert head.headers["content-type"] == whole.headers["content-type"]
    assert server.http.head("/v1/completions").status_code == 405


def test_live_figures_and_composition(server: Server) -> None:
    server.complete(prompt=PROMPT, max_tokens=5)
    stats = server.stats()
    assert stats["state"] == "ready" and stats["generation_tokens_per_s"] > 0 and stats["ttft_p50_ms"] > 0
    composition = server.http.get("/composition").json()
    assert composition["scheduler"] == "decode_first" and composition["engine"]["max_model_len"] == 256
    assert (composition["policy"], composition["policy_origin"]) == ("auto", "policy/auto.yaml")


def test_the_log_has_no_prompts(server: Server) -> None:
    server.complete(prompt="a very secret prompt", max_tokens=1, user="somebody")
    server.post("/v1/completions", prompt="a very secret prompt", temperature=-1, user="somebody else")
    server.complete(prompt="another", max_tokens=1, user="the last")
    line = server.wait_for_log("user", "somebody")
    server.wait_for_log("user", "the last")
    assert not any("secret" in line for line in server.lines)
    assert line["completion_tokens"] == 1 and line["finish_reasons"] == ["length"] and line["status"] == 200


def test_the_openapi_document_describes_the_bodies(server: Server) -> None:
    document = server.http.get("/openapi.json").json()
    text = json.dumps(document)
    for name in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert name in document["components"]["schemas"]
    properties = document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert properties["top_k"]["anyOf"][0]["minimum"] == -1
    assert document["paths"]["/v1/completions"]["post"]["requestBody"]["required"] is True


def test_requests_on_one_connection_follow_each_other(server: Server) -> None:
    """A refused request leaves the connection in order."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        for body, expected in (({"prompt": ""}, b"400"), ({"prompt": PROMPT, "max_tokens": 1}, b"200")):
            connection.sendall(server.raw_request(**body))
            answer = b""
            while not answer.endswith(b"}"):
                answer += connection.recv(65536)
            assert answer.split(b" ")[1] == expected
