"""Compile the kernels that a call launches for a GPU that is not there, and read what the compiler made of them.

Needs a process without ``TRITON_INTERPRET``: that variable turns ``triton.jit`` into interpreted functions.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True)
class Compiled:
    """registers: per thread. stack: bytes per thread, 0 if nothing was spilled. shared: bytes. warps: per program."""

    name: str
    registers: int
    stack: int
    shared: int
    warps: int
    ptx: str
    cubin: bytes

    def __str__(self) -> str:
        return f"{self.name} w{self.warps}: {self.registers} registers, {self.stack} B stack, {self.shared} B shared"

    def sass(self) -> list[str]:
        """Instructions, one a line, without addresses."""
        text = _cuobjdump("-sass", self.cubin)
        return re.findall(r"/\*[0-9a-f]{4}\*/\s+(.*?);", text)


class _AbsentGPU:
    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch  # compiled kernels are remembered per device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def _absent_gpu(capability: int) -> Iterator[list[Any]]:
    kernels = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernels.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    with (
        mock.patch.object(driver, "_active", _AbsentGPU(capability)),
        mock.patch.object(JITFunction, "run", compile_only),
    ):
        yield kernels


def compile_launches(call: Callable[[], Any], capability: int) -> list[Compiled]:
    """Every kernel that ``call`` launches (on CPU tensors; nothing runs), compiled for sm_{capability}."""
    with _absent_gpu(capability) as kernels:
        call()
    return [_inspect(kernel) for kernel in kernels]


def _inspect(kernel: Any) -> Compiled:
    usage = re.search(r"REG:(\d+) STACK:(\d+)", _cuobjdump("-res-usage", kernel.asm["cubin"]))
    assert usage is not None
    metadata = kernel.metadata
    return Compiled(
        metadata.name,
        int(usage[1]),
        int(usage[2]),
        metadata.shared,
        metadata.num_warps,
        kernel.asm["ptx"],
        kernel.asm["cubin"],
    )


def _cuobjdump(option: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([CUOBJDUMP, option, file.name], capture_output=True, text=True, check=True).stdout
