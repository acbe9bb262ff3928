"""Which backends a policy is offered, from what they declare: nothing is built, so a CPU can answer for a GPU."""

from __future__ import annotations

from dataclasses import make_dataclass

import pytest
import torch

from nanoserve.config import PluginChoice, group_names, load_yaml
from nanoserve.contracts.attention import AttentionSpec
from nanoserve.contracts.capabilities import PHASES, Capabilities, Requirements
from nanoserve.contracts.errors import ConfigError, PluginError
from nanoserve.engine.build import resolve_device, stored_dtype
from nanoserve.engine.selection import candidates_for
from nanoserve.hookspecs import hookimpl
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


class Nearsighted:
    """Announces a backend that does not attend to the whole context."""

    __name__ = "nearsighted"

    @hookimpl
    def nanoserve_attention(self, register):
        can = Capabilities(phases=frozenset(PHASES), full_attention=False)
        register(AttentionSpec("nearsighted", "", can, make_dataclass("Config", []), lambda context, options: None))


def warnings_of(table: list, need: Requirements, caplog: pytest.LogCaptureFixture, name: str = "auto") -> list[str]:
    registry = Registry.discover(extra=(Nearsighted(),))
    spec = registry.get("policy", "auto")
    policy = spec.factory(registry.make_options("policy", spec, {"table": table}))
    caplog.clear()
    candidates_for(registry, PluginChoice(name), need, policy)
    return caplog.messages


ON_CPU = Requirements(16, 8, 128, "float32", "cpu", None, 16, "bf16")


def test_names_of_a_policy_that_can_never_serve_are_told(caplog: pytest.LogCaptureFixture) -> None:
    table = [
        {"phase": "prefill", "use": ["nearsighted", "hopper_flash", "sdpa"]},
        {"phase": "decode", "use": ["triton_flash", "padged_v1", "hopper_decode", "sdpa"]},
        {"phase": "decode", "when": {"kv_format": ["bf61", "int8"]}, "use": ["sdpa"]},
        {"phase": "decode", "when": {"kv_format": ["bf61"]}, "use": ["sdpa"]},
    ]
    of_format, *of_backends = warnings_of(table, ON_CPU, caplog)
    assert of_format == "the policy tells KV format bf61 from others, which is not installed; did you mean 'bf16'?"
    assert of_backends == [
        "the policy names nearsighted for prefill, which does not attend to the whole context, so it must be chosen: "
        "attention=nearsighted",
        "the policy names padged_v1 for decode, which is not installed; did you mean 'paged_v1'?",
        "the policy names triton_flash for decode, which has no decode",
    ]
    assert warnings_of(table, ON_CPU, caplog, "sdpa") == []  # which leaves the policy no choice


@pytest.mark.parametrize("disabled", ["", "kvcache.int8,attention.hopper_decode,attention.triton_flash"])
@pytest.mark.parametrize("name", group_names("policy"))
def test_our_own_policies_name_nothing_in_vain(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str, disabled: str
) -> None:
    monkeypatch.setenv("NANOSERVE_DISABLE_PLUGINS", disabled)
    table = (load_yaml("policy", name) or {})["table"]
    for need in (ON_CPU, Requirements(16, 8, 128, "bfloat16", "cuda", (8, 6), 16, "bf16")):
        assert warnings_of(table, need, caplog) == []


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
