"""Engines on tiny checkpoints, audited after every step, and what to ask of them."""

from __future__ import annotations

import random

from nanoserve import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def make(folder, **options) -> LLM:
    return LLM(model=str(folder), dtype="float32", device="cpu", **{"block_size": 16, "debug": True} | options)


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(512) for _ in range(length)]
