"""Every prefill and store kernel compiles without a GPU, for sm_80 and sm_90: no spills, and wgmma where it must be.

The code under test launches its kernels as on a GPU, with CPU tensors, in a process whose Triton driver is a stand-in:
a launch compiles and stops there. So what is compiled is what the defaults would run.
"""

import json
import os
import re
import subprocess
import sys
import tempfile

import pytest

SM80, SM90 = (8, 0), (9, 0)
SHARED_MEMORY = {SM80: 163 << 10, SM90: 227 << 10}  # bytes that one program may use

FRESH, CHUNK = [(512, 512)], [(512, 1024)]
FLASH_CASES = {
    **{f"head_dim {d}": {"head_dim": d} for d in (64, 96, 128, 256)},
    **{f"gqa {g}": {"num_q_heads": 2 * g} for g in (1, 3, 8)},
    **{f"{n} tokens": {"lens": [(n, n)]} for n in (16, 128, 2048)},
    "fp16": {"dtype": "float16"},
    "fp32": {"dtype": "float32"},
    "chunk, page 16": {"lens": CHUNK, "block_size": 16},
    "chunk, page 256": {"lens": CHUNK},
    "int8 chunk, page 16": {"lens": CHUNK, "block_size": 16, "kv_format": "int8"},
    "int8 chunk, page 256": {"lens": CHUNK, "kv_format": "int8"},
}
LONG_CHUNK = [(512, 4096)]
HOPPER_CASES = {
    "fresh": {},
    "fresh, long": {"lens": [(4096, 4096)]},
    "head_dim 64": {"head_dim": 64},
    "gqa 3": {"num_q_heads": 6},
    "fp16": {"dtype": "float16"},
    **{f"chunk, page {page}": {"lens": CHUNK, "block_size": page} for page in (16, 48, 256)},
    **{f"long chunk, page {page}": {"lens": LONG_CHUNK, "block_size": page} for page in (16, 64, 256)},
    "int8 chunk": {"lens": CHUNK, "kv_format": "int8"},
}
CASES = {
    "hopper_flash": HOPPER_CASES,
    "triton_varlen": {"bf16": {}, "int8": {"kv_format": "int8"}},
    "triton_flash": FLASH_CASES,
}


def attend(name, capability, kv_format="bf16", dtype="bfloat16", lens=FRESH, block_size=256, **kwargs):
    """Plan and run one prefill of backend ``name`` as on a GPU of ``capability``."""
    import importlib

    import torch

    from nanoserve.registry import Registry
    from nanoserve.testing.attention import make_case, make_context

    kwargs = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 128, "max_model_len": 8192} | kwargs
    registry = Registry.discover()
    context = make_context(
        registry.get("kvcache", kv_format),
        dtype=getattr(torch, dtype),
        block_size=block_size,
        num_blocks=4096 // block_size + 1,
        poison_value=0.0,
        **kwargs,
    )
    module = importlib.import_module(f"nanoserve_plugins.attention.{name}")
    spec = registry.get("attention", name)
    if name == "triton_varlen":
        backend = module.TritonVarlenBackend(context, spec.config())
    else:
        backend = {"triton_flash": "TritonFlashBackend", "hopper_flash": "HopperFlashBackend"}[name]
        backend = getattr(module, backend)(context, spec.config(), capability=capability)
    make_case(context, [k for _, k in lens], [q for q, _ in lens]).run(backend)


def compile_all(name, capability):
    """In a subprocess: run every case of ``name``, return a report for each kernel that was launched."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    class Driver:
        def get_current_target(self):
            return GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

    triton.runtime.driver.set_active(Driver())
    compiled = []

    def compile_only(self, *args, grid, warmup, **kwargs):
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    run, JITFunction.run = JITFunction.run, compile_only
    reports = {}
    for case, arguments in CASES[name].items():
        attend(name, capability, **arguments)
        reports[case] = [report(kernel) for kernel in compiled]
        compiled.clear()
    return reports


def report(kernel):
    import triton

    cuobjdump = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        usage = subprocess.run([cuobjdump, "--dump-resource-usage", cubin.name], capture_output=True, text=True).stdout
    return {
        "kernel": kernel.metadata.name,
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "stack": int(re.search(r"STACK:(\d+)", usage)[1]),
        "shared": kernel.metadata.shared,
        "wgmma": "wgmma.mma_async" in kernel.asm["ptx"],
        "mma": "mma.sync" in kernel.asm["ptx"],
    }


@pytest.mark.parametrize(
    ("name", "capability"),
    [("triton_varlen", SM80), ("triton_flash", SM80), ("triton_flash", SM90), ("hopper_flash", SM90)],
    ids=lambda value: value if isinstance(value, str) else f"sm_{value[0]}{value[1]}",
)
def test_compiles_without_spills(name, capability):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, name, *map(str, capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for case, kernels in json.loads(done.stdout.splitlines()[-1]).items():
        assert kernels, case
        for kernel in kernels:
            assert kernel["stack"] == 0, f"{case}: {kernel}"
            assert kernel["shared"] <= SHARED_MEMORY[capability], f"{case}: {kernel}"
            if kernel["kernel"] == "flash_kernel" and case != "fp32":
                assert kernel["wgmma" if capability == SM90 else "mma"], f"{case}: {kernel}"


if __name__ == "__main__":
    print(json.dumps(compile_all(sys.argv[1], (int(sys.argv[2]), int(sys.argv[3])))))
