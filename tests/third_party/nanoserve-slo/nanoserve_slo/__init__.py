"""Scheduler ``slo``: whose deadline comes first runs first, as long as it can still be met.

A request is due with its first token ``ttft`` after its arrival and with each further one ``tpot`` later. Earliest
deadline first meets all deadlines whenever that is possible (Liu and Layland, 1973) and hardly any under overload,
where it always serves whoever is about to be late. So a prompt that cannot make its first deadline any more is *late*:
late prompts get what those in time leave, the shortest first, since that many more can be done with. And *ageing*
bounds every wait: a request older than ``max_wait`` TTFTs is served before all others, oldest first.

A round: running sequences decode in that order; when blocks run out, the last of it are preempted. Prompts share what
is left of the token budget in the same order, and nobody is admitted past one that does not fit.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from nanoserve.contracts.scheduling import Blocks, Schedule, Scheduler, SchedulerLimits, SchedulerSpec, Sequence, Status
from nanoserve.hookspecs import hookimpl

NANOSERVE_CONTRACT = 2

AGED, IN_TIME, LATE = range(3)


@dataclass(frozen=True)
class SLOOptions:
    """ttft_ms, tpot_ms: objectives of a request of priority 0: to its first token, and per token after that.

    priority_factor: multiplies both for each step of priority; above 1, since a lower priority is more urgent.
    max_wait: a request older than so many of its TTFTs goes before all that are not.
    """

    ttft_ms: float = 1000.0
    tpot_ms: float = 100.0
    priority_factor: float = 2.0
    max_wait: float = 20.0

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "tpot_ms"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("priority_factor", "max_wait"):
            if not 1 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


class SLOScheduler(Scheduler):
    options: SLOOptions
    uses_priority = True

    def __init__(self, options: SLOOptions, limits: SchedulerLimits, blocks: Blocks) -> None:
        super().__init__(options, limits, blocks)
        self._round_seconds = 0.0  # how long a round takes: of the last ones, the latest weigh most
        self._last_round = math.inf  # when it began
        self._num_ending = 0  # running sequences that need no more of this round: their last token is in flight

    def schedule(self) -> Schedule:
        if self.now > self._last_round:
            self._round_seconds += 0.25 * (self.now - self._last_round - self._round_seconds)
        self._last_round = self.now
        schedule = Schedule()
        self._decode(schedule)
        self._prefill(schedule)
        while not schedule and self._stuck() and self._drop_last_partial():
            self._prefill(schedule)
        return schedule

    def add(self, seq: Sequence) -> None:
        if not self.has_unfinished:  # idle until now, which is no measure of a round
            self._last_round = math.inf
        super().add(seq)

    # --- order ---------------------------------------------------------------------------------------------------

    def urgency(self, seq: Sequence) -> tuple[float, ...]:
        """Sorts sequences: the most urgent first."""
        scale = self._scale(seq)
        ttft, tpot = scale * self.options.ttft_ms / 1e3, scale * self.options.tpot_ms / 1e3
        waited = self.now - seq.arrival_time
        if waited > self.options.max_wait * ttft:
            return AGED, seq.arrival_time
        num_output = seq.num_tokens - seq.num_prompt_tokens
        due = seq.arrival_time + ttft + num_output * tpot
        lacking = seq.num_tokens - seq.num_computed_tokens
        if not num_output:
            rounds = -(-lacking // self.limits.max_num_batched_tokens)
            if self.now + rounds * self._round_seconds > due:
                return LATE, lacking
        return IN_TIME, due

    def _scale(self, seq: Sequence) -> float:
        """Of the deadlines of its priority; a priority far out of the usual range must not overflow."""
        return self.options.priority_factor ** max(-32, min(32, seq.priority))

    # --- decode --------------------------------------------------------------------------------------------------

    def _decode(self, schedule: Schedule) -> None:
        """Fill ``schedule.decode`` from ``running``, most urgent first, and take blocks from its other end."""
        most = min(self.limits.max_num_seqs, self.limits.max_num_batched_tokens)
        queue = deque(sorted(self.running, key=self.urgency))
        ending = [seq for seq in queue if seq.num_tokens >= seq.max_num_tokens]
        queue = deque(seq for seq in queue if seq.num_tokens < seq.max_num_tokens)
        self._num_ending = len(ending)
        coming = self.blocks.num_releasing + sum(len(seq.block_table) for seq in ending)
        waits: list[Sequence] = []  # each for one of the blocks that come back by themselves
        while queue and len(schedule.decode) < most:
            seq = queue.popleft()
            while not self.blocks.grant(seq, 1):
                if coming > len(waits):
                    waits.append(seq)
                    break
                if queue:
                    self.preempt(queue.pop())
                elif not self._drop_last_partial():
                    self.preempt(seq)
                    break
                coming = max(coming, self.blocks.num_releasing)
            else:
                schedule.decode.append(seq)
        self.running = deque([*schedule.decode, *waits, *queue, *ending])

    def _drop_last_partial(self) -> bool:
        """Take the blocks of the least urgent prompt that is half done. False if there is none."""
        partial = [seq for seq in self.waiting if seq.block_table and not seq.releasing]
        if not partial:
            return False
        victim = max(partial, key=self.urgency)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.blocks.release(victim)
        return True

    # --- prefill -------------------------------------------------------------------------------------------------

    def _prefill(self, schedule: Schedule) -> None:
        """Add to ``schedule.prefill`` what budget, sequences per step and blocks allow, most urgent first."""
        budget = self.limits.max_num_batched_tokens - len(schedule.decode)
        slots = self.limits.max_num_seqs - len(schedule.decode)
        admissible = self.limits.max_num_seqs - self.blocks.num_holding + self._num_ending
        still_waiting = []
        for seq in sorted(self.waiting, key=self.urgency):
            granted = 0
            if budget and slots and not seq.releasing and (seq.block_table or (admissible > 0 and self._fits(seq))):
                known, is_new = seq.num_tokens, not seq.block_table
                granted = self.blocks.grant(seq, budget)
                admissible -= is_new and granted > 0
            if not granted:
                if not seq.block_table and not seq.releasing:
                    admissible = 0  # nobody is admitted past it
                still_waiting.append(seq)
                continue
            schedule.prefill.append((seq, granted))
            budget -= granted
            slots -= 1
            if seq.num_computed_tokens == known:
                seq.status = Status.RUNNING
                self.running.append(seq)
            else:
                still_waiting.append(seq)
        self.waiting = deque(still_waiting)

    def _fits(self, seq: Sequence) -> bool:
        """One that has lost its blocks comes back when there is room for all of it, or it would lose them again."""
        return not seq.num_preemptions or -(-seq.num_tokens // self.blocks.block_size) <= self.blocks.num_free

    def _stuck(self) -> bool:
        """Nothing is on its way that could free a block: half-done prompts hold them all."""
        return not self.blocks.num_releasing and not any(seq.in_flight for seq in (*self.running, *self.waiting))


@hookimpl
def nanoserve_scheduler(register) -> None:
    register(
        SchedulerSpec(
            name="slo",
            summary="earliest deadline first, by TTFT, TPOT and priority; late prompts shortest first, with ageing",
            config=SLOOptions,
            factory=SLOScheduler,
        )
    )


@hookimpl
def nanoserve_config_paths() -> list[str]:
    return ["pkg://nanoserve_slo.conf"]
