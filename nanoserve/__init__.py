"""nanoserve: an LLM inference engine for Qwen3 in which every contested decision is a plugin."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanoserve.async_llm import AsyncLLM
    from nanoserve.config import EngineConfig
    from nanoserve.contracts.errors import (
        CapacityError,
        ConfigError,
        ModelLoadError,
        NanoserveError,
        PluginError,
        RequestError,
    )
    from nanoserve.contracts.grammar import StructuredOutput
    from nanoserve.llm import LLM
    from nanoserve.outputs import CompletionOutput, EngineStats, RequestOutput
    from nanoserve.sampling_params import SamplingParams

__version__ = "0.1.0"

_HOME = {
    "LLM": "nanoserve.llm",
    "AsyncLLM": "nanoserve.async_llm",
    "SamplingParams": "nanoserve.sampling_params",
    "StructuredOutput": "nanoserve.contracts.grammar",
    "EngineConfig": "nanoserve.config",
    "RequestOutput": "nanoserve.outputs",
    "CompletionOutput": "nanoserve.outputs",
    "EngineStats": "nanoserve.outputs",
    "NanoserveError": "nanoserve.contracts.errors",
    "ConfigError": "nanoserve.contracts.errors",
    "PluginError": "nanoserve.contracts.errors",
    "ModelLoadError": "nanoserve.contracts.errors",
    "RequestError": "nanoserve.contracts.errors",
    "CapacityError": "nanoserve.contracts.errors",
}
__all__ = ["__version__", *(name for name in _HOME if name != "AsyncLLM")]  # a star needs no extra


def __getattr__(name: str) -> Any:
    """Public names are imported on first use, so that ``import nanoserve`` costs no torch."""
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'nanoserve' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(["__version__", *_HOME])
