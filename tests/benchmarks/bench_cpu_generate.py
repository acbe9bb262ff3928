"""Output tokens per second on this CPU beside `transformers`: same process, embedded checkpoint, fp32 on both sides.

    python tests/benchmarks/bench_cpu_generate.py

16 prompts × 64 greedy tokens; the two engines run in turn, medians of five.
"""

from __future__ import annotations

import statistics
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanoserve import LLM, SamplingParams
from nanoserve.models.loader import resolve_model

PROMPTS = [f"def {name}(path, {arg}):\n    " for name in ("read_json", "copy", "walk", "open_file") for arg in "abcd"]
TOKENS, ROUNDS = 64, 5


def main() -> None:
    folder = str(resolve_model("pkg://nanoserve.assets.tiny"))
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)

    with LLM(folder, dtype="float32", device="cpu", enable_prefix_caching=False) as llm, torch.inference_mode():

        def ours() -> None:
            outputs = llm.generate(PROMPTS, params)
            if [len(o.token_ids) for o in outputs] != [TOKENS] * len(PROMPTS):
                raise SystemExit("nanoserve returned the wrong number of tokens")

        def theirs() -> None:
            out = peer.generate(**inputs, do_sample=False, max_new_tokens=TOKENS, min_new_tokens=TOKENS)
            if out.shape[1] != inputs["input_ids"].shape[1] + TOKENS:
                raise SystemExit("transformers returned the wrong number of tokens")

        times: dict[str, list[float]] = {"nanoserve": [], "transformers": []}
        for round_ in range(ROUNDS + 1):
            for name, run in (("nanoserve", ours), ("transformers", theirs)):
                start = time.perf_counter()
                run()
                if round_:  # the first round warms up
                    times[name].append(time.perf_counter() - start)
    rate = {name: len(PROMPTS) * TOKENS / statistics.median(values) for name, values in times.items()}
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {len(PROMPTS)} prompts x {TOKENS} tokens, fp32"
    )
    for name, value in rate.items():
        print(f"{name:14} {value:8.0f} output tokens/s")
    print(f"ratio          {rate['nanoserve'] / rate['transformers']:8.2f}")


if __name__ == "__main__":
    main()
