"""Small tasks that a small model of Python can do, made from held-out files. A seed draws the items.

*parses*: a greedy continuation of a function's first line is valid Python as far as it goes (the model card's rule).
*brackets*: which of ``)``, ``]`` and ``}`` comes next, judged by the probability of all tokens that begin with it;
the three are equally frequent, so chance is 1/3.
*cloze*: the next identifier, one that the context has already used, is what greedy decoding would write.
"""

from __future__ import annotations

import io
import keyword
import random
import re
import tokenize
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nanoserve.sampling_params import SamplingParams
from nanoserve.tasks.eval.scoring import score
from nanoserve.tasks.eval.texts import Document

if TYPE_CHECKING:
    from nanoserve.llm import LLM
    from nanoserve.tokenizer import Tokenizer

CLOSERS = {"(": ")", "[": "]", "{": "}"}
CONTEXT = 600  # characters of source before the gap
PARSE_TOKENS = 96  # the model card's


@dataclass(frozen=True)
class Gap:
    """Source text up to a gap, and what is in it."""

    prompt: str
    target: str


def bracket_gaps(documents: list[Document], count: int, seed: int) -> list[Gap]:
    """Equally many gaps of each closing bracket, the opening one in the prompt, the gap right after a word."""
    found: dict[str, list[Gap]] = {closer: [] for closer in CLOSERS.values()}
    for _, text in documents:
        opened: list[int] = []
        for token, start, _ in _tokens(text):
            if token in CLOSERS:
                opened.append(start)
            elif token in found and opened:
                begin = _line_start(text, start - CONTEXT)
                if begin <= opened.pop() and text[start - 1].isalnum():
                    found[token].append(Gap(text[begin:start], token))
    rng = random.Random(seed)
    each = min(count // len(found), *map(len, found.values()))
    return [gap for gaps in found.values() for gap in rng.sample(gaps, each)]


def cloze_gaps(documents: list[Document], count: int, seed: int) -> list[Gap]:
    """Identifiers of four letters or more after a blank or a dot, used before in the prompt.

    The blank or dot belongs to the target, because tokenizers join it to the word.
    """
    found = []
    for _, text in documents:
        for token, start, _ in _tokens(text):
            if len(token) < 4 or not token.isidentifier() or keyword.iskeyword(token) or start < 2:
                continue
            if text[start - 1] not in " ." or not (text[start - 2].isalnum() or text[start - 2] in "=:,"):
                continue
            prompt = text[_line_start(text, start - CONTEXT) : start - 1]
            if re.search(rf"\b{re.escape(token)}\b", prompt):
                found.append(Gap(prompt, text[start - 1] + token))
    return random.Random(seed).sample(found, min(count, len(found)))


def _tokens(text: str) -> list[tuple[str, int, int]]:
    """Python tokens outside strings and comments: (token, start, end) in characters of ``text``."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tokens = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text, newline="").readline):
            if token.type in (tokenize.OP, tokenize.NAME):
                (row, column), (end_row, end) = token.start, token.end
                tokens.append((token.string, starts[row - 1] + column, starts[end_row - 1] + end))
    except (tokenize.TokenError, SyntaxError):
        pass  # a file cut short is good up to there
    return tokens


def _line_start(text: str, at: int) -> int:
    """The beginning of the first whole line at or after ``at``."""
    return 0 if at <= 0 else text.find("\n", at) + 1


@dataclass(frozen=True)
class Result:
    right: int
    total: int

    @property
    def share(self) -> float:
        return self.right / self.total


def brackets(llm: LLM, gaps: list[Gap], chunk: int) -> Result:
    assert llm.tokenizer is not None
    masks: torch.Tensor | None = None  # [3, vocab_size]
    closers = list(CLOSERS.values())
    right = 0
    for gap in gaps:
        logits = score(llm.engine, llm.tokenizer.encode(gap.prompt), [0], chunk)[0]
        if masks is None:
            masks = _begins_with(llm.tokenizer, closers, len(logits)).to(logits.device)
        mass = logits.softmax(-1) @ masks.T.to(logits.dtype)
        right += closers[int(mass.argmax())] == gap.target
    return Result(right, len(gaps))


def _begins_with(tokenizer: Tokenizer, symbols: list[str], vocab_size: int) -> torch.Tensor:
    """bool ``[len(symbols), vocab_size]``: the tokens whose text begins with each symbol."""
    table = tokenizer.token_bytes(skip_special_tokens=True)
    texts = [table[i] if table is not None else tokenizer.decode([i]).encode() for i in range(vocab_size)]
    return torch.tensor([[text.startswith(symbol.encode()) for text in texts] for symbol in symbols])


def cloze(llm: LLM, gaps: list[Gap], chunk: int) -> Result:
    assert llm.tokenizer is not None
    right = 0
    for gap in gaps:
        target = llm.tokenizer.encode(gap.target)
        logits = score(llm.engine, llm.tokenizer.encode(gap.prompt), target, chunk)
        right += logits.argmax(-1).tolist() == target
    return Result(right, len(gaps))


def parse_prompts(count: int) -> list[str]:
    """The model card's prompts: signatures of held-out functions that occur nowhere in the training files."""
    from nanoserve.assets.tiny.train import heldout_signatures

    return heldout_signatures(None, count)


def parses(llm: LLM, prompts: list[str]) -> Result:
    from nanoserve.assets.tiny.train import parses

    outputs = llm.generate(list(prompts), SamplingParams(temperature=0.0, max_tokens=PARSE_TOKENS))
    texts = (p + o.text + ("\n" if o.finish_reason == "stop" else "") for p, o in zip(prompts, outputs, strict=True))
    return Result(sum(map(parses, texts)), len(prompts))
