"""Conformance suite of schedulers.

The scheduler under test drives the real block manager. In place of the model stands :class:`PagedModel`, which keeps a
KV cache and a block table as a device does, so that a lost, doubled, foreign, stale or unwritten token cannot hide.
"""

from __future__ import annotations

import functools
import random
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from nanoserve.contracts.scheduling import Schedule, Scheduler, SchedulerLimits, Status
from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.sequence import Sequence
from nanoserve.engine.simulator import Simulator, scheduled
from nanoserve.testing.plugins import discover


class Reference:
    """What a prompt must continue with. The "KV" of a token is a digest of all up to it, and decides the next token."""

    def __init__(self, prompt: list[int], vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.kv: list[int] = []
        self.tokens: list[int] = []
        for token in prompt:
            self._append(token)

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        self.kv.append(digest(self.kv[-1] if self.kv else 0, token))

    def first(self, n: int) -> list[int]:
        """The first ``n`` tokens, the prompt's included."""
        while len(self.tokens) < n:
            self._append(self.sample(len(self.tokens)))
        return self.tokens[:n]

    def sample(self, n: int) -> int:
        """The token that follows the first ``n``."""
        return (self.kv[n - 1] >> 8) % self.vocab_size


def digest(before: int, token: int) -> int:
    return hash((before, token))


class PagedModel:
    """A device: executes steps in launch order and reads K/V only through its own block table, row by row.

    All tokens of a step are stored before any sequence reads. Reads the whole context of whoever samples.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self.blocks = blocks
        self.table: dict[tuple[int, int], int] = {}
        self.last_tokens: dict[int, int] = {}
        self.kv = [-1 - slot for slot in range(blocks.num_blocks * blocks.block_size)]

    def __call__(self, schedule: Schedule) -> list[list[int]]:
        for seq in self.blocks.take_new_rows():
            self.last_tokens.pop(seq.table_row, None)
        for row, column, block in zip(*self.blocks.take_table_updates(), strict=True):
            self.table[row, column] = block
        lengths = [1] * len(schedule.decode) + [n for _, n in schedule.prefill]
        for seq, n in zip(scheduled(schedule), lengths, strict=True):
            for position in range(seq.num_computed_tokens - n, seq.num_computed_tokens):
                self._store(seq, position)
        return [self._sample(seq) if seq.num_pending else [] for seq in scheduled(schedule)]

    def _slot(self, seq: Sequence, position: int) -> int:
        size = self.blocks.block_size
        return self.table[seq.table_row, position // size] * size + position % size

    def _store(self, seq: Sequence, position: int) -> None:
        known = position < len(seq.token_ids)
        token = seq.token_ids[position] if known else self.last_tokens[seq.table_row]
        before = self.kv[self._slot(seq, position - 1)] if position else 0
        self.kv[self._slot(seq, position)] = digest(before, token)

    def _sample(self, seq: Sequence) -> list[int]:
        reference: Reference = seq.state  # type: ignore[assignment]
        n = seq.num_computed_tokens
        reference.first(n)
        for position in range(n):
            stored = self.kv[self._slot(seq, position)]
            assert stored == reference.kv[position], f"{seq} does not find its KV at position {position}"
        token = self.last_tokens[seq.table_row] = reference.sample(n)
        return [token]


class Harness(Simulator):
    """A simulator that checks the contract at every step, and every token against its reference."""

    def __init__(
        self, make: Any, limits: SchedulerLimits, blocks: BlockManager, vocab_size: int, overlap: bool
    ) -> None:
        super().__init__(make, limits, blocks, device=PagedModel(blocks), overlap=overlap)
        self.vocab_size = vocab_size
        self.sequences: list[Sequence] = []
        self.aborted: list[Sequence] = []
        self.trace: list[tuple[list[str], list[tuple[str, int]]]] = []

    def add(self, request_id: str, prompt_token_ids: list[int], max_tokens: int, **options: Any) -> Sequence:
        seq = super().add(request_id, prompt_token_ids, max_tokens, **options)
        seq.state = Reference(prompt_token_ids, self.vocab_size)
        self.sequences.append(seq)
        return seq

    def abort(self, seq: Sequence) -> None:
        if seq.status != Status.FINISHED:
            self.aborted.append(seq)
        super().abort(seq)
        self._check_books()

    def launch(self) -> Schedule:
        before = {
            seq: (seq.num_computed_tokens, seq.num_tokens, seq.in_flight, seq.releasing, seq.num_preemptions)
            for seq in self.sequences
            if seq.status != Status.FINISHED
        }
        schedule = super().launch()
        work = dict(
            zip(scheduled(schedule), [1] * len(schedule.decode) + [n for _, n in schedule.prefill], strict=True)
        )
        limits = self.limits
        assert len(work) == len(schedule.decode) + len(schedule.prefill), "a sequence was scheduled twice in a round"
        assert len(work) <= limits.max_num_seqs, f"{len(work)} sequences in a step, {limits.max_num_seqs} allowed"
        assert sum(work.values()) <= limits.max_num_batched_tokens, f"{sum(work.values())} tokens in a step"
        for seq, (computed, num_tokens, in_flight, releasing, num_preemptions) in before.items():
            assert (seq.in_flight > in_flight) == (seq in work), f"{seq}: a grant that is not in the schedule"
            if seq not in work:
                continue
            assert not releasing, f"{seq} was scheduled while its blocks are on their way back"
            assert num_tokens < seq.max_num_tokens, f"{seq} was scheduled beyond its last token"
            held = computed > 0 and seq.num_preemptions == num_preemptions
            assert not held or seq.num_computed_tokens == computed + work[seq], f"{seq} was granted something else"
            assert (seq.status == Status.RUNNING) == (seq.num_pending > 0), f"{seq} has the wrong status"
            assert seq not in schedule.decode or (held and num_tokens == computed + 1), f"{seq} is not ready to decode"
        going_on = [seq for seq, (_, num_tokens, *_) in before.items() if num_tokens < seq.max_num_tokens]
        active = sum(bool(seq.block_table) and not seq.releasing for seq in going_on)
        assert active <= limits.max_num_seqs, f"{active} sequences hold blocks, {limits.max_num_seqs} may run"
        self.trace.append(([s.request_id for s in schedule.decode], [(s.request_id, n) for s, n in schedule.prefill]))
        self._check_books()
        return schedule

    def commit(self) -> None:
        super().commit()
        self._check_books()
        for seq in self.sequences:
            expected = seq.state.first(len(seq.token_ids))  # type: ignore[attr-defined]
            assert seq.token_ids == expected, f"{seq} has lost, doubled or changed a token"

    def _check_books(self) -> None:
        self.blocks.audit()
        queued = [*self.scheduler.running, *self.scheduler.waiting]
        unfinished = [seq for seq in self.sequences if seq.status != Status.FINISHED]
        assert sorted(map(id, queued)) == sorted(map(id, unfinished)), "a sequence is in no queue, in two, or has ended"
        for seq in self.scheduler.running:
            assert seq.status == Status.RUNNING, f"{seq} is in the wrong queue"

    def finish(self, max_steps: int = 3000) -> None:
        """Drain, then check that everybody got exactly what was asked for and that every block is back."""
        self.run(max_steps)
        for seq in self.sequences:
            assert seq.status == Status.FINISHED and not seq.block_table and not seq.in_flight, f"{seq} is not done"
            output = seq.token_ids[seq.num_prompt_tokens :]
            assert not seq.stop_ids.intersection(output[:-1]), f"{seq} ran past its end"
            stopped = bool(seq.stop_ids.intersection(output[-1:]))
            exact = len(seq.token_ids) == seq.max_num_tokens or stopped
            assert exact or seq in self.aborted, f"{seq} ended early"
        assert self.blocks.num_free == self.blocks.num_blocks, "leaked blocks"
        self.sequences.clear()
        self.aborted.clear()


def prompts(rng: random.Random, count: int, shortest: int, longest: int, vocab_size: int = 1000) -> list[list[int]]:
    return [[rng.randrange(vocab_size) for _ in range(rng.randint(shortest, longest))] for _ in range(count)]


class SchedulerSuite:
    """Subclass with ``scheduler = "NAME"``.

    plugins: modules with hooks that no entry point announces. options: the scheduler's options, other than defaults.
    preempts: False for a scheduler that never needs to. num_examples: runs of the state machine.
    """

    scheduler: str
    plugins: ClassVar[tuple[Any, ...]] = ()
    options: ClassVar[dict[str, Any]] = {}
    preempts = True
    num_examples = 500

    @classmethod
    def build(cls, limits: SchedulerLimits, blocks: BlockManager) -> Scheduler:
        registry = discover(cls.plugins)
        spec = registry.get("scheduler", cls.scheduler)
        return spec.factory(registry.make_options("scheduler", spec, cls.options), limits, blocks)

    @classmethod
    def harness(
        cls,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 256,
        vocab_size: int = 1000,
        caching: bool = True,
        overlap: bool = False,
    ) -> Harness:
        limits = SchedulerLimits(max_num_seqs, max_num_batched_tokens, max_model_len)
        blocks = BlockManager(num_blocks, block_size, enable_prefix_caching=caching)
        return Harness(cls.build, limits, blocks, vocab_size, overlap)

    @pytest.fixture(params=[False, True], ids=["sync", "overlap"])
    def overlap(self, request: pytest.FixtureRequest) -> bool:
        return request.param

    @pytest.fixture(params=[False, True], ids=["no_cache", "prefix_cache"])
    def caching(self, request: pytest.FixtureRequest) -> bool:
        return request.param

    def test_one_request(self, overlap: bool) -> None:
        """Prompt and output of every length around the edges of a block; one step per output token."""
        for prompt_len in (1, 3, 4, 5, 8):
            for max_tokens in (1, 2, 4, 5):
                harness = self.harness(num_blocks=4, block_size=4, overlap=overlap)
                seq = harness.add("a", list(range(prompt_len)), max_tokens)
                harness.finish()
                assert seq.num_output_tokens == max_tokens and harness.num_steps == max_tokens

    def test_prompt_longer_than_the_budget(self, overlap: bool) -> None:
        """C05: it runs in chunks."""
        harness = self.harness(num_blocks=20, max_num_batched_tokens=32, overlap=overlap)
        for i, n in enumerate((100, 5, 5, 5)):
            harness.add(str(i), [i * 100 + j for j in range(n)], 6)
        harness.finish()
        assert sum(any(name == "0" for name, _ in prefill) for _, prefill in harness.trace) >= 4

    @pytest.mark.parametrize("budget", [512, 24])
    def test_cache_pressure(self, caching: bool, overlap: bool, budget: int) -> None:
        """C07: more than twice what the pool holds, with a common prefix; no token is lost or doubled."""
        harness = self.harness(num_blocks=12, max_num_batched_tokens=budget, caching=caching, overlap=overlap)
        common = list(range(32))
        seqs = [harness.add(str(i), common + [100 + i] * 8, 60) for i in range(4)]
        harness.finish()
        assert [seq.num_output_tokens for seq in seqs] == [60] * 4
        assert not self.preempts or harness.scheduler.num_preemptions > 0
        assert harness.scheduler.num_preemptions == sum(seq.num_preemptions for seq in seqs)

    def test_more_requests_than_slots(self, overlap: bool) -> None:
        """C09: never more than three in a step (checked at each), all served."""
        harness = self.harness(num_blocks=30, max_num_seqs=3, overlap=overlap)
        for i, prompt in enumerate(prompts(random.Random(0), 25, 1, 40)):
            harness.add(str(i), prompt, i % 7 + 1)
        harness.finish()

    def test_requests_as_large_as_the_pool(self, caching: bool, overlap: bool) -> None:
        """C01: three requests each of which needs every block, and a small one between; nothing waits for ever."""
        harness = self.harness(num_blocks=8, caching=caching, overlap=overlap)
        for name, prompt_len, max_tokens in (("a", 128, 1), ("b", 10, 4), ("c", 127, 2), ("d", 60, 69)):
            harness.add(name, [ord(name)] * prompt_len, max_tokens)
        harness.finish(max_steps=500)

    @pytest.mark.parametrize("victim", range(4))
    def test_abort_at_any_moment(self, overlap: bool, victim: int) -> None:
        """C10: before and after every single launch and commit; the others, one of which shares its prefix, go on."""
        moment, done = 0, False
        while not done:
            harness = self.harness(
                num_blocks=6, block_size=4, max_num_batched_tokens=7, max_num_seqs=3, overlap=overlap
            )
            common = [1, 2, 3, 4]
            tails = [[5] * 9, [6] * 2, [5] * 5, [7]]
            seqs = [harness.add(str(i), common + tail, 6) for i, tail in enumerate(tails)]
            for half_step in range(moment):
                if harness.in_flight and (half_step % 2 or len(harness.in_flight) > overlap):
                    harness.commit()
                elif harness.has_work:
                    harness.launch()
            done = seqs[victim].status == Status.FINISHED
            harness.abort(seqs[victim])
            harness.abort(seqs[victim])
            harness.finish()
            moment += 1
        assert moment > 6

    def test_aborts_without_end(self, overlap: bool) -> None:
        """C10: two hundred mixed rounds on one pool leave nothing behind, and a request of nine blocks still runs."""
        rng = random.Random(1)
        harness = self.harness(num_blocks=10, max_num_batched_tokens=32, overlap=overlap)
        for _ in range(200):
            seqs = [harness.add(str(i), [7] * 32 + [i] * rng.randint(1, 68), 40) for i in range(4)]
            for seq in rng.sample(seqs, 3):
                for _ in range(rng.randint(0, 3)):
                    harness.step()
                harness.abort(seq)
            for seq in seqs:
                harness.abort(seq)
            while harness.in_flight:
                harness.commit()
            assert harness.blocks.num_free == 10
            harness.sequences.clear()
        harness.add("last", [1] * 140, 5)
        harness.finish()

    def test_nobody_starves(self, overlap: bool) -> None:
        """A long prompt ends although a short one arrives at every step, and so do those that arrived before it."""
        harness = self.harness(num_blocks=24, block_size=4, max_num_batched_tokens=8, max_num_seqs=4, overlap=overlap)
        first = [harness.add(f"first{i}", [i], 5) for i in range(2)]
        first.append(harness.add("long", list(range(60)), 5))
        for i in range(300):
            harness.add(f"short{i}", [i, i, i], 2)
            harness.step()
            if all(seq.status == Status.FINISHED for seq in first):
                break
        assert all(seq.status == Status.FINISHED for seq in first), "starved"
        for seq in harness.sequences:
            harness.abort(seq)
        harness.finish()

    def test_is_deterministic(self, overlap: bool) -> None:
        traces = []
        for _ in range(2):
            harness = self.harness(num_blocks=14, block_size=4, max_num_batched_tokens=16, overlap=overlap)
            for i, prompt in enumerate(prompts(random.Random(2), 20, 1, 30)):
                harness.add(str(i), prompt, i % 5 + 1, priority=i % 3)
            harness.finish()
            traces.append(harness.trace)
        assert traces[0] == traces[1]

    def test_three_letter_prompts(self, overlap: bool) -> None:
        """C13 (d): two hundred random prompts over three tokens through a pool of six blocks, each equal to solo."""
        rng = random.Random(3)
        harness = self.harness(num_blocks=6, block_size=4, max_num_batched_tokens=16, vocab_size=3, overlap=overlap)
        for i, prompt in enumerate(prompts(rng, 200, 1, 18, vocab_size=3)):
            harness.add(str(i), prompt, rng.randint(1, 6), stop_ids=[0] if i % 4 == 0 else [])
            harness.step()
        harness.finish()
        assert harness.blocks.prefix_hits > 0 and harness.blocks.cache_evictions > 0

    def test_state_machine(self) -> None:
        """Any order of add, launch, commit and abort over random pools and budgets, then everybody is served."""
        run_state_machine_as_test(
            functools.partial(_Machine, self.harness),  # type: ignore[arg-type]  # any callable that makes one will do
            settings=settings(
                max_examples=self.num_examples,
                stateful_step_count=25,
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )


class _Machine(RuleBasedStateMachine):
    def __init__(self, make_harness: Any) -> None:
        super().__init__()
        self.make_harness = make_harness
        self.num_added = 0

    @initialize(
        block_size=st.integers(1, 4),
        num_blocks=st.integers(1, 10),
        budget=st.integers(1, 12),
        max_num_seqs=st.integers(1, 5),
        caching=st.booleans(),
        overlap=st.booleans(),
    )
    def start(
        self, block_size: int, num_blocks: int, budget: int, max_num_seqs: int, caching: bool, overlap: bool
    ) -> None:
        self.harness: Harness = self.make_harness(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            vocab_size=3,
            caching=caching,
            overlap=overlap,
        )

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=20), max_tokens=st.integers(1, 8), stops=st.booleans()
    )
    def add(self, prompt: list[int], max_tokens: int, stops: bool) -> None:
        self.num_added += 1
        longest = self.harness.blocks.max_num_tokens - 1
        self.harness.add(str(self.num_added), prompt[:longest], max_tokens, stop_ids=[0] if stops else [])

    @precondition(lambda self: self.harness.sequences)
    @rule(which=st.integers(0, 30), more=st.lists(st.integers(0, 2), max_size=4))
    def continue_conversation(self, which: int, more: list[int]) -> None:
        earlier = self.harness.sequences[which % len(self.harness.sequences)]
        self.add(earlier.token_ids + more, 4, False)

    @precondition(lambda self: self.harness.has_work and len(self.harness.in_flight) <= self.harness.overlap)
    @rule()
    def launch(self) -> None:
        self.harness.launch()

    @precondition(lambda self: self.harness.in_flight)
    @rule()
    def commit(self) -> None:
        self.harness.commit()

    @precondition(lambda self: self.harness.has_work)
    @rule(turns=st.integers(1, 10))
    def run(self, turns: int) -> None:
        for _ in range(turns):
            if self.harness.has_work:
                self.harness.step()

    @precondition(lambda self: self.harness.sequences)
    @rule(which=st.integers(0, 30))
    def abort(self, which: int) -> None:
        self.harness.abort(self.harness.sequences[which % len(self.harness.sequences)])

    def teardown(self) -> None:
        if self.num_added:
            self.harness.finish()
