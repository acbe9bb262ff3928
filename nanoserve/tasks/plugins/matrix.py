"""Which attention backend runs over which KV format, in which phase, where: what is declared, and what has been tried.

A combination is *claimed* when the capabilities of both plugins accept it. :func:`check` runs every claimed one that
this machine can run, on a few ragged sequences, and compares it with dense attention in float64. Results are kept in a
file, one section per device, and the matrix shows a combination as working only if it is claimed **and** its result is
there.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanoserve.contracts.attention import AttentionSpec
from nanoserve.contracts.capabilities import PHASES, Capabilities, Phase, Requirements
from nanoserve.contracts.errors import ConfigError
from nanoserve.contracts.kvcache import KVCacheSpec
from nanoserve.registry import Registry

OK = "ok"
#: What is preferred to try it in. Triton's interpreter computes wrong dots in bf16.
DTYPES = {"cuda": ("bfloat16", "float16", "float32"), "cpu": ("float32", "float16")}
#: (query length, context length): fresh, with a prefix, one token, and one that ends behind a block's edge.
SEQUENCES = [(5, 5), (3, 20), (1, 1), (2, 33)]


@dataclass(frozen=True)
class Combination:
    attention: AttentionSpec
    kv: KVCacheSpec
    phase: Phase

    def __str__(self) -> str:
        return f"attention={self.attention.name} kv={self.kv.name} {self.phase}"


def combinations(registry: Registry) -> Iterator[Combination]:
    for attention in registry.specs("attention"):
        for kv in registry.specs("kvcache"):
            for phase in PHASES:
                yield Combination(attention, kv, phase)


def requirements(one: Combination, device: str, capability: tuple[int, int] | None) -> Requirements:
    """Of a small model whose dtype, head and block sizes suit both plugins, as far as any do."""
    both = (one.attention.capabilities, one.kv.capabilities)

    def first(values: tuple[Any, ...], of: str) -> Any:
        accepted = [getattr(can, of) for can in both]
        return next((v for v in values if all(a is None or v in a for a in accepted)), values[0])

    block_size = 16
    while block_size < 1024 and any(block_size % can.block_size_multiple_of for can in both):
        block_size *= 2
    return Requirements(
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=first((64, 128, 32, 96, 256), "head_dims"),
        dtype=first(DTYPES[device], "dtypes"),
        device=device,
        compute_capability=capability,
        block_size=block_size,
        kv_format=one.kv.name,
    )


MESSAGE = 300  # characters of an exception that a result keeps


def refusals(one: Combination, device: str, capability: tuple[int, int] | None = None) -> list[str]:
    """Why the combination does not run on ``device``; empty if it is claimed. On a CPU, Triton may be interpreted."""
    need = requirements(one, device, capability)

    def asked(can: Capabilities, phase: Phase | None) -> list[str]:
        if device == "cpu" and can.interpretable:
            can = replace(can, devices=can.devices | {"cpu"})
        return can.refusals(need, phase)

    return asked(one.attention.capabilities, one.phase) + asked(one.kv.capabilities, None)


def check(registry: Registry, one: Combination, device: str, capability: tuple[int, int] | None) -> str:
    """Run it: "ok", or what is wrong with it."""
    import torch

    from nanoserve.testing.attention import TOLERANCES, make_case, make_context, relative_error

    need = requirements(one, device, capability)
    dtype = getattr(torch, need.dtype)
    finite_only = one.attention.capabilities.needs_finite_cache
    try:
        context = make_context(
            one.kv,
            num_q_heads=need.num_q_heads,
            num_kv_heads=need.num_kv_heads,
            head_dim=need.head_dim,
            dtype=dtype,
            device=device,
            block_size=need.block_size,
            poison_value=1e4 if finite_only else float("nan"),
        )
        backend = one.attention.factory(context, registry.make_options("attention", one.attention, {}))
        queries = [q for q, _ in SEQUENCES] if one.phase == "prefill" else None
        case = make_case(context, [k for _, k in SEQUENCES], queries)
        out, expected = case.run(backend), case.expected()
        if (
            not one.attention.capabilities.full_attention
        ):  # its own tests have its oracle; a token alone is its own value
            if not out.isfinite().all():
                return "its output is not finite"
            (alone,) = [i for i, (_, num_keys) in enumerate(SEQUENCES) if num_keys == 1]
            row = sum(queries[:alone]) if queries else alone
            out, expected = out[row : row + 1], expected[row : row + 1]
        total, token = relative_error(out, expected)
    except Exception as error:
        message = " ".join(str(error).split())  # a compiler's is megabytes
        return f"{type(error).__name__}: {message[:MESSAGE]}{' …' * (len(message) > MESSAGE)}"
    allowed = TOLERANCES[dtype]
    if total <= allowed and token <= 3 * allowed:
        return OK
    return f"relative error {total:.1e} in {need.dtype}, allowed {allowed:.0e}"


def this_device() -> tuple[str, tuple[int, int] | None]:
    """("cuda", its compute capability) where there is a GPU, else ("cpu", None)."""
    import torch

    return ("cuda", torch.cuda.get_device_capability()) if torch.cuda.is_available() else ("cpu", None)


def check_all(registry: Registry) -> dict[str, Any]:
    """A section of the file of results: every combination that is claimed for this machine's device, tried."""
    import torch

    device, capability = this_device()
    with interpreter() if device == "cpu" else nullcontext():
        claimed = [one for one in combinations(registry) if not refusals(one, device, capability)]
        if device == "cpu":
            require_interpreter(claimed)
        results = {str(one): check(registry, one, device, capability) for one in claimed}
    return {
        "hardware": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "compute_capability": capability,
        "torch": torch.__version__,
        "results": results,
    }


