"""The suite runs where the kernel does, on a Hopper GPU; test_compile_decode.py compiles it everywhere."""

import pytest
import torch

from nanoserve.registry import Registry
from nanoserve.testing import AttentionBackendSuite
from nanoserve.testing.attention import make_context
from nanoserve_plugins.attention.hopper_decode import HopperDecodeBackend, HopperDecodeConfig


class TestHopperDecode(AttentionBackendSuite):
    backend = "hopper_decode"


class TestHopperDecodeInPieces(AttentionBackendSuite):
    """Most contexts are cut; up to 7 of them a second kernel merges, from 8 on the last piece."""

    backend = "hopper_decode"
    options = {"num_splits": 5}


def test_refuses_to_be_interpreted() -> None:
    context = make_context(Registry.discover().get("kvcache", "bf16"), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="paged_v2_split is its portable twin"):
        HopperDecodeBackend(context, HopperDecodeConfig())
