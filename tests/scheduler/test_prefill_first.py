from nanoserve.contracts.scheduling import SchedulerLimits
from nanoserve.testing import SchedulerSuite


class TestPrefillFirst(SchedulerSuite):
    scheduler = "prefill_first"


def names(seqs):
    return [seq.request_id for seq in seqs]


def test_a_step_is_all_prefill_or_all_decode():
    harness = TestPrefillFirst.harness(num_blocks=40, block_size=4, max_num_batched_tokens=8)
    harness.add("a", [1] * 4, 4)
    harness.step()
    harness.add("long", [2] * 20, 2)
    harness.add("late", [3] * 2, 2)
    rounds = [(names(s.decode), [n for _, n in s.prefill]) for s in (harness.step() for _ in range(4))]
    assert rounds == [([], [8]), ([], [8]), ([], [4, 2]), (["a", "long", "late"], [])]
    harness.finish()


def test_a_prompt_is_admitted_when_all_of_it_fits():
    """Two blocks are free and three are needed: decoding goes on until they are there, and nobody overtakes."""
    harness = TestPrefillFirst.harness(num_blocks=4, block_size=4)
    first = harness.add("first", [1] * 7, 2)
    harness.step()
    harness.add("large", [2] * 9, 1)
    harness.add("small", [3], 1)
    assert names(harness.step().decode) == ["first"]
    assert first.num_output_tokens == 2
    assert names(seq for seq, _ in harness.step().prefill) == ["large", "small"]
    harness.finish()


def test_decoding_favours_the_front_and_preempts_from_the_tail():
    harness = TestPrefillFirst.harness(num_blocks=5, block_size=4)
    for i in range(3):
        harness.add(str(i), [i] * 4, 4)
    harness.step()
    rounds = [names(harness.step().decode) for _ in range(3)]
    assert rounds == [["0", "1"]] * 3
    assert harness.scheduler.num_preemptions == 1
    harness.finish()


def test_decoding_goes_on_with_those_it_has_begun_with():
    harness = TestPrefillFirst.harness(num_blocks=8)
    for i in range(3):
        harness.add(str(i), [i], 3)
    harness.step()
    harness.scheduler.limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=2, max_model_len=256)
    assert [names(harness.step().decode) for _ in range(3)] == [["0", "1"], ["0", "1"], ["2"]]
    harness.finish()
