"""Token embeddings, in the dtype of the residual stream that they begin."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def embedding(ids: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows ``ids`` of ``weight`` in ``dtype``: ``[tokens, n]``, fresh.

    ids: ``[tokens]`` int32 or int64, all in ``[0, len(weight))``. weight: ``[vocab_size, n]``. Both contiguous.
    """
    if weight.is_cuda:
        from nanoserve.ops import _elementwise

        return _elementwise.embedding(ids, weight, dtype)
    return F.embedding(ids, weight).to(dtype)
