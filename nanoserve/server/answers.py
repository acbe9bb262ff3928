"""From an engine's outputs to the OpenAI API's responses, whole or as the events of a stream."""

from __future__ import annotations

import codecs
import re
import time
from dataclasses import replace
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from nanoserve.contracts.errors import RequestError
from nanoserve.engine import structured
from nanoserve.outputs import CompletionOutput, RequestOutput
from nanoserve.sampling_params import SamplingParams
from nanoserve.server.messages import TokenLogprobs
from nanoserve.server.protocol import (
    AnswerMessage,
    ApiError,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatRequest,
    ChatResponse,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
    ErrorResponse,
    GenerationRequest,
    PromptTokensDetails,
    TokenLogprob,
    TopLogprob,
    Usage,
    bad_request,
)
from nanoserve.server.streams import Stream
from nanoserve.tokenizer import Tokenizer

R = TypeVar("R", bound=GenerationRequest)

DONE = b"data: [DONE]\n\n"
#: What Python's ``str.splitlines``, and with it httpx, takes for the end of a line; a server-sent event does not.
LINE_ENDS = re.compile(rb"\xe2\x80[\xa8\xa9]|\xc2\x85")
_encoder = msgspec.json.Encoder()


def _encode(data: Any) -> bytes:
    """JSON on one line, whoever reads it."""
    return LINE_ENDS.sub(lambda found: b"\\u%04x" % ord(found[0].decode()), _encoder.encode(data))


def event(data: Struct) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % _encode(data)


def error_event(error: ApiError) -> bytes:
    """How a stream that has begun says what went wrong: no event follows, not even [DONE]."""
    return event(ErrorResponse(error.body.error))


