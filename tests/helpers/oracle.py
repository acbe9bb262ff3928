"""Greedy decoding, judged by `transformers` in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


@torch.no_grad()
def is_greedy(model: Any, prompt: Sequence[int], output: Sequence[int]) -> bool:
    """True if ``output`` is what greedy decoding continues ``prompt`` with.

    One teacher-forced pass decides it: by induction every token is the argmax after the tokens before it.
    """
    ids = torch.tensor([[*prompt, *output]])
    predicted = model(ids).logits[0].argmax(-1).tolist()
    return predicted[len(prompt) - 1 : -1] == list(output)


@torch.no_grad()
def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """The first ``count`` greedy tokens, EOS ignored."""
    tokens = list(prompt)
    out = model(torch.tensor([tokens]), use_cache=True)
    result = []
    for _ in range(count):
        token = int(out.logits[0, -1].argmax())
        result.append(token)
        out = model(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
    return result
