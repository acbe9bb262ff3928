"""The endpoints. Errors have OpenAI's shape, whatever raised them; the status is sent with the first token, so that
what goes wrong before it has a status of its own, in a stream too."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Coroutine, Mapping
from importlib.resources import files
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import PlainTextResponse
from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import nanoserve
from nanoserve.async_llm import AsyncLLM, EngineDeadError
from nanoserve.contracts.errors import NanoserveError, RequestError
from nanoserve.outputs import RequestOutput
from nanoserve.sampling_params import SamplingParams
from nanoserve.server import protocol
from nanoserve.server.answers import Answer, ChatAnswer, CompletionAnswer, TokenStrings, error_event, event
from nanoserve.server.guard import INTERNAL_ERROR, Exchange, Guard, Receive, Scope, Send
from nanoserve.server.messages import TokenLogprobs
from nanoserve.server.metrics import exposition
from nanoserve.server.protocol import (
    ApiError,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    bad_request,
)

log = logging.getLogger("nanoserve.server")

Endpoint = Callable[..., Coroutine[Any, Any, Response]]

CHAT_PATH = "/v1/chat/completions"
SHUTTING_DOWN = "the server is shutting down"
RETRY_AFTER = {"retry-after": "1"}  # seconds; a place is free as soon as any request ends
LARGE_BODY = 256 << 10  # bytes from which a body is parsed in a thread


@dataclasses.dataclass
class Serving:
    """What the endpoints share.

    model_name: in the API. defaults: what a request leaves open. max_queue: sequences that may wait beyond those the
    engine runs at once. log_prompts: whether prompts and answers go into the log. draining: no new requests.
    """

    llm: AsyncLLM
    model_name: str
    defaults: SamplingParams
    max_queue: int
    log_prompts: bool = False
    draining: bool = False

    def __post_init__(self) -> None:
        self._tokens: TokenStrings | None = None

    @property
    def state(self) -> str:
        return "draining" if self.draining else self.llm.state

    @property
    def tokens(self) -> TokenStrings:
        if self._tokens is None:
            self._tokens = TokenStrings(self.llm.tokenizer)
        return self._tokens

    async def shut_down(self) -> None:
        """End the engine; whoever waits for it is told why."""
        self.draining = True
        await self.llm.close(SHUTTING_DOWN)

    @property
    def limit(self) -> int:
        """Sequences that the queue holds, those that run included."""
        return self.llm.config.engine.max_num_seqs + self.max_queue

    def sizes(self) -> dict[str, int]:
        """What ``protocol.decode`` refuses at once; nothing before the engine is known."""
        if not self.llm.has_started:
            return {}
        return {"max_model_len": self.llm.info.max_model_len, "max_prompts": self.limit}

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            message = f"the model {name!r} does not exist; this server has {self.model_name!r}"
            raise ApiError(404, message, "model", "model_not_found")

    def admit(self, num_sequences: int) -> None:
        """Raise 429 while the queue is full, 400 for more than it could ever hold, 503 while nobody serves."""
        if self.state != "ready":
            message = SHUTTING_DOWN if self.state in ("draining", "closed") else f"the server is {self.state}"
            raise ApiError(503, message, code="not_ready", headers=RETRY_AFTER)
        limit = self.limit
        if num_sequences > limit:
            raise ApiError(400, f"n: the request asks for {num_sequences} sequences; the queue holds {limit}", "n")
        if self.llm.num_sequences + num_sequences > limit:
            raise ApiError(429, "the queue is full; try again later", code="queue_full", headers=RETRY_AFTER)


class Json(Response):
    """A struct as a response."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


class EventStream(Response):
    """Server-sent events: what a stream brings, as it comes. ``first`` has come already."""

    def __init__(self, answer: Answer[Any], first: RequestOutput, exchange: Exchange) -> None:
        self.answer, self.first, self.exchange = answer, first, exchange
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # type: ignore[override]
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        # A task of its own: whatever stands around this call would be passed through again for every token.
        last = await asyncio.create_task(self._pump())
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _pump(self) -> bytes:
        """Send events as they come; returns the last ones."""
        answer, send, output = self.answer, self.exchange.send, self.first
        stream = answer.stream
        try:
            async with asyncio.timeout_at(self.exchange.deadline):
                while True:
                    if events := answer.events(output):
                        await send({"type": "http.response.body", "body": events, "more_body": True})
                    if answer.failure is not None:
                        raise answer.failure
                    output = await stream.__anext__()
        except StopAsyncIteration:
            return answer.end()
        except Exception as error:
            self.exchange.fields["error"] = str(error)
            return error_event(as_api_error(error))
        finally:
            stream.close()
            note(self.exchange, answer)


