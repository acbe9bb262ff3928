"""What the suites share: the registry, and the device a component is tested on."""

from __future__ import annotations

import functools
from typing import Any

import torch

from nanoserve.contracts.capabilities import Capabilities
from nanoserve.registry import Registry


@functools.cache
def discover(plugins: tuple[Any, ...]) -> Registry:
    """Every installed plugin and ``plugins``, which no entry point announces; found once per test run."""
    return Registry.discover(extra=plugins)


def default_device(capabilities: Capabilities) -> str:
    """The GPU if there is one and the component takes it; a component that neither device suits says so when asked."""
    return "cuda" if torch.cuda.is_available() and "cuda" in capabilities.devices else "cpu"


def compute_capability(device: str) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability() if device == "cuda" else None
