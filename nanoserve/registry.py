"""From a name to a plugin, and every error a person can meet when a plugin is wrong.

Discovery is our own loop over ``importlib.metadata``: pluggy's loader lets one broken package kill the host and skips a
second plugin of the same name in silence. Here each entry point is imported alone, under its own pluggy manager, so a
fault belongs to a plugin and a distribution that a message can name, and everything else goes on working.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import logging
import os
import re
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint, distributions, entry_points
from typing import Any

import pluggy

import nanoserve
from nanoserve import hookspecs
from nanoserve.config import build, did_you_mean, group_names
from nanoserve.contracts import CONTRACT_VERSION
from nanoserve.contracts.capabilities import Capabilities
from nanoserve.contracts.errors import NanoserveError, PluginError

log = logging.getLogger("nanoserve")

#: Seconds after which a log line names the plugin that is still being imported, or whose factory still runs.
SLOW_IMPORT = 10.0


class PluginWarning(UserWarning):
    """A plugin is broken or ambiguous; the rest works. ``NANOSERVE_STRICT_PLUGINS=1`` makes it an error."""


@dataclass(frozen=True)
class Kind:
    """A kind of component: its folder in ``conf/``, and where its spec class and the class of its product live."""

    group: str
    module: str
    spec: str
    product: str


KINDS = {
    "attention": Kind("attention", "nanoserve.contracts.attention", "AttentionSpec", "AttentionBackend"),
    "kvcache": Kind("kv", "nanoserve.contracts.kvcache", "KVCacheSpec", "KVCacheFormat"),
    "scheduler": Kind("scheduler", "nanoserve.contracts.scheduling", "SchedulerSpec", "Scheduler"),
    "policy": Kind("policy", "nanoserve.contracts.policy", "PolicySpec", "SelectionPolicy"),
    "grammar": Kind("grammar", "nanoserve.contracts.grammar", "GrammarSpec", "GrammarCompiler"),
}
OWN_DISTRIBUTION, INLINE = "nanoserve", "(inline)"


@dataclass(frozen=True)
class Source:
    """Where a plugin comes from."""

    entry_point: str
    distribution: str
    version: str = ""

    def __str__(self) -> str:
        return f"{self.entry_point!r} of distribution {' '.join((self.distribution, self.version)).rstrip()}"


@dataclass(frozen=True)
class Registration:
    """A component as a plugin registered it."""

    kind: str
    spec: Any
    source: Source

    @property
    def entry_point(self) -> str:
        """The entry point that would promise it."""
        return f"{self.kind}.{self.spec.name}"


@dataclass(frozen=True)
class BrokenPlugin:
    """A plugin that could not be used, and why."""

    source: Source
    error: BaseException

    def __str__(self) -> str:
        reason = " ".join(str(self.error).split())
        return f"plugin {self.source} does not work: {type(self.error).__name__}: {reason}"


class Registry:
    """The plugins of one engine. Make a fresh one per engine and per test: :meth:`discover`.

    An entry point ``KIND.NAME`` is imported when that name is asked for; any other name is imported here and now.

    entry_points: what to load. extra: modules or objects with hook implementations, registered as if installed.
    disable: entry points to skip, as ``NAME`` or ``NAME@DISTRIBUTION``. strict: a warning becomes a PluginError.
    """

    def __init__(
        self,
        entry_points: Iterable[EntryPoint] = (),
        *,
        extra: Iterable[object] = (),
        disable: Iterable[str] = (),
        strict: bool = False,
    ) -> None:
        self.broken: list[BrokenPlugin] = []
        self.strict = strict
        self._disabled: set[Source] = set()
        self._modules: dict[Source, str] = {}  # in order of rank: of two plugins with one name the first is kept
        self._plugins: list[tuple[Source, object, pluggy.PluginManager]] = []
        self._registered: list[Registration] = []
        self._lazy: list[tuple[Source, EntryPoint]] = []
        self._promised: list[Source] = []  # as _lazy, but nothing is taken out
        self._warned: set[str] = set()
        disable = set(disable)
        eager = []
        # What ships with nanoserve comes first, so that nothing can take its name; the others as on every machine.
        for source, entry_point in sorted(
            ((_source(entry_point), entry_point) for entry_point in entry_points),
            key=lambda found: (found[0].distribution != OWN_DISTRIBUTION, found[0].distribution, found[0].entry_point),
        ):
            self._modules.setdefault(source, entry_point.value)
            if disable & {source.entry_point, f"{source.entry_point}@{source.distribution}"}:
                self._disabled.add(source)
            elif _promise(source.entry_point):
                self._lazy.append((source, entry_point))
                self._promised.append(source)
            else:
                eager.append((source, entry_point))
        for source, entry_point in eager:
            self._load(source, entry_point)
        skippable = {s.entry_point for s in self._modules} | {
            f"{s.entry_point}@{s.distribution}" for s in self._modules
        }
        for name in sorted(disable - skippable):
            self._warn(
                f"no plugin is skipped as {name!r}, for none has that entry point{did_you_mean(name, skippable)}"
            )
        for plugin in extra:
            self._load_inline(plugin)
        if strict:
            for kind in KINDS:
                self.registrations(kind)

    @classmethod
    def discover(
        cls,
        disable: Iterable[str] = (),
        paths: Sequence[str] | None = None,
        *,
        extra: Iterable[object] = (),
        strict: bool | None = None,
    ) -> Registry:
        """All installed plugins. paths: where to look for distributions (default: ``sys.path``).

        The environment adds to the arguments: ``NANOSERVE_DISABLE_PLUGINS=a,b`` and ``NANOSERVE_STRICT_PLUGINS=1``.
        """
        if paths is None:
            found: Iterable[EntryPoint] = entry_points(group=hookspecs.GROUP)
        else:
            found = (e for d in distributions(path=list(paths)) for e in d.entry_points if e.group == hookspecs.GROUP)
        blocked = os.environ.get("NANOSERVE_DISABLE_PLUGINS", "").split(",")
        if strict is None:
            strict = os.environ.get("NANOSERVE_STRICT_PLUGINS", "") not in ("", "0")
        return cls(found, extra=extra, disable={*disable, *(name.strip() for name in blocked)} - {""}, strict=strict)

    # --- questions ---------------------------------------------------------------------------------------------

    def get(self, kind: str, name: str) -> Any:
        """The spec of a component. Raises PluginError: unknown, broken or disabled."""
        self._load_promised(kind, name)
        self._warn_of_clashes(kind)
        found = self._find(kind, name)
        if not found:
            raise self.unknown(kind, name, self.names(kind))
        return found[0].spec

    def names(self, kind: str) -> list[str]:
        """Names that can be chosen, sorted. Imports nothing; a plugin not yet imported may still turn out broken."""
        promises = [promise for source, _ in self._lazy if (promise := _promise(source.entry_point))]
        names = {name for promised_kind, name in promises if promised_kind == kind}
        return sorted(names | {r.spec.name for r in self._registered if r.kind == kind})

    def is_installed(self, kind: str, name: str) -> bool:
        """Whether there is a plugin of that name, be it broken or disabled."""
        unusable = [*(broken.source for broken in self.broken), *self._disabled]
        return name in self.names(kind) or (kind, name) in [_promise(source.entry_point) for source in unusable]

    def specs(self, kind: str, only: Collection[str] | None = None) -> list[Any]:
        """All working specs of a kind, or ``only`` those of these names, sorted by name. Imports their plugins."""
        return [registration.spec for registration in self.registrations(kind, only)]

    def registrations(self, kind: str, only: Collection[str] | None = None) -> list[Registration]:
        """As :meth:`specs`, with where each comes from."""
        kept = []
        for name in self.names(kind):
            if only is not None and name not in only:
                continue
            self._load_promised(kind, name)
            kept += self._find(kind, name)[:1]
        self._warn_of_clashes(kind)
        return kept

    def unknown(self, kind: str, name: str, known: Sequence[str]) -> PluginError:
        """The error for a name that cannot be had: why, and what could be chosen instead."""
        group = KINDS[kind].group
        entry_point = f"{kind}.{name}"
        for broken in self.broken:
            if broken.source.entry_point == entry_point:
                error = PluginError(f"{group}={name}: {broken}")
                error.__cause__ = broken.error
                return error
        if any(source.entry_point == entry_point for source in self._disabled):
            return PluginError(f"{group}={name} is disabled by NANOSERVE_DISABLE_PLUGINS")
        lost = [str(b.source) for b in self.broken if _promise(b.source.entry_point) is None]
        elsewhere = [KINDS[other].group for other in KINDS if name in self.names(other)]
        hint = f"; there is {elsewhere[0]}={name}" if elsewhere else did_you_mean(name, known)
        if lost:
            hint += f"; these plugins failed to load: {', '.join(lost)}"
        elif not hint:
            hint = f"; if a package brings it, pip install that one (its entry point is called {entry_point})"
        return PluginError(f"unknown {group} {name!r}; known are: {', '.join(known)}{hint}")

    def make_options(self, kind: str, spec: Any, options: Mapping[str, Any]) -> Any:
        """An instance of ``spec.config``. Raises ConfigError that names the key, as the command line spells it."""
        return build(spec.config, options, KINDS[kind].group, owner=f"{KINDS[kind].group}={spec.name}")

    def observers(self, engine_info: Any) -> list[Any]:
        """One observer per plugin that wants one. A hook that fails costs a warning, never the engine."""
        from nanoserve.contracts.observer import Observer

        observers = []
        for source, _, manager in self._plugins:
            for observer in self._call(source, partial(manager.hook.nanoserve_observer, engine_info=engine_info)):
                if isinstance(observer, Observer):
                    observers.append(observer)
                else:
                    self._warn(f"plugin {source}: nanoserve_observer returned {observer!r}, which is no Observer")
        return observers

    def config_paths(self) -> list[str]:
        """Hydra search paths of all third-party plugins, whose modules this imports; ours are in ``nanoserve.conf``."""
        for source, entry_point in [item for item in self._lazy if item[0].distribution != OWN_DISTRIBUTION]:
            self._load(source, entry_point)
        return self._config_paths()

    def config_paths_for(self, group: str, name: str) -> list[str]:
        """Search paths among which ``GROUP/NAME.yaml`` is, if a plugin brings it.

        Imports as little as can be: nothing for a file of ours, a component's own plugin for its name, and all
        third-party plugins for a name that is neither.
        """
        if name in group_names(group):
            return []
        for kind, details in KINDS.items():
            if details.group == group and name in self.names(kind):
                self._load_promised(kind, name)
                return self._config_paths()
        paths = self._config_paths()
        return paths if name in group_names(group, paths) else self.config_paths()

    def _config_paths(self) -> list[str]:
        paths: list[str] = []
        for source, _, manager in self._plugins:
            for answer in self._call(source, manager.hook.nanoserve_config_paths):
                if isinstance(answer, (list, tuple)) and all(isinstance(path, str) for path in answer):
                    paths += [path for path in answer if path not in paths]
                else:
                    self._warn(f"plugin {source}: nanoserve_config_paths returned {answer!r}, not a list of strings")
        return paths

    # --- loading -----------------------------------------------------------------------------------------------

    def _load_promised(self, kind: str, name: str) -> None:
        if kind not in KINDS:
            raise PluginError(f"unknown kind {kind!r}; there are: {', '.join(KINDS)}")
        rank = list(self._modules).index
        for source, entry_point in [item for item in self._lazy if item[0].entry_point == f"{kind}.{name}"]:
            kept = self._find(kind, name)
            if not kept or rank(source) < rank(kept[0].source):  # else it has come too late, and is not imported
                self._load(source, entry_point)

    def _load(self, source: Source, entry_point: EntryPoint) -> None:
        promised = {s.entry_point for s, e in self._lazy if e.value == entry_point.value}
        self._lazy = [item for item in self._lazy if item[1] is not entry_point]
        allowed = promised if _promise(source.entry_point) else None
        self._guard(source, lambda: self._register(source, _import(source, entry_point), allowed))

    def _load_inline(self, plugin: object) -> None:
        number = str(sum(source.distribution == INLINE for source in self._modules) + 1)
        source = Source(getattr(plugin, "__name__", type(plugin).__name__), INLINE, number)
        self._modules[source] = f"{INLINE} {number}"
        self._guard(source, lambda: self._register(source, plugin, None))

    def _guard(self, source: Source, load: Callable[[], None]) -> None:
        try:
            load()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a plugin that calls sys.exit at import must not end the host
            broken = BrokenPlugin(source, error)
            self.broken.append(broken)
            self._warn(str(broken), error)

    def _register(self, source: Source, plugin: object, promised: set[str] | None) -> None:
        """All of a plugin or nothing. promised: names that may come from its module; None when any may."""
        new: list[Registration] = []
        if not any(plugin is known for _, known, _ in self._plugins):  # one object through two channels is benign
            manager = pluggy.PluginManager(hookspecs.GROUP)
            manager.add_hookspecs(hookspecs)
            manager.register(plugin, source.entry_point)
            try:
                manager.check_pending()
            except pluggy.PluginValidationError as error:
                self._warn(f"plugin {source}: {error}{self._nearest_hook(manager)}")
            if not manager.get_hookcallers(plugin):
                raise PluginError("it has no function marked with nanoserve.hookspecs.hookimpl")
            for kind in KINDS:

                def register(spec: Any, kind: str = kind) -> None:
                    new.append(Registration(kind, _checked(kind, spec, source), source))

                getattr(manager.hook, f"nanoserve_{kind}")(register=register)
            if promised is not None:
                disabled = {s.entry_point for s in self._disabled if s.distribution == source.distribution}
                new = [r for r in new if r.entry_point not in disabled]
                if more := {r.entry_point for r in new} - promised:
                    raise PluginError(f"it also registers {min(more)}, which no entry point of that name announces")
            self._plugins.append((source, plugin, manager))
            self._registered += new
        promise = _promise(source.entry_point)
        if promise and not self._find(*promise):
            raise PluginError(f"it does not register {promise[0]} {promise[1]!r}, which its entry point promises")

    def _call(self, source: Source, hook: Callable[[], list[Any]]) -> list[Any]:
        try:
            return hook()
        except Exception as error:
            self._warn(f"plugin {source}: {type(error).__name__}: {error}", error)
            return []

    def _find(self, kind: str, name: str) -> list[Registration]:
        """Whoever has registered it, the one that is kept first."""
        found = [r for r in self._registered if r.kind == kind and r.spec.name == name]
        return sorted(found, key=lambda r: list(self._modules).index(r.source))

    def _warn_of_clashes(self, kind: str) -> None:
        """Of each name that several plugins claim, by their entry points or by what they have registered."""
        for name in self.names(kind):
            promised = [source for source in self._promised if source.entry_point == f"{kind}.{name}"]
            claims: dict[str, Source] = {}  # by module: one plugin through two channels is benign
            for source in [*promised, *(r.source for r in self._find(kind, name))]:
                claims.setdefault(self._modules[source], source)
            kept, *others = sorted(claims.values(), key=list(self._modules).index)
            for other in others:
                remedy = f"; NANOSERVE_DISABLE_PLUGINS={other.entry_point}@{other.distribution} silences this"
                self._warn(
                    f"{kind} {name!r} of plugin {other} is not used: plugin {kept} has that name"
                    + (remedy if other.distribution != INLINE else "")
                )

    @staticmethod
    def _nearest_hook(manager: pluggy.PluginManager) -> str:
        hooks = vars(manager.hook)
        known = [name for name, hook in hooks.items() if not name.startswith("_") and hook.has_spec()]
        pending = [name for name, hook in hooks.items() if not name.startswith("_") and not hook.has_spec()]
        return did_you_mean(pending[0], known)

    def _warn(self, message: str, cause: BaseException | None = None) -> None:
        if self.strict:
            raise PluginError(message) from cause
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, PluginWarning, stacklevel=2)


def _import(source: Source, entry_point: EntryPoint) -> object:
    """The plugin behind an entry point. Raises PluginError when it was written for other contracts than ours."""
    with _reported_when_slow(source):
        if source.distribution != OWN_DISTRIBUTION:
            _refuse_other_contract(source, _stated_contract(entry_point.module))
        return entry_point.load()


def _stated_contract(module: str) -> Any:
    """``NANOSERVE_CONTRACT`` of a module, read from its source: one written for other contracts may not import.

    None if it states none, or has no source.
    """
    try:
        spec = importlib.util.find_spec(module)
        source = None if spec is None or spec.loader is None else spec.loader.get_source(module)  # type: ignore[attr-defined]
        body = ast.parse(source or "").body
    except Exception:  # whatever is wrong with the module, its import will say so
        return None
    for statement in body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        named = any(isinstance(target, ast.Name) and target.id == "NANOSERVE_CONTRACT" for target in targets)
        if named and isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(statement.value, ast.Constant):
            return statement.value.value
    return None


def _refuse_other_contract(source: Source, stated: Any) -> None:
    if stated is None or stated == CONTRACT_VERSION:
        return
    ours = f"nanoserve {nanoserve.__version__} has version {CONTRACT_VERSION}"
    if type(stated) is not int:
        raise PluginError(f"its NANOSERVE_CONTRACT is {stated!r}, not the number of a contract version; {ours}")
    newer = f"upgrade nanoserve, or install an older {source.distribution}"
    older = f"upgrade {source.distribution}, or install an older nanoserve"
    raise PluginError(
        f"it was written for version {stated} of nanoserve's contracts, and {ours}: "
        + (newer if stated > CONTRACT_VERSION else older)
    )


@contextmanager
def _reported_when_slow(source: Source, what: str = "is still being imported") -> Iterator[None]:
    message = f"plugin {source} {what} after {SLOW_IMPORT:g} s; Ctrl-C stops it, "
    message += f"NANOSERVE_DISABLE_PLUGINS={source.entry_point} skips it"
    timer = threading.Timer(SLOW_IMPORT, log.warning, [message])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _source(entry_point: EntryPoint) -> Source:
    dist = entry_point.dist
    return Source(entry_point.name, "(unknown)") if dist is None else Source(entry_point.name, dist.name, dist.version)


def _promise(entry_point: str) -> tuple[str, str] | None:
    """(kind, name) that an entry point ``KIND.NAME`` promises; None for any other name."""
    kind, _, name = entry_point.partition(".")
    return (kind, name) if kind in KINDS and name else None


def _checked(kind: str, spec: Any, source: Source) -> Any:
    """``spec`` with a factory whose product is checked. Raises PluginError when the spec itself is malformed."""
    contract = importlib.import_module(KINDS[kind].module)
    spec_class, product_class = getattr(contract, KINDS[kind].spec), getattr(contract, KINDS[kind].product)
    if not isinstance(spec, spec_class):
        raise PluginError(f"nanoserve_{kind} registered {spec!r}, which is no {KINDS[kind].spec}")
    if not isinstance(spec.name, str) or not re.fullmatch(r"\w[\w-]*", spec.name):
        raise PluginError(f"{kind} name {spec.name!r} must be letters, digits, '_' and '-'")
    if not (isinstance(spec.config, type) and dataclasses.is_dataclass(spec.config)):
        raise PluginError(f"{kind} {spec.name!r}: config must be a dataclass, not {spec.config!r}")
    for f in dataclasses.fields(spec.config):
        if f.init and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise PluginError(f"{kind} {spec.name!r}: option {f.name!r} of {spec.config.__name__} has no default")
    if not isinstance(getattr(spec, "capabilities", Capabilities()), Capabilities):
        raise PluginError(f"{kind} {spec.name!r}: capabilities must be a Capabilities, not {spec.capabilities!r}")
    make = spec.factory

    def factory(*arguments: Any) -> Any:
        try:
            with _reported_when_slow(source, f"is still building {kind} {spec.name!r}"):
                product = make(*arguments)
        except (NanoserveError, MemoryError):
            raise
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {error}"
            raise PluginError(f"{kind} {spec.name!r} ({source}): its factory failed: {reason}") from error
        if not isinstance(product, product_class):
            raise PluginError(
                f"{kind} {spec.name!r} ({source}): its factory returned {type(product).__name__}, "
                f"not a {KINDS[kind].product}"
            )
        product.plugin = f"{KINDS[kind].group}={spec.name} of {source.distribution} {source.version}".rstrip()
        return product

    return dataclasses.replace(spec, factory=factory)
