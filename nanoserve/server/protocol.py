"""What clients send and get: the request and response bodies of the OpenAI API as msgspec structs.

Parsing is strict: wrong types, unknown fields, keys given twice and malformed JSON are refused by name with status 400,
and a field of OpenAI's that the server lacks is refused too unless it asks for nothing (null, or its neutral value). So
nothing is accepted and ignored. ``user`` and ``safety_identifier`` name the caller; they go into the log line of the
request.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from nanoserve.config import did_you_mean
from nanoserve.contracts.errors import RequestError
from nanoserve.contracts.grammar import MAX_CHARS, StructuredOutput
from nanoserve.sampling_params import MAX_LOGPROBS, MAX_N, SamplingParams

MAX_ID_DIGITS = 19  # of a token id as a JSON key; with more, Python or the message to the engine could refuse it
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens for /v1/completions

#: How many entries a request's lists may have: what is made of each holds up the other requests.
MAX_ENTRIES = {"stop": 256, "stop_token_ids": 4096, "logit_bias": 4096, "guided_choice": 4096}

#: Fields that are read only to refuse them, and the values besides null that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "best_of": (1,),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (),
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "metadata": ({},),
    "prompt_cache_key": (),
    "web_search_options": (),
}

#: The same of a message.
MESSAGE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "name": (),
    "reasoning_content": ("",),
    "tool_calls": ([],),
    "tool_call_id": (),
    "refusal": (),
}


class ApiError(Exception):
    """A response that is an error: the HTTP status, and what OpenAI's error object holds."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    @property
    def body(self) -> ErrorResponse:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else kinds.get(self.status, "invalid_request_error")
        return ErrorResponse(ErrorBody(self.message, kind, self.param, self.code))


