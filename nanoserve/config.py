"""Configuration as dataclasses, and the one strict way to build them from a mapping.

The command line (composed by Hydra), the keywords of ``LLM`` and the options of a plugin all pass through
:func:`build`, so that an unknown key, a wrong type or a senseless value is refused in the same words everywhere,
before any weight is read. Neither torch nor Hydra is imported here.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.resources
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NewType, TypeVar

from nanoserve.contracts.errors import ConfigError

T = TypeVar("T")

#: A string taken as typed. In any other optional string field the word None is refused, because it means null.
FreeText = NewType("FreeText", str)


@dataclass(frozen=True)
class ModelOptions:
    """Which model to load.

    path: checkpoint folder, hub id, or ``pkg://package/folder`` for one that ships inside a Python package.
    config: keys of a Hugging Face ``config.json``, for a model without a checkpoint (``load_format=dummy``).
    load_format: overrides ``engine.load_format`` for this model.
    """

    name: str
    path: str | None = None
    config: dict[str, Any] | None = None
    load_format: Literal["auto", "dummy"] | None = None

    def __post_init__(self) -> None:
        if self.path is None and self.config is None:
            raise ConfigError("model.path: a checkpoint folder or a hub id is required")
        if self.path == "":
            raise ConfigError("model.path must not be empty")


@dataclass(frozen=True)
class EngineOptions:
    """The engine's own options; the plugins' are in :class:`PluginChoice`.

    dtype: compute dtype; auto is the checkpoint's on a GPU and float32 on the CPU.
    load_format: auto reads the checkpoint; dummy makes random weights of the exact shape.
    block_size: tokens per KV block. num_kv_blocks: size of the KV pool; None sizes it from the memory left.
    gpu_memory_utilization: fraction of the GPU's memory for weights, activations and KV pool.
    max_num_seqs: sequences per step. max_num_batched_tokens: tokens per step.
    max_model_len: longest sequence in tokens; None takes the model's.
    enforce_eager: no CUDA graphs. graph_capture: when they are captured, as each is first needed or all at the start.
    graph_max_tokens: steps with prompts replay graphs between attentions up to so many tokens; 0: never.
    overlap: prepare a step while the one before runs; None does so on a GPU.
    debug: audit the block pool after every step.
    """

    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    device: str = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    seed: int = 0
    block_size: int = 16
    num_kv_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    graph_capture: Literal["lazy", "start"] = "lazy"
    graph_max_tokens: int = 8192
    tensor_parallel_size: int = 1
    overlap: bool | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        def require(key: str, legal: bool, rule: str) -> None:
            if not legal:
                raise ConfigError(f"engine.{key} must be {rule}, not {getattr(self, key)!r}")

        def require_between(key: str, high: int, limit: str, optional: bool = False) -> None:
            value = getattr(self, key)
            rule = f"1 to {limit}" + (", or null" if optional else "")
            require(key, (optional and value is None) or (value is not None and 1 <= value <= high), rule)

        size = self.block_size
        require("device", re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device) is not None, "auto, cpu, cuda or cuda:N")
        require("seed", 0 <= self.seed < 2**63, "between 0 and 2^63 - 1")
        require("block_size", 1 <= size <= 1024 and size & (size - 1) == 0, "a power of two from 1 to 1024")
        require_between("num_kv_blocks", 2**31 - 1, "2^31 - 1", optional=True)  # block ids are int32
        require("gpu_memory_utilization", 0 < self.gpu_memory_utilization <= 1, "above 0 and at most 1")
        require_between("max_num_seqs", 2**16, "65536")
        require_between("max_num_batched_tokens", 2**24, "2^24")
        require_between("max_model_len", 2**24, "2^24", optional=True)
        require("graph_max_tokens", 0 <= self.graph_max_tokens <= 2**16, "0 to 65536")
        if self.enforce_eager:
            for key in ("graph_capture", "graph_max_tokens"):
                as_is = getattr(self, key) == getattr(EngineOptions, key)
                require(key, as_is, "left out with enforce_eager=true, which captures nothing")
        require("tensor_parallel_size", self.tensor_parallel_size == 1, "1 (tensor parallelism is not built yet)")


@dataclass(frozen=True)
class PluginChoice:
    """A plugin by name and the options given for it; ``Registry.make_options`` turns them into its dataclass."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


