"""`Kind`: the values that a setting takes, with unit, range, parser and remedy."""

from __future__ import annotations

import dataclasses
import math
import numbers as abstract
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from .errors import ConfigError


def number(value: object) -> float:
    """A real number of any type, as numpy's, as a float. NaN if it is not a number."""
    if not isinstance(value, (abstract.Real, Decimal)) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except (OverflowError, ValueError):  # an integer larger than any float, a signalling NaN
        return math.nan


def whole(value: object, otherwise: int) -> int:
    """A whole number of any type as an int. `otherwise` if it is not a whole number."""
    return int(value) if isinstance(value, abstract.Integral) and not isinstance(value, bool) else otherwise


@dataclasses.dataclass(frozen=True)
class Kind:
    """The values that a setting takes."""

    unit: str
    """Unit and range, as docs/settings.md shows them."""
    remedy: str
    """The end of an error: "use 0 or 1"."""
    plain: Callable[[Any], Any]
    """Returns the value in its plain type: settings are compared, saved and sent. None for a bad value."""
    read: Callable[[str], object] = str.lower
    """Returns what the text of a variable stands for, for `plain` to judge."""

    def check(self, value: object, what: str) -> Any:
        """Returns the plain value. Raises ConfigError, which begins with `what`, for a bad one."""
        found = self.plain(value)
        if found is None:
            raise ConfigError(f"{what}: {self.remedy}")
        return found


def numbers(
    unit: str, least: float, most: float, span: str, *, also: Sequence[float] = (), is_whole: bool = False
) -> Kind:
    """Numbers from `least` to `most`, and those in `also`; `span` says so in words."""

    def plain(value: object) -> float | None:
        found = whole(value, -1) if is_whole else number(value)
        return found if least <= found <= most or found in also else None

    def read(text: str) -> object:
        try:
            return int(text) if is_whole else float(text)
        except ValueError:
            return text

    return Kind(f"{unit}, {span}", f"use a {'whole ' * is_whole}number, {span} ({unit})", plain, read)


def words(known: Sequence[str]) -> Kind:
    """One of the words."""
    shown = ", ".join(f"`{word}`" for word in known)
    return Kind(shown, f"use one of {', '.join(known)}", lambda value: value if value in known else None)


def text(unit: str, remedy: str, read: Callable[[str], object] = str.lower) -> Kind:
    """Any text. `read` str: in the case in which it is written."""
    return Kind(unit, remedy, lambda value: value if isinstance(value, str) else None, read)


def _names(value: object) -> tuple[str, ...] | None:
    good = isinstance(value, (tuple, list)) and all(isinstance(name, str) and name.strip("^") for name in value)
    return tuple(value) if good else None  # type: ignore[arg-type]  # mypy forgets what is good


def _range(value: object, least: int, most: int) -> tuple[int, ...] | None:
    """The first and the last of a range within these limits; empty: there is none."""
    if not isinstance(value, (tuple, list)):
        return None
    ends = tuple(whole(end, -1) for end in value)
    return ends if not ends or (len(ends) == 2 and least <= ends[0] <= ends[1] <= most) else None


def _is_address(value: object) -> bool:
    """Whether it is a port, or a host and a port."""
    found = re.fullmatch(r"(?:[^\s/]+:)?(\d{4,5})", value) if isinstance(value, str) else None
    return found is not None and 1024 <= int(found[1]) <= 65535


FLAG = Kind(
    "bool",
    "use 0 or 1 (in Python: False or True)",
    lambda value: value if isinstance(value, bool) else None,
    lambda text: {"0": False, "1": True}.get(text, text),
)
PATH = text("path", "use the path of a file", str)
HOST = text("host", "use an address of this host, as 127.0.0.1", str)
FOLDER = text("folder", "use the path of a folder", str)
NAMES = Kind(
    *("names", "use a comma list of names, as eth0,eth1 or ^docker0", _names),
    read=lambda text: [name.strip() for name in text.split(",")],
)
PORT_RANGE = Kind(
    "first-last, 1024 to 65535",
    "use a range of UDP ports between 1024 and 65535, as 20000-20100",
    lambda value: _range(value, 1024, 65535),
    lambda text: [int(word) if word.isdecimal() else word for word in text.split("-")] if len(text) < 12 else text,
)
ADDRESS = Kind(
    "[host:]port, 1024 to 65535",
    "use a port between 1024 and 65535, or HOST:PORT with an address of rank 0's host",
    lambda value: value if value == "" or _is_address(value) else None,
    read=str,
)
