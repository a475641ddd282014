"""A TOML table as a frozen dataclass: the fields are the keys, their types are checked, errors name the key."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from ...errors import ConfigError
from .rate import parse_rate

T = TypeVar("T")


def check(good: bool, key: str, value: object, remedy: str) -> None:
    """Raises ConfigError, which names the key, the value and the remedy, unless `good`."""
    if not good:
        raise ConfigError(f"{key} = {value!r}: {remedy}")


def key_of(field: dataclasses.Field[Any]) -> str:
    """The key of a field in a table. As usual in TOML, `nics` is written as several tables [[nic]]."""
    several = str(field.type).startswith("tuple[") and not field.name.endswith("ss")
    return field.name.removesuffix("s") if several else field.name


def read(kind: type[T], table: object, where: str = "") -> T:
    """Builds `kind`, a dataclass, from a table. Raises ConfigError with the full name of the wrong key."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} = {table!r}: expected a table")
    fields = {key_of(field): field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]  # T is a dataclass
    hints = typing.get_type_hints(kind)
    values = {}
    for key, value in table.items():
        name = f"{where}.{key}" if where else key
        if key not in fields:
            raise ConfigError(f"{name} = {value!r}: there is no such key; known here: {', '.join(fields)}")
        values[fields[key].name] = _value(hints[fields[key].name], value, name)
    for key, field in fields.items():
        if field.default is dataclasses.MISSING and field.name not in values:
            raise ConfigError(f"{where or 'the file'}: {key} is missing")
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}.{error}" if where else str(error)) from None


def table_of(value: Any) -> dict[str, Any]:
    """Inverse of `read`: a table of plain values for JSON and TOML."""
    table = {}
    for field in dataclasses.fields(value):
        content = getattr(value, field.name)
        if isinstance(content, tuple):
            content = [table_of(part) if dataclasses.is_dataclass(part) else part for part in content]
        if content is not None:  # TOML has no null
            table[key_of(field)] = content
    return table


def _value(hint: Any, value: object, name: str) -> object:
    if isinstance(hint, types.UnionType):  # X | None
        hint = next(option for option in typing.get_args(hint) if option is not type(None))
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{name} = {value!r}: expected a list, or tables written as [[{name}]]")
        part = typing.get_args(hint)[0]
        return tuple(_value(part, item, f"{name}[{number}]") for number, item in enumerate(value))
    if typing.get_origin(hint) is typing.Literal:
        choices = typing.get_args(hint)
        check(value in choices, name, value, f"expected one of {', '.join(map(str, choices))}")
        return value
    if dataclasses.is_dataclass(hint):
        return read(typing.cast(type, hint), value, name)
    if hint is float and isinstance(value, str) and name.endswith("_bps"):
        try:
            return parse_rate(value)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from None
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{name} = {value}: expected a number of at most 308 digits") from None
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    check(type(value) is hint, name, value, f"expected {_WORDS[hint]}")
    return value


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text in quotes"}
