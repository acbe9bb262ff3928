"""Where this process stands among the ranks of a tensor-parallel group, and what it keeps of a dimension."""

from __future__ import annotations

from dataclasses import dataclass

from nanoserve.contracts.errors import ConfigError


@dataclass(frozen=True)
class Split:
    """The part ``start … stop`` of a dimension of ``full`` elements that one rank keeps."""

    full: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def region(self) -> slice:
        return slice(self.start, self.stop)

    def times(self, factor: int) -> Split:
        """The same part when every element stands for ``factor`` rows (heads → head_dim rows each)."""
        return Split(self.full * factor, self.start * factor, self.stop * factor)


@dataclass(frozen=True)
class ParallelContext:
    """Passed to every layer that is built; nothing reads a global. Weights split; collectives are not built yet."""

    rank: int = 0
    world_size: int = 1

    def whole(self, size: int) -> Split:
        """A dimension that every rank keeps."""
        return Split(size, 0, size)

    def split(self, size: int, what: str, *, replicate: bool = False) -> Split:
        """This rank's equal share of ``size`` elements.

        replicate: with fewer elements than ranks, several ranks keep the same one (KV heads). Raises ConfigError,
        naming ``what``, when no equal share exists.
        """
        if size % self.world_size == 0:
            share = size // self.world_size
            return Split(size, self.rank * share, (self.rank + 1) * share)
        if replicate and self.world_size % size == 0:
            index = self.rank * size // self.world_size
            return Split(size, index, index + 1)
        raise ConfigError(f"tensor_parallel_size = {self.world_size} cannot split the model's {what} = {size} evenly")
