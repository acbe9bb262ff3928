"""The errors a person can meet, one class per kind of fault.

Every message says what is wrong and what would be right. Each class also inherits the built-in exception that a
caller who does not know nanoserve would catch.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


class NanoserveError(Exception):
    """Base of every error that nanoserve raises on purpose. figures: what a task had measured before it failed."""

    figures: Mapping[str, Any] = MappingProxyType({})


class ConfigError(NanoserveError, ValueError):
    """A configuration key is unknown, has the wrong type, or has a value that makes no sense."""


class PluginError(NanoserveError, RuntimeError):
    """A plugin is unknown, broken, ambiguous, or refuses the configuration it was chosen for."""


class ModelLoadError(NanoserveError, RuntimeError):
    """A checkpoint is incomplete, inconsistent, or of an unsupported architecture."""


class RequestError(NanoserveError, ValueError):
    """A request is malformed; it was refused and no other request was touched."""


class CapacityError(RequestError):
    """A well-formed request that can never fit (context length, KV pool); refused when it is added."""