#: Folders of ``conf/`` that choose a plugin.
PLUGIN_GROUPS = ("attention", "kv", "scheduler", "policy", "grammar")
DEFAULTS = {
    "model": "tiny",
    "attention": "auto",
    "kv": "bf16",
    "scheduler": "decode_first",
    "policy": "auto",
    "grammar": "llguidance",
}
CONFIG_PATHS = ("pkg://nanoserve.conf",)
#: (group, name) -> folders beyond ours to look for ``GROUP/NAME.yaml`` in, as ``Registry.config_paths_for`` knows them.
MorePaths = Callable[[str, str], Sequence[str]]


def no_more_paths(group: str, name: str) -> Sequence[str]:
    return ()


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine is built from.

    policy_by_device: part of a GPU's name → preset (``policy/NAME.yaml``) that takes the place of ``policy`` there.
    """

    model: ModelOptions
    attention: PluginChoice
    kv: PluginChoice
    scheduler: PluginChoice
    policy: PluginChoice
    grammar: PluginChoice
    engine: EngineOptions = field(default_factory=EngineOptions)
    policy_by_device: dict[str, str] = field(default_factory=dict)

    @property
    def load_format(self) -> Literal["auto", "dummy"]:
        return self.model.load_format or self.engine.load_format

    @property
    def has_checkpoint(self) -> bool:
        """False for random weights of a shape that ``model.config`` gives."""
        return self.model.path is not None and (self.load_format != "dummy" or self.model.config is None)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> EngineConfig:
        """From a composed configuration: one mapping per group, ``name`` beside the options of a plugin."""
        policy = dict(_mapping("policy", values["policy"]))
        by_device = _mapping("policy.by_device", policy.pop("by_device", None) or {})
        return cls(
            model=build(ModelOptions, values["model"], "model"),
            engine=build(EngineOptions, values["engine"], "engine"),
            policy_by_device={str(device): str(preset) for device, preset in by_device.items()},
            **{group: _plugin_choice(group, {**values, "policy": policy}[group]) for group in PLUGIN_GROUPS},
        )

    def policy_on(self, device_name: str, more_paths: MorePaths = no_more_paths) -> PluginChoice:
        """The policy on a device of this name. Raises ConfigError if its preset does not exist."""
        part = self._part_of(device_name)
        if part is None:
            return self.policy
        stored = _stored("policy", preset := self.policy_by_device[part], more_paths)
        if stored is None:
            raise ConfigError(f"policy.by_device.{part}: there is no policy/{preset}.yaml")
        stored.pop("by_device", None)  # of a preset nobody asks
        return _plugin_choice("policy", stored)

    def policy_origin_on(self, device_name: str, more_paths: MorePaths = no_more_paths) -> str:
        """Where the options of :meth:`policy_on` come from, in words: ``policy/NAME.yaml`` if that has just these."""
        from omegaconf.errors import OmegaConfBaseException

        part = self._part_of(device_name)
        if part is not None:
            return f"policy/{self.policy_by_device[part]}.yaml"
        for name in dict.fromkeys([self.policy.name, *group_names("policy")]):
            try:
                stored = _stored("policy", name, more_paths) or {}
            except OmegaConfBaseException:  # it refers to the rest of the configuration
                continue
            stored.pop("by_device", None)
            if stored == {"name": self.policy.name, **self.policy.options}:
                return f"policy/{name}.yaml"
        return "options of its own" if self.policy.options else "its defaults"

    def _part_of(self, device_name: str) -> str | None:
        """The key of ``policy_by_device`` that a device of this name goes by."""
        return next((part for part in self.policy_by_device if part.lower() in device_name.lower()), None)

    @classmethod
    def from_kwargs(cls, *, more_paths: MorePaths = no_more_paths, **keywords: Any) -> EngineConfig:
        """From the keywords of ``LLM``.

        ``model`` is the name of a model configuration, a checkpoint folder or a hub id. ``attention``, ``kv``,
        ``scheduler``, ``policy`` and ``grammar`` are a name or ``{"name": …, option: …}``. A name is
        ``GROUP/NAME.yaml`` of ours or in ``more_paths`` if there is one, else a plugin's. All other keywords are fields
        of :class:`EngineOptions`.
        """
        legal = [*DEFAULTS, *(f.name for f in dataclasses.fields(EngineOptions))]
        for key in keywords:
            if key not in legal:
                raise ConfigError(f"unknown keyword {key!r}; known are: {', '.join(legal)}{did_you_mean(key, legal)}")
        engine = {key: value for key, value in keywords.items() if key not in DEFAULTS}
        chosen = {key: keywords.get(key, default) for key, default in DEFAULTS.items()}
        groups = {group: _load_choice(group, chosen[group], more_paths) for group in PLUGIN_GROUPS}
        return cls.from_mapping({"model": _load_model(chosen["model"], more_paths), "engine": engine, **groups})


def _plugin_choice(group: str, values: Any) -> PluginChoice:
    options = dict(_mapping(group, values))
    name = options.pop("name", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{group}.name: expected the name of a plugin, got {name!r}")
    return PluginChoice(name, options)


def _stored(group: str, name: Any, more_paths: MorePaths) -> dict[str, Any] | None:
    if not isinstance(name, str) or re.fullmatch(r"[\w.-]+", name) is None:
        return None
    return load_yaml(group, name, (*CONFIG_PATHS, *more_paths(group, name)))


def _load_choice(group: str, value: Any, more_paths: MorePaths) -> dict[str, Any]:
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{group}: expected a name, or {{name: …}} and options beside it, got {value!r}")
    given = dict(value)
    stored = _stored(group, given.get("name"), more_paths)
    if stored is None:
        return given
    options = {key: option for key, option in given.items() if key != "name"}
    if group == "policy" and options:
        stored.pop("by_device", None)  # presets for devices would replace what was given
    # The YAML of a preset (policy=h200) names the plugin it configures, so its name wins over the preset's.
    return {**given, **stored, **options}


def _load_model(value: Any, more_paths: MorePaths) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return {**(_stored("model", value.get("name"), more_paths) or {}), **value}
    if isinstance(value, Path):
        value = str(value)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"model: expected the name of a model configuration or a path, got {value!r}")
    stored = _stored("model", value, more_paths)
    if stored is not None:
        return stored
    if "/" not in value and not Path(value).is_dir():
        names = group_names("model", (*CONFIG_PATHS, *more_paths("model", value)))
        raise ConfigError(
            f"model {value!r} is neither a folder nor a model configuration; "
            f"configurations: {', '.join(names)}{did_you_mean(value, names)}"
        )
    return {"name": Path(value).name, "path": value}


def config_folders(config_paths: Iterable[str]) -> list[Any]:
    """The existing folders behind Hydra search paths (``pkg://package`` or ``file://folder``)."""
    folders = []
    for path in config_paths:
        scheme, _, rest = path.partition("://")
        if scheme == "pkg":
            package, *inner = rest.split("/")
            try:
                folder: Any = importlib.resources.files(package).joinpath(*inner)
            except ModuleNotFoundError:
                if path in CONFIG_PATHS:
                    raise ConfigError(
                        "nanoserve runs from its source tree, without its conf: pip install -e ."
                    ) from None
                continue
        else:
            folder = Path(rest if scheme == "file" else path)
        if folder.is_dir():
            folders.append(folder)
    return folders


def group_names(group: str, config_paths: Iterable[str] = CONFIG_PATHS) -> list[str]:
    """Names of the YAML files of a group, sorted."""
    return sorted(
        {
            entry.name.removesuffix(".yaml")
            for folder in config_folders(config_paths)
            if (folder / group).is_dir()
            for entry in (folder / group).iterdir()
            if entry.name.endswith(".yaml")
        }
    )


def load_yaml(group: str, name: str, config_paths: Iterable[str] = CONFIG_PATHS) -> dict[str, Any] | None:
    """``GROUP/NAME.yaml`` of the first folder that has it, read as Hydra reads it; None if there is none."""
    if re.fullmatch(r"[\w.-]+", name) is None:
        return None
    for folder in config_folders(config_paths):
        file = folder / group / f"{name}.yaml"
        if file.is_file():
            from omegaconf import OmegaConf

            values = OmegaConf.to_container(OmegaConf.create(file.read_text(encoding="utf-8")), resolve=True)
            return dict(_mapping(f"{group}/{name}.yaml", values))
    return None


# --- the strict builder ------------------------------------------------------------------------------------------


def build(cls: type[T], values: Any, prefix: str, owner: str = "") -> T:
    """An instance of the dataclass ``cls`` from a mapping, or a ConfigError that names the key.

    prefix: what keys are called in messages (``engine`` for ``engine.seed``). owner: whose options these are.
    Types are exact: an int field takes no 4.0, no "4" and no True; a float field takes an int.
    """
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    arguments = {}
    for key, value in _mapping(prefix, values).items():
        if key not in fields:
            whose = f" of {owner}" if owner else ""
            known = f"it has: {', '.join(fields)}" if fields else "it has no options"
            raise ConfigError(f"{_join(prefix, key)}: unknown option{whose}; {known}{did_you_mean(key, fields)}")
        arguments[key] = coerce(value, hints[key], _join(prefix, key))
    for name, f in fields.items():
        if name not in arguments and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{_join(prefix, name)}: a value is required ({describe(hints[name])})")
    try:
        return cls(**arguments)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:  # a plugin's or a request's own validation
        message = str(error)
        named = re.match(r"\w+", message)
        separator = "." if named and named.group() in fields and prefix else ": "
        raise ConfigError(f"{prefix}{separator}{message}" if prefix else message) from error


def coerce(value: Any, expected: Any, key: str) -> Any:
    """``value`` if it is of the annotated type ``expected``, else a ConfigError. A list becomes a tuple where asked."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if expected is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if type(None) in arguments and value == "None" and FreeText not in arguments:
            raise ConfigError(f"{key}: 'None' is a word here; write null for no value")
        exact = [member for member in arguments if type(value) is member]
        for member in exact or arguments:
            try:
                return coerce(value, member, key)
            except ConfigError as error:
                if len([m for m in arguments if m is not type(None)]) == 1 and member is not type(None):
                    raise error if dataclasses.is_dataclass(member) else _mismatch(key, expected, value) from None
        raise _mismatch(key, expected, value)
    if origin is Literal:
        if not any(type(value) is type(member) and value == member for member in arguments):
            raise ConfigError(f"{key}: {value!r} is not one of {describe(expected)}{did_you_mean(value, arguments)}")
        return value
    if isinstance(expected, NewType):
        return coerce(value, expected.__supertype__, key)
    if origin in (list, tuple, set, frozenset, Sequence):
        return _coerce_sequence(value, expected, key)
    if origin in (dict, Mapping):
        keys, items = arguments
        return {_coerce_key(k, keys, key): coerce(v, items, f"{key}.{k}") for k, v in _mapping(key, value).items()}
    if dataclasses.is_dataclass(expected) and isinstance(value, Mapping):
        return build(typing.cast(type, expected), value, key)
    if expected is float and type(value) is int:
        return float(value)
    if expected is type(None):
        expected = types.NoneType
    # bool is a subclass of int, and True is no number here.
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        raise _mismatch(key, expected, value)
    return value


def _coerce_sequence(value: Any, expected: Any, key: str) -> Any:
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if isinstance(value, str) or not isinstance(value, (list, tuple, set, frozenset)):
        raise _mismatch(key, expected, value)
    if origin is tuple and arguments[-1] is not Ellipsis:
        if len(value) != len(arguments):
            raise _mismatch(key, expected, value)
        return tuple(coerce(v, t, f"{key}[{i}]") for i, (v, t) in enumerate(zip(value, arguments, strict=True)))
    items = [coerce(v, arguments[0], f"{key}[{i}]") for i, v in enumerate(value)]
    return items if origin in (list, Sequence) else origin(items)


def _coerce_key(name: Any, expected: Any, key: str) -> Any:
    if expected is int and isinstance(name, str) and re.fullmatch(r"-?\d+", name):
        return int(name)  # JSON has string keys only
    return coerce(name, expected, f"{key} (a key)")


def _mapping(key: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _mismatch(key, dict, value)
    return value


def _mismatch(key: str, expected: Any, value: Any) -> ConfigError:
    a_list = isinstance(value, str) and "list" in describe(expected) and not value.startswith("[")
    hint = f"; one entry is written [{value}]" if a_list else ""
    return ConfigError(f"{key}: expected {describe(expected)}, got {value!r}{hint}")


def _join(prefix: str, key: object) -> str:
    return f"{prefix}.{key}" if prefix else str(key)


def describe(expected: Any) -> str:
    """A type in words: ``int or null``, ``auto, dummy``."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin is Literal:
        return ", ".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(describe, arguments))
    if origin is tuple and arguments[-1] is not Ellipsis:
        return f"[{', '.join(map(describe, arguments))}]"
    if origin in (list, tuple, set, frozenset, Sequence):
        return f"a list of {describe(arguments[0])}"
    if origin in (dict, Mapping):
        return f"a mapping {{{': '.join(map(describe, arguments))}}}"
    if dataclasses.is_dataclass(expected):
        return f"{{{', '.join(f'{f.name}: …' for f in dataclasses.fields(expected) if f.init)}}}"
    if isinstance(expected, NewType):
        return "text"
    if expected in (type(None), None):
        return "null"
    if expected is dict:
        return "a mapping of options"
    return expected.__name__ if isinstance(expected, type) and not arguments else str(expected).replace("typing.", "")


def did_you_mean(word: object, known: Iterable[object]) -> str:
    """``; did you mean 'x'?``, or nothing when no known word is near."""
    near = difflib.get_close_matches(str(word), list(map(str, known)), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
