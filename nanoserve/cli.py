"""The command ``nanoserve``: Hydra composes a configuration, one dispatch on ``task`` runs it.

Around Hydra stand three things of ours. Before it, the arguments are rewritten so that free text needs no quoting
(:func:`rewrite`), and checked for what Hydra would refuse in words of its own (:func:`check_overrides`). After it, the
composed values are checked strictly (``nanoserve.config``). And ``--help`` and every error are in our words: one line,
exit code 2 for a wrong command, 1 for a failure; ``HYDRA_FULL_ERROR=1`` adds the traceback.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import signal
import sys
import tempfile
import textwrap
import threading
import traceback
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nanoserve
from nanoserve.config import (
    CONFIG_PATHS,
    DEFAULTS,
    PLUGIN_GROUPS,
    EngineOptions,
    config_folders,
    did_you_mean,
    group_names,
    load_yaml,
)
from nanoserve.contracts.errors import ConfigError, NanoserveError, PluginError
from nanoserve.registry import KINDS, PluginWarning, Registry

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

#: Values taken as typed. For a file, null still means none, and a value in quotes is left to Hydra's own grammar.
TEXT_KEYS = frozenset({"prompt", "system"})
FILE_KEYS = frozenset(
    ("prompts", "output", "report", "quality", "base", "new", "model.path", "bench.trace", "eval.text",
     "simulate.trace", "simulate.fit", "simulate.check", "simulate.plot", "plot", "record", "update")
)  # fmt: skip
#: Flags that bring configurations of the user's own, which may name any choice of any plugin.
OWN_NAMES = ("--config-path", "-cp", "--config-name", "-cn", "hydra.searchpath=")
OWN_FOLDERS = ("--config-dir", "-cd", *OWN_NAMES)
#: The tasks that sample as ``sampling`` says.
SAMPLING_TASKS = ("generate", "chat", "serve")
#: The key of a choice that does not exist, in the configuration of a job of a sweep: why.
REFUSED = "refused"
USAGE, FAILURE, INTERRUPTED, TERMINATED = 2, 1, 130, 143
#: Not being able to write is the machine's affair; a traceback would explain nothing.
CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)

ABOUT = """\
nanoserve runs Qwen3 language models on an engine whose every contested part is a plugin.

  nanoserve prompt="def read_json(path):"
  nanoserve task=chat model.path=Qwen/Qwen3-0.6B
  nanoserve prompts=prompts.jsonl output=results.jsonl kv=int8
  nanoserve -m kv=bf16,int8 scheduler=decode_first,prefill_first prompt="def f(x):"

Write KEY=VALUE. -m runs every combination of comma-separated values and compares them in one table; each job keeps a
folder in multirun/, or in hydra.sweep.dir=FOLDER.
Also: task=NAME --help explains one task, --cfg job prints the configuration, --version, --hydra-help.
"""


class Terminated(BaseException):  # noqa: N818  # as KeyboardInterrupt, it is no error
    """SIGTERM, where Ctrl-C raises KeyboardInterrupt: whatever is open is closed on the way out."""


class JobFailedError(BaseException):
    """Carries a job's exception past Hydra, which would print a list of overrides before passing it on."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: ``sys.argv[1:]``); returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    show_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    if sys.stdin is None:  # closed, as by <&-
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        print("nanoserve: error: standard output is closed", file=sys.stderr)
        return FAILURE
    try:
        with _plain_warnings():
            if {"-h", "--help"} & set(arguments):
                tasks = [word.removeprefix("task=") for word in arguments if word.startswith("task=")]
                print(task_help(tasks[-1]) if tasks else help_text(Registry.discover()))
            elif "--version" in arguments:
                print(f"nanoserve {nanoserve.__version__}")
            else:
                with _terminable():
                    _compose_and_run(arguments)
            sys.stdout.flush()
    except SystemExit as stop:
        if isinstance(stop.__cause__, OSError):
            return _report(stop.__cause__, show_traceback)
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else FAILURE
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except Terminated:
        print("nanoserve: terminated", file=sys.stderr)
        return TERMINATED
    except JobFailedError as failure:
        return _report(failure.__cause__ or failure, show_traceback)
    except Exception as error:
        return _report(error, show_traceback)
    return 0