class TokenStrings:
    """How tokens are written in logprobs: their text, or ``bytes:\\xe4\\xb8`` if they are a part of a character."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.has_text = tokenizer is not None
        self._tokenizer = tokenizer
        self._bytes = None if tokenizer is None else tokenizer.token_bytes(skip_special_tokens=False)

    def bytes_of(self, token_id: int) -> bytes | None:
        if self._bytes is not None:
            return self._bytes[token_id]
        return None if self._tokenizer is None else self._tokenizer.decode([token_id], False).encode()

    def __getitem__(self, token_id: int) -> str:
        data = self.bytes_of(token_id)
        if data is None:
            return f"token_id:{token_id}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join([f"\\x{byte:02x}" for byte in data])


class Answer(Generic[R]):
    """One HTTP request's answer: ``n`` choices for each of its prompts. Subclasses know the shape of their endpoint.

    prompts: token ids. prompt_texts, prompt_logprobs: per prompt, for ``echo``.
    """

    prefix: str
    text_field: bytes  # of an event

    def __init__(
        self,
        request: R,
        params: SamplingParams,
        *,
        id: str,
        model: str,
        prompts: list[list[int]],
        stream: Stream,
        tokens: TokenStrings,
    ) -> None:
        self.id = f"{self.prefix}-{id}"
        self.model = model
        self.created = int(time.time())
        self.stream = stream
        self.completion_tokens = 0
        self.finish_reasons: list[str] = []
        self.ttft: float | None = None
        self.failure: ApiError | None = None  # of a stream
        self._request = request
        self._n = params.n
        self._tokens = tokens
        self._prompt_of = {request_id: i for i, request_id in enumerate(stream.request_ids)}
        self._prompt_tokens = sum(map(len, prompts))
        self._cached_tokens = [0] * len(prompts)
        options = request.stream_options
        self._include_usage = options is not None and options.include_usage
        self._continuous_usage = options is not None and options.continuous_usage_stats
        self._begun: set[int] = set()  # choices that have had an event
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # of a choice: what stands around the text of its events

    @property
    def usage(self) -> Usage:
        """As it stands now."""
        prompt, completion = self._prompt_tokens, self.completion_tokens
        return Usage(prompt, completion, prompt + completion, PromptTokensDetails(sum(self._cached_tokens)))

    def whole(self, outputs: list[RequestOutput]) -> Struct:
        """The response, from one finished output per prompt."""
        choices: list[Any] = []
        for output in outputs:
            i = self._prompt_of[output.request_id]
            self._note(i, output)
            for completion in output.outputs:
                if (failure := self._count(completion)) is not None:
                    raise failure
                choices.append(self._choice(i * self._n + completion.index, i, completion))
        choices.sort(key=lambda choice: choice.index)
        return self._response(choices)

    def events(self, output: RequestOutput) -> bytes:
        """The events that say what ``output`` brought; nothing if there is nothing to say yet. ``failure`` is what went
        wrong after that.

        Without a tokenizer there is never a text, and an event says that there are tokens.
        """
        i = self._prompt_of[output.request_id]
        begun, has_text = self._begun, self._tokens.has_text
        parts = []
        for completion in output.outputs:
            if (failure := self._count(completion)) is not None:
                self.failure = failure
                if not completion.token_ids:
                    continue
                completion = replace(completion, finish_reason=None, stop_reason=None)
            index = i * self._n + completion.index
            if index not in begun:
                self._note(i, output)
            elif completion.finish_reason is None and not completion.logprobs:
                if has_text and not completion.text:
                    continue
                if not self._continuous_usage:
                    before, after = self._frames.get(index) or self._frame(index, i, completion)
                    parts.append(b"%b%b%b" % (before, _encode(completion.text), after))
                    continue
            choice = self._delta(index, i, completion)
            begun.add(index)
            parts.append(event(self._chunk([choice], self.usage if self._continuous_usage else None)))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _frame(self, index: int, prompt: int, completion: CompletionOutput) -> tuple[bytes, bytes]:
        """The event of nothing but a text, cut where the text stands: most events differ in it alone."""
        empty = event(self._chunk([self._delta(index, prompt, CompletionOutput(completion.index))], None))
        before, found, after = empty.partition(self.text_field + b'""')
        assert found  # and not in the model's name, in which JSON writes quotes otherwise
        self._frames[index] = frame = before + self.text_field, after
        return frame

    def end(self) -> bytes:
        """The events that close a stream."""
        return (event(self._chunk([], self.usage)) if self._include_usage else b"") + DONE

    def _note(self, prompt: int, output: RequestOutput) -> None:
        self._cached_tokens[prompt] = output.num_cached_tokens
        if self.ttft is None:
            self.ttft = output.metrics.ttft

    def _count(self, completion: CompletionOutput) -> ApiError | None:
        """What went wrong, if it ended with that."""
        self.completion_tokens += len(completion.token_ids)
        reason = completion.finish_reason
        if reason is None:
            return None
        self.finish_reasons.append(reason)
        if reason == "error":
            field, _, why = (completion.error or "generation failed").partition(": ")
            if not field.startswith("structured."):
                return ApiError(500, completion.error or field, code="generation_failed")
            if why.startswith(structured.BUG):
                return ApiError(500, why, code="generation_failed")
            return bad_request(RequestError(f"{field}: {why}"))  # the form turned out to be too much on the way
        if reason == "abort":
            return ApiError(503, "the request was aborted by the server", code="aborted")
        return None

    def _response(self, choices: list[Any]) -> Struct:
        raise NotImplementedError

    def _chunk(self, choices: list[Any], usage: Usage | None) -> Struct:
        raise NotImplementedError

    def _choice(self, index: int, prompt: int, completion: CompletionOutput) -> Struct:
        raise NotImplementedError

    def _delta(self, index: int, prompt: int, completion: CompletionOutput) -> Struct:
        raise NotImplementedError


class CompletionAnswer(Answer[CompletionRequest]):
    prefix = "cmpl"
    text_field = b'"text":'

    def __init__(
        self,
        request: CompletionRequest,
        params: SamplingParams,
        *,
        prompts: list[list[int]],
        echo_texts: list[str],
        prompt_logprobs: list[list[TokenLogprobs]] | None,
        tokenizer: Tokenizer | None,
        **common: Any,
    ) -> None:
        super().__init__(request, params, prompts=prompts, **common)
        self._prompts = prompts
        self._given_as_text = [isinstance(prompt, str) for prompt in request.prompts]
        self._echo_texts = echo_texts if request.echo else None
        self._prompt_logprobs = prompt_logprobs
        self._tokenizer = tokenizer
        self._skip_special_tokens = params.skip_special_tokens
        self._offsets: dict[int, _Offsets] = {}

    def only_prompts(self) -> CompletionResponse:
        """The answer to max_tokens=0: nothing but the prompts, for each of the ``n``."""
        choices = []
        for i in range(len(self._prompts)):
            for k in range(self._n):
                choices.append(self._choice(i * self._n + k, i, CompletionOutput(k, finish_reason="length")))
        return self._response(choices)

    def _response(self, choices: list[Any]) -> CompletionResponse:
        return self._chunk(choices, self.usage)

    def _chunk(self, choices: list[Any], usage: Usage | None) -> CompletionResponse:
        return CompletionResponse(self.id, "text_completion", self.created, self.model, choices, usage)

    def _choice(self, index: int, prompt: int, completion: CompletionOutput) -> CompletionChoice:
        text = completion.text
        if self._echo_texts is not None and index not in self._begun:
            text = self._echo_texts[prompt] + text
        logprobs = None if self._request.logprobs is None else self._logprobs(index, prompt, completion)
        return CompletionChoice(index, text, logprobs, completion.finish_reason, completion.stop_reason)

    _delta = _choice

    def _logprobs(self, index: int, prompt: int, completion: CompletionOutput) -> CompletionLogprobs:
        offsets = self._offsets.get(index)
        if offsets is None:
            offsets = self._offsets[index] = _Offsets(self._tokenizer)
        skips: list[bool] = []
        ids: list[int] = []
        entries: list[TokenLogprobs | None] = []
        if self._prompt_logprobs is not None and index not in self._begun:
            # a prompt given as text is echoed as it came, with its special tokens
            skips += [self._skip_special_tokens and not self._given_as_text[prompt]] * len(self._prompts[prompt])
            ids += self._prompts[prompt]
            entries += [None, *self._prompt_logprobs[prompt]]
        ids += completion.token_ids
        skips += [self._skip_special_tokens] * len(completion.token_ids)
        entries += completion.logprobs or ()
        tokens = self._tokens
        return CompletionLogprobs(
            tokens=[tokens[token_id] for token_id in ids],
            token_logprobs=[None if e is None else e[token_id] for token_id, e in zip(ids, entries, strict=True)],
            top_logprobs=[None if e is None else {tokens[i]: logprob for i, logprob in e.items()} for e in entries],
            text_offset=[offsets.advance(token_id, skip) for token_id, skip in zip(ids, skips, strict=True)],
        )


class ChatAnswer(Answer[ChatRequest]):
    prefix = "chatcmpl"
    text_field = b'"content":'

    def _response(self, choices: list[Any]) -> ChatResponse:
        return ChatResponse(self.id, "chat.completion", self.created, self.model, choices, self.usage)

    def _chunk(self, choices: list[Any], usage: Usage | None) -> ChatChunk:
        return ChatChunk(self.id, "chat.completion.chunk", self.created, self.model, choices, usage)

    def _choice(self, index: int, prompt: int, completion: CompletionOutput) -> ChatChoice:
        message = AnswerMessage("assistant", completion.text)
        return ChatChoice(index, message, self._logprobs(completion), completion.finish_reason, completion.stop_reason)

    def _delta(self, index: int, prompt: int, completion: CompletionOutput) -> ChatChunkChoice:
        delta = ChatDelta(None if index in self._begun else "assistant", completion.text)
        return ChatChunkChoice(
            index, delta, self._logprobs(completion), completion.finish_reason, completion.stop_reason
        )

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if completion.logprobs is None:
            return None
        num_top = self._request.top_logprobs or 0
        content = []
        for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True):
            ranked = sorted(entry.items(), key=lambda item: -item[1])[:num_top]
            top = [TopLogprob(self._tokens[other], logprob, self._bytes(other)) for other, logprob in ranked]
            content.append(TokenLogprob(self._tokens[token_id], entry[token_id], self._bytes(token_id), top))
        return ChatLogprobs(content)

    def _bytes(self, token_id: int) -> list[int] | None:
        data = self._tokens.bytes_of(token_id)
        return None if data is None else list(data)


class _Offsets:
    """Where in the text each token begins, in characters: at the character that its first byte belongs to."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._bytes = {skip: None if tokenizer is None else tokenizer.token_bytes(skip) for skip in (False, True)}
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def advance(self, token_id: int, skip_special_tokens: bool) -> int:
        """The offset of this token; the next call is for the one after it."""
        offset = self._offset
        table = self._bytes[skip_special_tokens]
        if table is not None:
            data, unfinished = table[token_id], self._utf8.getstate()[0]
            self._offset += len(self._utf8.decode(data))
            if unfinished and data and not 0x80 <= data[0] < 0xC0:  # the character stays unfinished: a U+FFFD before us
                offset += 1
        elif self._tokenizer is not None:
            self._offset += len(self._tokenizer.decode([token_id], skip_special_tokens))
        return offset
