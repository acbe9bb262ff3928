"""Host time of a decode step, without a model: schedule + batch building + commit, per sequence and step.

    python tests/benchmarks/bench_host.py

A fake model answers at once, so what is left is what the host does between two forwards; for streams also what it
takes to tell the server. Printed, not asserted: the target is 8 µs per sequence at 256 running sequences, whatever the
context length.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from nanoserve import SamplingParams
from nanoserve.config import PluginChoice
from nanoserve.contracts.scheduling import Schedule, SchedulerLimits
from nanoserve.engine.batch import BatchBuilder, RowState
from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.engine import Engine
from nanoserve.engine.runner import SampledTokens
from nanoserve.engine.sampler import Sampler
from nanoserve.registry import Registry
from nanoserve.server.messages import encode

VOCAB, BLOCK_SIZE = 151_936, 16


@dataclass
class FakeStep:
    sampled: list
    chunks: list

    def wait(self) -> SampledTokens:
        return SampledTokens([7] * len(self.sampled))


class FakeRunner:
    """Builds the batch and the sampling plan as the real runner does, and answers token 7 for everybody."""

    def __init__(self, blocks: BlockManager, max_model_len: int) -> None:
        device = torch.device("cpu")
        self.builder = BatchBuilder(blocks, RowState(512, -(-max_model_len // BLOCK_SIZE), device), device)
        self.sampler = Sampler(VOCAB, device)

    def launch(self, schedule: Schedule) -> FakeStep:
        for seq in self.builder.blocks.take_new_rows():
            self.sampler.set_row(seq.table_row, seq.params, seq.seed, seq)
        batch = self.builder.build(schedule)
        self.sampler.prepare(batch.sampled_rows_cpu, batch.sample_positions_cpu, batch.sampled)
        return FakeStep(batch.sampled, batch.chunks)

    def synchronize(self) -> None: ...

    def close(self) -> None: ...


def microseconds_per_sequence(scheduler: str, num_seqs: int, context: int, stream: bool, steps: int = 60) -> float:
    """Median over ``steps`` decode steps of ``num_seqs`` running sequences with ``context`` tokens each."""
    max_model_len = context + steps + 64
    blocks = BlockManager(num_seqs * (max_model_len // BLOCK_SIZE + 1), BLOCK_SIZE)
    registry = Registry.discover()
    choice = PluginChoice(scheduler)
    spec = registry.get("scheduler", choice.name)
    limits = SchedulerLimits(num_seqs, num_seqs * max_model_len, max_model_len)
    queue = spec.factory(registry.make_options("scheduler", spec, choice.options), limits, blocks)
    engine = Engine(FakeRunner(blocks, max_model_len), queue, blocks, vocab_size=VOCAB, max_model_len=max_model_len)
    params = SamplingParams(temperature=0.6, seed=1, max_tokens=steps + 32, ignore_eos=True)
    for i in range(num_seqs):
        engine.add_request(str(i), [i % 1000] * context, params, stream=stream)
    while len(queue.running) < num_seqs:
        engine.step()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.advance()
        encode(engine.report_columns())
        times.append(time.perf_counter() - start)
    return statistics.median(times) / num_seqs * 1e6


def main() -> None:
    print(f"{'µs per sequence and step':>49}")
    print(f"{'scheduler':14} {'running':>8} {'context':>8} {'whole':>8} {'streams':>8}")
    for scheduler in ("decode_first", "prefill_first"):
        for num_seqs, context in ((256, 128), (256, 1024), (256, 4096), (32, 1024)):
            costs = [microseconds_per_sequence(scheduler, num_seqs, context, stream) for stream in (False, True)]
            print(f"{scheduler:14} {num_seqs:8} {context:8} {costs[0]:8.2f} {costs[1]:8.2f}")


if __name__ == "__main__":
    main()
