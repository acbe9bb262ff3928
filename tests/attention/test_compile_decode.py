"""Every decode kernel compiles without a GPU, for sm_80 and sm_90: no spills at Qwen3's shapes, tensor cores in use.

What is compiled is what a backend launches at its defaults (``helpers.triton_compile``), in a process of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

TESTS = Path(__file__).parents[1]

#: name of the case → backend, KV format and what differs from Qwen3-0.6B on pages of 16 tokens.
CASES: dict[str, dict[str, Any]] = {
    "paged_v1": {"backend": "paged_v1"},
    "int8_fused": {"backend": "int8_fused", "kv": "int8"},
    "paged_v2": {"backend": "paged_v2"},
    "paged_v2-int8": {"backend": "paged_v2", "kv": "int8"},
    "split-small-batch": {"backend": "paged_v2_split", "batch": 1},
    "split": {"backend": "paged_v2_split"},
    "split-96": {"backend": "paged_v2_split", "batch": 96},
    "split-128": {"backend": "paged_v2_split", "batch": 128},
    "split-int8-small-batch": {"backend": "paged_v2_split", "kv": "int8", "batch": 1},
    "split-int8": {"backend": "paged_v2_split", "kv": "int8"},
    "split-head256": {"backend": "paged_v2_split", "head_dim": 256},
    "split-gqa16": {"backend": "paged_v2_split", "q_heads": 32, "kv_heads": 2},
    "hopper-small-batch": {"backend": "hopper_decode", "batch": 1},
    "hopper": {"backend": "hopper_decode"},
    "hopper-head64": {"backend": "hopper_decode", "head_dim": 64},
    "hopper-gqa8-fp16": {"backend": "hopper_decode", "q_heads": 8, "kv_heads": 1, "dtype": "float16"},
    "hopper-int8-small-batch": {"backend": "hopper_decode", "kv": "int8", "batch": 1},
    "hopper-int8": {"backend": "hopper_decode", "kv": "int8"},
    "hopper-int8-large-batch": {"backend": "hopper_decode", "kv": "int8", "batch": 256},
    "hopper-int8-gqa8": {"backend": "hopper_decode", "kv": "int8", "q_heads": 8, "kv_heads": 1},
    "hopper-int8-head64": {"backend": "hopper_decode", "kv": "int8", "head_dim": 64},
    "hopper-int8-page256": {"backend": "hopper_decode", "kv": "int8", "block_size": 256},
}

#: Bytes per thread that may be spilled, outside of the loops, where registers are short.
SPILLS = {"split-head256": 24, "split-gqa16": 16}


def compile_case(
    capability: int,
    backend: str,
    kv: str = "bf16",
    batch: int = 32,
    block_size: int = 16,
    q_heads: int = 16,
    kv_heads: int = 8,
    head_dim: int = 128,
    dtype: str = "bfloat16",
) -> dict[str, dict[str, Any]]:
    """Kernel name → what the compiler reports, for one decode step of a backend that believes in an H200 or A100."""
    import torch
    from helpers.triton_compile import compile_launches

    from nanoserve.registry import Registry
    from nanoserve.testing.attention import make_case, make_context
    from nanoserve_plugins.attention import _kernels

    registry = Registry.discover()
    context = make_context(
        registry.get("kvcache", kv),
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=getattr(torch, dtype),
        block_size=block_size,
        num_blocks=batch,
        max_num_seqs=batch,
    )
    case = make_case(context, [1] * batch)
    gpu = _kernels.GPU(multiprocessors=132, capability=(capability // 10, capability % 10))
    spec = registry.get("attention", backend)
    with mock.patch.object(_kernels.GPU, "of", return_value=gpu):
        kernels = compile_launches(lambda: case.run(spec.factory(context, spec.config())), capability)
    return {
        kernel.name: {
            "report": str(kernel),
            "stack": kernel.stack,
            "fences": sum("MEMBAR" in line for line in kernel.sass()),
            "mma": "mma.sync" in kernel.ptx,
            "integer mma": kernel.ptx.count("m16n8k32.row.col.satfinite.s32.s8.s8.s32"),
            "byte permutes between products": count_between_products(kernel.sass(), ("PRMT",)),
            "shared memory between products": count_between_products(kernel.sass(), ("BAR", "LDS", "STS")),
        }
        for kernel in kernels
    }


def count_between_products(sass: list[str], operations: tuple[str, ...]) -> int:
    """Within stretches without a branch: at the end of an item q does pass through shared memory."""
    count, since_product = 0, None
    for line in sass:
        if "BRA" in line:
            since_product = None
        elif "HMMA" in line or "IMMA" in line:
            count, since_product = count + (since_product or 0), 0
        elif since_product is not None:
            since_product += any(op in line for op in operations)
    return count


def compile_in_subprocess(capability: int, names: list[str]) -> dict[str, dict[str, dict[str, Any]]]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), *filter(None, [environment.get("PYTHONPATH")])])
    command = [sys.executable, __file__, str(capability), *names]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    hopper = [name for name in CASES if name.startswith("hopper")]
    portable = [name for name in CASES if name not in hopper]
    return {"sm_80": compile_in_subprocess(80, portable), "sm_90": compile_in_subprocess(90, portable + hopper)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_compiles_without_spills(architecture: str, name: str, compiled: dict[str, Any]) -> None:
    if architecture == "sm_80" and name.startswith("hopper"):
        pytest.skip("needs compute capability 9.0")
    kernels = compiled[architecture][name]
    backend = CASES[name]["backend"]
    assert f"{backend}_kernel" in kernels
    if backend in ("hopper_decode", "paged_v2_split"):
        plan = "_plan" if "_plan" in kernels else "_plan_pieces"
        assert kernels[plan]["fences"] == 0, "one for each piece of a context"
    for kernel in kernels.values():
        assert kernel["stack"] <= SPILLS.get(name, 0), kernel["report"]
    kernel = kernels[f"{backend}_kernel"]
    assert kernel["mma"] == (backend not in ("paged_v1", "int8_fused"))
    if backend == "hopper_decode":  # what a lane loads is a fragment already
        assert kernel["shared memory between products"] == 0, kernel["report"]
        # INT8: K is multiplied as it lies, and V takes 3 permutes a word, of which a lane has 32 in two tiles.
        assert (kernel["integer mma"] > 0) == (CASES[name].get("kv") == "int8")
        assert kernel["byte permutes between products"] <= 96, kernel["report"]


if __name__ == "__main__":
    print(json.dumps({name: compile_case(int(sys.argv[1]), **CASES[name]) for name in sys.argv[2:]}))