def _compose_and_run(arguments: Sequence[str]) -> None:
    from hydra._internal.utils import get_args_parser
    from hydra.core.config_store import ConfigStore
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import MissingConfigException
    from hydra.main import main as hydra_main

    arguments = rewrite(arguments)
    known, rest = get_args_parser().parse_known_args(arguments)
    if unknown := [argument for argument in rest if argument.startswith("-")]:
        raise ConfigError(f"unknown flag {unknown[0]!r}; see nanoserve --help and --hydra-help")
    words = [*known.overrides, *rest]
    flags = [argument for argument in arguments if argument not in words]
    overrides = OverridesParser.create().parse_overrides(words)
    multirun = known.multirun or "hydra.mode=MULTIRUN" in words
    check_overrides(overrides, multirun)

    registry = Registry.discover()
    if any(argument.startswith(OWN_FOLDERS) for argument in arguments):
        paths = registry.config_paths()
    else:
        asked = [path for choice in _choices(overrides) for path in registry.config_paths_for(*choice)]
        paths = list(dict.fromkeys(asked))
    # A plugin needs no YAML of its own: its name alone is a choice, with the defaults of its dataclass.
    for kind, details in KINDS.items():
        for name in set(registry.names(kind)) - set(group_names(details.group, (*CONFIG_PATHS, *paths))):
            ConfigStore.instance().store(group=details.group, name=name, node={"name": name}, provider="nanoserve")
    of_sweep = {choice for o in overrides if multirun and o.is_sweep_override() for choice in _choices([o])}
    if any(argument.startswith(OWN_NAMES) for argument in arguments):
        of_sweep = set()
    folders = [*CONFIG_PATHS, *paths, *([f"file://{known.config_dir}"] if known.config_dir else [])]
    words = _with_search_paths(words, paths)
    if multirun and not any(word.startswith("hydra.sweep.dir=") for word in words):
        words += _somewhere_to_write()
    with _refusals_as_choices(registry, of_sweep, folders), _as_hydra_wants_it([*words, *flags]):
        try:
            hydra_main(version_base="1.3", config_path=CONFIG_PATHS[0], config_name="config")(job)()
        except MissingConfigException as error:
            group, _, name = str(error.missing_cfg_file).rpartition("/")
            raise _unknown_choice(group, name, sorted(error.options or []), registry) from error
        except OSError as error:
            if not multirun or isinstance(error, BrokenPipeError):
                raise
            why = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
            raise ConfigError(f"hydra.sweep.dir: the sweep cannot keep its results there ({why})") from error
        except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
            # A job's own errors come as JobFailedError, so this is a value that Hydra was not prepared for.
            of_hydra = [word for word in words if "hydra" in word and word not in _with_search_paths([], paths)]
            given = " ".join(of_hydra or words)
            raise ConfigError(f"Hydra cannot use {given} ({type(error).__name__}: {error})") from error


def job(values: DictConfig) -> None:
    """One job, as Hydra calls it. In a sweep its outcome, good or bad, goes into its folder and the sweep goes on."""
    from omegaconf import OmegaConf

    from nanoserve import sweep
    from nanoserve.tasks import run_task

    try:
        logging.basicConfig(format="%(message)s")  # what hydra.verbose=[nanoserve] asks for, on standard error
        in_sweep = sweep.running()
        if in_sweep:
            sweep.announce()
        if REFUSED in values:
            raise ConfigError(values[REFUSED])
        plain: Any = OmegaConf.to_container(values, resolve=True, throw_on_missing=True)
        figures = run_task(plain, sweep.folder() if in_sweep else None)
        if in_sweep:
            sweep.record(figures)
    except (Exception, SystemExit) as error:  # a plugin may call sys.exit
        if not in_sweep:
            raise JobFailedError from error
        sweep.record(getattr(error, "figures", None), one_line(error), traceback.format_exc())


# --- before Hydra --------------------------------------------------------------------------------------------------


def rewrite(arguments: Sequence[str]) -> list[str]:
    """The command line in Hydra's grammar.

    Values of free-text keys are quoted, so that they need nothing but the shell's quotes and never sweep. Options of
    plugins are force-added, since a YAML need not list them; the plugin's dataclass checks them. A model given by its
    path, as ``model=FOLDER/…`` or ``model.path=…``, chooses the group's entry ``path``.
    """
    rewritten = []
    by_path = has_model = False
    of_policy = set()
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key == "model" and "/" in value:
            key = "model.path"
        has_model |= key == "model"
        by_path |= key == "model.path"
        name = key.lstrip("+")
        if not equals or argument.startswith("-"):
            pass
        elif name in TEXT_KEYS or (name in FILE_KEYS and value != "null" and not re.fullmatch(r"(['\"]).*\1", value)):
            argument = f"{key}={quote(value)}"
        elif key.partition(".")[0] in PLUGIN_GROUPS and "." in key:
            argument = f"++{argument}"
        if equals and name.startswith("policy."):
            of_policy.add(name.split(".")[1])
        rewritten.append(argument)
    if by_path and not has_model:
        rewritten.append("model=path")
    if of_policy and "by_device" not in of_policy:
        rewritten.append("++policy.by_device=null")  # presets for devices would replace what was given
    return rewritten