class ErrorBody(Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(Struct):
    error: ErrorBody


# --- requests ------------------------------------------------------------------------------------------------------


def _limits(**schema: Any) -> Meta:
    """Limits for the OpenAPI document. SamplingParams checks them, in better words than a schema's."""
    return Meta(extra_json_schema=schema)


MAX_KEY = 40  # characters of a key in a message
WORD = Meta(le=2**63 - 1)  # the largest integer on the way to the engine; of what is too small SamplingParams speaks

_REFUSED = Meta(description="not supported: null or left out", extra_json_schema={"type": "null"})
Refused = Annotated[Any, _REFUSED]
TokenIds = Annotated[list[Any], Meta(extra_json_schema={"items": {"type": "integer", "minimum": 0}, "minItems": 1})]


class StreamOptions(Struct, forbid_unknown_fields=True):
    """include_usage: a last event with the usage. continuous_usage_stats (vLLM's): usage in every event."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Struct, forbid_unknown_fields=True):
    """name, description: labels for the caller's own use. The output always follows the schema, strict or not."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """json_schema: only with, and always with, type json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class GenerationRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """What both generating endpoints take. Null, or a field left out, is the server's default (``sampling.*``)."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, _limits(minimum=1, maximum=MAX_N)] | None = None
    max_tokens: Annotated[int, WORD, _limits(minimum=1)] | None = None
    temperature: Annotated[float, _limits(minimum=0)] | None = None
    top_p: Annotated[float, _limits(exclusiveMinimum=0, maximum=1)] | None = None
    top_k: Annotated[int, WORD, _limits(minimum=-1)] | None = None
    min_p: Annotated[float, _limits(minimum=0, maximum=1)] | None = None
    presence_penalty: Annotated[float, _limits(minimum=-2, maximum=2)] | None = None
    frequency_penalty: Annotated[float, _limits(minimum=-2, maximum=2)] | None = None
    repetition_penalty: Annotated[float, _limits(exclusiveMinimum=0)] | None = None
    logit_bias: Annotated[dict[str, float], _limits(maxProperties=MAX_ENTRIES["logit_bias"])] | None = None
    seed: Annotated[int, _limits(minimum=-(2**63), maximum=2**64 - 1)] | None = None
    stop: str | Annotated[list[str], _limits(maxItems=MAX_ENTRIES["stop"])] | None = None
    stop_token_ids: Annotated[list[Annotated[int, WORD]], _limits(maxItems=MAX_ENTRIES["stop_token_ids"])] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: Annotated[int, WORD, _limits(minimum=0)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    response_format: ResponseFormat | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], _limits(maxItems=MAX_ENTRIES["guided_choice"])] | None = None
    guided_grammar: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: Refused = None
    store: Refused = None
    metadata: Refused = None
    prompt_cache_key: Refused = None

    def check_sizes(self, max_model_len: int | None, max_prompts: int | None) -> None:
        """Raise ApiError for lists that are too long, before anybody walks through them; ``decode`` says of what."""
        for name, limit in MAX_ENTRIES.items():
            entries = getattr(self, name)
            if entries is not None and not isinstance(entries, str) and len(entries) > limit:
                raise ApiError(400, f"{name} has {len(entries)} entries; at most {limit} are allowed", name)
        if (form := self.response_format) is not None and form.json_schema is not None:
            size = len(msgspec.json.encode(form.json_schema.schema))  # far faster than what StructuredOutput measures
            if size > 4 * MAX_CHARS:  # bytes of a character
                raise ApiError(400, f"response_format has more than {MAX_CHARS} characters", "response_format")

    def max_output_tokens(self) -> tuple[str, int | None]:
        return "max_tokens", self.max_tokens

    def num_logprobs(self) -> int | None:
        raise NotImplementedError

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """The request's parameters over the server's. Raises ApiError or RequestError, both name the field."""
        for name, neutral in NEUTRAL.items():
            if name in self.__struct_fields__ and not _asks_for_nothing(getattr(self, name), neutral):
                raise _unsupported(name)
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options: only with stream=true", "stream_options")
        for key in self.logit_bias or ():
            if not re.fullmatch(rf"0|[1-9][0-9]{{0,{MAX_ID_DIGITS - 1}}}", key, re.ASCII):
                where = _at("logit_bias", key)
                raise ApiError(400, f"{where}: the key must be a token id, an integer >= 0", where)
        for name, values in (("stop", self.stop), ("stop_token_ids", self.stop_token_ids)):
            for i, value in enumerate(values if isinstance(values, list) else ()):
                if value == "" or (type(value) is int and value < 0):
                    rule = "must not be empty" if value == "" else f"must be an integer >= 0, not {value}"
                    raise ApiError(400, f"{name}[{i}] {rule}", f"{name}[{i}]")
        given = {name: value for name in _SHARED if (value := getattr(self, name)) is not None}
        name, limit = self.max_output_tokens()
        if limit is not None:
            if limit < 1:
                raise ApiError(400, f"{name} must be an integer >= 1, not {limit}", name)
            given["max_tokens"] = limit
        if (logprobs := self.num_logprobs()) is not None:
            given["logprobs"] = logprobs
        structured = structured_output(self)
        if structured is not None:
            given["structured"] = structured
        return dataclasses.replace(defaults, **given)

    def check_ids(self, vocab_size: int) -> None:
        """Raise ApiError that names a token id which the model does not have."""
        check_ids("stop_token_ids", self.stop_token_ids or (), vocab_size)
        for key in self.logit_bias or ():
            if int(key) >= vocab_size:
                where = _at("logit_bias", key)
                raise ApiError(400, f"{where}: outside the vocabulary 0 … {vocab_size - 1}", where)


