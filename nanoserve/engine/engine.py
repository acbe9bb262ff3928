"""The loop: schedule a step, launch it, and while it runs commit the step before it."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Any, TypeVar

from nanoserve.contracts.errors import CapacityError, NanoserveError, PluginError, RequestError
from nanoserve.contracts.grammar import Matcher
from nanoserve.contracts.observer import EngineInfo, Observer
from nanoserve.contracts.scheduling import Schedule, Scheduler, Status
from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.detokenizer import OutputText
from nanoserve.engine.guard import FAULTS, Watchdog, broken_rule, failure
from nanoserve.engine.news import News, Output, Request
from nanoserve.engine.runner import InFlight, Runner
from nanoserve.engine.sampler import child_seed
from nanoserve.engine.sequence import Sequence
from nanoserve.engine.structured import Grammars
from nanoserve.outputs import Deltas, EngineStats, FinishReason, RequestOutput
from nanoserve.sampling_params import SamplingParams
from nanoserve.tokenizer import Tokenizer

log = logging.getLogger("nanoserve")

NO_TOKEN = (
    "no token can be chosen: the logits are not finite, or logit_bias, min_tokens or the grammar excludes every token"
)
INTERRUPTED = "an interrupt ended the step that it was in"

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _whole(method: _Method) -> _Method:
    """A method that Ctrl-C, or another exception that is no fault of a plugin, must not leave half done."""

    @functools.wraps(method)
    def guarded(self: Engine, *args: Any, **kwargs: Any) -> Any:
        if self._torn:  # another interrupt has come while things were put in order
            self._start_anew()
        try:
            return method(self, *args, **kwargs)
        except FAULTS:
            raise
        except BaseException:
            self._torn = True
            self._start_anew()
            raise

    return guarded  # type: ignore[return-value]


class Engine:
    """Runs requests to their end. Not thread-safe: one thread owns it.

    Every argument is built already (see ``nanoserve.engine.build``), so tests bring a fake runner or any scheduler.

    max_model_len: longest prompt plus output, in tokens. eos_token_ids: tokens that end a sequence.
    overlap: commit a step only after the next one has been launched; needs a runner whose launch does not block.
    debug: audit the block manager after every step. grammars: compiles the grammars of structured output.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        blocks: BlockManager,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Iterable[int] = (),
        tokenizer: Tokenizer | None = None,
        grammars: Grammars | None = None,
        observers: Seq[Observer] = (),
        info: EngineInfo | None = None,
        seed: int = 0,
        overlap: bool = False,
        debug: bool = False,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.blocks = blocks
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.tokenizer = tokenizer
        self.grammars = grammars
        self.observers = list(observers)
        self.info = info
        self.overlap = overlap
        self.debug = debug
        self.watchdog = Watchdog(str(info and f"attention {info.attention}, kv {info.kv}, scheduler {info.scheduler}"))
        self.requests: dict[str, Request] = {}
        self._seed = seed
        self._num_unseeded = 0
        self._num_history = 0  # unfinished sequences whose sampling needs the values of the tokens before it
        self._in_flight: InFlight | None = None
        self._news = News()
        self.num_unfinished = 0  # sequences, those that wait included
        self._steps = self._prompt_tokens = self._generation_tokens = self._finished = self._aborted = 0
        self._closed = self._torn = False

    # ---------------------------------------------------------------- requests

    @property
    def capacity(self) -> int:
        """Longest sequence that can run: the context length, and the pool (the last token needs no KV)."""
        return min(self.max_model_len, self.blocks.max_num_tokens)

    def check(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Raise RequestError for a malformed request, CapacityError for one that can never run; changes nothing."""
        if not prompt_token_ids:
            raise RequestError("the prompt is empty; Qwen3 has no BOS token, so at least one token is needed")
        for token in prompt_token_ids:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise RequestError(f"prompt token id {token!r} is not an integer in [0, {self.vocab_size})")
        params.validate_for(self.vocab_size)
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this model has none; use stop_token_ids")
        if params.structured is not None:
            self._matchers(params)
        n = len(prompt_token_ids)
        if n >= self.max_model_len:
            raise CapacityError(
                f"the prompt has {n} tokens; max_model_len is {self.max_model_len}, "
                f"so a prompt may have at most {self.max_model_len - 1} and leave room for one token"
            )
        if n >= self.capacity:
            raise CapacityError(
                f"the prompt has {n} tokens; the KV pool holds {self.capacity - 1} "
                f"({self.blocks.num_blocks} blocks of {self.blocks.block_size}); raise engine.num_kv_blocks"
            )

    @_whole
    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        stream: bool = False,
        priority: int = 0,
    ) -> None:
        """Queue a request. Raises RequestError (also for an id that is in use), or PluginError for a scheduler's bug;
        then nothing has changed.

        stream: ``step`` reports the deltas of every step instead of the whole result at the end.
        """
        if self._closed:
            raise NanoserveError("the engine is closed")
        if request_id in self.requests:
            raise RequestError(f"request id {request_id!r} is in use by an unfinished request")
        self.check(prompt_token_ids, params)
        request = Request(request_id, prompt, list(prompt_token_ids), params, stream)
        base_seed = params.seed
        if base_seed is None:
            base_seed = child_seed(self._seed, self._num_unseeded)
            self._num_unseeded += 1
        stop_ids = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            stop_ids |= self.eos_token_ids
        limit = self.capacity
        if params.max_tokens is not None:
            limit = min(limit, len(prompt_token_ids) + params.max_tokens)
        incremental = self.tokenizer is not None and bool(stream or params.stop)
        matchers = None if params.structured is None else self._matchers(params)
        for index in range(params.n):
            seq = Sequence(
                request_id,
                prompt_token_ids,
                params,
                index=index,
                max_num_tokens=limit,
                seed=base_seed if params.n == 1 else child_seed(base_seed, index),
                stop_ids=stop_ids,
                matcher=None if matchers is None else matchers(),
                priority=priority,
                arrival_time=request.metrics.arrival_time,
            )
            text = None if self.tokenizer is None else OutputText(self.tokenizer, params)
            seq.state = Output(request, index, text, incremental, limit)
            request.sequences.append(seq)
        try:
            self._queue(request.sequences[0])
        except NanoserveError:
            raise
        except FAULTS as error:
            raise PluginError(self._blamed(error)) from error
        request.unfinished = params.n
        self.num_unfinished += params.n
        self.requests[request_id] = request
        self._num_history += params.n if params.needs_history else 0
        request.held = request.sequences[1:]
        self._prompt_tokens += len(prompt_token_ids)
        for observer in self.observers:
            self._notify(observer, "request_added", request_id, len(prompt_token_ids), request.metrics.arrival_time)

    def _queue(self, seq: Sequence) -> None:
        """Raises what the scheduler raises, which does not hold ``seq`` then."""
        try:
            self.scheduler.add(seq)
        except FAULTS:
            with contextlib.suppress(ValueError):
                self.scheduler.waiting.remove(seq)
            raise

    def _matchers(self, params: SamplingParams) -> Callable[[], Matcher]:
        if self.grammars is None:
            raise RequestError("structured output needs a tokenizer, and this model has none")
        return self.grammars.compile(params.structured)  # type: ignore[arg-type]

    @_whole
    def abort(self, request_id: str) -> bool:
        """End a request at any moment; the next ``step`` reports it. False if it is unknown or has ended."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        held, request.held = request.held, []
        fault = None
        for seq in request.sequences:
            if seq.status != Status.FINISHED:
                try:
                    if seq not in held:
                        self.scheduler.abort(seq)
                except FAULTS as error:
                    fault = error
                self._let_go(seq)
                self._finish(seq, "abort")
        if fault is not None:
            self._scheduler_failed(fault)
        return True

    @property
    def has_work(self) -> bool:
        """True while ``step`` has something to do or to report."""
        return self.can_step or self.has_reports

    @property
    def can_step(self) -> bool:
        """True while there is a step to launch or to commit."""
        return self._in_flight is not None or self.scheduler.has_unfinished

    @property
    def has_reports(self) -> bool:
        return bool(self._news)

    def check_priority(self, priority: int) -> None:
        """Raise RequestError for a priority that the scheduler would ignore.

        ``add_request`` takes it all the same, for benchmarks that compare schedulers.
        """
        if priority and not self.scheduler.uses_priority:
            name = self.scheduler.plugin or type(self.scheduler).__name__
            raise RequestError(f"priority: {name} does not use it; leave it out, or choose a scheduler that does")

    @_whole
    def drain(self) -> None:
        """Commit the step in flight, if there is one, without starting another."""
        self._commit_in_flight()

    # ---------------------------------------------------------------- the loop

    def step(self) -> list[RequestOutput]:
        """Advance by one step and report."""
        self.advance()
        return self.report()

    @_whole
    def advance(self) -> None:
        """One step, whose news wait for ``report``."""
        with self.watchdog:
            self._step()

    def report(self) -> list[RequestOutput]:
        """What there is to say since the last call: deltas of streaming requests, results of ended ones."""
        return self._news.take()

    def report_columns(self) -> tuple[list[Deltas], list[RequestOutput]]:
        """As ``report``, cheaper: most deltas as columns, which come before the others of their requests."""
        return self._news.take_columns()

    def _step(self) -> None:
        overlap = self.overlap and not self._num_history
        if self._in_flight is not None and not overlap:
            self._commit_in_flight()
        schedule = self._schedule()
        launched = self._launch(schedule) if schedule else None
        before, self._in_flight = self._in_flight, launched
        if before is not None:
            self._commit(before)
        elif not schedule and self.scheduler.has_unfinished:
            self._scheduler_failed("scheduled nothing although nothing is in flight")
        if launched is not None and not overlap:
            self._commit_in_flight()
        if self.debug:
            self.blocks.audit()

    def _schedule(self) -> Schedule:
        """What the scheduler decides. One that raises or breaks a rule costs its requests, not the engine."""
        self.scheduler.now = time.perf_counter()
        try:
            schedule = self.scheduler.schedule()
            fault = broken_rule(schedule, self.scheduler.limits)
        except FAULTS as error:
            return self._scheduler_failed(error)
        return schedule if fault is None else self._scheduler_failed(fault)

    def _launch(self, schedule: Schedule) -> InFlight | None:
        self._steps += 1
        now = time.perf_counter()
        for seq, _ in schedule.prefill:
            metrics = seq.state.request.metrics  # type: ignore[attr-defined]
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = now
        if self.observers:
            self._observe_step(schedule, now)
        try:
            return self.runner.launch(schedule)
        except FAULTS as error:
            log.exception("a step failed; its requests end with an error")
            with contextlib.suppress(*FAULTS):  # what it had launched may still read buffers that are used in turn
                self.runner.synchronize()
            self._fail([*schedule.decode, *(seq for seq, _ in schedule.prefill)], error)  # type: ignore[list-item]
            return None

    def _commit_in_flight(self) -> None:
        step, self._in_flight = self._in_flight, None
        if step is not None:
            self._commit(step)

    def _commit(self, step: InFlight) -> None:
        """Bring the values of the oldest step home: append, check stop conditions, tell the scheduler."""
        try:
            tokens = step.wait()
        except FAULTS as error:
            log.exception("a step failed; its requests end with an error")
            self._fail([*step.sampled, *step.chunks], error)
            return
        commit = self.blocks.commit
        finished: list[Sequence] = []
        spoilt: list[Sequence] = []
        streamed: list[Request] = []
        new_tokens: list[int] = []
        new_texts: list[str] = []
        num_plain = 0
        for i, seq, token in zip(range(len(step.sampled)), step.sampled, tokens.token_ids, strict=True):
            output: Output = seq.state  # type: ignore[assignment]
            if output.goes_on and token >= 0 and token not in seq.stop_ids and len(seq.token_ids) < output.last_index:
                commit(seq, [token])
                num_plain += 1
                if output.request.stream:
                    if output.incremental:
                        text = self._detokenize(seq, token)
                        if text is None:
                            finished.append(seq)
                            continue
                        new_texts.append(text)
                    streamed.append(output.request)
                    new_tokens.append(token)
                    output.num_reported += 1
                continue
            if seq.status == Status.FINISHED:
                self._drop(seq)
                continue
            if token < 0:
                spoilt.append(seq)
            else:
                commit(seq, [token])
                if tokens.logprobs is not None and seq.params.logprobs is not None:
                    top = tokens.top[i] if tokens.top is not None else []
                    self._add_logprobs(seq, token, tokens.logprobs[i], top[: seq.params.logprobs])
            if self._accept(seq, token):
                finished.append(seq)
        for seq in step.chunks:
            if seq.status == Status.FINISHED:
                self._drop(seq)
            else:
                commit(seq, [])
        self._generation_tokens += num_plain
        if streamed:
            self._news.add_step(streamed, new_tokens, new_texts)
        self._commit_to_scheduler(finished)
        for seq in spoilt:  # its KV is not to be found by others
            self.blocks.discard(seq)

    def _accept(self, seq: Sequence, token: int) -> bool:
        """Take in one new token of ``seq``; True when the sequence ends with it."""
        output: Output = seq.state  # type: ignore[assignment]
        request = output.request
        if token < 0:
            self.blocks.spoil(seq)
            return self._finish(seq, "error", error=getattr(seq.matcher, "fault", None) or NO_TOKEN)
        self._generation_tokens += 1
        if request.metrics.first_token_time is None:
            self._first_token(request)
        if token in seq.stop_ids:
            reason = None if token in self.eos_token_ids else token
            return self._finish(seq, "stop", stop_reason=reason)
        if seq.matcher is not None:
            try:
                seq.matcher.accept(token)
            except Exception as error:
                if not isinstance(error, ValueError):  # which says that the form turned out to be too much
                    log.exception("a grammar failed")
                return self._finish(seq, "error", error=f"structured.{seq.params.structured.field}: {error}")  # type: ignore[union-attr]
        if output.incremental:
            delta = self._detokenize(seq, token)
            if delta is None:
                return True
            if delta:
                output.delta.append(delta)
            if output.text.stopped_by is not None:  # type: ignore[union-attr]
                return self._finish(seq, "stop", stop_reason=output.text.stopped_by)  # type: ignore[union-attr]
        if request.stream:
            self._news.add(request)
        else:
            output.goes_on = output.is_plain
        if seq.matcher is not None and seq.matcher.is_terminated:
            return self._finish(seq, "stop")
        if len(seq.token_ids) >= seq.max_num_tokens:
            return self._finish(seq, "length")
        return False

    def _detokenize(self, seq: Sequence, token: int) -> str | None:
        """What ``token`` adds to the text that its reader may see; None when the sequence ends because it failed."""
        try:
            return seq.state.text.append(token)  # type: ignore[attr-defined, no-any-return]
        except Exception as error:
            log.exception("detokenisation failed")
            self._finish(seq, "error", error=f"detokenisation failed: {error}")
            return None

    def _first_token(self, request: Request) -> None:
        request.metrics.first_token_time = now = time.perf_counter()
        held, request.held = request.held, []
        for seq in held:
            try:
                self._queue(seq)
            except FAULTS as error:
                log.exception("the scheduler failed")
                self._let_go(seq)
                self._finish(seq, "error", error=self._blamed(error))
        for observer in self.observers:
            self._notify(observer, "first_token", request.id, now)

    def _finish(
        self, seq: Sequence, reason: FinishReason, stop_reason: str | int | None = None, error: str | None = None
    ) -> bool:
        """Record the end of a sequence (the caller tells the scheduler). Always True."""
        output: Output = seq.state  # type: ignore[assignment]
        request, completion = output.request, output.completion
        completion.token_ids = seq.token_ids[seq.num_prompt_tokens :]
        if output.text is not None and reason != "error":
            if not output.incremental:
                ended_by_id = reason == "stop" and completion.token_ids[-1] in seq.stop_ids
                output.text.append_many(completion.token_ids[:-1] if ended_by_id else completion.token_ids)
            if output.text.stopped_by is None:
                output.delta.append(output.text.finish())
        if output.text is not None:
            completion.text = output.text.text
        completion.finish_reason, completion.stop_reason, completion.error = reason, stop_reason, error
        output.goes_on = False
        request.unfinished -= 1
        self.num_unfinished -= 1
        self._num_history -= bool(request.params.needs_history)
        self._news.add(request)
        if request.held and not request.unfinished - len(request.held):
            held, request.held = request.held, []  # the first sibling ended without a token: the others will too
            for sibling in held:
                sibling.status = Status.FINISHED
                self._finish(sibling, reason, stop_reason, error)
        elif not request.unfinished:
            self._end(request, reason)
        return True

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.metrics.finished_time = now = time.perf_counter()
        request.metrics.num_preemptions = sum(seq.num_preemptions for seq in request.sequences)
        del self.requests[request.id]
        if reason == "abort":
            self._aborted += 1
        else:
            self._finished += 1
        for observer in self.observers:
            total = sum(seq.num_output_tokens for seq in request.sequences)
            self._notify(observer, "request_finished", request.id, reason, total, now)

    def _fail(self, sequences: Iterable[Sequence], error: BaseException) -> None:
        """A step failed: end its sequences, give their blocks back, leave every other request alone."""
        sequences = list(sequences)
        alive = [seq for seq in sequences if seq.status != Status.FINISHED]
        for seq in alive:
            self._finish(seq, "error", error=failure(error))
        self._commit_to_scheduler(alive)
        for seq in sequences:
            self.blocks.discard(seq)

    def _drop(self, seq: Sequence) -> None:
        """A committed step of a sequence that has ended meanwhile: its KV may be kept unless an earlier step failed."""
        if seq.state.completion.finish_reason == "error":  # type: ignore[attr-defined]
            self.blocks.discard(seq)
        else:
            self.blocks.commit(seq, [])

    def _commit_to_scheduler(self, finished: list[Sequence]) -> None:
        try:
            self.scheduler.commit(finished)
        except FAULTS as error:
            for seq in finished:
                self._let_go(seq)
            self._scheduler_failed(error)

    def _let_go(self, seq: Sequence) -> None:
        """What the scheduler does to a sequence that ends, if it has not been done."""
        seq.status = Status.FINISHED
        self.blocks.release(seq)

    def _blamed(self, fault: str | BaseException) -> str:
        name = self.info.scheduler if self.info is not None else type(self.scheduler).__name__
        what = fault if isinstance(fault, str) else f"raised {type(fault).__name__}: {fault}"
        return f"scheduler {name!r} {what}"

    def _scheduler_failed(self, fault: str | BaseException) -> Schedule:
        """A scheduler's bug must become neither a hang nor a leak: end what it holds. Returns an empty schedule."""
        message = self._blamed(fault)
        log.error(message, exc_info=None if isinstance(fault, str) else fault)
        launched = [] if self._in_flight is None else [*self._in_flight.sampled, *self._in_flight.chunks]
        for request in list(self.requests.values()):
            for seq in request.sequences:
                if seq.status != Status.FINISHED:
                    self._let_go(seq)
                    self._finish(seq, "error", error=message)
                    for _ in range(seq.in_flight - launched.count(seq)):  # granted, but never launched
                        self.blocks.discard(seq)
        self.scheduler.waiting.clear()
        self.scheduler.running.clear()
        return Schedule()

    def _start_anew(self) -> None:
        """Nobody knows how far things came: every request ends with an error, and all books are begun again."""
        with contextlib.suppress(*FAULTS):
            self.runner.synchronize()
        self.watchdog.rest()
        self._in_flight = None
        self._num_history = self.num_unfinished = 0
        for request in list(self.requests.values()):
            for seq in request.sequences:
                with contextlib.suppress(*FAULTS):  # one that keeps books of its own is told
                    self.scheduler.abort(seq)
                seq.status = Status.FINISHED
                output: Output = seq.state  # type: ignore[assignment]
                output.goes_on = False
                if output.completion.finish_reason is None:
                    output.completion.finish_reason, output.completion.error = "error", INTERRUPTED
                    output.completion.token_ids = seq.token_ids[seq.num_prompt_tokens :]
                    output.completion.text = "" if output.text is None else output.text.text
            request.held, request.unfinished = [], 0
            self._news.add(request)
            self._end(request, "error")
        self.scheduler.waiting.clear()
        self.scheduler.running.clear()
        self.blocks.reset()
        self._torn = False

    @staticmethod
    def _add_logprobs(seq: Sequence, token: int, logprob: float, top: list[tuple[int, float]]) -> None:
        completion = seq.state.completion  # type: ignore[attr-defined]
        if completion.logprobs is None:
            completion.logprobs, completion.cumulative_logprob = [], 0.0
        completion.logprobs.append({**dict(top), token: logprob})
        completion.cumulative_logprob += logprob

    # ---------------------------------------------------------------- around the loop

    def _observe_step(self, schedule: Schedule, now: float) -> None:
        num_prefill_tokens = sum(n for _, n in schedule.prefill)
        for observer in list(self.observers):
            self._notify(observer, "step", len(schedule.decode), num_prefill_tokens, self.blocks.num_free, now)

    def _notify(self, observer: Observer, event: str, *args: object) -> None:
        try:
            getattr(observer, event)(*args)
        except FAULTS:
            log.exception("observer %s failed in %s and is dropped", type(observer).__name__, event)
            self.observers.remove(observer)

    def stats(self) -> EngineStats:
        blocks = self.blocks
        return EngineStats(
            num_blocks=blocks.num_blocks,
            num_free_blocks=blocks.num_free,
            prefix_queries=blocks.prefix_queries,
            prefix_hits=blocks.prefix_hits,
            cache_evictions=blocks.cache_evictions,
            preemptions=self.scheduler.num_preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            steps=self._steps,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            requests_finished=self._finished,
            requests_aborted=self._aborted,
        )

    def close(self) -> None:
        """End every request and give all device memory back. Idempotent."""
        if self._closed:
            return
        for request_id in list(self.requests):
            self.abort(request_id)
        self._commit_in_flight()
        self._closed = True
        self.watchdog.close()
        self.runner.close()
