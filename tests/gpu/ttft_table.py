"""TTFT and prefill tok/s of prompt batches: ``auto`` beside every single prefill backend, in one process and in turn.

    python tests/gpu/ttft_table.py [model] [rounds]     # qwen3_0_6b with random weights, 15

TTFT is the wall time of a call that generates one token per prompt, from random ids to the last of the tokens: median
of the rounds, each of which asks every engine once, in a new order. Prints Markdown.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # noqa: E402

from nanoserve import LLM, SamplingParams  # noqa: E402
from nanoserve.contracts.errors import PluginError  # noqa: E402

BACKENDS = ("auto", "hopper_flash", "triton_flash", "triton_varlen", "sdpa")
PROMPTS = ((8, 32), (8, 128), (8, 256), (1, 1024))
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def engines(model: str) -> dict[str, LLM]:
    found = {}
    for name in BACKENDS:
        try:
            found[name] = LLM(model, load_format="dummy", attention=name, num_kv_blocks=1024, max_num_seqs=8)
        except PluginError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    return found


def measure(llms: dict[str, LLM], rounds: int) -> dict[tuple[int, int], dict[str, float]]:
    """Milliseconds per prompts and backend."""
    rng, table = random.Random(0), {}
    top = min(10000, next(iter(llms.values())).engine.vocab_size - 1)
    for count, length in PROMPTS:
        times: dict[str, list[float]] = {name: [] for name in llms}
        for round_ in range(-2, rounds):
            for name in rng.sample(list(llms), len(llms)):
                prompts = [[rng.randint(0, top) for _ in range(length)] for _ in range(count)]
                start = time.perf_counter()
                llms[name].generate(prompts, ONE)
                if round_ >= 0:  # before, kernels compile and graphs are captured
                    times[name].append(1e3 * (time.perf_counter() - start))
        table[count, length] = {name: statistics.median(of_one) for name, of_one in times.items()}
    return table


def main(model: str = "qwen3_0_6b", rounds: str = "15") -> None:
    llms = engines(model)
    others = [name for name in llms if name != "auto"]
    table = measure(llms, int(rounds))
    print(f"| prompts | {' | '.join(llms)} | best | auto is at |\n|{'---|' * (len(llms) + 3)}")
    for (count, length), ms in table.items():
        cells = [f"{t:.2f} ms, {count * length / t * 1e3:,.0f} tok/s" for t in ms.values()]
        best = min(others, key=ms.__getitem__)
        print(f"| {count} × {length} | {' | '.join(cells)} | {best} | {ms[best] / ms['auto']:.1%} of it |")
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"\n{where}, torch {torch.__version__}, {model}, medians of {rounds}")
    for llm in llms.values():
        llm.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
