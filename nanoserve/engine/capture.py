"""Where CUDA graphs are captured, and the memory that they share."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class GraphPool:
    """The memory of an engine's graphs; what one of them needs only while it runs, all of them use."""

    def __init__(self) -> None:
        self.handle: Any = torch.cuda.graph_pool_handle()

    @contextmanager
    def capturing(self) -> Iterator[Any]:
        """While one graph is captured; yields the handle of its memory.

        The garbage collector must not run: it could come upon graphs of an engine that is gone, and to destroy one ends
        the capture of another. A capture that CUDA has ended leaves its memory to itself for ever, so that after any
        failure the next one gets other memory.
        """
        collects = gc.isenabled()
        gc.disable()
        try:
            yield self.handle
        except BaseException:
            self.handle = torch.cuda.graph_pool_handle()
            raise
        finally:
            if collects:
                gc.enable()
