"""The engine's loop without a model: any scheduler over the real block manager and sequences, on the host alone.

The "device" is a function that is called with every schedule in launch order and says what was sampled. With
``overlap`` a step is committed only after the next one has been scheduled, as the engine does on a GPU.

:class:`Simulator` knows steps but no time. :class:`Replay` gives every step a duration and sends it a workload.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from nanoserve.contracts.errors import CapacityError, PluginError
from nanoserve.contracts.scheduling import Schedule, Scheduler, SchedulerLimits, Status
from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.guard import broken_rule
from nanoserve.engine.sequence import Sequence
from nanoserve.metrics import RequestTimeline
from nanoserve.workload import Request, Workload
from nanoserve.workload import token_ids as prompt_token_ids_of

#: What a step samples, one list per sequence, decode then prefill: one token, or none for an unfinished chunk.
Device = Callable[[Schedule], list[list[int]]]


def scheduled(schedule: Schedule) -> list[Sequence]:
    """All sequences of a schedule, decode then prefill."""
    return cast(list[Sequence], [*schedule.decode, *(seq for seq, _ in schedule.prefill)])


def zeros(schedule: Schedule) -> list[list[int]]:
    """The device for those who ask only who runs when: every sample is token 0."""
    return [[0] if seq.num_pending else [] for seq in scheduled(schedule)]


class Simulator:
    """Runs sequences to their end.

    num_steps: steps launched, and the clock. peak_blocks: most blocks ever in use at once.
    """

    def __init__(
        self,
        make_scheduler: Callable[[SchedulerLimits, BlockManager], Scheduler],
        limits: SchedulerLimits,
        blocks: BlockManager,
        *,
        device: Device = zeros,
        overlap: bool = False,
    ) -> None:
        self.limits = limits
        self.blocks = blocks
        self.scheduler = make_scheduler(limits, blocks)
        self.device = device
        self.overlap = overlap
        self.in_flight: deque[list[tuple[Sequence, list[int]]]] = deque()
        self.num_steps = 0
        self.peak_blocks = 0

    def add(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        max_tokens: int,
        *,
        stop_ids: Iterable[int] = (),
        priority: int = 0,
        arrival_time: float | None = None,
    ) -> Sequence:
        """Queue a sequence. Raises CapacityError when no token could ever be sampled for it."""
        longest = min(self.limits.max_model_len, self.blocks.max_num_tokens)
        if not 0 < len(prompt_token_ids) < longest:
            raise CapacityError(f"a prompt of {len(prompt_token_ids)} tokens cannot run: 1 to {longest - 1} can")
        seq = Sequence(
            request_id,
            prompt_token_ids,
            None,  # type: ignore[arg-type]  # nothing here samples
            max_num_tokens=min(len(prompt_token_ids) + max_tokens, longest),
            stop_ids=frozenset(stop_ids),
            priority=priority,
            arrival_time=self.clock() if arrival_time is None else arrival_time,
        )
        self.scheduler.add(seq)
        return seq

    def abort(self, seq: Sequence) -> None:
        """As the engine does it: at any moment, and a no-op once the sequence has ended."""
        if seq.status != Status.FINISHED:
            self.scheduler.abort(seq)

    def launch(self) -> Schedule:
        """Schedule a step and hand it to the device. The schedule may be empty; then nothing was launched."""
        self.scheduler.now = self.clock()
        schedule = self.scheduler.schedule()
        if (fault := broken_rule(schedule, self.scheduler.limits)) is not None:
            raise PluginError(f"{self.scheduler.plugin or type(self.scheduler).__name__} {fault}")
        if schedule:
            self.in_flight.append(list(zip(scheduled(schedule), self.device(schedule), strict=True)))
            self.num_steps += 1
            self.peak_blocks = max(self.peak_blocks, self.blocks.num_blocks - self.blocks.num_free)
        elif self.scheduler.has_unfinished and not self.in_flight:
            raise PluginError(f"{type(self.scheduler).__name__} scheduled nothing although nothing is in flight")
        return schedule

    def commit(self) -> None:
        """Bring the oldest step in flight home."""
        finished = []
        for seq, token_ids in self.in_flight.popleft():
            if seq.status == Status.FINISHED:
                self.blocks.commit(seq, [])
                continue
            self.blocks.commit(seq, token_ids)
            ended = len(seq.token_ids) >= seq.max_num_tokens or not seq.stop_ids.isdisjoint(token_ids)
            if token_ids and ended:
                finished.append(seq)
        self.scheduler.commit(finished)

    def step(self) -> Schedule:
        """One turn of the engine's loop; the schedule that was launched."""
        schedule = self.launch()
        if self.in_flight and (len(self.in_flight) > self.overlap or not schedule):
            self.commit()
        return schedule

    def clock(self) -> float:
        """The time of ``Scheduler.now`` and of arrivals."""
        return float(self.num_steps)

    @property
    def has_work(self) -> bool:
        return bool(self.in_flight) or self.scheduler.has_unfinished

    def run(self, max_steps: int | None = None) -> None:
        """Step until all is done. Raises PluginError after ``max_steps`` turns: some sequence starves."""
        turns = 0
        while self.has_work:
            if turns == max_steps:
                raise PluginError(f"{type(self.scheduler).__name__} is not done after {max_steps} steps")
            self.step()
            turns += 1


class StepLoad(NamedTuple):
    """What a step has to do. context_tokens: tokens whose KV its decoding sequences read."""

    num_decode: int
    num_prefill_tokens: int
    context_tokens: int


def step_load(schedule: Schedule) -> StepLoad:
    """The load of a step that has just been scheduled."""
    return StepLoad(
        len(schedule.decode),
        sum(n for _, n in schedule.prefill),
        sum(seq.num_computed_tokens for seq in schedule.decode),
    )


