"""Cheap repeated launches of Triton kernels from Python."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction


class Launcher:
    """Launches ``kernel``, from the second time on at about a third of the host time of ``kernel[grid](...)``.

    Triton inspects every argument and every constant at each launch. Here the caller names its constants by a key, and
    only what else selects a compiled kernel is looked at: device, dtype and 16-byte alignment of tensors. Integers must
    be in the kernel's ``do_not_specialize``; the key tells the blocks of TMA descriptors. Holds compiled kernels, no
    tensors. The interpreter is called plainly.
    """

    def __init__(self, kernel: JITFunction) -> None:
        self.kernel = kernel
        self.compiled: dict[Hashable, tuple[CompiledKernel, tuple[Any, ...]]] = {}

    def __call__(
        self, programs: int, arguments: tuple[Any, ...], key: Hashable, constants: Callable[[], dict[str, Any]]
    ) -> None:
        """arguments: of the kernel, in order, up to its constants. constants: called once per key: the constexprs that
        follow, all of them and in order, and launch options such as num_warps."""
        kinds: list[Hashable] = [key]
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                kinds += argument.device.index, argument.dtype, argument.data_ptr() % 16
            else:
                kinds.append(type(argument).__name__)
        found = self.compiled.get(tuple(kinds))
        if found is not None:
            kernel, values = found
            kernel[programs, 1, 1](*arguments, *values)
            return
        named = constants()
        kernel = self.kernel[(programs,)](*arguments, **named)
        if isinstance(kernel, CompiledKernel):
            names = self.kernel.arg_names[len(arguments) :]
            self.compiled[tuple(kinds)] = kernel, tuple(named[name] for name in names)
