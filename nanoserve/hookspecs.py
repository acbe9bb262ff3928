"""The whole extension surface of nanoserve, on one page.

A plugin is a module or object with functions decorated by :data:`hookimpl`, published under the entry-point group
``nanoserve``. An entry point called ``KIND.NAME`` (``attention.window``, ``kvcache.fp8``, ``scheduler.slo``,
``policy.mine``) promises to register exactly that component and is imported only when the name is chosen, a list is
asked for, or a chosen YAML is nowhere else; any other entry-point name is imported whenever an engine is built.

A name belongs to whoever has it first: what ships with nanoserve, then distributions in the order of ``sys.path``. The
others get a warning, or in strict mode (``NANOSERVE_STRICT_PLUGINS=1``) an error.

The module of an entry point states the version of the contracts that it was written for, as a plain number:
``NANOSERVE_CONTRACT = 2``. One written for another version is refused with a sentence before it is imported.

Hooks run at start-up only; nothing calls one inside the step loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from nanoserve.contracts.attention import AttentionSpec
    from nanoserve.contracts.grammar import GrammarSpec
    from nanoserve.contracts.kvcache import KVCacheSpec
    from nanoserve.contracts.observer import EngineInfo, Observer
    from nanoserve.contracts.policy import PolicySpec
    from nanoserve.contracts.scheduling import SchedulerSpec

GROUP = "nanoserve"

hookspec = pluggy.HookspecMarker("nanoserve")
hookimpl = pluggy.HookimplMarker("nanoserve")


@hookspec
def nanoserve_attention(register: Callable[[AttentionSpec], None]) -> None:
    """Call ``register`` once per attention backend. Called when a registry discovers the plugin."""


@hookspec
def nanoserve_kvcache(register: Callable[[KVCacheSpec], None]) -> None:
    """Call ``register`` once per KV-cache format. Called when a registry discovers the plugin."""


@hookspec
def nanoserve_scheduler(register: Callable[[SchedulerSpec], None]) -> None:
    """Call ``register`` once per scheduler. Called when a registry discovers the plugin."""


@hookspec
def nanoserve_policy(register: Callable[[PolicySpec], None]) -> None:
    """Call ``register`` once per selection policy. Called when a registry discovers the plugin."""


@hookspec
def nanoserve_grammar(register: Callable[[GrammarSpec], None]) -> None:
    """Call ``register`` once per grammar compiler. Called when a registry discovers the plugin."""


@hookspec
def nanoserve_config_paths() -> list[str]:
    """Hydra search paths, such as ``["pkg://their_package.conf"]``, whose groups join ours.

    Asked of a component's plugin when that component is chosen, and of all plugins when a name is chosen that nobody
    registers, such as a preset's. So the YAML called like a component belongs to the plugin that registers it.
    """
    return []


@hookspec
def nanoserve_observer(engine_info: EngineInfo) -> Observer | None | Any:
    """An object that is told of request and step events, or None. Called once when an engine is built."""
