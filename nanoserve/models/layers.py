"""Weights that know their shard, and the one factory of linear layers.

Plain objects around tensors, not ``nn.Module``: inference needs neither autograd nor hooks, and on the CPU a small
model spends more time in attribute look-ups than in arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from nanoserve.models.parallel import Split
from nanoserve.ops.linear import Norm, linear, linear_add_norm_, norm_linear, norm_swiglu

#: Rows of x that a packed weight is laid out for: decode steps of a small batch, which is what a CPU serves.
PACKED_FOR_ROWS = 16


class Sliceable(Protocol):
    """A checkpoint tensor that is read when indexed: a tensor, or a slice handle of safetensors."""

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor: ...


@dataclass(frozen=True)
class WeightShard:
    """Where one checkpoint tensor goes: its ``region`` is copied (and cast) into ``target``.

    target: a parameter or a view of one. full_shape: shape that the tensor must have in the checkpoint.
    """

    target: torch.Tensor
    full_shape: tuple[int, ...]
    region: tuple[slice, ...]

    def load(self, source: Sliceable) -> None:
        self.target.copy_(source[self.region])


def packed(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` ``[out, in]`` in the layout that :func:`linear` reads fastest; on the CPU in fp32 an opaque copy.

    oneDNN's blocked layout saves it from reordering the matrix in every call: 1.3 to 1.7 times as fast at 16 rows.
    """
    if weight.dtype == torch.float32 and not weight.is_cuda and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
    return weight


def whole(parameter: torch.Tensor) -> WeightShard:
    """The shard of a weight that every rank keeps completely."""
    return WeightShard(parameter, tuple(parameter.shape), tuple(slice(0, size) for size in parameter.shape))


class Linear:
    """``y = x Wᵀ + b``; x ``[tokens, in]``, y ``[tokens, out]``, W ``[out, in]``.

    Several checkpoint matrices may be stacked along ``out`` and computed as one product (qkv, gate and up). Methods
    other than the call take along what comes before or after the product, where a kernel can.
    """

    __slots__ = ("weight", "bias", "_shards")

    def __init__(
        self,
        outputs: Mapping[str, Split],
        inputs: Split,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        rows = sum(part.size for part in outputs.values())
        self.weight = torch.empty(rows, inputs.size, dtype=dtype, device=device)
        self.bias = torch.empty(rows, dtype=dtype, device=device) if bias else None
        self._shards: dict[str, WeightShard] = {}
        start = 0
        for name, part in outputs.items():
            stop = start + part.size
            shape, region = (part.full, inputs.full), (part.region, inputs.region)
            self._shards[f"{name}.weight"] = WeightShard(self.weight[start:stop], shape, region)
            if self.bias is not None:
                self._shards[f"{name}.bias"] = WeightShard(self.bias[start:stop], shape[:1], region[:1])
            start = stop

    def shards(self, prefix: str) -> dict[str, WeightShard]:
        """Checkpoint tensor name → where it goes."""
        return {prefix + name: shard for name, shard in self._shards.items()}

    def pack(self) -> None:
        """The weights are loaded: lay them out for speed. No shard can be loaded afterwards."""
        self.weight = packed(self.weight)
        self._shards = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)

    def of_norm(self, norm: Norm) -> torch.Tensor:
        """The product with ``norm()``, in the dtype of the weights."""
        return norm_linear(norm, self.weight, self.bias)

    def swiglu_of_norm(self, norm: Norm) -> torch.Tensor:
        """``silu(gate) * up`` of the product with ``norm()``. Gates are the first half of ``out``; no bias."""
        return norm_swiglu(norm, self.weight)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, norm_weight: torch.Tensor, eps: float) -> Norm:
        """Add the product with x to ``residual`` ``[tokens, out]`` in place, computed in the dtype of ``residual``;
        returns the RMSNorm of that."""
        return linear_add_norm_(residual, x, self.weight, self.bias, norm_weight, eps)


def make_linear(
    outputs: Mapping[str, Split],
    inputs: Split,
    *,
    bias: bool = False,
    dtype: torch.dtype,
    device: torch.device,
) -> Linear:
    """Every linear layer of a model is made here, so that a weight format can replace them in one place.

    outputs: checkpoint name of each stacked matrix → the rows this rank keeps (split: column parallel).
    inputs: the input columns it keeps (split: row parallel; the product is then a partial sum, and so is the bias).
    """
    return Linear(outputs, inputs, bias=bias, dtype=dtype, device=device)
