"""``AsyncLLM``: an engine in a process of its own, for programs that live on an event loop. The server uses it too.

    async with AsyncLLM(model="tiny") as llm:
        async for delta in llm.generate("import json", SamplingParams(max_tokens=32)):
            print(delta.text, end="")

The engine steps without waiting for anybody here: what a step brings comes as one message, is decoded once and handed
to the streams that wait (``server.streams``). ``server.supervisor`` starts its process and notices its end.
It needs the extra ``nanoserve[serve]``, and, like everything that starts processes with ``spawn``, a script needs
``if __name__ == "__main__":`` around its start.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from nanoserve.config import EngineConfig
from nanoserve.contracts.errors import CapacityError, NanoserveError, RequestError
from nanoserve.contracts.observer import EngineInfo
from nanoserve.outputs import Deltas, EngineStats
from nanoserve.registry import Registry
from nanoserve.sampling_params import MAX_LOGPROBS, SamplingParams
from nanoserve.server.engine_process import error_named
from nanoserve.server.messages import Abort, Add, NewRequest, Refusal, Score, Started, Step, TokenLogprobs
from nanoserve.server.metrics import ServingMetrics
from nanoserve.server.streams import Inbox, RequestInFlight, Stream
from nanoserve.server.supervisor import EngineDeadError, EngineProcess
from nanoserve.tokenizer import Tokenizer, has_tokenizer

__all__ = ["AsyncLLM", "EngineDeadError", "Prompt", "Stream"]

log = logging.getLogger("nanoserve.server")

Prompt = str | list[int]
State = Literal["new", "starting", "ready", "dead", "closed"]

LONG_TEXT = 4096  # characters from which a text is tokenized in a thread: the tokenizer releases the interpreter lock
MAX_PRIORITY = 2**63  # what MessagePack holds


class AsyncLLM:
    """A model served by a process of its own. Use it as an asynchronous context manager, or ``start`` and ``close``.

    Keywords are those of :class:`nanoserve.LLM`. restart: when the engine process dies, start it once more; what was
    in flight fails with EngineDeadError all the same. One event loop may use an AsyncLLM.

    state: new, starting, ready, dead (the process has ended and will not be started again), closed.
    """

    def __init__(self, model: str = "tiny", *, restart: bool = False, **options: Any) -> None:
        registry = Registry.discover()
        config = EngineConfig.from_kwargs(model=model, more_paths=registry.config_paths_for, **options)
        self._configure(config, restart, None)

    @classmethod
    def from_config(cls, config: EngineConfig, *, restart: bool = False, log_level: int | None = None) -> AsyncLLM:
        """From a ready configuration. log_level: the engine process logs JSON lines to standard error from there on."""
        llm = cls.__new__(cls)
        llm._configure(config, restart, log_level)
        return llm

    def _configure(self, config: EngineConfig, restart: bool, log_level: int | None) -> None:
        self.config = config
        self.state: State = "new"
        self.tokenizer: Tokenizer | None = None
        self.metrics = ServingMetrics()
        self.num_sequences = 0  # unfinished, aborted ones included until the engine has confirmed
        self._reason = ""  # of the close
        self._restarts_left = int(restart)
        self._log_level = log_level
        self._engine: EngineProcess | None = None
        self._started: Started | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._ids = itertools.count()
        self._requests: dict[str, RequestInFlight] = {}
        self._scores: dict[str, asyncio.Future[list[TokenLogprobs]]] = {}

    # ---------------------------------------------------------------- life

    async def start(self) -> None:
        """Start the engine process and wait until it can serve.

        Raises ConfigError, PluginError or ModelLoadError as ``LLM`` does, EngineDeadError if the process ends instead.
        """
        if self.state != "new":
            raise EngineDeadError(f"an AsyncLLM starts once; this one is {self.state}")
        await self._start_engine()

    async def _start_engine(self) -> None:
        self.state = "starting"
        imports = [asyncio.create_task(asyncio.to_thread(_import_tokenizers))] if self._may_have_tokenizer else []
        self._engine = engine = EngineProcess(self.config, self._log_level, self._on_news, self._on_exit)
        try:
            started = await engine.started
            await asyncio.gather(*imports)
            if started.tokenizer is not None and self.tokenizer is None:
                self.tokenizer = await asyncio.to_thread(Tokenizer, started.tokenizer)
        except BaseException:
            for task in imports:
                task.cancel()
            if self._engine is engine:
                self.state = "dead"
                engine.kill()
            raise
        if self._engine is not engine:
            raise EngineDeadError("the AsyncLLM was closed while it started")
        self._started = started
        if engine.alive:
            self.state = "ready"

    @property
    def _may_have_tokenizer(self) -> bool:
        path = Path(self.config.model.path or "")
        return self.config.has_checkpoint and (not path.is_dir() or has_tokenizer(path))

    async def close(self, reason: str = "the AsyncLLM is closed") -> None:
        """End the engine process and give everything back; unfinished requests fail with ``reason``. Idempotent."""
        engine, self._engine = self._engine, None
        self.state, self._reason = "closed", reason
        if self._restarting is not None:
            self._restarting.cancel()
        self._fail_all(EngineDeadError(reason))
        if engine is not None:
            self._closing = asyncio.create_task(engine.close())
        if self._closing is not None:  # whoever closes waits for the end, also if another began
            await asyncio.shield(self._closing)

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def info(self) -> EngineInfo:
        """The composition that serves. Raises EngineDeadError before the first start has succeeded."""
        return self._about.info

    @property
    def has_started(self) -> bool:
        """Whether an engine has been there, so that ``info`` is known."""
        return self._started is not None

    @property
    def vocab_size(self) -> int:
        return self._about.vocab_size

    @property
    def _about(self) -> Started:
        if self._started is None:
            raise EngineDeadError("the engine has not started yet")
        return self._started

    @property
    def engine_pid(self) -> int | None:
        """The engine's process, None if there is none."""
        return None if self._engine is None else self._engine.pid

    def stats(self) -> EngineStats:
        """Counters since start-up, over restarts, and gauges of the last step."""
        return self.metrics.stats()

    # ---------------------------------------------------------------- requests

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        stream: bool = True,
        text: str | None = None,
        priority: int = 0,
    ) -> Stream:
        """Queue a request. ``async for`` over the result gives deltas, as ``LLM.stream`` does, or with stream=False one
        whole result.

        prompt: text or token ids. text: what the ids were made from, for ``RequestOutput.prompt``. priority: lower is
        more urgent; refused by a scheduler that does not use it. Leaving the loop, cancelling it, or forgetting the
        stream aborts the request. Refusals (RequestError, CapacityError), a grammar plugin's bugs (PluginError) and the
        death of the engine (EngineDeadError) are raised where the stream is awaited; a prompt of the wrong type or
        longer than the context is refused at once.
        """
        return self.generate_many([prompt], [_checked(params)], stream=stream, texts=[text], priority=priority)

    def generate_many(
        self,
        prompts: Seq[Prompt],
        params: Seq[SamplingParams],
        *,
        stream: bool = True,
        texts: Seq[str | None] | None = None,
        priority: int = 0,
    ) -> Stream:
        """Several requests in one stream, told apart by ``Stream.request_ids``; they are aborted together."""
        engine = self._ready()
        wheres = [f"prompt {i}: " if len(prompts) > 1 else "" for i in range(len(prompts))]
        tokenized = [
            self._tokenize(prompt, None if texts is None else texts[i], wheres[i]) for i, prompt in enumerate(prompts)
        ]
        if len(params) != len(prompts):
            raise RequestError(f"{len(params)} SamplingParams for {len(prompts)} prompts; give one for each")
        if type(priority) is not int or not -MAX_PRIORITY <= priority < MAX_PRIORITY:
            raise RequestError(f"priority must be an integer of 64 bits, lower for the more urgent, not {priority!r}")
        inbox = Inbox()
        now = time.perf_counter()
        for i, ((prompt, ids), own) in enumerate(zip(tokenized, params, strict=True)):
            inbox.requests.append(RequestInFlight(str(next(self._ids)), wheres[i], prompt, ids, own, inbox, now))
        try:
            engine.send(Add([NewRequest(r.id, r.prompt_token_ids, r.params, stream, priority) for r in inbox.requests]))
        except (OverflowError, UnicodeEncodeError) as error:  # what MessagePack cannot hold
            raise RequestError(f"SamplingParams: more than 64 bits, or not valid Unicode: {error}") from None
        for request in inbox.requests:
            self._requests[request.id] = request
            self.num_sequences += request.params.n
        return Stream(inbox, self._abort)

    async def score(self, prompt: Prompt, num_top: int = 0, *, counted: bool = True) -> list[TokenLogprobs]:
        """Log-probabilities of a prompt's own tokens but the first: one ``{token_id: logprob}`` each.

        The token itself is in it, with the ``num_top`` most likely ones. Cancelling gives it up. counted: the metrics
        count it as a request without output; off where a request that generates from the same prompt counts already.
        """
        engine = self._ready()
        if type(num_top) is not int or not 0 <= num_top <= MAX_LOGPROBS:
            raise RequestError(f"num_top must be an integer in 0 … {MAX_LOGPROBS}, not {num_top!r}")
        arrival = time.perf_counter()
        ids = self._tokenize(prompt, None)[1]
        request_id = str(next(self._ids))
        future = self._scores[request_id] = asyncio.get_running_loop().create_future()
        self.num_sequences += 1
        reason: str | None = "error"
        try:
            engine.send(Score(request_id, ids, num_top))
            scores = await future
            reason = "length"
            return scores
        except asyncio.CancelledError:
            reason = "abort"
            raise
        except RequestError:
            reason = None
            raise
        finally:
            if counted and reason is not None:
                self.metrics.scored(len(ids), reason, time.perf_counter() - arrival)
            if self._scores.pop(request_id, None) is not None:
                self.num_sequences -= 1
            if not future.done() or future.cancelled():
                self._abort([request_id])

    async def encode(self, text: str) -> list[int]:
        """Token ids of a text; a long one does not hold up the event loop."""
        tokenizer = self._with_tokenizer()
        return tokenizer.encode(text) if len(text) < LONG_TEXT else await asyncio.to_thread(tokenizer.encode, text)

    async def render_chat(self, messages: list[dict[str, Any]], **template_kwargs: Any) -> list[int]:
        """Token ids of a conversation in the chat template, with the generation prompt. Raises RequestError."""
        tokenizer = self._with_tokenizer("messages")
        known = messages if isinstance(messages, list | tuple) else ()  # the tokenizer says what is wrong with others
        if sum(len(str(message.get("content"))) for message in known if isinstance(message, dict)) < LONG_TEXT:
            return tokenizer.render_chat(messages, **template_kwargs)
        return await asyncio.to_thread(tokenizer.render_chat, messages, **template_kwargs)

    # ---------------------------------------------------------------- inside

    def _ready(self) -> EngineProcess:
        if self._engine is None or self.state != "ready":
            remedy = "; enter `async with` or await start() first" if self.state == "new" else ""
            raise EngineDeadError(self._reason or f"the engine is not ready: {self.state}{remedy}")
        return self._engine

    def _with_tokenizer(self, what: str = "prompt") -> Tokenizer:
        self._ready()
        if self.tokenizer is None:
            raise RequestError(f"{what}: this model has no tokenizer; give a prompt of token ids")
        return self.tokenizer

    def _tokenize(self, prompt: Prompt, text: str | None, where: str = "") -> tuple[str | None, list[int]]:
        """Text and token ids. where: what a refusal of its length begins with. Length first: it holds up nobody."""
        if isinstance(prompt, str):
            text, prompt = prompt, self._with_tokenizer().encode(prompt)
        if isinstance(prompt, list) and len(prompt) >= (limit := self.info.max_model_len):
            raise CapacityError(
                f"{where}the prompt has {len(prompt)} tokens; max_model_len is {limit}, "
                f"so a prompt may have at most {limit - 1} and leave room for one token"
            )
        if not isinstance(prompt, list) or not all(type(token) is int and 0 <= token < 2**63 for token in prompt):
            raise RequestError("prompt must be a string or a list of token ids, which are integers >= 0")
        return text, prompt

    def _abort(self, request_ids: list[str]) -> None:
        if self._engine is not None and self.state == "ready":
            with contextlib.suppress(EngineDeadError):  # then there is nothing left to abort
                self._engine.send(Abort(request_ids))

    def _on_news(self, engine: EngineProcess, step: Step) -> None:
        if engine is not self._engine:
            return
        metrics, requests = self.metrics, self._requests
        metrics.step(step)
        for refusal in step.refusals:
            self._on_refusal(refusal)
        for scores in step.scores:
            if (future := self._scores.get(scores.request_id)) is not None and not future.done():
                future.set_result(scores.logprobs)
        for deltas in step.deltas:
            self._on_deltas(deltas)
        for report in step.reports:
            request = requests.get(report.request_id)
            if request is not None:
                metrics.report(request, report, step.time)
                if report.finished:
                    self._forget(request)
                request.put(report)

    def _on_deltas(self, deltas: Deltas) -> None:
        known, choices = self._requests, []
        texts = deltas.texts or itertools.repeat("")
        for request_id, token_id, text in zip(deltas.request_ids, deltas.token_ids, texts, strict=False):
            request = known.get(request_id)
            if request is not None:
                choices.append(request.choices[0])
                request.put_token(token_id, text)
        self.metrics.tokens(choices, deltas.time)

    def _on_refusal(self, refusal: Refusal) -> None:
        error = error_named(refusal.kind, refusal.message)
        if (future := self._scores.get(refusal.request_id)) is not None and not future.done():
            future.set_exception(error)
        request = self._requests.get(refusal.request_id)
        if request is not None:
            for one in request.inbox.requests:
                self._forget(one)
            request.inbox.fail(type(error)(f"{request.where}{error}"))

    def _forget(self, request: RequestInFlight) -> None:
        request.ended = True
        del self._requests[request.id]
        self.num_sequences -= request.params.n

    def _fail_all(self, error: NanoserveError) -> None:
        requests, self._requests = self._requests, {}
        self.num_sequences = 0
        for request in requests.values():
            request.ended = True
            self.metrics.failed(request)
            request.inbox.fail(error)
        scores, self._scores = self._scores, {}
        for future in scores.values():
            if not future.done():
                future.set_exception(error)

    def _on_exit(self, engine: EngineProcess, code: int | None) -> None:
        if engine is not self._engine:
            return
        was_ready = self.state == "ready"
        if self.state != "dead":  # else it was killed because it had refused to start, which has been said
            fields = {"exit_code": code, "in_flight": len(self._requests)}
            log.error("the engine process has ended", extra={"fields": fields})
        self.metrics.engine_ended()
        self.state = "dead"
        self._fail_all(EngineDeadError(f"the engine process has ended with exit code {code}"))
        if was_ready and self._restarts_left:
            self._restarts_left -= 1
            self.state = "starting"
            self._restarting = asyncio.get_running_loop().create_task(self._restart())

    async def _restart(self) -> None:
        try:
            await self._start_engine()
        except NanoserveError as error:
            log.error("the engine could not be started again: %s", error)
        else:
            log.warning("the engine serves again", extra={"fields": {"pid": self.engine_pid}})


def _checked(params: SamplingParams | None) -> SamplingParams:
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise RequestError(f"params must be SamplingParams, not {type(params).__name__}")
    return params


def _import_tokenizers() -> None:
    """While the engine loads weights, import what is slow to import."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401
