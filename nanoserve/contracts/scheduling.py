"""Contract: a scheduler decides which sequences run in a step and how many of their tokens.

There is one rule, *computed tokens catch up with known tokens*; prefill, chunks, resume after preemption and decode
are cases of it. Mechanism lives in the core: a scheduler calls :meth:`Blocks.grant`, which finds the prefix in the
cache, reserves blocks and advances the sequence, and :meth:`Blocks.release`, which takes the blocks back. What is left
to a plugin is policy: the order of the queues, the budgets, the victims.

Steps overlap: ``schedule()`` may be called while one step is in flight. So progress (``num_computed_tokens``, blocks)
is advanced when a step is scheduled, token values arrive at ``commit``, and the blocks of a sequence that ends or is
preempted while in flight are freed only when its last step has been committed (until then ``releasing`` is True).
No torch here: everything is Python numbers and lists, and deterministic: a scheduler that cares for time reads
``Scheduler.now``, never a clock of its own.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Protocol


class Status(enum.IntEnum):
    WAITING = 0  # queued: new, between two chunks of its prompt, or preempted
    RUNNING = 1  # all known tokens scheduled; decodes one token per step
    FINISHED = 2


class Sequence(Protocol):
    """What a scheduler may know of a sequence. It writes ``status`` only; the rest belongs to the core.

    token_ids: known tokens, prompt then output. num_prompt_tokens: length of the prompt.
    num_tokens: known tokens plus those sampled on the device whose value has not arrived.
    num_computed_tokens: tokens whose KV is in the cache or is being computed by a scheduled step.
    max_num_tokens: num_tokens never exceeds it (prompt + max_tokens, cropped to context length and pool).
    block_table: blocks it holds, in order; empty for a new or preempted sequence.
    in_flight: scheduled steps not yet committed. releasing: its blocks are freed once in_flight is 0; not schedulable.
    num_preemptions, priority (any integer, 0 by default, lower is more urgent), arrival_time (seconds, on the clock of
    ``Scheduler.now``).
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    max_num_tokens: int
    block_table: list[int]
    status: Status
    in_flight: int
    releasing: bool
    num_preemptions: int
    priority: int
    arrival_time: float

    @property
    def num_tokens(self) -> int: ...


class Blocks(Protocol):
    """The block manager, as a scheduler sees it."""

    block_size: int
    num_blocks: int

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now: never used, or cached but owned by nobody."""
        ...

    @property
    def num_releasing(self) -> int:
        """Blocks that sequences in flight will give back at a coming commit (shared ones counted once per owner)."""
        ...

    @property
    def num_holding(self) -> int:
        """Sequences that hold blocks and are not ``releasing``. Keep it within ``max_num_seqs`` when admitting."""
        ...

    def grant(self, seq: Sequence, max_tokens: int) -> int:
        """Schedule the next tokens of ``seq``: at most ``max_tokens``, at most what it lacks, at most what fits.

        A sequence without blocks first claims the longest cached prefix. Blocks are reserved for exactly the tokens
        granted. Returns their number, 0 if nothing fits, in which case nothing changed. A grant > 0 advances
        ``num_computed_tokens``, increments ``in_flight`` and, when the sequence has caught up, makes one sampled token
        pending. The sequence must be in this round's ``Schedule`` exactly once.
        """
        ...

    def release(self, seq: Sequence) -> None:
        """Take all blocks of ``seq`` back, now or, while it is in flight, when its last step is committed.

        A released sequence starts again from its cached prefix. Idempotent.
        """
        ...


@dataclass(slots=True)
class Schedule:
    """The work of one step. decode: sequences with one token each; prefill: (sequence, number of tokens) pairs.

    The phases may be mixed and both lists may be empty: then nothing can run before a step in flight is committed.
    """

    decode: list[Sequence] = field(default_factory=list)
    prefill: list[tuple[Sequence, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.decode or self.prefill)


@dataclass(frozen=True)
class SchedulerLimits:
    """max_num_seqs: sequences per step. max_num_batched_tokens: tokens per step. max_model_len: longest sequence."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class Scheduler(ABC):
    """Base class: the queues and their bookkeeping. A plugin implements ``schedule``.

    ``waiting`` holds sequences whose known tokens are not all scheduled, ``running`` those that decode. Between calls
    every unfinished sequence is in exactly one of them, except that ``schedule`` may rebuild both.

    now: seconds; what time it is, on the clock of ``arrival_time``. The caller sets it before each ``schedule``: an
    engine from the machine's monotonic clock, a simulator from its own. It never goes back.
    uses_priority: True in a class whose ``schedule`` looks at ``Sequence.priority``; for others a server refuses
    requests that have one.
    """

    #: What messages call it, as ``scheduler=NAME of DISTRIBUTION VERSION``; the registry sets it.
    plugin: str = ""
    uses_priority: bool = False

    def __init__(self, options: Any, limits: SchedulerLimits, blocks: Blocks) -> None:
        self.options = options
        self.limits = limits
        self.blocks = blocks
        self.waiting: deque[Sequence] = deque()
        self.running: deque[Sequence] = deque()
        self.num_preemptions = 0
        self.now = 0.0

    @abstractmethod
    def schedule(self) -> Schedule:
        """Choose this step's work within ``limits``.

        Never more than max_num_seqs sequences or max_num_batched_tokens tokens; no sequence twice; skip sequences that
        are ``releasing`` or whose ``num_tokens`` has reached ``max_num_tokens`` (they end at a coming commit). An empty
        schedule is allowed only while a step is in flight or nothing is queued.
        """

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence. It fits: the engine has refused those that never can."""
        self.waiting.append(seq)

    def abort(self, seq: Sequence) -> None:
        """Forget an unfinished sequence at any moment; its blocks come back at once or after its step in flight."""
        queue = self.running if seq.status == Status.RUNNING else self.waiting
        queue.remove(seq)
        seq.status = Status.FINISHED
        self.blocks.release(seq)

    def commit(self, finished: Collection[Sequence]) -> None:
        """The oldest step in flight is done: the core has appended its tokens and hashed blocks.

        finished: those of its sequences for which the core found a stop condition, also when they have been preempted
        since. The default ends them.
        """
        if not finished:
            return
        for seq in finished:
            seq.status = Status.FINISHED
            self.blocks.release(seq)
        self.running = deque(s for s in self.running if s.status != Status.FINISHED)
        if any(s.status == Status.FINISHED for s in self.waiting):  # finished at the commit after its preemption
            self.waiting = deque(s for s in self.waiting if s.status != Status.FINISHED)

    def preempt(self, seq: Sequence) -> None:
        """Send ``seq``, which the caller has taken out of its queue, without its blocks to the head of ``waiting``."""
        seq.status = Status.WAITING
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.blocks.release(seq)
        self.waiting.appendleft(seq)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)


@dataclass(frozen=True)
class SchedulerSpec:
    """Registers a scheduler. config: dataclass of its options. factory: ``(options, limits, blocks) -> Scheduler``."""

    name: str
    summary: str
    config: type
    factory: Callable[[Any, SchedulerLimits, Blocks], Scheduler]
