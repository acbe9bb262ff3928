from collections import deque

import pytest

from nanoserve.contracts.errors import ConfigError
from nanoserve.contracts.scheduling import SchedulerLimits, Status
from nanoserve.engine.sequence import Sequence
from nanoserve.testing import SchedulerSuite
from nanoserve_plugins.scheduler.decode_first import DecodeFirstOptions


class TestDecodeFirst(SchedulerSuite):
    scheduler = "decode_first"


class TestOnePartialPrefill(SchedulerSuite):
    """The seed's mode, in which a long prompt blocks those behind it."""

    scheduler = "decode_first"
    options = {"max_partial_prefills": 1}
    num_examples = 100


MIXED = [1, 2, 4, 6, 8, 15]


def simulate(prompt_lens, *, budget, num_blocks):
    """Block size 4, four tokens per request, all queued at once, one unfinished prefill per round."""
    harness = TestOnePartialPrefill.harness(
        num_blocks=num_blocks, block_size=4, max_num_batched_tokens=budget, max_num_seqs=len(prompt_lens)
    )
    for i, n in enumerate(prompt_lens):
        harness.add(str(i), [100 * i + j for j in range(n)], 4)
    harness.finish()
    return harness


@pytest.mark.parametrize(
    ("prompt_lens", "budget", "num_blocks", "rounds", "preemptions", "peak"),
    [
        pytest.param(MIXED, 8, 24, 10, 0, 9, id="mixed, ample cache"),
        pytest.param(MIXED, 6, 7, 12, 0, 7, id="mixed, cache pressure"),
        pytest.param([1] * 12, 4, 12, 12, 0, 4, id="decode fairness"),
        pytest.param([3] * 8, 12, 4, 12, 4, 4, id="decode preemption pressure"),
    ],
)
def test_the_seeds_table(prompt_lens, budget, num_blocks, rounds, preemptions, peak):
    """Spec C. No block leaks, or ``finish`` would have said so; under pressure the peak is the whole pool."""
    harness = simulate(prompt_lens, budget=budget, num_blocks=num_blocks)
    assert (harness.num_steps, harness.scheduler.num_preemptions, harness.peak_blocks) == (rounds, preemptions, peak)


