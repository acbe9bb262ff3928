"""Which backends a policy is offered, from what they declare: nothing is built, so a CPU can answer for a GPU."""

from __future__ import annotations

import pytest
import torch

from nanoserve.config import PluginChoice
from nanoserve.contracts.capabilities import Requirements
from nanoserve.contracts.errors import ConfigError, PluginError
from nanoserve.engine.build import resolve_device, stored_dtype
from nanoserve.engine.selection import candidates_for
from nanoserve.registry import Registry


@pytest.mark.parametrize("stored, reads", [("auto", True), ("bfloat16", True), ("float16", False), ("float32", False)])
def test_a_kernel_that_takes_words_as_they_lie_is_not_offered_another_dtype(stored: str, reads: bool) -> None:
    registry = Registry.discover()
    options = registry.make_options("kvcache", registry.get("kvcache", "bf16"), {"dtype": stored})
    need = Requirements(16, 8, 128, "bfloat16", "cuda", (9, 0), 16, "bf16", kv_dtype=stored_dtype(options))
    decode = candidates_for(registry, PluginChoice("auto"), need)["decode"]
    assert ("hopper_decode" in decode) == reads and "paged_v2_split" in decode
    if not reads:
        with pytest.raises(PluginError, match=f"only in the compute dtype, bfloat16, and they are stored in {stored}"):
            candidates_for(registry, PluginChoice("hopper_decode"), need)


def test_the_storage_dtype_of_int8_is_its_own() -> None:
    registry = Registry.discover()
    assert stored_dtype(registry.make_options("kvcache", registry.get("kvcache", "int8"), {})) is None


def test_a_device_that_is_not_current_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, whatever the tensors say."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert resolve_device("cuda") == resolve_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(
        ConfigError, match="current device is cuda:0; use engine.device=cuda with CUDA_VISIBLE_DEVICES=1"
    ):
        resolve_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert resolve_device("auto") == resolve_device("cuda:1") == torch.device("cuda:1")
