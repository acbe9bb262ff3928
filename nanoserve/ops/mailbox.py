"""Words that the host leaves for the device, which takes them with a kernel: inside a CUDA graph, step after step.

A copy by the GPU's copy engine would stand between two graphs, and both would wait for it to start and to end.
"""

from __future__ import annotations

import numpy as np
import torch


class Mailbox:
    """Up to ``size`` int32 words at a time, through two halves in turn, pinned where the device is a GPU.

    So a letter may be written while the device has not taken the one before it, but not before it has taken the one
    before that. Letters are taken in the order in which they are written, and which half is next is counted on either
    side. If what happened to one is not known, for something was raised, the next waits for the device and asks it.

    words: int32 on the device, what was taken last; at least ``size`` of them.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        size = 1 << (size - 1).bit_length()
        self._halves = torch.zeros(2, size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._arrays = self._halves.numpy()
        self._sent = 0
        self._open = False
        self._turn = torch.zeros(1, dtype=torch.int32, device=device)
        self.words = torch.zeros(size, dtype=torch.int32, device=device)

    def letter(self) -> np.ndarray:
        """The half to write the next letter into. After this comes ``send``."""
        if self._open:
            self._sent = int(self._turn.item())
        self._open = True
        return self._arrays[self._sent % 2]

    def send(self) -> None:
        """The letter is written, and what takes it is launched."""
        self._sent += 1
        self._open = False

    def take(self, size: int) -> None:
        """Fill ``words``, or the first ``size`` of them at least, from the next letter; runs on the device."""
        if self.words.is_cuda:
            from nanoserve.ops import _elementwise

            _elementwise.take(self._halves, self._turn, self.words, size)
        else:
            self.words[:size].copy_(self._halves[int(self._turn.item()), :size])
            self._turn.bitwise_xor_(1)
