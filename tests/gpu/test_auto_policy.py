"""The policy that an engine uses by default names a backend within 5 % of the best, all over the kernel table."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from nanoserve.config import EngineConfig
from nanoserve.contracts.policy import SelectionPolicy
from nanoserve.registry import Registry
from nanoserve.tasks.kernels.measure import Bench, Effort, Heads, fastest
from nanoserve.tasks.kernels.shapes import TABLE, KernelShape
from nanoserve.tasks.tune import selection_shape

pytestmark = pytest.mark.gpu

SHAPES = [(phase, name) for phase, names in TABLE.items() for name in names]


@functools.cache
def bench(kv: str, rounds: int) -> Bench:
    config = EngineConfig.from_kwargs(device="cuda", dtype="bfloat16", kv=kv)
    return Bench(config, Registry.discover(), Heads(), kv, Effort(rounds=rounds))


@functools.cache
def times(kv: str, phase: str, name: str, rounds: int) -> dict:
    one = bench(kv, rounds)
    return one.measure(KernelShape.parse(name, phase), one.candidates[phase], with_torch=False)


@functools.cache
def auto() -> SelectionPolicy:
    registry = Registry.discover()
    choice = EngineConfig.from_kwargs(policy="auto").policy_on(torch.cuda.get_device_name())
    spec = registry.get("policy", choice.name)
    return spec.factory(registry.make_options("policy", spec, choice.options))


@pytest.mark.parametrize("kv", ["bf16", "int8"])
@pytest.mark.parametrize("phase, name", SHAPES)
def test_auto_is_within_5_percent_of_the_best(phase, name, kv):
    """Also for a CUDA graph, whose backend is chosen before any context is known. A miss is measured again, longer:
    the times of short kernels vary by 5 % themselves."""
    one, chooser = bench(kv, 9), auto()
    shape = selection_shape(one, KernelShape.parse(name, phase))
    asked = {"a step": (shape, one.candidates[phase])}
    if phase == "decode":
        capturable = tuple(candidate for candidate in one.candidates[phase] if one.capturable(candidate))
        asked["a graph"] = (replace(shape, captured=True, max_context=40960), capturable)
    for what, (step, candidates) in asked.items():
        chosen = chooser.select(phase, step, candidates)
        for rounds in (9, 31):
            timings = times(kv, phase, name, rounds)
            best = fastest(timings, candidates)
            assert best is not None and timings[chosen].valid, timings
            lost = timings[chosen].us / timings[best].us - 1
            if lost <= 0.05:
                break
        assert lost <= 0.05, f"{what}: {chosen} takes {lost:.1%} longer than {best}: {timings}"
