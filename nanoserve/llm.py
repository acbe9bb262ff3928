"""The offline API: ``LLM(...)`` composes an engine from plugins and runs prompts to their end, without Hydra."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

import numpy as np

from nanoserve.config import EngineConfig
from nanoserve.contracts.errors import NanoserveError, RequestError
from nanoserve.engine.build import build_engine
from nanoserve.engine.engine import Engine
from nanoserve.outputs import EngineStats, RequestOutput
from nanoserve.registry import Registry
from nanoserve.sampling_params import SamplingParams

Prompt = str | list[int]


class LLM:
    """A model and the engine that serves it. Use it as a context manager, or call ``close``.

    Keywords are those of :meth:`nanoserve.config.EngineConfig.from_kwargs`: ``model`` (a folder, a hub id or the name
    of a model config), the plugins ``attention``, ``kv``, ``scheduler``, ``policy`` (a name, or ``{"name": …, option:
    …}``), and the engine's options. An unknown keyword raises ConfigError. One thread at a time may use an LLM; a
    second one gets a RequestError. Ctrl-C inside a step ends all requests of that moment; open streams end with
    an error, and the LLM serves on, with an empty prefix cache.

    >>> with LLM(model="tiny", kv="int8") as llm:
    ...     print(llm.generate("import json\\n", SamplingParams(max_tokens=32))[0].text)
    """

    def __init__(self, model: str = "tiny", *, registry: Registry | None = None, **options: Any) -> None:
        registry = registry or Registry.discover()
        config = EngineConfig.from_kwargs(model=model, more_paths=registry.config_paths_for, **options)
        self._start(config, registry)

    @classmethod
    def from_config(cls, config: EngineConfig, registry: Registry | None = None) -> LLM:
        """An LLM from a ready configuration, as the command line builds it."""
        llm = cls.__new__(cls)
        llm._start(config, registry)
        return llm

    def _start(self, config: EngineConfig, registry: Registry | None) -> None:
        self.config = config
        self.engine: Engine = build_engine(config, registry)
        self.tokenizer = self.engine.tokenizer
        self._ids = itertools.count()
        self._inbox: dict[str, deque[RequestOutput]] = {}
        self._interrupted: set[str] = set()  # requests that were open then
        self._in_use = threading.RLock()

    def generate(
        self,
        prompts: str | list[str] | list[int] | list[list[int]],
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        priority: int | list[int] = 0,
        progress: bool = False,
        on_finish: Callable[[int, RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Run prompts (texts or token ids) to their end; results in the order of the prompts.

        params: one for all, or one per prompt; default ``SamplingParams()``. priority: likewise; lower is more urgent,
        for schedulers that care. progress: a bar on standard error.
        on_finish: called with (position of the prompt, its result) as soon as a prompt has ended, in any order.
        A prompt that can never run raises RequestError (CapacityError if it does not fit), naming its position, before
        anything has been started.
        """
        tokenized = [self._tokenize(p) for p in self._as_list(prompts)]
        per_prompt = self._params_for(params, len(tokenized))
        priorities = self._priorities_for(priority, len(tokenized))
        for i, ((_, ids), p) in enumerate(zip(tokenized, per_prompt, strict=True)):
            try:
                self.engine.check(ids, p)
            except RequestError as error:
                raise type(error)(f"prompt {i}: {error}" if len(tokenized) > 1 else str(error)) from None
        started: list[str] = []
        with self._alone():
            try:
                for (text, ids), p, urgency in zip(tokenized, per_prompt, priorities, strict=True):
                    started.append(self._new_id())
                    self._add(started[-1], ids, p, prompt=text, priority=urgency)
                results: dict[str, RequestOutput] = {}
                with _bar(len(started), enabled=progress) as bar:
                    while len(results) < len(started):
                        self._step()
                        for i, request_id in enumerate(started):
                            if request_id not in results and self._inbox[request_id]:
                                results[request_id] = self._inbox[request_id].popleft()
                                bar.update()
                                if on_finish is not None:
                                    on_finish(i, results[request_id])
                return [results[request_id] for request_id in started]
            finally:
                for request_id in started:
                    self._forget(request_id)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> Iterator[RequestOutput]:
        """Yield deltas as they come: text and token ids that are new since the last one, for each of ``n`` outputs.

        The concatenated deltas are exactly what ``generate`` returns. Leaving the loop aborts the request. The request
        is checked and queued at once, so errors are raised here and not at the first ``next``.
        """
        if isinstance(prompt, list) and any(isinstance(p, str | list) for p in prompt):
            raise RequestError("stream takes one prompt, a string or a list of token ids; open a stream for each")
        text, ids = self._tokenize(prompt)
        (urgency,) = self._priorities_for(priority, 1)
        stream = _Stream(self, self._new_id())
        with self._alone():
            self._add(stream.id, ids, _one(params), prompt=text, stream=True, priority=urgency)
        return stream

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        params: SamplingParams | list[SamplingParams] | None = None,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several, through the checkpoint's chat template (``enable_thinking=False`` …)."""
        one = not messages or isinstance(messages[0], dict)
        conversations: list[Any] = [messages] if one else messages
        return self.generate([self.render_chat(c, **template_kwargs) for c in conversations], params)

    def render_chat(self, messages: list[dict[str, Any]], **template_kwargs: Any) -> list[int]:
        """Token ids of a conversation with the generation prompt; hand them to ``generate`` or ``stream``."""
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer, so it cannot chat; give token ids to generate()")
        return self.tokenizer.render_chat(messages, **template_kwargs)

    def check(self, prompt: Prompt, params: SamplingParams) -> None:
        """Raise RequestError if this request could never run; nothing is started."""
        self.engine.check(self._tokenize(prompt)[1], params)

    def stats(self) -> EngineStats:
        """Counters since start-up and gauges of this moment."""
        return self.engine.stats()

    def close(self) -> None:
        """Give all memory back. Idempotent."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # ---------------------------------------------------------------- helpers

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("this model has no tokenizer; give token ids")
            return prompt, self.tokenizer.encode(prompt)
        if isinstance(prompt, np.ndarray):
            prompt = prompt.tolist()
        if isinstance(prompt, list):
            return None, [int(t) if isinstance(t, np.integer) else t for t in prompt]
        raise RequestError(f"a prompt is a string or a list of token ids, not {type(prompt).__name__}")

    @staticmethod
    def _as_list(prompts: Any) -> list[Any]:
        if isinstance(prompts, str):
            return [prompts]
        if isinstance(prompts, np.ndarray):
            prompts = prompts.tolist()
        if not isinstance(prompts, list):
            raise RequestError(f"prompts are a string, a list of strings or lists of ids, not {type(prompts).__name__}")
        return [prompts] if prompts and all(isinstance(p, int | np.integer) for p in prompts) else prompts

    @staticmethod
    def _params_for(params: SamplingParams | list[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if not isinstance(params, list):
            return [_one(params)] * count
        if len(params) != count:
            raise RequestError(f"{len(params)} SamplingParams for {count} prompts; give one, or one for each")
        return [_one(p) for p in params]

    def _priorities_for(self, priority: int | list[int], count: int) -> list[int]:
        priorities = priority if isinstance(priority, list) else [priority] * count
        if len(priorities) != count:
            raise RequestError(f"{len(priorities)} priorities for {count} prompts; give one, or one for each")
        for value in priorities:
            if type(value) is not int:
                raise RequestError(f"a priority is an integer, lower for the more urgent, not {value!r}")
            self.engine.check_priority(value)
        return priorities

    def _new_id(self) -> str:
        return f"llm-{next(self._ids)}"

    def _add(
        self,
        request_id: str,
        ids: list[int],
        params: SamplingParams,
        *,
        prompt: str | None,
        priority: int,
        stream: bool = False,
    ) -> None:
        self.engine.add_request(request_id, ids, params, prompt=prompt, stream=stream, priority=priority)
        self._inbox[request_id] = deque()

    def _step(self) -> None:
        try:
            self._deliver(self.engine.step())
        except Exception:
            raise
        except BaseException:  # what was reported may not have been delivered
            self._interrupted.update(self._inbox)
            raise

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While one thread runs a batch, or what brings the next delta of a stream, the others are refused."""
        if not self._in_use.acquire(blocking=False):
            raise RequestError("another thread is using this LLM; let them take turns, or use AsyncLLM")
        try:
            yield
        finally:
            with suppress(RuntimeError):  # it is free
                while True:  # once more if an interrupt has kept it from being released
                    self._in_use.release()

    def _deliver(self, reports: list[RequestOutput]) -> None:
        """Reports go to whoever waits for them: several streams may be open."""
        for output in reports:
            inbox = self._inbox.get(output.request_id)
            if inbox is not None:
                inbox.append(output)

    def _forget(self, request_id: str) -> None:
        with self._in_use:
            self.engine.abort(request_id)
            self._inbox.pop(request_id, None)
            self._interrupted.discard(request_id)
            if not self.engine.requests:  # nobody will step again to commit what is in flight
                self.engine.drain()
                self._deliver(self.engine.report())


class _Stream(Iterator[RequestOutput]):
    """The deltas of one request. Closed, or forgotten by its owner, it aborts the request."""

    def __init__(self, llm: LLM, request_id: str) -> None:
        self._llm: LLM | None = llm
        self.id = request_id

    def __next__(self) -> RequestOutput:
        if self._llm is None:
            raise StopIteration
        inbox = self._llm._inbox[self.id]
        try:
            with self._llm._alone():
                while not inbox:
                    if self.id in self._llm._interrupted:
                        raise NanoserveError("an interrupt ended a step of this request, or lost what it had brought")
                    self._llm._step()
        except BaseException:
            self.close()
            raise
        output = inbox.popleft()
        if output.finished:
            self.close()
        return output

    def close(self) -> None:
        """Abort the request unless it has ended. Idempotent."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm._forget(self.id)

    def __del__(self) -> None:
        self.close()


def _one(params: SamplingParams | None) -> SamplingParams:
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise RequestError(f"params must be SamplingParams or a list of them, not {type(params).__name__}")
    return params


def _bar(total: int, *, enabled: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, unit="request", disable=not enabled)