def check_overrides(overrides: Sequence[Override], multirun: bool) -> None:
    """Raise ConfigError for what Hydra takes without a word, or refuses with advice about its own insides."""
    from hydra.core.override_parser.types import ValueType

    groups = config_groups()
    seen: set[str] = set()
    task = next((override.value() for override in overrides if override.key_or_group == "task"), None)
    unused = _unused(task, {override.key_or_group for override in overrides}) if isinstance(task, str) else {}
    for override in overrides:
        key, value = override.key_or_group, override.value()
        if key in seen:
            raise ConfigError(f"{key} is given twice; once is enough")
        seen.add(key)
        if override.is_delete() and key in groups:
            raise ConfigError(f"{key}: this group is required; write {key}=NAME")
        if override.is_sweep_override() and not multirun:
            a_list = override.value_type == ValueType.SIMPLE_CHOICE_SWEEP and key not in groups
            hint = f", and a list is written {key}=[{override.get_value_string()}]" if a_list else ""
            raise ConfigError(f"{override.input_line}: several values need -m{hint}")
        if key in groups and not override.is_sweep_override() and not isinstance(value, str):
            kinds = [kind for kind, details in KINDS.items() if details.group == key]
            installed = {name for kind in kinds for name in Registry.discover().names(kind)}
            names = ", ".join(sorted({*group_names(key), *installed}))
            raise ConfigError(
                f"{override.input_line}: expected a name ({names}); options are written {key}.OPTION=VALUE"
            )
        if (found := next((part for part in (key, key.partition(".")[0]) if part in unused), None)) is not None:
            raise ConfigError(f"{override.input_line}: task={task} does not use {found}{unused[found]}; leave it out")
        if key == "hydra.verbose" and not isinstance(value, (bool, str, list)):
            raise ConfigError(f"{override.input_line}: expected true, false, or names of loggers as [a,b]")


def _unused(task: str, given: Collection[str]) -> dict[str, str]:
    """The groups and keys that a task looks at nowhere, if these keys are given, and what to say of it."""
    unused = {}
    if task not in SAMPLING_TASKS:
        unused["sampling"] = " (it has bench.temperature)" if task == "bench" else ""
    if task == "simulate":
        unused |= dict.fromkeys(("attention", "policy", "grammar"), ", which runs no model")
        if "simulate.fit" not in given:
            unused["kv"] = " without simulate.fit"
    if task in ("bench_kernels", "tune"):
        of_model = " (it has num_q_heads, num_kv_heads and head_dim)"
        unused |= {"model": of_model, "scheduler": "", "policy": "", "grammar": ""}
        options = {field.name for field in fields(EngineOptions)} - {"device", "dtype", "block_size"}
        unused |= {f"engine.{name}": "" for name in options}
    if task == "capacity":
        unused |= dict.fromkeys(("attention", "scheduler", "policy", "grammar"), "")
    if task in ("plugins", "new_plugin"):
        unused |= dict.fromkeys(("model", "engine", *PLUGIN_GROUPS), "")
    if task == "compare":
        if {"base", "new"} & {*given}:
            unused |= dict.fromkeys((*PLUGIN_GROUPS, "bench"), " with base and new, which have been measured")
        else:
            unused["gate"] = " without base and new: choosing a plugin is no regression"
    return unused


def config_groups() -> list[str]:
    """The folders of ``conf/``."""
    folder = config_folders(CONFIG_PATHS)[0]
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("_"))


def _choices(overrides: Sequence[Override]) -> Iterator[tuple[str, str]]:
    """Every (group, name) that the command line asks for, of our groups and of Hydra's that Hydra itself lacks."""
    from hydra.core.override_parser.types import ChoiceSweep

    groups = config_groups()
    for override in overrides:
        group = override.key_or_group
        of_hydra = group.startswith("hydra/")
        if override.is_delete() or not (of_hydra or group in groups):
            continue
        value: Any = override.value()
        for name in value.list if isinstance(value, ChoiceSweep) else [value]:
            text = getattr(name, "text", name)  # in a sweep a quoted name is a QuotedString
            if isinstance(text, str) and not (of_hydra and text in group_names(group, ["pkg://hydra.conf"])):
                yield group, text