@dataclass
class Progress:
    """What :class:`Replay` keeps about one request.

    served_step, served_until: the last step that worked on it and when that one ended; before the first, the last step
    launched before it arrived, and its arrival. computed: the most tokens it ever had in the cache. num_recomputed:
    tokens computed again after a preemption. max_passed_over, max_wait: most steps in a row that went without it, and
    the longest time between two that did not. marks: (step, what happened), if asked for: D(ecode), P(refill),
    x (preempted).
    """

    timeline: RequestTimeline
    served_step: int
    served_until: float
    computed: int = 0
    num_recomputed: int = 0
    max_passed_over: int = 0
    max_wait: float = 0.0
    marks: list[tuple[int, str]] = field(default_factory=list)


@dataclass(frozen=True)
class StepRecord:
    """One step: when the device began and ended it, its load, blocks in use, sequences queued behind it."""

    start: float
    end: float
    load: StepLoad
    blocks_used: int
    num_waiting: int


class Replay(Simulator):
    """A workload on a simulated clock: the host takes no time, and the device runs one step after the other.

    step_time: the duration of a step by its load. Tokens are handed over when their step is committed: when it has
    ended, with ``overlap`` after the next one has been scheduled. keep_marks: record what happens to whom in each step.

    now: the clock. progress: per request, in order of arrival. steps: one record each.
    """

    def __init__(
        self,
        make_scheduler: Callable[[SchedulerLimits, BlockManager], Scheduler],
        limits: SchedulerLimits,
        blocks: BlockManager,
        workload: Workload,
        *,
        step_time: Callable[[StepLoad], float] = lambda load: 1.0,
        overlap: bool = False,
        keep_marks: bool = False,
        vocab_size: int = 1 << 20,
    ) -> None:
        super().__init__(make_scheduler, limits, blocks, overlap=overlap)
        self.step_time = step_time
        self.keep_marks = keep_marks
        self.vocab_size = vocab_size
        self.workload = workload
        self.concurrency = workload.concurrency
        self.now = 0.0
        self.progress: list[Progress] = []
        self.steps: list[StepRecord] = []
        self._to_come: deque[Request] = deque(workload.requests)
        self._ends: deque[float] = deque()  # of the steps in flight
        self._device_free = 0.0
        self._unfinished: dict[Sequence, Progress] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._to_come) or super().has_work

    def step(self) -> Schedule:
        if not super().has_work and self._to_come and self.concurrency is None:
            self.now = max(self.now, self._to_come[0].arrival)
        self._arrive()
        return super().step()

    def launch(self) -> Schedule:
        num_preemptions = self.scheduler.num_preemptions
        preemptions = {seq: seq.num_preemptions for seq in self._unfinished} if self.keep_marks else {}
        schedule = super().launch()
        if not schedule:
            return schedule
        load = step_load(schedule)
        start = max(self.now, self._device_free)
        end = self._device_free = start + self.step_time(load)
        self._ends.append(end)
        used = self.blocks.num_blocks - self.blocks.num_free
        self.steps.append(StepRecord(start, end, load, used, len(self.scheduler.waiting)))
        for seq in schedule.decode:
            self._serve(cast(Sequence, seq), 1, "D", start, end)
        for seq, n in schedule.prefill:
            self._serve(cast(Sequence, seq), n, "P", start, end)
        if self.keep_marks and self.scheduler.num_preemptions > num_preemptions:
            for seq, before in preemptions.items():
                if seq.num_preemptions > before:
                    self._unfinished[seq].marks.append((self.num_steps - 1, "x"))
        return schedule

    def commit(self) -> None:
        self.now = max(self.now, self._ends.popleft())
        step = self.in_flight[0]
        super().commit()
        for seq, tokens in step:
            progress = self._unfinished.get(seq)
            if progress is None:
                continue
            timeline = progress.timeline
            if tokens:
                timeline.deliveries.append((self.now, len(tokens)))
            if seq.status == Status.FINISHED:
                timeline.finished, timeline.finish_reason = self.now, "length"
                timeline.num_preemptions = seq.num_preemptions
                timeline.num_cached_tokens = seq.num_cached_tokens
                del self._unfinished[seq]

    def clock(self) -> float:
        return self.now

    def _arrive(self) -> None:
        """Queue whoever has come by now; in a closed loop, as many as may be unfinished at once."""
        while self._to_come:
            if self.concurrency is None and self._to_come[0].arrival > self.now:
                return
            if self.concurrency is not None and len(self._unfinished) >= self.concurrency:
                return
            request = self._to_come.popleft()
            arrival = request.arrival if self.concurrency is None else self.now
            token_ids = prompt_token_ids_of(request, self.vocab_size)
            seq = self.add(
                str(request.id), token_ids, request.output_len, priority=request.priority, arrival_time=arrival
            )
            timeline = RequestTimeline(seq.request_id, arrival, request.prompt_len)
            self._unfinished[seq] = progress = Progress(timeline, self.num_steps - 1, arrival)
            self.progress.append(progress)

    def _serve(self, seq: Sequence, n: int, mark: str, start: float, end: float) -> None:
        progress, step = self._unfinished[seq], self.num_steps - 1
        progress.num_recomputed += max(0, min(progress.computed, seq.num_computed_tokens) - seq.num_computed_tokens + n)
        progress.computed = max(progress.computed, seq.num_computed_tokens)
        progress.max_passed_over = max(progress.max_passed_over, step - progress.served_step - 1)
        progress.max_wait = max(progress.max_wait, start - progress.served_until)
        progress.served_step, progress.served_until = step, end
        if progress.timeline.scheduled is None:
            progress.timeline.scheduled = start
        if self.keep_marks:
            progress.marks.append((step, mark))
