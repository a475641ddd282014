"""`Row`: one setting, as a field of a dataclass declares it; `Found`: its value in
this process, and the source.

    ports: Annotated[int, kind.numbers("sockets", 1, 8, "1 to 8", is_whole=True), "sockets per interface"] = 1
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from . import kind
from .errors import ConfigError

COMMON = "all ranks of a job must have the same"
"""Marks a row: ranks that differ cannot talk to each other."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One setting."""

    name: str
    default: object
    kind: kind.Kind
    meaning: str
    is_common: bool

    def from_file(self, value: object, what: str) -> Any:
        """The plain value of an entry of a TOML file. Text counts as that of a variable, 0 and 1 as false and true, and
        whole numbers as text where the setting is a text.

        Raises ConfigError, which begins with `what`, for a bad one.
        """
        if isinstance(value, str) or (isinstance(self.default, (bool, str)) and type(value) is int):
            value = self.kind.read(str(value))
        return self.kind.check(value, what)


@functools.cache
def rows(settings: Any) -> tuple[Row, ...]:
    """The settings in a dataclass: `Annotated[type, Kind where the type does not tell, meaning, COMMON]`."""
    hints = get_type_hints(settings, include_extras=True)
    return tuple(_row(field, *get_args(hints[field.name])) for field in dataclasses.fields(settings))


def _row(field: dataclasses.Field[Any], hint: object, *about: Any) -> Row:
    if hint is bool:
        about = (kind.FLAG, *about)
    elif get_origin(hint) is Literal:
        about = (kind.words(get_args(hint)), *about)
    its_kind, meaning, *marks = about
    return Row(field.name, field.default, its_kind, meaning, COMMON in marks)


def check(settings: Any, of: Any, name_of: Callable[[str, object], str]) -> None:
    """Checks the fields of `of` and makes them plain; `name_of` names a field and its value in errors."""
    for row in rows(of):
        value = getattr(settings, row.name)
        object.__setattr__(settings, row.name, row.kind.check(value, name_of(row.name, value)))


def changed(settings: Any, of: Any) -> dict[str, Any]:
    """The fields of `of` that are not the defaults."""
    values = {row.name: (getattr(settings, row.name), row.default) for row in rows(of)}
    return {name: value for name, (value, default) in values.items() if value != default}


@dataclasses.dataclass(frozen=True)
class Found:
    """The value of a setting, and its source."""

    value: Any
    source: Literal["default", "environment", "file"] = "default"
    where: str = ""
    """The variable, or the path of the file."""


@dataclasses.dataclass(frozen=True)
class Section:
    """A section of a file: its entries, and names for errors."""

    name: str
    path: str
    """The path of the file."""
    entries: Mapping[str, object]

    def found(self, row: Row) -> Found | None:
        """The value of a setting; None: the section has none. Raises ConfigError, which names file, key and value."""
        if row.name not in self.entries:
            return None
        value = self.entries[row.name]
        shown = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
        return Found(row.from_file(value, f"{self.path}: [{self.name}] {row.name} = {shown}"), "file", self.path)


def find(
    settings: Any, environ: Mapping[str, str], variable: Callable[[str], str], section: Section
) -> dict[str, Found]:
    """The value of each row: that of its variable, otherwise that of the file's section, otherwise the default.

    An empty variable counts as unset. Raises ConfigError, which names variable or entry, value and remedy.
    """
    found = {}
    for row in rows(settings):
        name = variable(row.name)
        text = environ.get(name, "").strip()
        in_file = section.found(row)  # checked even where a variable has precedence
        if text:
            found[row.name] = Found(row.kind.check(row.kind.read(text), f"{name}={text}"), "environment", name)
        else:
            found[row.name] = in_file or Found(row.default)
    return found


def made(settings: Any, found: Mapping[str, Found]) -> Any:
    """An instance of `settings` with these values.

    Raises ConfigError if they contradict each other; it names the file of those that a file has set.
    """
    try:
        return settings(**{name: setting.value for name, setting in found.items()})
    except ConfigError as error:
        in_file = [name for name, setting in found.items() if setting.source == "file"]
        if not in_file:
            raise
        path = next(setting.where for setting in found.values() if setting.source == "file")
        raise ConfigError(f"{path}: {error} (the file sets {', '.join(in_file)})") from None