@contextmanager
def _refusals_as_choices(
    registry: Registry, choices: Iterable[tuple[str, str]], paths: Sequence[str]
) -> Iterator[None]:
    """Meanwhile the ``choices`` (group, name) that do not exist compose, to a job that is refused with the reason.

    Hydra composes a sweep's jobs as it goes, and one that it cannot compose would end all of them.
    """
    from hydra.core.config_store import ConfigStore

    kinds = {details.group: kind for kind, details in KINDS.items()}
    stored = []
    for group, name in choices:
        known = {*group_names(group, paths), *(registry.names(kinds[group]) if group in kinds else ())}
        if group in config_groups() and name not in known:
            why = str(_unknown_choice(group, name, sorted(known), registry))
            node = {REFUSED: why.replace("${", r"\${")}
            ConfigStore.instance().store(group=group, name=name, package="_global_", node=node, provider="nanoserve")
            stored.append((group, name))
    try:
        yield
    finally:
        for group, name in stored:
            del ConfigStore.instance().repo[group][f"{name}.yaml"]


def _with_search_paths(words: Sequence[str], paths: Sequence[str]) -> list[str]:
    if not paths:
        return list(words)
    key = "hydra.searchpath="
    given = [word.removeprefix(key).strip("[]") for word in words if word.startswith(key)]
    return [*(word for word in words if not word.startswith(key)), f"{key}[{','.join([*filter(None, given), *paths])}]"]


def _somewhere_to_write() -> list[str]:
    """An override of the sweep's folder where ``multirun/`` cannot be written, as in a read-only working directory."""
    folder = Path("multirun")
    try:
        with tempfile.TemporaryDirectory(dir=folder if folder.exists() else Path()):
            return []
    except OSError as error:
        instead = tempfile.mkdtemp(prefix="nanoserve-multirun-")
        print(
            f"nanoserve: multirun/ cannot be written ({error.strerror}); the results of the jobs go to {instead} "
            "(hydra.sweep.dir=FOLDER sets it)",
            file=sys.stderr,
        )
        return [f"hydra.sweep.dir={quote(instead)}"]


def quote(text: str) -> str:
    """``text`` as one quoted string of Hydra's grammar that OmegaConf reads back as exactly ``text``."""
    from hydra.core.override_parser.types import Quote, QuotedString

    if text == "???":  # OmegaConf's mark of a missing value; only an interpolation can stand for these characters
        literal = "${oc.decode:\"'???'\"}"
    else:
        # An odd number of backslashes makes ${ literal, and pairs of them stand for one.
        literal = re.sub(r"(\\*)\$\{", lambda match: match.group(1) * 2 + r"\${", text)
    return QuotedString(text=literal, quote=Quote.single).with_quotes()


@contextmanager
def _as_hydra_wants_it(arguments: list[str]) -> Iterator[None]:
    """Hydra reads ``sys.argv``, and lets exceptions through instead of printing them if HYDRA_FULL_ERROR is set."""
    before, asked = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = ["nanoserve", *arguments], "1"
    try:
        yield
    finally:
        sys.argv = before
        del os.environ["HYDRA_FULL_ERROR"]
        if asked is not None:
            os.environ["HYDRA_FULL_ERROR"] = asked


# --- errors --------------------------------------------------------------------------------------------------------


def _report(error: BaseException, show_traceback: bool) -> int:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    cannot_write = isinstance(error, OSError) and error.errno in CANNOT_WRITE
    if cannot_write or isinstance(error, BrokenPipeError):
        with suppress(OSError):
            sys.stdout.flush()
        with suppress(io.UnsupportedOperation):  # what is left in the buffer must not fail once more at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):  # the reader has gone, as in `nanoserve … | head -1`
        return FAILURE
    usage = isinstance(error, (ConfigError, PluginError, HydraException, OmegaConfBaseException))
    if show_traceback:
        traceback.print_exception(error)
    plain = usage or cannot_write or isinstance(error, NanoserveError)
    hint = "" if plain else " (HYDRA_FULL_ERROR=1 shows the traceback)"
    print(f"nanoserve: error: {one_line(error)}{hint}", file=sys.stderr)
    return USAGE if usage else FAILURE


