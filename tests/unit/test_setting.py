"""A setting's value comes from its variable, from the file or from the default, in this order."""

import dataclasses
import re
from typing import Annotated, Any, Literal

import pytest

from commlayer import kind
from commlayer.errors import ConfigError
from commlayer.setting import COMMON, Found, Section, changed, find, made, rows


@dataclasses.dataclass(frozen=True)
class Settings:
    count: Annotated[int, kind.numbers("things", 1, 8, "1 to 8", is_whole=True), "a number", COMMON] = 3
    is_on: Annotated[bool, "a switch"] = False
    names: Annotated[tuple[str, ...], kind.NAMES, "some names"] = ()
    address: Annotated[str, kind.ADDRESS, "a port"] = ""
    way: Annotated[Literal["auto", "1"], "a way"] = "auto"

    def __post_init__(self) -> None:
        if self.is_on and self.count > 5:
            raise ConfigError("count: use at most 5 with is_on")


def found(entries: dict[str, object], **environ: str) -> dict[str, Found]:
    return find(Settings, environ, str.upper, Section("part", "a.toml", entries))


def test_rows_are_the_fields() -> None:
    assert [(row.name, row.default, row.meaning, row.is_common) for row in rows(Settings)] == [
        ("count", 3, "a number", True),
        ("is_on", False, "a switch", False),
        ("names", (), "some names", False),
        ("address", "", "a port", False),
        ("way", "auto", "a way", False),
    ]


@dataclasses.dataclass(frozen=True)
class More(Settings):
    """Settings with a field that is none."""

    own: bool = True


def test_changed_settings_are_those_that_are_not_the_defaults() -> None:
    assert changed(Settings(), Settings) == {}
    assert changed(More(count=4, names=("lo",)), Settings) == {"count": 4, "names": ("lo",)}


def test_a_variable_counts_more_than_the_file_and_the_file_more_than_the_default() -> None:
    assert found({"count": 4, "is_on": True}, COUNT="5", IS_ON=" ") == {
        "count": Found(5, "environment", "COUNT"),
        "is_on": Found(True, "file", "a.toml"),
        "names": Found((), "default", ""),
        "address": Found("", "default", ""),
        "way": Found("auto", "default", ""),
    }


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ({"count": 4}, 4),
        ({"count": "4"}, 4),
        ({"is_on": 1}, True),
        ({"is_on": "0"}, False),
        ({"is_on": False}, False),
        ({"names": ["eth0", "^ib0"]}, ("eth0", "^ib0")),
        ({"names": "eth0, ^ib0"}, ("eth0", "^ib0")),
        ({"address": 29600}, "29600"),
        ({"way": 1}, "1"),
    ],
)
def test_entries_may_be_written_as_in_a_variable(entry: dict[str, object], value: object) -> None:
    assert found(entry)[next(iter(entry))].value == value


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({"count": 9}, "a.toml: [part] count = 9: use a whole number, 1 to 8 (things)"),
        ({"count": True}, "a.toml: [part] count = true: use a whole number"),
        ({"count": 1.5}, "a.toml: [part] count = 1.5: use a whole number"),
        ({"is_on": "yes"}, "a.toml: [part] is_on = 'yes': use 0 or 1"),
        ({"is_on": 2}, "a.toml: [part] is_on = 2: use 0 or 1"),
        ({"names": {"eth0": 1}}, "a.toml: [part] names = {'eth0': 1}: use a comma list of names"),
    ],
)
@pytest.mark.parametrize("environ", [{}, {"COUNT": "1", "IS_ON": "0", "NAMES": "a"}])
def test_a_bad_entry_is_refused_even_where_a_variable_counts(
    entry: dict[str, object], told: str, environ: dict[str, str]
) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        found(entry, **environ)


def test_contradictions_name_the_file() -> None:
    assert made(Settings, found({"count": 4, "is_on": True})) == Settings(4, True)
    told = "a.toml: count: use at most 5 with is_on (the file sets is_on)"
    with pytest.raises(ConfigError, match=f"^{re.escape(told)}$"):
        made(Settings, found({"is_on": True}, COUNT="6"))
    with pytest.raises(ConfigError, match=r"^count: use at most 5 with is_on$"):
        made(Settings, found({}, COUNT="6", IS_ON="1"))


def test_every_field_is_a_row_or_an_error() -> None:
    plain: Any = dataclasses.make_dataclass("plain", [("count", int, 1)])
    with pytest.raises((TypeError, ValueError)):
        rows(plain)
