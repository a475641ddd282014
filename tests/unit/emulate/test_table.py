from dataclasses import dataclass
from typing import Any, Literal

import pytest

from commlayer.errors import ConfigError
from commlayer.tools.emulate.table import check, read, table_of


@dataclass(frozen=True)
class Wheel:
    width: float = 1.0

    def __post_init__(self) -> None:
        check(self.width > 0, "width", self.width, "use more than 0")


@dataclass(frozen=True)
class Cart:
    name: str
    wheels: tuple[Wheel, ...] = ()
    tags: tuple[str, ...] = ()
    colour: Literal["red", "blue"] = "red"
    load: int | None = None
    open: bool = False


def test_read_and_back() -> None:
    table = {"name": "a", "wheel": [{"width": 2.5}, {}], "tag": ["x"], "colour": "blue", "load": 3, "open": True}
    cart = read(Cart, table)
    assert cart == Cart("a", (Wheel(2.5), Wheel()), ("x",), "blue", 3, True)
    assert read(Cart, table_of(cart)) == cart
    assert "load" not in table_of(Cart("a"))


def test_numbers_may_be_written_either_way() -> None:
    assert read(Wheel, {"width": 2}).width == 2.0
    assert read(Cart, {"name": "a", "load": 5e3}).load == 5000


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "the file: name is missing"),
        ({"name": 3}, "name = 3: expected text in quotes"),
        ({"name": "a", "wings": 2}, r"wings = 2: there is no such key; known here: name, wheel, tag"),
        ({"name": "a", "wheel": {}}, r"expected a list, or tables written as \[\[wheel\]\]"),
        ({"name": "a", "wheel": [{}, {"width": -1}]}, r"wheel\[1\].width = -1.0: use more than 0"),
        ({"name": "a", "wheel": [{"width": True}]}, r"wheel\[0\].width = True: expected a number"),
        ({"name": "a", "wheel": [{"width": 10**400}]}, r"wheel\[0\].width = 1000.*expected a number"),
        ({"name": "a", "wheel": [3]}, r"wheel\[0\] = 3: expected a table"),
        ({"name": "a", "colour": "green"}, "colour = 'green': expected one of red, blue"),
        ({"name": "a", "load": 1.5}, "load = 1.5: expected a whole number"),
        ({"name": "a", "open": 1}, "open = 1: expected true or false"),
    ],
)
def test_errors_name_key_value_and_remedy(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(Cart, table)
