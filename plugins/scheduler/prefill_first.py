"""``prefill_first``: new requests come first, as in nano-vllm. A step is all prefill or all decode.

Waiting sequences are prefilled, first in first out, as long as one fits; only a step that finds none decodes. A
sequence is admitted when its whole prompt fits the free blocks, so decoding never competes with a prompt for them; a
prompt longer than the token budget goes in chunks. Decoding favours the front of ``running`` and preempts from its
tail. Best time to first token, at the price of decode steps that stall while prompts arrive.
"""

from __future__ import annotations

from dataclasses import dataclass

from nanoserve.contracts.scheduling import Schedule, SchedulerSpec, Sequence
from nanoserve.hookspecs import hookimpl
from nanoserve_plugins.scheduler.decode_first import DecodeFirst


@dataclass(frozen=True)
class PrefillFirstOptions:
    """It has none."""


class PrefillFirst(DecodeFirst):
    """Differs from ``decode_first`` in the order of the two phases and in who is admitted; victims are the same.

    Half-done prefills cannot block each other: one that was admitted goes on at once, and its blocks are free.
    """

    def schedule(self) -> Schedule:
        self._begin()
        schedule = Schedule()
        self._prefill(schedule, self.limits.max_num_batched_tokens, self.limits.max_num_seqs)
        if not schedule:
            not_picked = self._decode(schedule)
            self.running.extend(schedule.decode)
            self.running.extend(not_picked)
        return schedule

    def _fits(self, seq: Sequence) -> bool:
        return self._fits_whole(seq)

    @property
    def _max_unfinished(self) -> int:
        return 1


@hookimpl
def nanoserve_scheduler(register):
    register(
        SchedulerSpec(
            name="prefill_first",
            summary="prefill first, decode when no prompt waits or fits; nano-vllm's order",
            config=PrefillFirstOptions,
            factory=PrefillFirst,
        )
    )
