"""Shapes at which attention kernels are timed: their names, the lengths behind them, and what they cost at least."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass

from nanoserve.contracts.capabilities import Phase
from nanoserve.contracts.errors import ConfigError

#: The kernel table: what a GPU is judged at, and what a CPU can show.
TABLE: dict[Phase, tuple[str, ...]] = {
    "prefill": (
        *("8x32", "8x128", "8x256", "8x512", "8x1024", "16x1024", "4x4096", "1x16384"),
        *("ragged64", "4x512+7500"),
    ),
    "decode": (
        *("1x1024", "8x511", "1x4096", "1x32768", "32x1024", "32x4096", "256x1024", "64x8192"),
        "ragged64",
    ),
}
CPU_TABLE: dict[Phase, tuple[str, ...]] = {
    "prefill": ("2x16", "1x64", "ragged3x40", "2x8+24"),
    "decode": ("1x64", "4x33", "ragged3x40"),
}


#: Sequences of a shape: as many as an engine may have running (``engine.max_num_seqs``).
MAX_BATCH = 2**16


@dataclass(frozen=True)
class KernelShape:
    """query_lens, context_lens: tokens per sequence; the queries are the last of each context, one in decode."""

    name: str
    phase: Phase
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]

    @classmethod
    def parse(cls, name: str, phase: Phase) -> KernelShape:
        """``BxN``: B sequences of N tokens. ``BxN+P`` (prefill): N tokens each after P cached ones. ``raggedBxN``: B
        sequences of 16 … N tokens, N being 2048 if left out. Raises ConfigError."""
        if found := re.fullmatch(r"(\d+)x(\d+)(?:\+(\d+))?", name):
            batch, length, prefix = (int(group or 0) for group in found.groups())
            lens = (length,) * min(batch, MAX_BATCH)
        elif found := re.fullmatch(r"ragged(\d+)(?:x(\d+))?", name):
            batch, longest, prefix = int(found[1]), int(found[2] or 2048), 0
            rng = random.Random(batch)
            lens = tuple(rng.randint(16, max(16, longest)) for _ in range(min(batch, MAX_BATCH)))
        else:
            raise ConfigError(f"shape {name!r}: write BxN, BxN+P (N tokens after P cached ones) or raggedBxN")
        if batch > MAX_BATCH:
            raise ConfigError(f"shape {name!r}: an engine has at most {MAX_BATCH} sequences")
        if not lens or min(lens) < 1:
            raise ConfigError(f"shape {name!r}: it has no tokens")
        if phase == "prefill":
            return cls(name, phase, lens, tuple(n + prefix for n in lens))
        if prefix:
            raise ConfigError(f"shape {name!r}: decode has no prefix; write BxN for contexts of N tokens")
        return cls(name, phase, (1,) * len(lens), lens)

    @property
    def batch(self) -> int:
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def has_prefix(self) -> bool:
        return self.query_lens != self.context_lens

    @property
    def equal(self) -> bool:
        """Whether all sequences are alike, so that they form a dense batch."""
        return len({*zip(self.query_lens, self.context_lens, strict=True)}) == 1

    def flops(self, num_q_heads: int, head_dim: int) -> float:
        """Of the two products, over the pairs that the causal mask leaves."""
        lens = zip(self.query_lens, self.context_lens, strict=True)
        return 4 * num_q_heads * head_dim * sum(q * (k - q) + q * (q + 1) / 2 for q, k in lens)


def parse_all(names: Iterable[str], phase: Phase) -> list[KernelShape]:
    return [KernelShape.parse(name, phase) for name in names]
