"""Descriptors are remembered by address, hold few tensors, and never stand for a copy."""

from types import SimpleNamespace

import torch

from nanoserve_plugins._launch import Descriptors


def test_descriptors():
    made = []

    def make(x, rows):
        made.append((x.data_ptr(), rows))
        return SimpleNamespace(base=x if x.is_contiguous() else x.contiguous(), rows=rows)

    descriptors, x = Descriptors(2), torch.zeros(4, 8)
    first = descriptors.get(make, x, 64)
    assert descriptors.get(make, x.view(4, 8), 64) is first and len(made) == 1
    assert descriptors.get(make, x, 32).rows == 32
    assert len(made) == 2
    for _ in range(2):
        descriptors.get(make, x.t(), 16)
    assert len(made) == 4  # a copy has other contents the next time
    descriptors.get(make, torch.ones(3), 64)  # takes the place of the oldest
    assert descriptors.get(make, x, 64) is not first