def test_blocks_are_allocated_as_they_are_needed():
    """Spec C: 16 blocks when every request reserves all it may need up front, 9 at the peak when it does not."""
    up_front = sum(-(-(n + 3) // 4) for n in MIXED)  # the KV of the last token is never stored
    assert (up_front, simulate(MIXED, budget=8, num_blocks=24).peak_blocks) == (16, 9)


def running(num_seqs, num_blocks, *, prompt_len=4, overlap=False):
    """Sequences that have been prefilled together and are about to decode, one full block each."""
    harness = TestDecodeFirst.harness(num_blocks=num_blocks, block_size=4, overlap=overlap)
    seqs = [harness.add(str(i), [i] * prompt_len, 8) for i in range(num_seqs)]
    harness.step()
    return harness, seqs


def names(seqs):
    return [seq.request_id for seq in seqs]


def test_victims_come_from_the_tail_and_wait_at_the_head():
    """Three full blocks, one free: the first takes it, the second takes the third's, nobody picked is a victim."""
    harness, _ = running(3, 4)
    harness.add("new", [9] * 4, 1)
    schedule = harness.step()
    assert names(schedule.decode) == ["0", "1"] and not schedule.prefill
    assert names(harness.scheduler.waiting) == ["2", "new"]
    assert names(harness.scheduler.running) == ["0", "1"]
    harness.finish()


def test_the_last_candidate_gives_way_itself():
    harness, _ = running(2, 3)
    assert names(harness.step().decode) == ["0"]
    assert names(harness.scheduler.waiting) == ["1"] and harness.scheduler.num_preemptions == 1
    harness.finish()


def test_half_done_prefills_give_way_before_the_last_candidate():
    harness, _ = running(1, 4)
    long = harness.add("long", list(range(16)), 1)
    assert harness.step().prefill == [(long, 8)]  # the sequence that decodes has taken its second block
    for _ in range(4):
        schedule = harness.step()
    assert names(schedule.decode) == ["0"] and long.num_preemptions == 1
    harness.finish()


def test_a_preempted_sequence_recovers_from_its_cached_prefix():
    """Of its two blocks the other sequence has overwritten one."""
    harness, seqs = running(2, 5, prompt_len=8)
    harness.step()
    assert seqs[1].status == Status.WAITING and not seqs[1].block_table
    while not seqs[1].block_table:
        schedule = harness.step()
    assert schedule.prefill == [(seqs[1], 5)] and seqs[1].num_computed_tokens == 9
    harness.finish()


def test_a_preempted_sequence_comes_back_when_all_of_it_fits():
    """Else it would take what is left of the blocks that it has just given away, and lose them at the next crossing."""
    harness = TestDecodeFirst.harness(num_blocks=3, block_size=4, caching=False)
    first, victim = harness.add("first", [1] * 4, 8), harness.add("victim", [2] * 8, 4)
    harness.step()
    while first.status != Status.FINISHED:
        assert not harness.step().prefill
    assert harness.step().prefill == [(victim, 9)] and victim.num_preemptions == 1
    harness.finish()


def test_who_was_not_picked_comes_first_in_the_next_round():
    harness, _ = running(6, 20)
    harness.scheduler.limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=4, max_model_len=256)
    rounds = [names(harness.step().decode) for _ in range(3)]
    assert rounds == [["0", "1", "2", "3"], ["4", "5", "0", "1"], ["2", "3", "4", "5"]]
    harness.finish()


@pytest.mark.parametrize(("tail", "preempted"), [([8], ["3"]), ([4, 4], ["3", "4"])], ids=["two blocks", "one each"])
def test_no_more_victims_in_flight_than_needed(tail, preempted):
    """Two candidates need a block each. They sit one round out, until the victims' step has been committed."""
    harness = TestDecodeFirst.harness(num_blocks=5, block_size=4, overlap=True)
    for i, n in enumerate([4, 4, 3, *tail]):
        harness.add(str(i), [i] * n, 8)
    harness.step()
    assert names(harness.step().decode) == ["2"]
    assert names(harness.scheduler.waiting) == preempted
    assert names(harness.step().decode) == ["0", "1"]
    harness.finish()


def test_a_half_done_prefill_goes_on_behind_a_victim_in_flight():
    harness = TestDecodeFirst.harness(num_blocks=3, block_size=4, max_num_batched_tokens=10, overlap=True)
    for name, n in (("0", 4), ("victim", 4), ("partial", 8)):
        harness.add(name, [ord(name[0])] * n, 1 if name == "partial" else 8)
    assert [(seq.request_id, n) for seq, n in harness.step().prefill] == [("0", 4), ("victim", 4), ("partial", 2)]
    schedule = harness.step()
    assert names(harness.scheduler.waiting) == ["victim", "partial"] and not schedule.decode
    assert [(seq.request_id, n) for seq, n in schedule.prefill] == [("partial", 2)]
    harness.finish()


def test_blocks_of_ending_sequences_are_waited_for():
    """The other sequence ends at the commit to come, so nobody is preempted for the block that it gives back."""
    harness = TestDecodeFirst.harness(num_blocks=2, block_size=4, overlap=True)
    harness.add("goes on", [1] * 4, 4)
    harness.add("ends", [2] * 4, 1)
    harness.step()
    assert not harness.step()
    assert names(harness.step().decode) == ["goes on"]
    harness.finish()
    assert harness.scheduler.num_preemptions == 0


def test_a_slot_is_reused_as_soon_as_its_owner_is_sure_to_end():
    """With a step in flight the end is not committed yet, but the next request starts at once."""
    harness = TestDecodeFirst.harness(num_blocks=8, max_num_seqs=1, overlap=True)
    for i in range(3):
        harness.add(str(i), [i] * 4, 1)
    assert [names(seq for seq, _ in harness.step().prefill) for _ in range(3)] == [["0"], ["1"], ["2"]]
    harness.finish()


def long_and_short(suite, **options):
    harness = suite.harness(num_blocks=60, block_size=4, max_num_batched_tokens=32, **options)
    for name, n in (("long", 100), ("a", 5), ("b", 5), ("c", 5)):
        harness.add(name, [ord(name[0])] * n, 2)
    return harness


def test_a_long_prompt_does_not_block_short_ones():
    """It leaves up to half of the budget to them, and takes what they do not need."""
    harness = long_and_short(TestDecodeFirst)
    assert [(seq.request_id, n) for seq, n in harness.step().prefill] == [("long", 17), ("a", 5), ("b", 5), ("c", 5)]
    assert [(seq.request_id, n) for seq, n in harness.step().prefill] == [("long", 29)]
    harness.finish()


def test_in_the_seeds_mode_it_does():
    harness = long_and_short(TestOnePartialPrefill)
    rounds = [[(seq.request_id, n) for seq, n in harness.step().prefill] for _ in range(4)]
    assert rounds == [[("long", 32)], [("long", 32)], [("long", 32)], [("long", 4), ("a", 5), ("b", 5), ("c", 5)]]
    harness.finish()


def test_long_prompts_share_a_round_up_to_the_limit():
    harness = TestDecodeFirst.harness(num_blocks=200, block_size=4, max_num_batched_tokens=32)
    for i in range(6):
        harness.add(str(i), [i] * 100, 2)
    assert [(seq.request_id, n) for seq, n in harness.step().prefill] == [("0", 16), ("1", 8), ("2", 4), ("3", 4)]
    assert names(harness.scheduler.waiting) == ["0", "1", "2", "3", "4", "5"]
    harness.finish()


def test_a_long_queue_is_not_walked():
    """With every block taken, each of five rounds looks at the head of the queue and no further."""

    class Queue(deque):
        looked_at = 0

        def popleft(self):
            self.looked_at += 1
            return super().popleft()

    harness = TestDecodeFirst.harness(num_blocks=2)
    harness.scheduler.waiting = queue = Queue()
    for i in range(1000):
        harness.scheduler.add(Sequence(str(i), [i], None, max_num_tokens=9))
    for _ in range(5):
        assert len(harness.scheduler.schedule().decode) in (0, 2)
    assert queue.looked_at == 2 + 5


def test_a_long_prompt_keeps_the_budget_that_nobody_can_use():
    """Those behind it find no free slot."""
    harness = long_and_short(TestDecodeFirst, max_num_seqs=1)
    assert [(seq.request_id, n) for seq, n in harness.step().prefill] == [("long", 32)]
    harness.finish()


def test_half_done_prefills_that_hold_every_block_do_not_wait_for_each_other():
    harness = TestDecodeFirst.harness(num_blocks=8, block_size=4, max_num_batched_tokens=16)
    seqs = [harness.add(str(i), [i] * 30, 1) for i in range(2)]
    harness.run()
    assert [seq.num_preemptions for seq in seqs] == [0, 1]
    harness.finish()


def test_the_option_is_checked():
    with pytest.raises(ConfigError, match="scheduler.max_partial_prefills"):
        DecodeFirstOptions(max_partial_prefills=0)
