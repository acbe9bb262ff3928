"""What ``task=NAME`` runs: one module per task, imported when it is chosen.

A task module has a dataclass ``Options`` (its own top-level keys, listed in ``conf/task/NAME.yaml``) and
``run(job) -> dict``: it does the work and returns the figures that a sweep shows in its table.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoserve.config import PLUGIN_GROUPS, EngineConfig, build, group_names
from nanoserve.contracts.errors import ConfigError
from nanoserve.registry import KINDS, Registry

if TYPE_CHECKING:
    from nanoserve.llm import LLM
    from nanoserve.sampling_params import SamplingParams

SECTIONS = ("model", *PLUGIN_GROUPS, "engine", "sampling")


@dataclass(frozen=True)
class Job:
    """A validated configuration.

    options: an instance of the task's ``Options``. folder: in a sweep the job's own folder, where its files belong.
    """

    options: Any
    config: EngineConfig
    sampling: SamplingParams
    registry: Registry
    folder: Path | None = None

    def llm(self) -> LLM:
        """The configured engine; the task closes it, since the next job of a sweep needs its memory."""
        from nanoserve.llm import LLM

        return LLM.from_config(self.config, self.registry)

    def file(self, key: str, name: str | None, suffixes: Sequence[str] = ()) -> Path | None:
        """Where the file ``name`` of option ``key`` goes; its folder may have to be made. To be asked before the work.

        None stays None. Raises ConfigError if it cannot be written there, or does not end in one of ``suffixes``.
        """
        if name is None:
            return None
        path = self._place(key, name)
        if suffixes and path.suffix not in suffixes:
            raise ConfigError(f"{key}={name}: the file's name must end in {' or '.join(suffixes)}")
        _check_writable(f"{key}={name}", path, folder=False)
        return path

    def directory(self, key: str, name: str) -> Path:
        """As :meth:`file`, for an option that names a folder; makes it."""
        path = self._place(key, name)
        _check_writable(f"{key}={name}", path, folder=True)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def _place(self, key: str, name: str) -> Path:
        if self.folder is not None and Path(name).is_absolute():
            raise ConfigError(
                f"{key}={name}: every job of a sweep would write there; a relative name goes into the job's own folder"
            )
        return (self.folder or Path()) / name


def _check_writable(option: str, path: Path, folder: bool) -> None:
    try:
        there = next(p for p in (path, *path.parents) if p.exists())
        is_dir = there.is_dir()
    except OSError as error:  # no permission to look, a name that is too long
        raise ConfigError(f"{option}: {error.strerror}") from None
    if there == path and is_dir != folder:
        found, wanted = ("file", "folder") if folder else ("folder", "file")
        raise ConfigError(f"{option}: there is a {found} of that name; give the name of a {wanted}")
    if there != path and not is_dir:
        raise ConfigError(f"{option}: {there} is a file, so nothing can be written inside it")
    if not os.access(there, os.W_OK):
        raise ConfigError(f"{option}: {there} cannot be written")
    if is_dir:
        try:
            with tempfile.TemporaryFile(dir=there):
                pass
        except OSError as error:  # /proc says yes and takes no file
            raise ConfigError(f"{option}: {there} cannot be written ({error.strerror})") from None


def run_task(values: Mapping[str, Any], folder: Path | None = None) -> dict[str, Any]:
    """Check a composed configuration, run its task, return the figures. Raises NanoserveError."""
    from nanoserve.sampling_params import SamplingParams

    own = dict(values)
    name = own.pop("task", None)
    if name not in group_names("task"):
        raise ConfigError(f"task: {name!r} is not one of {', '.join(group_names('task'))}")
    sections = {key: own.pop(key) for key in SECTIONS if key in own}
    if missing := [key for key in SECTIONS if key not in sections]:
        raise ConfigError(f"{missing[0]}: this group is required")
    module = importlib.import_module(f"nanoserve.tasks.{name}")
    registry = Registry.discover()
    config = EngineConfig.from_mapping(sections)
    sampling = build(SamplingParams, sections["sampling"], "sampling")
    try:
        options = build(module.Options, own, "", owner=f"task={name}")
    except ConfigError:
        # A misspelt option of a plugin comes before one that is missing, though it costs the plugin's import to know.
        check_plugin_options(config, registry)
        raise
    figures: dict[str, Any] = module.run(Job(options, config, sampling, registry, folder))
    return figures


def check_plugin_options(config: EngineConfig, registry: Registry) -> None:
    """Raise ConfigError or PluginError if a chosen plugin, or an option given for it, does not exist."""
    for kind, details in KINDS.items():
        choice = getattr(config, details.group)
        if (kind, choice.name) != ("attention", "auto"):  # the one name that stands for no plugin
            registry.make_options(kind, registry.get(kind, choice.name), choice.options)
