"""``decode_first``: running requests decode first, prefill gets what is left of one shared budget.

A round, in order:

1. *Decode.* Every running sequence is a candidate, in round-robin order: those not picked in this round come first in
   the next. A candidate needs a block only when it crosses into one. If there is none, candidates not yet picked are
   preempted from the tail, then half-done prefills, then the candidate itself: who is in this round's batch is never
   a victim.
2. *Prefill.* The waiting queue, first in first out: half-done prompts, preempted sequences (at the head) and new ones
   are one case, since a grant starts from whatever the prefix cache still holds. A chunk shrinks to what fits, and
   nobody is admitted past a sequence that does not fit at all.

A step in flight may still hold the blocks of a victim. Then the candidate sits this round out, and no further victim
is taken as long as what is on its way suffices.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from nanoserve.contracts.errors import ConfigError
from nanoserve.contracts.scheduling import Blocks, Schedule, Scheduler, SchedulerLimits, SchedulerSpec, Sequence, Status
from nanoserve.hookspecs import hookimpl


@dataclass(frozen=True)
class DecodeFirstOptions:
    """max_partial_prefills: prompts that one round may leave unfinished.

    Above 1, a prompt too long for any single round leaves up to half of the budget to those queued behind it, so that
    it cannot block them; as the first in the queue it still gets the other half of every round. With 1 it takes all.
    """

    max_partial_prefills: int = 4

    def __post_init__(self) -> None:
        if self.max_partial_prefills < 1:
            raise ConfigError(f"scheduler.max_partial_prefills must be at least 1, not {self.max_partial_prefills}")


class DecodeFirst(Scheduler):
    def __init__(self, options: Any, limits: SchedulerLimits, blocks: Blocks) -> None:
        super().__init__(options, limits, blocks)
        self._num_partial = 0  # of this round: waiting sequences that hold blocks
        self._num_ending = 0  # of this round: running sequences whose last token is in flight

    def schedule(self) -> Schedule:
        self._begin()
        limits = self.limits
        schedule = Schedule()
        not_picked = self._decode(schedule)
        self.running.extend(not_picked)
        self.running.extend(schedule.decode)
        num_decode = len(schedule.decode)
        self._prefill(schedule, limits.max_num_batched_tokens - num_decode, limits.max_num_seqs - num_decode)
        self._resolve_deadlock(schedule)
        return schedule

    def _begin(self) -> None:
        self._num_partial = self.blocks.num_holding - len(self.running)
        self._num_ending = 0

    # --- decode ------------------------------------------------------------------------------------------------

    def _decode(self, schedule: Schedule) -> list[Sequence]:
        """Fill ``schedule.decode`` from ``running``, which is left empty. Returns those not picked, in order."""
        candidates, grant, picked = self.running, self.blocks.grant, schedule.decode
        most = min(self.limits.max_num_seqs, self.limits.max_num_batched_tokens)
        passed_over: list[Sequence] = []
        num_expected = num_promised = 0  # blocks that come free without a victim; how many of them are spoken for
        while candidates and len(picked) < most:
            seq = candidates.popleft()
            if seq.num_tokens >= seq.max_num_tokens:
                self._num_ending += 1
                num_expected += len(seq.block_table)
                passed_over.append(seq)
                continue
            granted = grant(seq, 1)
            while not granted:
                if self.blocks.num_releasing + num_expected > num_promised:
                    num_promised += 1
                    passed_over.append(seq)
                    break
                if candidates:
                    victim = candidates.pop()
                    if victim.num_tokens >= victim.max_num_tokens:
                        self._num_ending += 1
                        num_expected += len(victim.block_table)
                        passed_over.append(victim)
                        continue
                    self.preempt(victim)
                elif not self._drop_last_partial():
                    self.preempt(seq)
                    break
                granted = grant(seq, 1)
            if granted:
                picked.append(seq)
        passed_over.extend(candidates)
        candidates.clear()
        return passed_over

    def _drop_last_partial(self) -> bool:
        """Take the blocks of the last half-done prefill in the queue, which keeps its place. False if there is none."""
        if not self._num_partial:
            return False
        holders = (seq for seq in self.waiting if seq.block_table and not seq.releasing)
        victim = next(islice(holders, self._num_partial - 1, None))
        self._num_partial -= 1
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.blocks.release(victim)
        return True

    # --- prefill -----------------------------------------------------------------------------------------------

    @property
    def _max_unfinished(self) -> int:
        return self.options.max_partial_prefills

    def _prefill(self, schedule: Schedule, budget: int, slots: int) -> None:
        """Add to ``schedule.prefill`` within ``budget`` tokens and ``slots`` sequences."""
        blocks, waiting = self.blocks, self.waiting
        num_partial = self._num_partial  # half-done prefills not met yet
        # How many may be admitted. At 0, the queue is walked for the half-done ones only.
        admissible = max(0, self.limits.max_num_seqs - blocks.num_holding + self._num_ending)
        num_unfinished = 0
        kept: list[Sequence] = []
        while waiting and budget and slots and (admissible or num_partial) and num_unfinished < self._max_unfinished:
            seq = waiting.popleft()
            if seq.releasing:  # a victim of this round
                kept.append(seq)
                continue
            known, granted = seq.num_tokens, 0
            if seq.block_table:
                num_partial -= 1
                granted = blocks.grant(seq, self._chunk(seq, budget, num_unfinished, num_partial + admissible))
            elif admissible and self._fits(seq):
                admissible -= 1
                granted = blocks.grant(seq, self._chunk(seq, budget, num_unfinished, num_partial + admissible))
            if not granted:
                admissible = 0
                kept.append(seq)
                continue
            schedule.prefill.append((seq, granted))
            budget -= granted
            slots -= 1
            if seq.num_computed_tokens == known:
                seq.status = Status.RUNNING
                self.running.append(seq)
            else:
                kept.append(seq)
                num_unfinished += 1
        waiting.extendleft(reversed(kept))

    def _fits(self, seq: Sequence) -> bool:
        """May ``seq``, which holds no blocks, be admitted as far as the free ones go?

        A new one may start with any chunk. A preempted one comes back when all of it fits, or it would fill the blocks
        it has just given away and lose them again.
        """
        return not seq.num_preemptions or self._fits_whole(seq)

    def _fits_whole(self, seq: Sequence) -> bool:
        return -(-seq.num_tokens // self.blocks.block_size) <= self.blocks.num_free

    def _chunk(self, seq: Sequence, budget: int, num_unfinished: int, num_behind: int) -> int:
        """Tokens of ``budget`` for ``seq``, just taken from the queue; ``num_behind`` may run after it in this round.

        See DecodeFirstOptions.
        """
        lacking = seq.num_tokens - seq.num_computed_tokens
        if lacking <= self.limits.max_num_batched_tokens or num_unfinished + 1 >= self._max_unfinished:
            return budget
        wanted_behind, half = 0, budget // 2
        for other in islice(self.waiting, num_behind):
            wanted_behind += other.num_tokens - other.num_computed_tokens
            if wanted_behind >= half:
                break
        return budget - min(wanted_behind, half)

    # --- progress ----------------------------------------------------------------------------------------------

    def _resolve_deadlock(self, schedule: Schedule) -> None:
        """Half-done prefills can hold all blocks so that none can go on. Then the last ones give way to the first."""
        if schedule or self.blocks.num_releasing or any(seq.in_flight for seq in chain(self.running, self.waiting)):
            return
        while not schedule and self._drop_last_partial():
            self._prefill(schedule, self.limits.max_num_batched_tokens, self.limits.max_num_seqs)


@hookimpl
def nanoserve_scheduler(register):
    register(
        SchedulerSpec(
            name="decode_first",
            summary="decode first, prefill with what is left of the shared budget; chunked, round-robin, preempting",
            config=DecodeFirstOptions,
            factory=DecodeFirst,
        )
    )
