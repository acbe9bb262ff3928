"""What a model thinks of a text: logits after every token, and the measures made from them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from nanoserve.contracts.scheduling import Schedule
from nanoserve.engine.sequence import Sequence
from nanoserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanoserve.engine.block_manager import BlockManager
    from nanoserve.engine.engine import Engine
    from nanoserve.engine.runner import ModelRunner


def prompt_logits(engine: Engine, token_ids: list[int], chunk: int) -> Iterator[torch.Tensor]:
    """Logits ``[n, vocab_size]`` fp32 after each of ``token_ids``, ``chunk`` tokens at a time, through the KV cache.

    Chunks after the first read the keys and values of those before them from the cache, as a served request does. The
    engine must be idle and without prefix cache: a hit would leave out the logits of the tokens found.
    """
    runner: ModelRunner = engine.runner  # type: ignore[assignment]
    blocks: BlockManager = engine.blocks
    if engine.has_work or blocks.enable_prefix_caching:
        raise ValueError("scoring needs an idle engine with engine.enable_prefix_caching=false")
    if not 0 < len(token_ids) <= engine.max_model_len:
        raise ValueError(f"{len(token_ids)} tokens to score; it must be 1 … max_model_len={engine.max_model_len}")
    seq = Sequence("score", token_ids, SamplingParams(), max_num_tokens=len(token_ids) + 1)
    try:
        while seq.num_computed_tokens < len(token_ids):
            n = blocks.grant(seq, chunk)
            if not n:
                raise ValueError(f"the KV pool of {blocks.max_num_tokens} tokens cannot hold {len(token_ids)}")
            try:
                yield runner.prompt_logits(Schedule(prefill=[(seq, n)]))
            finally:
                blocks.commit(seq, [])
    finally:
        blocks.release(seq)


def score(engine: Engine, prompt_ids: list[int], target_ids: list[int], chunk: int) -> torch.Tensor:
    """Logits ``[len(target_ids), vocab_size]`` from which each target token would be drawn, all before it given.

    Of a prompt too long for the engine only the end is read.
    """
    token_ids = (prompt_ids + target_ids[:-1])[-(engine.capacity - 1) :]
    return torch.cat(list(prompt_logits(engine, token_ids, chunk)))[-len(target_ids) :]


class Window(NamedTuple):
    """Tokens ``start … end - 1`` are read; those after positions ``first … end - 1`` are scored."""

    start: int
    end: int
    first: int


def windows(num_tokens: int, window: int, stride: int) -> Iterator[Window]:
    """Sliding windows over a text: ``window`` tokens are read, the next begins ``stride`` tokens later.

    Every token but the text's first is scored exactly once, in the first window that reaches it: with at least
    ``window - stride + 1`` tokens of context, or all there are. stride = window is the cheap, pessimistic form.
    """
    start = scored = 0
    while scored < num_tokens - 1:
        end = min(start + window, num_tokens - 1)
        yield Window(start, end, scored)
        scored = end
        start += stride


class Scores(NamedTuple):
    """Per scored token, fp32 on the device. nll: −log p(target), nats. top1: the most likely token's id."""

    nll: torch.Tensor
    top1: torch.Tensor


def token_scores(logits: torch.Tensor, targets: torch.Tensor) -> Scores:
    """logits ``[n, vocab_size]`` fp32, targets int64 ``[n]``."""
    nll = -logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    return Scores(nll, logits.argmax(-1))


def kl_divergence(p_logits: torch.Tensor, q_logits: torch.Tensor) -> torch.Tensor:
    """KL(p ‖ q) per row of ``[n, vocab_size]`` logits, in nats, over the whole vocabulary.

    What is lost when q stands in for p (Kullback and Leibler 1951): zero only if they are the same distribution.
    """
    log_p, log_q = p_logits.log_softmax(-1), q_logits.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


@dataclass
class Perplexity:
    """Sums over scored tokens. num_bytes: UTF-8 bytes of the texts, first tokens included (they are not scored)."""

    nll: float = 0.0
    num_tokens: int = 0
    num_bytes: int = 0

    def add(self, nll: torch.Tensor) -> None:
        self.nll += nll.double().sum().item()
        self.num_tokens += len(nll)

    def figures(self) -> dict[str, float]:
        """Nats per token; perplexity per token and per byte (comparable between tokenizers); bits per byte."""
        per_token, per_byte = self.nll / self.num_tokens, self.nll / self.num_bytes
        return {
            "nll": per_token,
            "ppl": math.exp(per_token),
            "byte_ppl": math.exp(per_byte),
            "bits_per_byte": per_byte / math.log(2),
        }


@dataclass
class Divergence:
    """How far a second model strays from the first when both read the same text (teacher forcing), token by token."""

    delta_nll: list[torch.Tensor] = field(default_factory=list)
    kl: list[torch.Tensor] = field(default_factory=list)
    agree: int = 0

    def add(self, base: Scores, other: Scores, kl: torch.Tensor) -> None:
        self.delta_nll.append((other.nll - base.nll).cpu())
        self.kl.append(kl.cpu())
        self.agree += int((base.top1 == other.top1).sum())

    def figures(self) -> dict[str, float]:
        """delta_nll: mean, nats per token, with its standard error (as if tokens were independent).

        delta_ppl: relative rise of the perplexity per token. kl: mean KL(base ‖ other), and its 99th percentile.
        top1_agreement: share of tokens whose most likely candidate is the same.
        """
        delta, kl = torch.cat(self.delta_nll).double(), torch.cat(self.kl).double()
        mean = delta.mean().item()
        error = (delta.std() / math.sqrt(len(delta))).item() if len(delta) > 1 else math.nan
        return {
            "delta_nll": mean,
            "delta_nll_stderr": error,
            "delta_ppl": math.expm1(mean),
            "kl": kl.mean().item(),
            "kl_p99": percentile(kl, 0.99),
            "top1_agreement": self.agree / len(delta),
        }


def percentile(values: torch.Tensor, share: float) -> float:
    """The smallest of ``values`` that at least ``share`` of them do not exceed (nearest rank)."""
    return values.flatten().kthvalue(max(1, math.ceil(share * values.numel()))).values.item()


def first_divergence(a: list[int], b: list[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def greedy_agreement(pairs: list[tuple[list[int], list[int]]]) -> dict[str, float]:
    """Of greedy outputs, equally long: share of positions that agree, of outputs that agree throughout, and how many
    tokens agree before the first difference, on average.

    No quality metric: after one near-tie falls the other way both go on from different texts, so one harmless token
    costs all that follow. Perplexity and KL look at every token given the same past.
    """
    same = [sum(x == y for x, y in zip(a, b, strict=True)) / len(a) for a, b in pairs]
    first = [first_divergence(a, b) for a, b in pairs]
    count = len(pairs)
    return {
        "greedy_agreement": sum(same) / count,
        "greedy_identical": sum(a == b for a, b in pairs) / count,
        "first_divergence": sum(first) / count,
    }
