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


MANY = 1 << 12  # more tensors than a KV cache has


class Descriptors:
    """The last ``limit`` TMA descriptors of tensors that stay where they are: making one takes the host a good part of
    a launch. Holds the tensors, so it must not live longer than they should.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._made: dict[Hashable, Any] = {}

    def get(self, make: Callable[..., Any], x: torch.Tensor, *how: Hashable) -> Any:
        """``make(x, *how)``, or what it was for a tensor at the same address. One of a copy of ``x`` is not kept."""
        key = (x.data_ptr(), *how)
        found = self._made.get(key)
        if found is None:
            found = make(x, *how)
            if found.base is x:
                if len(self._made) == self.limit:
                    del self._made[next(iter(self._made))]
                self._made[key] = found
        return found