class CompletionRequest(GenerationRequest, kw_only=True):
    """``POST /v1/completions``. max_tokens 0 is legal with echo=true: it scores the prompt and generates nothing."""

    prompt: Annotated[
        str | list[Any],
        Meta(
            description="text, token ids, or a list of either",
            extra_json_schema={
                "anyOf": [
                    {"type": "string", "minLength": 1},
                    {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
                    {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                    {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}, "minItems": 1},
                ]
            },
        ),
    ]
    echo: bool | None = None
    logprobs: Annotated[int, _limits(minimum=0, maximum=MAX_LOGPROBS)] | None = None
    suffix: Refused = None
    best_of: Refused = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list. Token values are checked by the engine; here only what is what."""
        prompt: Any = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise ApiError(400, "prompt must not be an empty list", "prompt")
        if _all_integers(prompt):
            return [prompt]
        for i, one in enumerate(prompt):
            if not isinstance(one, str) and not (isinstance(one, list) and _all_integers(one)):
                raise ApiError(400, f"prompt[{i}] must be a string or a list of token ids", f"prompt[{i}]")
            if not one:
                raise ApiError(400, f"prompt[{i}] must not be empty", f"prompt[{i}]")
        return prompt

    def check_sizes(self, max_model_len: int | None, max_prompts: int | None) -> None:
        GenerationRequest.check_sizes(self, max_model_len, max_prompts)
        if not isinstance(self.prompt, list) or not self.prompt:
            return
        if type(self.prompt[0]) is int:
            _check_length("prompt", self.prompt, max_model_len)
            return
        if max_prompts is not None and len(self.prompt) > max_prompts:
            message = f"prompt has {len(self.prompt)} prompts; at most {max_prompts} are allowed in one request"
            raise ApiError(400, message, "prompt")
        for i, prompt in enumerate(self.prompt):
            if isinstance(prompt, list):
                _check_length(f"prompt[{i}]", prompt, max_model_len)

    def check_ids(self, vocab_size: int) -> None:
        GenerationRequest.check_ids(self, vocab_size)
        for i, prompt in enumerate(self.prompts):
            if isinstance(prompt, list):
                check_ids("prompt" if prompt is self.prompt else f"prompt[{i}]", prompt, vocab_size)

    def max_output_tokens(self) -> tuple[str, int | None]:
        only_score = self.max_tokens == 0 and bool(self.echo)
        return "max_tokens", 1 if only_score else self.max_tokens

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        if defaults.max_tokens is None:
            defaults = dataclasses.replace(
                defaults, max_tokens=max(DEFAULT_COMPLETION_TOKENS, self.min_tokens or defaults.min_tokens)
            )
        return GenerationRequest.sampling_params(self, defaults)


class ChatMessage(Struct, forbid_unknown_fields=True):
    """One message. Whether a chat template shows any of the refused fields depends on the template and the place."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: Refused = None
    reasoning_content: Refused = None
    tool_calls: Refused = None
    tool_call_id: Refused = None
    refusal: Refused = None

    def as_dict(self) -> dict[str, Any]:
        return {"role": self.role, "content": self.content}


class ChatRequest(GenerationRequest, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Meta(extra_json_schema={"minItems": 1})]
    max_completion_tokens: Annotated[int, WORD, _limits(minimum=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, _limits(minimum=0, maximum=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Refused = None
    tool_choice: Refused = None
    parallel_tool_calls: Refused = None
    functions: Refused = None
    function_call: Refused = None
    audio: Refused = None
    modalities: Refused = None
    prediction: Refused = None
    reasoning_effort: Refused = None
    verbosity: Refused = None
    web_search_options: Refused = None

    def check_sizes(self, max_model_len: int | None, max_prompts: int | None) -> None:
        GenerationRequest.check_sizes(self, max_model_len, max_prompts)
        _check_messages(self.messages, max_model_len)

    def max_output_tokens(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return "max_tokens", self.max_tokens
        if self.max_tokens not in (None, self.max_completion_tokens):
            raise ApiError(400, "max_tokens and max_completion_tokens differ; give one", "max_tokens")
        return "max_completion_tokens", self.max_completion_tokens

    def num_logprobs(self) -> int | None:
        if not self.logprobs:
            if self.top_logprobs:
                raise ApiError(400, "top_logprobs: only with logprobs=true", "top_logprobs")
            return None
        top = self.top_logprobs or 0
        if not 0 <= top <= MAX_LOGPROBS:
            raise ApiError(400, f"top_logprobs must be an integer in 0 … {MAX_LOGPROBS}, not {top}", "top_logprobs")
        return top


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """``POST /tokenize``: of a prompt, or of messages in the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    def check_sizes(self, max_model_len: int | None, max_prompts: int | None) -> None:
        _check_messages(self.messages or [], max_model_len)


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: Annotated[list[int], Meta(extra_json_schema={"items": {"type": "integer", "minimum": 0}})]

    def check_sizes(self, max_model_len: int | None, max_prompts: int | None) -> None:
        if max_model_len is not None and len(self.tokens) > max_model_len:
            raise ApiError(400, f"tokens has {len(self.tokens)} entries; max_model_len is {max_model_len}", "tokens")


#: Fields that have SamplingParams' own name and meaning.
_SHARED = tuple(
    field.name
    for field in dataclasses.fields(SamplingParams)
    if field.name in GenerationRequest.__struct_fields__ and field.name != "max_tokens"
)

#: Fields of StructuredOutput, and of a request.
STRUCTURED_FIELDS = {
    "json_object": "response_format",
    "json_schema": "response_format",
    "regex": "guided_regex",
    "choice": "guided_choice",
    "grammar": "guided_grammar",
}


def structured_output(request: GenerationRequest) -> StructuredOutput | None:
    """What ``SamplingParams.structured`` gets; None if the output is free. Raises ApiError that names the field."""
    wished: dict[str, Any] = {
        "regex": request.guided_regex,
        "choice": request.guided_choice,
        "grammar": request.guided_grammar,
    }
    if (form := request.response_format) is not None:
        if (form.type == "json_schema") != (form.json_schema is not None):
            message = "response_format.json_schema: needed with type json_schema, and only then"
            raise ApiError(400, message, "response_format")
        if form.type != "text":
            wished[form.type] = True if form.json_schema is None else form.json_schema.schema
    wished = {field: value for field, value in wished.items() if value is not None}
    if not wished:
        return None
    if len(wished) > 1:
        names = [STRUCTURED_FIELDS[field] for field in wished]
        raise ApiError(400, f"{' and '.join(names)}: give one of them", names[0])
    try:
        return StructuredOutput(**wished)
    except RequestError as error:
        raise bad_request(error) from None


def _unsupported(name: str) -> ApiError:
    return ApiError(400, f"{name} is not supported by this server", name, "unsupported_parameter")


def _asks_for_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether it is null or one of ``neutral``; of another type it is not: True == 1 == 1.0."""
    return value is None or any(type(value) is type(one) and value == one for one in neutral)


def _check_messages(messages: list[ChatMessage], max_model_len: int | None) -> None:
    if max_model_len is not None and len(messages) >= max_model_len:
        text = f"messages has {len(messages)} entries, each of at least one token; max_model_len is {max_model_len}"
        raise ApiError(400, text, "messages")
    for i, message in enumerate(messages):
        for name, neutral in MESSAGE_NEUTRAL.items():
            if not _asks_for_nothing(getattr(message, name), neutral):
                raise _unsupported(f"messages[{i}].{name}")


def _all_integers(values: list[Any]) -> bool:
    """Whether all are int, and none bool."""
    return set(map(type, values)) <= {int}


def _check_length(name: str, ids: list[Any], max_model_len: int | None) -> None:
    if max_model_len is not None and len(ids) >= max_model_len:
        room = f"max_model_len is {max_model_len}, so at most {max_model_len - 1} leave room for one more"
        raise ApiError(400, f"{name} has {len(ids)} tokens; {room}", name)


def check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise ApiError that names the first of ``ids`` outside of the vocabulary, as ``name[i]``."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        i = next(i for i, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise ApiError(400, f"{name}[{i}]: {ids[i]} is outside the vocabulary 0 … {vocab_size - 1}", f"{name}[{i}]")


def decode(body: bytes, kind: type[Any], *, max_model_len: int | None = None, max_prompts: int | None = None) -> Any:
    """A request from its body. Raises ApiError 400 that names the field.

    max_model_len: of the engine; max_prompts: of one request. What is longer is refused before it is looked at in
    detail; None leaves it to others.
    """
    collects = gc.isenabled()
    gc.disable()  # a million small lists are looked at again and again, while the event loop waits
    try:
        request = msgspec.json.decode(body, type=kind)
        request.check_sizes(max_model_len, max_prompts)
        _refuse_twins(body)
        return request
    except msgspec.ValidationError as error:
        text, _, where = str(error).partition(" - at `$")
        path = where.rstrip("`").lstrip(".")
        path = _wrong_bias(body) if path == "logit_bias[...]" else path.partition("[...]")[0]
        if unknown := re.match(r"Object contains unknown field `(.*)`", text):
            name = unknown[1]
            known = [] if path else kind.__struct_fields__
            field = f"{path}.{name}" if path else name
            message = f"unknown field {field!r}{did_you_mean(name, known)}"
            raise ApiError(400, message, field, "unknown_parameter") from None
        if missing := re.match(r"Object missing required field `(.*)`", text):
            path = f"{path}.{missing[1]}" if path else missing[1]
            raise ApiError(400, f"{path} is required", path) from None
        raise ApiError(400, f"{path or 'the body'}: {text[:1].lower()}{text[1:]}", path or None) from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json") from None
    finally:
        if collects:
            gc.enable()


def _at(path: str, key: str | int) -> str:
    """The path of a value inside of another, as it would be written in code."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    if key.isidentifier() and len(key) <= MAX_KEY:
        return f"{path}.{key}" if path else key
    return f"{path}[{json.dumps(key if len(key) <= MAX_KEY else key[:MAX_KEY] + '…', ensure_ascii=False)}]"


def _refuse_twins(body: bytes) -> None:
    """Raise ApiError for a key that an object of a JSON text has twice: one of its values would be ignored."""
    objects: list[tuple[dict[str, Any], str]] = []  # with twins, and the first of these; what is outside comes last

    def make(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(items)
        if len(made) < len(items):
            counts = Counter(key for key, _ in items)
            objects.append((made, next(key for key in counts if counts[key] > 1)))
        return made

    def path_to(target: dict[str, Any], value: Any, path: str) -> str | None:
        if value is target:
            return path
        inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        paths = (path_to(target, child, _at(path, key)) for key, child in inside)
        return next((found for found in paths if found is not None), None)

    document = json.loads(body, object_pairs_hook=make)
    if objects:
        made, key = objects[-1]
        where = _at(path_to(made, document, "") or "", key)
        raise ApiError(400, f"{where} is given twice; give it once", where)


def _wrong_bias(body: bytes) -> str:
    """The path of the first ``logit_bias`` that is no number: msgspec does not say which."""
    try:
        biases = json.loads(body, parse_int=float)["logit_bias"].items()
        return _at("logit_bias", next(k for k, v in biases if type(v) is not float or not math.isfinite(v)))
    except (ValueError, RecursionError, AttributeError, StopIteration):  # what comes after it is no JSON, or a twin
        return "logit_bias"


def bad_request(error: RequestError) -> ApiError:
    """An engine's refusal as a response; ``param`` is the field that the message begins with, as the user wrote it."""
    message = str(error)
    if one := re.match(r"prompt (\d+): ", message):  # of several, which share everything but the prompt
        message = message[one.end() :]
    if structured := re.match(r"structured\.(\w+)", message):
        field = STRUCTURED_FIELDS[structured[1]]
        return ApiError(400, field + message[structured.end() :], field)
    message = re.sub(r"^logit_bias\[(\d+)\]", r'logit_bias["\1"]', message)
    first = re.match(r"(?:the )?((\w+)(?:\[[^\]]*\]|\.\w+)*)", message)
    known = {*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__}
    param = first[1] if first is not None and first[2] in known else None
    if one and param == "prompt":
        param = f"prompt[{one[1]}]"
        message = f"{param}: {message}"
    return ApiError(400, message, param)


# --- responses -----------------------------------------------------------------------------------------------------


class PromptTokensDetails(Struct):
    cached_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class CompletionLogprobs(Struct):
    """One entry per token. text_offset: characters of the choice's text before the token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class CompletionResponse(Struct, omit_defaults=True):
    """Whole, or one event of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]


class AnswerMessage(Struct):
    role: str
    content: str
    refusal: None = None


class ChatChoice(Struct):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ChatResponse(Struct, omit_defaults=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None


class ChatDelta(Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ChatChunk(Struct, omit_defaults=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class TokenizeResponse(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(Struct):
    prompt: str


class ModelCard(Struct):
    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Struct):
    object: str
    data: list[ModelCard]
