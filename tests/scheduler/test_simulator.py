"""The simulator, and the harness of the suite: what they refuse, and which faults of a scheduler they see."""

import pytest

from nanoserve.contracts.errors import CapacityError, NanoserveError, PluginError
from nanoserve.contracts.scheduling import Schedule, SchedulerLimits
from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.simulator import Simulator
from nanoserve.testing.scheduler import Harness
from nanoserve_plugins.scheduler.decode_first import DecodeFirst, DecodeFirstOptions


def decode_first(limits, blocks):
    return DecodeFirst(DecodeFirstOptions(), limits, blocks)


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "longest"), [(8, 256, 128), (100, 64, 63)], ids=["C01: pool", "C03: context"]
)
def test_a_prompt_that_can_never_run_is_refused(num_blocks, max_model_len, longest):
    """The others are not harmed, and the longest that can run is served and cropped."""
    blocks = BlockManager(num_blocks, 16)
    simulator = Simulator(decode_first, SchedulerLimits(8, 64, max_model_len), blocks)
    for n in (0, longest + 1, 1000):
        with pytest.raises(CapacityError, match=f"1 to {longest}"):
            simulator.add("refused", [1] * n, 4)
    seqs = [simulator.add("longest", [1] * longest, 4), simulator.add("short", [2] * 10, 4)]
    simulator.run(max_steps=500)
    assert [seq.num_output_tokens for seq in seqs] == [1, 4]


@pytest.mark.parametrize("overlap", [False, True])
def test_overlap_commits_one_step_late(overlap):
    simulator = Simulator(decode_first, SchedulerLimits(8, 64, 256), BlockManager(8, 16), overlap=overlap)
    seq = simulator.add("a", [1], 2)
    known = []
    while simulator.has_work:
        simulator.step()
        known.append(seq.num_output_tokens)
    assert known == ([0, 1, 2] if overlap else [1, 2])
    assert simulator.num_steps == 2


class Lazy(DecodeFirst):
    def schedule(self):
        return Schedule()


class Greedy(DecodeFirst):
    """Runs more sequences than it may."""

    def schedule(self):
        self.limits = SchedulerLimits(100, 100, 100)
        return super().schedule()


class Repetitive(DecodeFirst):
    def schedule(self):
        schedule = super().schedule()
        schedule.decode *= 2
        return schedule


class Forgetful(DecodeFirst):
    """Grants tokens and does not say so."""

    def schedule(self):
        schedule = super().schedule()
        schedule.prefill = schedule.prefill[:1]
        return schedule


class Leaky(DecodeFirst):
    """Drops what it preempts."""

    def preempt(self, seq):
        super().preempt(seq)
        self.waiting.popleft()


class Unfair(DecodeFirst):
    """Prefers whoever came last."""

    def add(self, seq):
        self.waiting.appendleft(seq)


@pytest.mark.parametrize("scheduler", [Lazy, Greedy, Repetitive, Forgetful, Leaky, Unfair])
def test_faults_are_seen(scheduler):
    def run(scheduler):
        limits = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=100)
        blocks = BlockManager(3, 4, enable_prefix_caching=False)
        harness = Harness(
            lambda limits, blocks: scheduler(DecodeFirstOptions(), limits, blocks), limits, blocks, 1000, overlap=False
        )
        first = [harness.add(str(i), [i] * 4, 4) for i in range(3)]
        for i in range(50):
            harness.add(f"late{i}", [i], 3)
            harness.step()
        assert all(seq.num_output_tokens == 4 for seq in first), "starved"
        harness.finish()

    run(DecodeFirst)
    with pytest.raises((AssertionError, PluginError)):
        run(scheduler)


def test_a_run_that_does_not_end_is_reported():
    simulator = Simulator(decode_first, SchedulerLimits(8, 64, 256), BlockManager(8, 16))
    simulator.add("a", [1], 50)
    with pytest.raises(NanoserveError, match="not done after 10"):
        simulator.run(max_steps=10)