def one_line(error: BaseException) -> str:
    """What is wrong and what would be right, without a line break."""
    from hydra.errors import HydraException, OverrideParseException
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

    cause = error.__cause__
    if isinstance(error, NanoserveError):
        text = str(error)
    elif isinstance(error, OverrideParseException):
        text = f"cannot read {error.override!r}: write KEY=VALUE; a value with special characters needs 'quotes' inside"
    elif isinstance(error, MissingMandatoryValue):
        text = f"{error.full_key}: a value is required"
    elif isinstance(error, HydraException) and isinstance(cause, (ConfigAttributeError, ConfigKeyError)):
        text = unknown_option(str(cause.full_key))
    elif isinstance(error, HydraException) and (exists := re.search(r"An item is already at '(.*?)'", str(error))):
        text = f"write {exists[1]}=VALUE without the +"
    elif isinstance(error, HydraException) and (twice := re.match(r"Multiple values for (\S+)\.", str(error))):
        text = f"write {twice[1]}=NAME without the +"
    elif isinstance(error, HydraException) and (
        absent := re.match(r"Could not (?:override|delete(?: from config)?)\.? '(.*?)'", str(error))
    ):
        text = unknown_option(absent[1])
    elif isinstance(error, (HydraException, OmegaConfBaseException)):
        text = str(error).split("\n    full_key")[0]
    elif isinstance(error, OSError) and error.errno in CANNOT_WRITE:
        text = f"cannot write: {error.strerror}" + (f": {error.filename}" if error.filename else "")
    else:
        text = f"{type(error).__name__}: {error}"
    return " ".join(text.split())


def unknown_option(key: str) -> str:
    """The message for a key that no group has, with the full name of the option that was probably meant."""
    known = {f"{group}.{name}" for group in ("engine", "sampling") for name in load_yaml(group, "default") or ()}
    tasks = {task: _keys_of(task) for task in group_names("task")}
    top, _, inner = key.partition(".")
    of = [task for task, keys in tasks.items() if top in keys]
    if of and not inner:
        named = " and ".join(f"task={task}" for task in of)
        return f"unknown option {key!r} of this task: it belongs to {named}"
    # Where Hydra names an inner key, the group around it is there.
    by_choice = {name: _inner_keys(top, load_yaml(top, name) or {}) for name in group_names(top) if of}
    if others := [name for name, keys in by_choice.items() if inner in keys]:
        return f"unknown option {key!r} here: it belongs to {' and '.join(f'{top}={name}' for name in others)}"
    of_tasks = [(load_yaml("task", task) or {}).get(top) for task in of]
    inside = set().union(*by_choice.values(), *(keys for keys in of_tasks if isinstance(keys, Mapping)))
    if inside:
        return f"unknown option {key!r} (nanoserve task={of[0]} --help lists them){did_you_mean(inner, inside)}"
    known |= {name for keys in tasks.values() for name in keys}
    last = key.rpartition(".")[2]
    same = sorted(name for name in known if name.rpartition(".")[2] == last)
    hint = f"; did you mean {same[0]!r}?" if same else did_you_mean(key, known)
    return f"unknown option {key!r} (nanoserve --help lists them){hint}"


def _inner_keys(group: str, values: Mapping[str, Any]) -> set[str]:
    """The keys of a group in a YAML file of it, which may be a global one."""
    return set(values.get(group, values))


def _keys_of(task: str) -> set[str]:
    """The top-level keys that ``task=TASK`` adds: its options and its groups."""
    return (set(load_yaml("task", task) or {}) | set(_groups_of(task))) - {"defaults", "task", "sampling"}


