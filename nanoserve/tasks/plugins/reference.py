"""The contracts as Markdown, from their docstrings: what a plugin author looks up."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from nanoserve.registry import KINDS

MODULES = (
    "nanoserve.hookspecs",
    "nanoserve.contracts.capabilities",
    *(kind.module for kind in KINDS.values()),
    "nanoserve.contracts.observer",
    "nanoserve.contracts.errors",
)


def markdown() -> str:
    return "\n\n".join(part for name in MODULES for part in _module(importlib.import_module(name)))


def _module(module: ModuleType) -> Iterator[str]:
    yield f"### `{module.__name__}`"
    yield _text(module)
    for name, member in vars(module).items():
        if name.startswith("_") or getattr(member, "__module__", None) != module.__name__:
            continue
        if inspect.isclass(member):
            yield f"#### `{name}`"
            yield from _class(member)
        elif isinstance(member, FunctionType):
            yield f"- `{_signature(name, member)}`  \n  {_indented(member)}"


def _class(cls: type) -> Iterator[str]:
    if not (text := _text(cls)).startswith(f"{cls.__name__}("):  # dataclass writes a docstring where there is none
        yield text
    if dataclasses.is_dataclass(cls):
        fields = [f"{f.name}: {f.type}{_default(f)}" for f in dataclasses.fields(cls)]
        yield "```python\n" + "\n".join(fields) + "\n```"
    if issubclass(cls, enum.Enum):
        yield ", ".join(f"`{member.name}`" for member in cls)
        return
    members = []
    for name, member in vars(cls).items():
        public = not name.startswith("_")
        if isinstance(member, property) and public:
            members.append(f"- `{name}: {inspect.signature(member.fget).return_annotation}`  \n  {_indented(member)}")  # type: ignore[arg-type]
        elif isinstance(member, FunctionType) and public and not issubclass(cls, BaseException):
            abstract = " (to implement)" if getattr(member, "__isabstractmethod__", False) else ""
            members.append(f"- `{_signature(name, member)}`{abstract}  \n  {_indented(member)}".rstrip())
    if members:
        yield "\n".join(members)


def _signature(name: str, function: Any) -> str:
    text = re.sub(r"'([^']*)'", r"\1", str(inspect.signature(function)))
    return name + re.sub(r"\(self(, )?", "(", text)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f" = {_literal(field.default)}"
    return "" if field.default_factory is dataclasses.MISSING else f" = {_literal(field.default_factory())}"


def _literal(value: Any) -> str:
    """As code. Sets have no order of their own, and text that is compared needs one."""
    if isinstance(value, frozenset) and value:
        return "{" + ", ".join(map(_literal, sorted(value))) + "}"
    return repr(value).replace("'", '"')


def _text(documented: Any) -> str:
    return re.sub(r":\w+:`~?([^`]*)`", r"``\1``", inspect.getdoc(documented) or "").replace("``", "`")


def _indented(documented: Any) -> str:
    return re.sub(r"\n(?=.)", "\n  ", _text(documented))