@contextmanager
def interpreter() -> Iterator[None]:
    """Meanwhile Triton interprets kernels, unless TRITON_INTERPRET is set. Triton looks when it is imported, which the
    modules of plugins do, so it does nothing once that has happened."""
    if "TRITON_INTERPRET" in os.environ or "triton" in sys.modules:
        yield
        return
    os.environ["TRITON_INTERPRET"] = "1"
    print("no GPU here: Triton kernels run in Triton's interpreter", file=sys.stderr)
    try:
        yield
    finally:
        del os.environ["TRITON_INTERPRET"]


def require_interpreter(claimed: Iterable[Combination]) -> None:
    """Raise ConfigError if there are kernels that only the interpreter can run here, and it is off."""
    if os.environ.get("TRITON_INTERPRET") != "1" and any(
        "cpu" not in one.attention.capabilities.devices for one in claimed
    ):
        raise ConfigError("check=true without a GPU runs Triton kernels in its interpreter: set TRITON_INTERPRET=1")


def read(path: Path) -> dict[str, Any]:
    """The sections of all devices. Raises ConfigError for a file that is none of results."""
    try:
        sections: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not all(isinstance(section["results"], dict) for section in sections.values()):
            raise ValueError("no results")
    except (OSError, ValueError, AttributeError, LookupError, TypeError) as error:
        raise ConfigError(f"record={path}: it holds no results of check=true ({type(error).__name__})") from None
    return sections


def record(path: Path, section: dict[str, Any]) -> None:
    """Put ``section`` in its device's place in the file; other devices' results stay."""
    device = "cpu" if section["compute_capability"] is None else "cuda"
    sections = {**(read(path) if path.exists() else {}), device: section}
    path.write_text(json.dumps(sections, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def markdown(registry: Registry, results: dict[str, Any]) -> str:
    """The matrix: a row per backend, a column per KV format and phase, in each cell CPU / CUDA.

    ✓ right, i right in Triton's interpreter, – refused, ? claimed but not tried, ✗ tried and wrong.
    """
    capability = tuple(results.get("cuda", {}).get("compute_capability") or (9, 0))
    formats = [spec.name for spec in registry.specs("kvcache")]
    header = ["`attention=`", *(f"{phase} `{name}`" for name in formats for phase in PHASES)]
    rows: dict[str, list[str]] = {}
    for one in combinations(registry):
        cells = []
        for device in ("cpu", "cuda"):
            if refusals(one, device, capability if device == "cuda" else None):
                cells.append("–")
                continue
            result = results.get(device, {}).get("results", {}).get(str(one))
            interpreted = device == "cpu" and "cpu" not in one.attention.capabilities.devices
            cells.append({None: "?", OK: "i" if interpreted else "✓"}.get(result, "✗"))
        rows.setdefault(one.attention.name, []).append(" / ".join(cells))
    lines = [header, ["---"] * len(header), *([f"`{name}`", *cells] for name, cells in rows.items())]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
