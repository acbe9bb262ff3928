"""What a component can do, declared as data, and the question an engine asks before it builds anything.

An engine builds one :class:`Requirements` from its configuration and model and asks every candidate
``capabilities.refusals(requirements)``. An empty list means yes; otherwise each entry is one reason in words.
Nothing is imported or allocated to answer.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")


@dataclass(frozen=True)
class Requirements:
    """What an engine needs from its plugins.

    dtype: compute dtype by torch name ("float32", "float16", "bfloat16").
    device: "cpu" or "cuda"; compute_capability: (major, minor) of the GPU, None on the CPU.
    cuda_graph: True when decode must be capturable in a CUDA graph.
    kv_dtype: dtype in which an option of the KV format has K and V stored; None: its own, or the compute dtype.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    device: str
    compute_capability: tuple[int, int] | None
    block_size: int
    kv_format: str
    cuda_graph: bool = False
    kv_dtype: str | None = None


@dataclass(frozen=True)
class Capabilities:
    """Declared limits of an attention backend or a KV-cache format. ``None`` means "any".

    phases: phases an attention backend implements; a KV format leaves it empty.
    kv_formats: names of the KV formats whose storage the kernels read directly; None = any, through ``gather``.
    min_compute_capability / max_compute_capability: inclusive (major, minor) bounds on the GPU. A kernel that uses
        instructions of one architecture sets both.
    interpretable: a Triton kernel that also runs on CPU tensors when ``TRITON_INTERPRET=1``.
    cuda_graph: decode may be captured: its launch does not depend on host-side lengths. A KV format: its store may.
    converts_kv: reads K and V also where an option has them stored in another dtype than the compute dtype.
    needs_finite_cache: reads KV rows that were never written (and masks their scores); the engine then
        zero-initialises the cache, and stale rows must hold finite numbers.
    requires: importable packages without which the component cannot run.
    block_size_multiple_of: the block size must be a multiple of this.
    full_attention: computes causal attention over the whole context, as its model was trained for. An attention backend
        that computes something else (a window, a sparse pattern) says False: it runs only when it is chosen by name.
    """

    phases: frozenset[Phase] = frozenset()
    kv_formats: frozenset[str] | None = None
    dtypes: frozenset[str] | None = None
    head_dims: frozenset[int] | None = None
    max_gqa_ratio: int | None = None
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    interpretable: bool = False
    min_compute_capability: tuple[int, int] | None = None
    max_compute_capability: tuple[int, int] | None = None
    block_size_multiple_of: int = 1
    cuda_graph: bool = False
    converts_kv: bool = True
    needs_finite_cache: bool = False
    full_attention: bool = True
    requires: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if unknown := self.phases - {*PHASES}:
            raise ValueError(f"phases: {_words(sorted(unknown))} is none; they are {_words(PHASES)}")

    def refusals(self, need: Requirements, phase: Phase | None = None) -> list[str]:
        """Every reason why this component cannot serve ``need`` (and ``phase``, if given); empty if it can."""
        no: list[str] = []
        if phase is not None and phase not in self.phases:
            no.append(f"does not implement {phase} (it implements {_words(sorted(self.phases))})")
        if self.kv_formats is not None and need.kv_format not in self.kv_formats:
            no.append(f"cannot read KV format {need.kv_format!r} (it reads {_words(sorted(self.kv_formats))})")
        if not self.converts_kv and need.kv_dtype not in (None, need.dtype):
            no.append(f"reads K and V only in the compute dtype, {need.dtype}, and they are stored in {need.kv_dtype}")
        if self.dtypes is not None and need.dtype not in self.dtypes:
            no.append(f"does not support dtype {need.dtype} (it supports {_words(sorted(self.dtypes))})")
        if self.head_dims is not None and need.head_dim not in self.head_dims:
            no.append(f"does not support head_dim {need.head_dim} (it supports {_words(sorted(self.head_dims))})")
        ratio = need.num_q_heads // max(need.num_kv_heads, 1)
        if self.max_gqa_ratio is not None and ratio > self.max_gqa_ratio:
            no.append(f"supports at most {self.max_gqa_ratio} query heads per KV head, the model has {ratio}")
        if need.block_size % self.block_size_multiple_of:
            no.append(f"needs a block_size that is a multiple of {self.block_size_multiple_of}, not {need.block_size}")
        for package in self.requires:
            if importlib.util.find_spec(package) is None:
                no.append(f"needs the package {package!r}, which is not installed")
        no += self._device_refusals(need)
        if need.cuda_graph and phase == "decode" and not self.cuda_graph:
            no.append("cannot run inside a CUDA graph (set engine.enforce_eager=true)")
        return no

    def _device_refusals(self, need: Requirements) -> list[str]:
        if need.device not in self.devices:
            interpretable = need.device == "cpu" and self.interpretable
            if not interpretable or os.environ.get("TRITON_INTERPRET") != "1":
                hint = "; TRITON_INTERPRET=1 runs it on the CPU, slowly" if interpretable else ""
                return [f"does not run on {need.device} (it runs on {_words(sorted(self.devices))}{hint})"]
            if need.dtype == "bfloat16":
                return ["is interpreted here, and Triton's interpreter multiplies bfloat16 matrices wrongly"]
        no = []
        have = need.compute_capability
        low, high = self.min_compute_capability, self.max_compute_capability
        if need.device == "cuda" and have is not None:
            if low is not None and have < low:
                no.append(f"needs compute capability {_version(low)} or higher, this GPU has {_version(have)}")
            if high is not None and have > high:
                no.append(f"needs compute capability {_version(high)} or lower, this GPU has {_version(have)}")
        return no


def _version(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _words(items: Sequence[object]) -> str:
    return ", ".join(map(str, items)) or "nothing"