def note(exchange: Exchange, answer: Answer[Any]) -> None:
    """What the log says of a generation."""
    usage = answer.usage
    exchange.fields |= {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "ttft_ms": None if answer.ttft is None else round(1e3 * answer.ttft, 3),
        "finish_reasons": sorted(set(answer.finish_reasons)),
    }


def as_api_error(error: Exception) -> ApiError:
    """Any exception as a response; what nobody foresaw is logged and is a 500 without details."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return bad_request(error)
        case EngineDeadError():
            return ApiError(503, str(error), code="engine_unavailable", headers=RETRY_AFTER)
        case TimeoutError():
            return ApiError(504, "the request took longer than the server allows", code="timeout")
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=dict(error.headers or {}))
        case NanoserveError():
            return ApiError(500, str(error), code="engine_error")
    log.error("a request failed", exc_info=error)
    return ApiError(500, INTERNAL_ERROR, code="internal_error")


def build_app(
    serving: Serving,
    *,
    api_key: str | None = None,
    max_body_bytes: int = 8 << 20,
    request_timeout: float = 600.0,
    cors_origins: tuple[str, ...] = (),
) -> FastAPI:
    """The ASGI application. It neither starts nor closes ``serving.llm``."""
    app = FastAPI(title="nanoserve", version=nanoserve.__version__, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, api_key=api_key, max_body_bytes=max_body_bytes, request_timeout=request_timeout)
    if cors_origins:  # outside of the guard: browsers ask permission without a key
        app.add_middleware(
            CORSMiddleware, allow_origins=cors_origins, allow_methods=["*"], allow_headers=["*"], max_age=600,
            expose_headers=["X-Request-Id", "Retry-After"],
        )  # fmt: skip

    async def on_error(request: Request, error: Exception) -> Response:
        api_error = as_api_error(error)
        made = api_error.code != "unknown_parameter"  # nobody has sent a prompt, it was made from
        if api_error.param == "prompt" and made and request.url.path == CHAT_PATH:
            api_error.param = "messages"
        Exchange.of(request.scope).fields["error"] = api_error.message
        return Json(api_error.body, api_error.status, api_error.headers)

    for kind in (ApiError, NanoserveError, TimeoutError, HTTPException, Exception):
        app.add_exception_handler(kind, on_error)
    _add_generation(app, serving)
    _add_tokenizer(app, serving)
    _add_operations(app, serving)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


# --- generation ----------------------------------------------------------------------------------------------------


def _add_generation(app: FastAPI, serving: Serving) -> None:
    llm = serving.llm

    @app.post("/v1/completions", openapi_extra=_body(CompletionRequest), responses=_responses("CompletionResponse"))
    async def completions(http: Request) -> Response:
        exchange = Exchange.of(http.scope)
        request = await _parse(http, CompletionRequest, serving)
        params = request.sampling_params(serving.defaults)
        given = request.prompts
        serving.admit(len(given) * params.n)
        request.check_ids(llm.vocab_size)
        async with asyncio.timeout_at(exchange.deadline):
            prompts = [await llm.encode(p) if isinstance(p, str) else p for p in given]
            texts = [_text_of(prompt, serving, params) for prompt in given] if request.echo else []
            serving.admit(len(prompts) * params.n)  # again after each await: others may have come in between
            scores = None
            if request.echo and request.logprobs is not None:
                scores = await _score(llm, prompts, request.logprobs, counted=request.max_tokens == 0)
                serving.admit(len(prompts) * params.n)
            only_prompts = request.max_tokens == 0
            to_run = [] if only_prompts else prompts
            stream = llm.generate_many(
                to_run, [params] * len(to_run), stream=bool(request.stream), priority=request.priority or 0
            )
            answer = CompletionAnswer(
                request, params, id=exchange.id, model=serving.model_name, prompts=prompts, stream=stream,
                tokens=serving.tokens, echo_texts=texts, prompt_logprobs=scores, tokenizer=llm.tokenizer,
            )  # fmt: skip
            if only_prompts:
                return _only_prompts(answer, bool(request.stream), exchange)
            return await _answer(answer, bool(request.stream), exchange)

    @app.post(CHAT_PATH, openapi_extra=_body(ChatRequest), responses=_responses("ChatResponse"))
    async def chat_completions(http: Request) -> Response:
        exchange = Exchange.of(http.scope)
        request = await _parse(http, ChatRequest, serving)
        params = request.sampling_params(serving.defaults)
        serving.admit(params.n)
        request.check_ids(llm.vocab_size)
        async with asyncio.timeout_at(exchange.deadline):
            ids = await _render(serving, request.messages, request.chat_template_kwargs)
            serving.admit(params.n)
            stream = llm.generate_many([ids], [params], stream=bool(request.stream), priority=request.priority or 0)
            answer = ChatAnswer(
                request, params, id=exchange.id, model=serving.model_name, prompts=[ids], stream=stream,
                tokens=serving.tokens,
            )  # fmt: skip
            return await _answer(answer, bool(request.stream), exchange)


async def _parse(http: Request, kind: type[Any], serving: Serving) -> Any:
    """The body as ``kind``; notes in the log who asks, and, if wished, what."""
    if name := next((name for name in http.query_params if name != "api-version"), None):  # which Azure's clients send
        raise ApiError(400, f"unknown query parameter {name!r}: everything goes into the body", name)
    content_type, *parameters = http.headers.get("content-type", "").lower().split(";")
    if content_type.strip() != "application/json":  # a form could be sent by any web page, without permission
        raise ApiError(415, f"Content-Type must be application/json, not {content_type.strip()!r}")
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "charset" and value.strip().strip('"') not in ("utf-8", "utf8"):
            raise ApiError(415, f"Content-Type: the charset must be utf-8, not {value.strip()}")
    encodings = ",".join(http.headers.getlist("content-encoding"))
    if any(encoding.strip().lower() not in ("identity", "") for encoding in encodings.split(",")):
        message = f"Content-Encoding: {encodings} is not supported; send the body as it is"
        raise ApiError(415, message, headers={"accept-encoding": "identity"})
    body = await http.body()
    sizes = serving.sizes()
    if len(body) < LARGE_BODY:
        request = protocol.decode(body, kind, **sizes)
    else:
        request = await asyncio.to_thread(protocol.decode, body, kind, **sizes)
    fields = Exchange.of(http.scope).fields
    if isinstance(request, GenerationRequest):
        fields |= {
            name: value for name in ("user", "safety_identifier") if (value := getattr(request, name)) is not None
        }
    if serving.log_prompts:
        fields["body"] = body.decode()
    serving.check_model(request.model)
    return request


async def _answer(answer: Answer[Any], stream: bool, exchange: Exchange) -> Response:
    try:
        first = await anext(answer.stream)
        if stream:
            return EventStream(answer, first, exchange)
        outputs = [first, *[output async for output in answer.stream]]
        return Json(answer.whole(outputs))
    finally:
        if not stream:
            answer.stream.close()
            note(exchange, answer)


def _only_prompts(answer: CompletionAnswer, stream: bool, exchange: Exchange) -> Response:
    response = answer.only_prompts()
    note(exchange, answer)
    if not stream:
        return Json(response)
    response.usage = None
    return Response(event(response) + answer.end(), media_type="text/event-stream")


async def _score(llm: AsyncLLM, prompts: list[list[int]], num_top: int, counted: bool) -> list[list[TokenLogprobs]]:
    """All at once, so that the engine can put short ones into one launch."""
    scores = await asyncio.gather(
        *(llm.score(ids, num_top, counted=counted) for ids in prompts), return_exceptions=True
    )
    for score in scores:
        if isinstance(score, BaseException):
            raise score
    return scores  # type: ignore[return-value]


def _text_of(prompt: str | list[int], serving: Serving, params: SamplingParams) -> str:
    if isinstance(prompt, str):
        return prompt
    tokenizer = serving.llm.tokenizer
    in_range = [token for token in prompt if 0 <= token < 2**32]  # the engine refuses the others
    return "" if tokenizer is None else tokenizer.decode(in_range, params.skip_special_tokens)


async def _render(serving: Serving, messages: list[ChatMessage], kwargs: Mapping[str, Any] | None) -> list[int]:
    if kwargs and serving.llm.tokenizer is not None:
        serving.llm.tokenizer.check_template_kwargs(kwargs)  # before one of them becomes another argument
    return await serving.llm.render_chat([message.as_dict() for message in messages], **(kwargs or {}))


# --- tokens --------------------------------------------------------------------------------------------------------


def _add_tokenizer(app: FastAPI, serving: Serving) -> None:
    llm = serving.llm

    @app.post("/tokenize", openapi_extra=_body(TokenizeRequest), responses=_responses("TokenizeResponse"))
    async def tokenize(http: Request) -> Response:
        request = await _parse(http, TokenizeRequest, serving)
        serving.admit(0)
        if (request.prompt is None) == (request.messages is None):
            raise ApiError(400, "give prompt or messages, one of them", "prompt")
        if request.prompt is not None:
            if request.chat_template_kwargs is not None:
                raise ApiError(400, "chat_template_kwargs: only with messages", "chat_template_kwargs")
            ids = await llm.encode(request.prompt)
        else:
            ids = await _render(serving, request.messages, request.chat_template_kwargs)
        strings = [serving.tokens[token_id] for token_id in ids] if request.return_token_strs else None
        return Json(protocol.TokenizeResponse(len(ids), llm.info.max_model_len, ids, strings))

    @app.post("/detokenize", openapi_extra=_body(DetokenizeRequest), responses=_responses("DetokenizeResponse"))
    async def detokenize(http: Request) -> Response:
        request = await _parse(http, DetokenizeRequest, serving)
        serving.admit(0)
        if llm.tokenizer is None:
            raise ApiError(400, "tokens: this model has no tokenizer", "tokens")
        protocol.check_ids("tokens", request.tokens, llm.vocab_size)
        return Json(protocol.DetokenizeResponse(llm.tokenizer.decode(request.tokens, skip_special_tokens=False)))


# --- operations ----------------------------------------------------------------------------------------------------


def _add_operations(app: FastAPI, serving: Serving) -> None:
    llm = serving.llm
    created = int(llm.metrics.start_time)

    def get(path: str, **options: Any) -> Callable[[Endpoint], Endpoint]:
        """``app.get``, and HEAD as well."""

        def add(endpoint: Endpoint) -> Endpoint:
            app.head(path, include_in_schema=False)(endpoint)
            return app.get(path, **options)(endpoint)

        return add

    def card() -> protocol.ModelCard:
        return protocol.ModelCard(serving.model_name, "model", created, "nanoserve", llm.info.max_model_len)

    @get("/v1/models", responses=_responses("ModelList"))
    async def models() -> Response:
        return Json(protocol.ModelList("list", [card()]))

    @get("/v1/models/{model:path}", responses=_responses("ModelCard"))
    async def model(model: str) -> Response:
        serving.check_model(model)
        return Json(card())

    @get("/health")
    async def health() -> Response:
        """Live: 200 while the server serves, or will without help from outside."""
        return Json({"status": serving.state}, 503 if llm.state in ("dead", "closed") else 200)

    @get("/ready")
    async def ready() -> Response:
        """200 while a request would be served."""
        return Json({"status": serving.state}, 200 if serving.state == "ready" else 503)

    @get("/version")
    async def version() -> Response:
        return Json({"version": nanoserve.__version__})

    @get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        body, content_type = exposition(llm.metrics, serving.model_name, llm.info if llm.has_started else None)
        return Response(body, headers={"content-type": content_type})

    @get("/stats")
    async def stats() -> Response:
        """Live figures: gauges, totals, rates and time to first token over the last ten seconds."""
        return Json({"state": serving.state, **llm.metrics.live()})

    @get("/composition")
    async def composition() -> Response:
        """The plugins and options that serve."""
        config, info = dataclasses.asdict(llm.config), dataclasses.asdict(llm.info)
        return Json({"version": nanoserve.__version__, **info, "engine": config.pop("engine"), "config": config})

    @get("/", include_in_schema=False)
    async def console() -> Response:
        page = files("nanoserve.server") / "console.html"
        return Response(page.read_bytes(), media_type="text/html; charset=utf-8")


# --- the OpenAPI document ------------------------------------------------------------------------------------------

STRUCTS: tuple[type[Struct], ...] = (
    CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest, protocol.CompletionResponse,
    protocol.ChatResponse, protocol.TokenizeResponse, protocol.DetokenizeResponse, protocol.ModelList,
    protocol.ModelCard, protocol.ErrorResponse,
)  # fmt: skip
REFERENCE = "#/components/schemas/{name}"
ERRORS = {
    400: "The request is malformed or not supported; param names the field.",
    401: "The API key is missing or wrong.",
    404: "The model does not exist.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON in UTF-8, or it is compressed.",
    429: "The queue is full; Retry-After says when to come back.",
    500: "Generation failed.",
    503: "The engine is not there.",
    504: "The request took too long.",
}


def _reference(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": REFERENCE.format(name=name)}}}


def _body(kind: type[Struct]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": _reference(kind.__name__)}}


def _responses(name: str) -> dict[int | str, dict[str, Any]]:
    content = _reference(name)
    if name in ("CompletionResponse", "ChatResponse"):
        content |= {"text/event-stream": {"schema": {"type": "string"}}}
    responses: dict[int | str, dict[str, Any]] = {200: {"description": "OK", "content": content}}
    for status, text in ERRORS.items():
        responses[status] = {"description": text, "content": _reference("ErrorResponse")}
    return responses


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, schemas = msgspec.json.schema_components(STRUCTS, ref_template=REFERENCE)
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
        app.openapi_schema = document
    return app.openapi_schema