def _unknown_choice(group: str, name: str, known: Sequence[str], registry: Registry) -> NanoserveError:
    for kind, details in KINDS.items():
        if details.group == group:
            return registry.unknown(kind, name, known)
    if not group:  # a whole configuration
        name = name.removesuffix(".yaml")
        return ConfigError(
            f"--config-name={name}: there is no {name}.yaml in the folders that are searched; leave it out"
        )
    hints = {"model": "; write model.path=FOLDER for a checkpoint"}
    if group in ("hydra/launcher", "hydra/sweeper"):
        hints[group] = f"; is it installed? pip install hydra-{name}-{group.removeprefix('hydra/')}"
    hint = did_you_mean(name, known) or hints.get(group, "")
    return ConfigError(f"unknown {group} {name!r}; known are: {', '.join(known)}{hint}")


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM raises Terminated meanwhile. A task that serves has a handler of its own.

    What a handler raises may be lost: in a destructor, a weak reference's callback, or while a module is compiled. So
    it is raised again, unless it is on its way out already, until that has been left.
    """
    replaced: dict[int, Any] = {}

    def stop(number: int, frame: Any) -> None:
        if signal.SIGALRM not in replaced:
            replaced[signal.SIGALRM] = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        error = sys.exc_info()[1]  # that what was interrupted is handling
        while error is not None and not isinstance(error, Terminated):
            error = error.__context__
        if error is None:
            raise Terminated

    def lost(unraisable: sys.UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, Terminated):
            hook(unraisable)

    if threading.current_thread() is not threading.main_thread():  # only that one may set handlers
        yield
        return
    replaced[signal.SIGTERM] = signal.signal(signal.SIGTERM, stop)
    hook, sys.unraisablehook = sys.unraisablehook, lost
    try:
        yield
    finally:
        if signal.SIGALRM in replaced:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in replaced.items():
            signal.signal(number, handler)
        sys.unraisablehook = hook


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """A plugin's warning is one line on standard error and comes once, however many registries are made."""
    original = warnings.showwarning
    seen = set()

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if not issubclass(category, PluginWarning):
            original(message, category, *where, **more)
        elif str(message) not in seen:
            seen.add(str(message))
            print(f"nanoserve: warning: {message}", file=sys.stderr)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = original


# --- help ----------------------------------------------------------------------------------------------------------


def help_text(registry: Registry) -> str:
    """Purpose, commands to copy, the groups and the options: read from the YAML files, nothing heavy is imported."""
    paths = (*CONFIG_PATHS, *registry.config_paths())
    kinds = {details.group: kind for kind, details in KINDS.items()}
    lines = [ABOUT, "Groups (GROUP=NAME; * is the default):"]
    defaults = {**DEFAULTS, "engine": "default", "sampling": "default", "task": "generate"}
    for group, default in defaults.items():
        names = {*group_names(group, paths), *(registry.names(kinds[group]) if group in kinds else ())}
        lines.append(_group_line(group, sorted(names), default))
    for group in ("engine", "sampling"):
        lines += ["", f"{group} options:", *_options_of(group, "default")]
    for task in group_names("task"):
        lines += ["", *_task_options(task)]
    lines += ["", "The options of a plugin are written GROUP.OPTION=VALUE, as in kv.dtype=float16."]
    return "\n".join(lines)


def task_help(task: str) -> str:
    """One task: what it does, its groups and its options. Raises ConfigError if there is none of this name."""
    if task not in group_names("task"):
        names = group_names("task")
        raise ConfigError(f"task: {task!r} is not one of {', '.join(names)}{did_you_mean(task, names)}")
    about = re.search(r"(?m)^# (?!@)(.*)", _yaml_text("task", task))
    return "\n".join([f"nanoserve task={task}: {about[1] if about else ''}", "", *_task_options(task)])


def _task_options(task: str) -> list[str]:
    lines = [f"task={task} options:", *_options_of("task", task)]
    for group, default in _groups_of(task).items():
        lines += [_group_line(group, group_names(group), default), *_options_of(group, default)]
    return lines


def _groups_of(task: str) -> dict[str, str]:
    """The groups that ``task=TASK`` brings, with the name that each begins with."""
    entries = (load_yaml("task", task) or {}).get("defaults", ())
    return {g.strip("/"): name for entry in entries if isinstance(entry, dict) for g, name in entry.items()}


def _group_line(group: str, names: Sequence[str], default: str) -> str:
    starred = ", ".join("*" + name if name == default else name for name in names)
    return textwrap.fill(starred, 110, initial_indent=f"  {group:11}", subsequent_indent=" " * 13)


def _yaml_text(group: str, name: str) -> str:
    text: str = (config_folders(CONFIG_PATHS)[0] / group / f"{name}.yaml").read_text(encoding="utf-8")
    return text


def _options_of(group: str, name: str) -> list[str]:
    """A line for every key that has a comment, one level of nesting deep. A task's keys stand alone."""
    lines = []
    prefix = "" if group == "task" else f"{group}."
    outer = ""
    for m in re.finditer(r"(?m)^( *)(\w+):(?: (.*?))??(?:  # (.*))?$", _yaml_text(group, name)):
        indent, key, value, comment = m.groups()
        if not indent:
            outer = f"{key}."
        if comment is not None:
            name_and_value = prefix + (outer if indent else "") + key + (f"={value}" if value else "")
            lines.append(f"  {name_and_value:46} {comment}")
    return lines
