"""``task=new_plugin``: writes a complete package of a plugin, which works as it is and passes the suite of its kind.

The files are ``templates/KIND/*.in`` and ``templates/*.in``; ``$name`` and its like are filled in.
"""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, Literal

from nanoserve.config import group_names
from nanoserve.contracts import CONTRACT_VERSION
from nanoserve.contracts.errors import ConfigError
from nanoserve.engine.selection import AUTO
from nanoserve.registry import KINDS, Registry

if TYPE_CHECKING:
    from nanoserve.tasks import Job

LONGEST_NAME = 60  # characters: it becomes the name of files


@dataclass(frozen=True)
class Options:
    """The keys of ``conf/task/new_plugin.yaml``."""

    kind: Literal["attention", "kvcache", "scheduler", "policy", "grammar", "observer"]
    name: str
    path: str = "."

    def __post_init__(self) -> None:
        if re.fullmatch(r"[a-z](_?[a-z0-9])*", self.name) is None or keyword.iskeyword(self.name):
            raise ConfigError(
                f"name={self.name}: a name is lower-case letters, digits and single _ between them, begins with a "
                f"letter and is no word of Python's, as in name={suggestion(self.name)}"
            )
        if len(self.name) > LONGEST_NAME:
            raise ConfigError(f"name={self.name}: {len(self.name)} characters are more than {LONGEST_NAME}")
        if self.kind == "attention" and self.name == AUTO:
            raise ConfigError("name=auto: attention=auto leaves the choice to the policy; as in name=my_auto")


def run(job: Job) -> dict[str, Any]:
    options: Options = job.options
    check_is_new(options, job.registry)
    try:
        folder = write(options)
    except OSError as error:
        raise ConfigError(f"path={options.path}: the package cannot be written there ({error.strerror})") from None
    where = folder.name if options.path == "." else folder
    print(f"{folder}: a package with the {options.kind} plugin {options.name!r}. To install it and to test it:")
    print(f"\n    pip install --no-deps -e {where} && python -m pytest {where}\n")
    if options.kind in KINDS:
        print(f"Then {KINDS[options.kind].group}={options.name} chooses it.")
    else:
        print("Then every engine has it: an observer is not chosen, it is installed.")
    return {"files": sum(path.is_file() for path in folder.rglob("*"))}


def check_is_new(options: Options, registry: Registry) -> None:
    """Raise ConfigError for a name that a plugin of the kind has already, or a folder that is there."""
    for registration in registry.registrations(options.kind) if options.kind in KINDS else ():
        if registration.spec.name == options.name:
            raise ConfigError(
                f"name={options.name}: there is one of that name, {registration.source}, and of two the first is kept; "
                f"as in name=my_{options.name}"
            )
    group = KINDS[options.kind].group if options.kind in KINDS else ""
    if group and options.name in group_names(group):
        stored = f"{group}/{options.name}.yaml"
        raise ConfigError(f"name={options.name} stands for {stored}, which we have; as in name=my_{options.name}")
    parent = Path(options.path)
    if not parent.is_dir():
        raise ConfigError(f"path={options.path}: there is no such folder; the package becomes a folder in it")
    if (parent / distribution(options)).exists():
        raise ConfigError(
            f"path={options.path}: {distribution(options)} is there already; remove it or take another path"
        )


def write(options: Options) -> Path:
    """Write the package into ``options.path``; returns its folder."""
    package = f"nanoserve_{options.name}"
    values = {
        "name": options.name,
        "kind": options.kind,
        "group": KINDS[options.kind].group if options.kind in KINDS else "",
        "package": package,
        "distribution": distribution(options),
        "Name": "".join(word.capitalize() for word in options.name.split("_")),
        "contract": CONTRACT_VERSION,
    }
    root = Path(options.path) / distribution(options)
    templates = files("nanoserve.tasks.new_plugin") / "templates"
    targets = {
        f"{options.kind}/plugin.py.in": f"{package}/__init__.py",
        f"{options.kind}/test_plugin.py.in": f"tests/test_{options.name}.py",
        "README.md.in": "README.md",
    }
    if options.kind in KINDS:
        targets["pyproject.toml.in"] = "pyproject.toml"
        targets["conf.py.in"] = f"{package}/conf/__init__.py"
        targets[f"{options.kind}/options.yaml.in"] = f"{package}/conf/{values['group']}/{options.name}.yaml"
    else:
        targets[f"{options.kind}/pyproject.toml.in"] = "pyproject.toml"
    for source, target in targets.items():
        text = Template((templates / source).read_text(encoding="utf-8")).substitute(values)
        (root / target).parent.mkdir(parents=True, exist_ok=True)
        (root / target).write_text(text, encoding="utf-8")
    return root


def distribution(options: Options) -> str:
    return f"nanoserve-{options.name}".replace("_", "-")


def suggestion(name: str) -> str:
    """The legal name nearest to ``name``."""
    legal = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") or "mine"
    return legal if legal[0].isalpha() and not keyword.iskeyword(legal) else f"my_{legal}"
