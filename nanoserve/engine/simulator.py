"""The engine's loop without a model: any scheduler over the real block manager and sequences, on the host alone.

The "device" is a function that is called with every schedule in launch order and says what was sampled. With
``overlap`` a step is committed only after the next one has been scheduled, as the engine does on a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import cast

from nanoserve.contracts.errors import CapacityError, PluginError
from nanoserve.contracts.scheduling import Schedule, Scheduler, SchedulerLimits, Status, StepResult
from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.sequence import Sequence

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

    num_steps: steps launched. peak_blocks: most blocks ever in use at once.
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
        )
        self.scheduler.add(seq)
        return seq

    def abort(self, seq: Sequence) -> None:
        """As the engine does it: at any moment, and a no-op once the sequence has ended."""
        if seq.status != Status.FINISHED:
            self.scheduler.abort(seq)

    def launch(self) -> Schedule:
        """Schedule a step and hand it to the device. The schedule may be empty; then nothing was launched."""
        schedule = self.scheduler.schedule()
        if schedule:
            self.in_flight.append(list(zip(scheduled(schedule), self.device(schedule), strict=True)))
            self.num_steps += 1
            self.peak_blocks = max(self.peak_blocks, self.blocks.num_blocks - self.blocks.num_free)
        elif self.scheduler.has_unfinished and not self.in_flight:
            raise PluginError(f"{type(self.scheduler).__name__} scheduled nothing although nothing is in flight")
        return schedule

    def commit(self) -> None:
        """Bring the oldest step in flight home."""
        results = []
        for seq, token_ids in self.in_flight.popleft():
            if seq.status == Status.FINISHED:
                self.blocks.commit(seq, [])
                continue
            self.blocks.commit(seq, token_ids)
            ended = len(seq.token_ids) >= seq.max_num_tokens or not seq.stop_ids.isdisjoint(token_ids)
            results.append(StepResult(seq, token_ids, finished=bool(token_ids) and ended))
        self.scheduler.commit(results)

    def step(self) -> Schedule:
        """One turn of the engine's loop; the schedule that was launched."""
        schedule = self.launch()
        if self.in_flight and (len(self.in_flight) > self.overlap or not schedule):
            self.commit()
        return schedule

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
