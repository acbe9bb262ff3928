"""Which attention backend runs: candidates are settled when the engine is built, the choice is made once per step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from nanoserve.config import PluginChoice, did_you_mean
from nanoserve.contracts.attention import AttentionBackend, AttentionContext, AttentionSpec
from nanoserve.contracts.capabilities import PHASES, Phase, Requirements
from nanoserve.contracts.errors import ConfigError, PluginError
from nanoserve.contracts.policy import SelectionPolicy, SelectionShape
from nanoserve.engine.guard import check_methods
from nanoserve.registry import Registry

log = logging.getLogger("nanoserve")

AUTO = "auto"


def candidates_for(
    registry: Registry, choice: PluginChoice, need: Requirements, policy: SelectionPolicy | None = None
) -> dict[Phase, tuple[str, ...]]:
    """Backends that may serve each phase: what ``policy`` considers, or whatever is installed if none of that can serve
    (or without a policy).

    ``attention=NAME`` fixes the phases that NAME implements and leaves the other to the policy. Raises PluginError with
    every reason, and the names that would work, when NAME cannot serve, or when nothing can.
    """
    found: dict[Phase, tuple[str, ...]] = {}
    chosen: AttentionSpec | None = None if choice.name == AUTO else registry.get("attention", choice.name)
    if chosen is not None:
        registry.make_options("attention", chosen, choice.options)  # backends are built late; refuse options early
    elif choice.options:
        raise ConfigError(f"attention.{next(iter(choice.options))}: attention={AUTO} has no options; choose a backend")
    if policy is not None and (chosen is None or chosen.capabilities.phases != frozenset(PHASES)):
        for name in sorted(policy.kv_formats()):
            if not registry.is_installed("kvcache", name):
                hint = did_you_mean(name, registry.names("kvcache"))
                log.warning("the policy tells KV format %s from others, which is not installed%s", name, hint)
    for phase in PHASES:
        if chosen is not None and phase in chosen.capabilities.phases:
            reasons = chosen.capabilities.refusals(need, phase)
            if reasons:
                working, _ = _accepting(registry, phase, need)
                raise PluginError(
                    f"attention={chosen.name} cannot run {phase} here: {'; '.join(reasons)}. "
                    f"These would: {', '.join(working) or 'none'}"
                )
            found[phase] = (chosen.name,)
            continue
        considered = None if policy is None else policy.considers(phase)
        for name in sorted(considered or ()):
            if why := _never(registry, name, phase):
                log.warning("the policy names %s for %s, which %s", name, phase, why)
        working, refused = _accepting(registry, phase, need, considered)
        if not working and considered is not None:
            working, refused = _accepting(registry, phase, need)
        if not working:
            why = "\n".join(f"  {name}: {'; '.join(reasons)}" for name, reasons in refused.items())
            raise PluginError(f"no attention backend can run {phase} here:\n{why}")
        found[phase] = tuple(working)
    return found


def _never(registry: Registry, name: str, phase: Phase) -> str | None:
    """Why a policy can name this backend for ``phase`` only by mistake; None if it serves somewhere."""
    if not registry.is_installed("attention", name):
        return f"is not installed{did_you_mean(name, registry.names('attention'))}"
    for spec in registry.specs("attention", [name]):
        if phase not in spec.capabilities.phases:
            return f"has no {phase}"
        if not spec.capabilities.full_attention:
            return f"does not attend to the whole context, so it must be chosen: attention={name}"
    return None


def _accepting(
    registry: Registry, phase: Phase, need: Requirements, only: Collection[str] | None = None
) -> tuple[list[str], dict[str, list[str]]]:
    working, refused = [], {}
    for spec in registry.specs("attention", only):
        reasons = spec.capabilities.refusals(need, phase)
        if not spec.capabilities.full_attention:  # nobody gets other answers than the model's without asking for them
            reasons.append(f"does not attend to the whole context, so it must be chosen: attention={spec.name}")
        if reasons:
            refused[spec.name] = reasons
        else:
            working.append(spec.name)
    return working, refused


class AttentionSelector:
    """Builds a backend the first time the policy names it and remembers it.

    capturable: the decode candidates that may run inside a CUDA graph.
    """

    def __init__(
        self,
        candidates: dict[Phase, tuple[str, ...]],
        policy: SelectionPolicy,
        build: Callable[[str], AttentionBackend],
        capturable: tuple[str, ...] = (),
    ) -> None:
        self.candidates = candidates
        self.capturable = capturable
        self.policy = policy
        self._build = build
        self._built: dict[str, AttentionBackend] = {}

    def select(self, phase: Phase, shape: SelectionShape, captured: bool = False) -> AttentionBackend:
        names = self.capturable if captured else self.candidates[phase]
        name = names[0] if len(names) == 1 else self.policy.select(phase, shape, names)
        if name not in names:
            who = self.policy.plugin or type(self.policy).__name__
            raise PluginError(f"{who} chose {name!r} for {phase}; it may choose {', '.join(names)}")
        return self._built.get(name) or self.build(name)

    def build(self, name: str) -> AttentionBackend:
        """The backend ``name``, built now. Raises what its factory raises for options that do not go together."""
        backend = self._built[name] = self._build(name)
        return backend

    def close(self) -> None:
        self._built.clear()


def make_builder(
    registry: Registry, choice: PluginChoice, context: AttentionContext
) -> Callable[[str], AttentionBackend]:
    """Builds backends by name; the options of ``choice`` go to the backend it names."""

    def build(name: str) -> AttentionBackend:
        spec = registry.get("attention", name)
        options = registry.make_options("attention", spec, choice.options if name == choice.name else {})
        backend = spec.factory(context, options)
        counts = {"prefill": {"plan_prefill": 1, "prefill": 6}, "decode": {"plan_decode": 1, "decode": 4}}
        for phase in spec.capabilities.phases:
            check_methods(backend, counts[phase])
        return backend

    return build
