"""Every prefill and store kernel compiles without a GPU, for sm_80 and sm_90: no spills, and wgmma where it must be.

The code under test launches its kernels as on a GPU, with CPU tensors, in a process whose Triton driver is a stand-in:
a launch compiles and stops there. So what is compiled is what the defaults would run. Gluon kernels are for sm_90 only
(for another target the compiler aborts the process).
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

CHUNK = [(512, 1024)]
FLASH_CASES = {
    SM80: {
        **{f"head_dim {d}": {"head_dim": d} for d in (64, 128, 256)},
        "gqa 3": {"num_q_heads": 6},
        "int8 chunk": {"lens": CHUNK, "block_size": 16, "kv_format": "int8"},
    },
    SM90: {
        **{f"{n} tokens": {"lens": [(n, n)]} for n in (16, 128, 512, 4096)},
        "head_dim 96": {"head_dim": 96},
        "fp32": {"dtype": "float32", "lens": [(200, 200)]},
        "chunk": {"lens": CHUNK, "block_size": 16},
        "int8 chunk": {"lens": CHUNK, "kv_format": "int8"},
    },
}
HOPPER_CASES = {
    "gqa 3, head_dim 64, fp16": {"lens": [(512, 512)], "num_q_heads": 6, "head_dim": 64, "dtype": "float16"},
    "chunk, page 16": {"lens": CHUNK, "block_size": 16},
    "int8 chunk": {"lens": CHUNK, "kv_format": "int8"},
}
FORMATS = {"bf16": {}, "int8": {"kv_format": "int8"}}
CASES = {
    ("triton_varlen", SM80): FORMATS,
    ("triton_flash", SM80): FLASH_CASES[SM80],
    ("triton_flash", SM90): FLASH_CASES[SM90],
    ("hopper_flash", SM90): HOPPER_CASES,
    ("store", SM80): FORMATS,
    ("store", SM90): FORMATS,
}


def launch(name, capability, kv_format="bf16", dtype="bfloat16", lens=((100, 100),), block_size=256, **kwargs):
    """One call of backend ``name``, or of the store kernels, as on a GPU of ``capability``."""
    import torch

    from nanoserve.registry import Registry
    from nanoserve.testing.attention import make_case, make_context
    from nanoserve_plugins.attention.hopper_flash import HopperFlashBackend, HopperFlashConfig
    from nanoserve_plugins.attention.triton_flash import TritonFlashBackend, TritonFlashConfig
    from nanoserve_plugins.attention.triton_varlen import TritonVarlenBackend, TritonVarlenConfig
    from nanoserve_plugins.kvcache import _kernels

    kwargs = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 128, "max_model_len": 4096} | kwargs
    context = make_context(
        Registry.discover().get("kvcache", kv_format),
        dtype=getattr(torch, dtype),
        block_size=block_size,
        num_blocks=4096 // block_size + 1,
        poison_value=0.0,
        **kwargs,
    )
    case = make_case(context, [k for _, k in lens], [q for q, _ in lens])
    if name == "store":
        _kernels.supports_pdl = lambda _: capability >= SM90
        layer, tokens = context.kv.layers[0], case.k.shape[0]
        _kernels.store(layer, case.k, case.v, case.meta.slot_mapping)
        qkv, weight, cos_sin = (
            torch.zeros(tokens, 8 * 128, dtype=case.k.dtype),
            torch.ones(128),
            torch.zeros(tokens, 128),
        )
        positions = case.meta.query_positions
        for needs_kv in (True, False):
            step = cos_sin, positions, case.meta.slot_mapping, needs_kv
            _kernels.norm_rope_store(layer, qkv, weight, weight, 1e-6, *step)
    elif name == "triton_varlen":
        case.run(TritonVarlenBackend(context, TritonVarlenConfig()))
    elif name == "triton_flash":
        case.run(TritonFlashBackend(context, TritonFlashConfig(), capability))
    else:
        case.run(HopperFlashBackend(context, HopperFlashConfig(), capability))


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
    for case, arguments in CASES[name, capability].items():
        launch(name, capability, **arguments)
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
        "waits for the kernel before": "griddepcontrol.wait" in kernel.asm["ptx"],
    }


@pytest.mark.parametrize(
    ("name", "capability"), CASES, ids=lambda value: value if isinstance(value, str) else f"sm_{value[0]}{value[1]}"
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
            if kernel["kernel"] == "flash_kernel" and case not in ("fp32", "16 tokens"):
                assert kernel["wgmma" if capability == SM90 else "mma"], f"{case}: {kernel}"
            if name == "store":
                assert kernel["waits for the kernel before"] == (capability == SM90), f"{case}: {kernel}"


if __name__ == "__main__":
    print(json.dumps(compile_all(sys.argv[1], (int(sys.argv[2]), int(sys.argv[3])))))
