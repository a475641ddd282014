"""The description by which a process makes itself known to the ranks of a group, see `Engine.describe`.

It comes through the Store, so another version of commlayer, or any program, may have written it. The engine uses its
numbers as they are; so they are checked first.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import CommError, ConfigError
from .members import Members

PEERS_MAX = 65535
"""Processes of a job, as packets number them (`CL_PEERS_MAX`)."""

FORMAT = 4
"""Number of the description and of the steps that follow it at the start of a group; raised with each change."""

_BELL_BYTES = 31


def printable(text: str) -> str:
    """The text with `?` for each lone surrogate: names of the system have them for bytes that are not UTF-8."""
    return text.encode(errors="replace").decode()


def _whole(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _text(most: int) -> Callable[[Any], bool]:
    """Text that UTF-8 can represent: no lone surrogates."""
    return lambda value: (
        isinstance(value, str) and printable(value) == value and len(value.encode()) <= most and "\0" not in value
    )


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _address(value: Any) -> bool:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return False
    return isinstance(value, str)


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "peer": _whole(0, PEERS_MAX - 1),
    "host": _text(1000),
    "shm": _flag,
    "pid": _whole(1, (1 << 31) - 1),
    "life": _text(64),
    "bell": _text(_BELL_BYTES),
    "meter": _whole(-1, (1 << 31) - 1),
    "ports": lambda value: isinstance(value, list),
    "packet_bytes": lambda value: _whole(8, 65535)(value) and value % 8 == 0,
}
_PORT_FIELDS: dict[str, Callable[[Any], bool]] = {
    "ifname": _text(64),
    "address": _address,
    "prefix": _whole(0, 128),
    "loopback": _flag,
    "running": _flag,
    "port": _whole(0, 65535),
    "endpoint": _text(255),
}


_JOB_FIELDS: dict[str, Callable[[Any], bool]] = {
    "job": _whole(1, (1 << 63) - 1),
    "key": lambda value: isinstance(value, str) and re.fullmatch(r"[0-9a-f]{32}", value) is not None,
    "paired": _flag,
    "group": _whole(0, (1 << 31) - 1),
}


def read_description(text: bytes, members: Members, rank: int) -> dict[str, Any]:
    """The description, whose engine's fields are not checked yet. Raises CommError for a text that is none."""
    try:
        description = json.loads(text)
    except ValueError:
        description = text
    if not isinstance(description, dict):
        raise _error(members, rank, "description", description)
    if description.get("format") != FORMAT:
        raise _error(members, rank, "format", description.get("format", "missing"))
    for name in ("settings", "policy"):
        if not isinstance(description.get(name), dict):
            raise _error(members, rank, name, description.get(name, "missing"))
    return description


def check_job(description: Mapping[str, Any], members: Members) -> None:
    """Raises CommError unless the description of rank 0 has the number and key of the job."""
    _check(description, _JOB_FIELDS, members, 0)


def check_description(description: object, members: Members, rank: int) -> None:
    """Raises CommError, which names the wrong field of the `rank` that sent the description."""
    if not isinstance(description, Mapping):
        raise _error(members, rank, "description", description)
    _check(description, _FIELDS, members, rank)
    for port in description["ports"]:
        if not isinstance(port, Mapping):
            raise _error(members, rank, "port", port)
        _check(port, _PORT_FIELDS, members, rank)


def check_peer(peer: int) -> None:
    """Raises ConfigError if a job can have no process of this number."""
    if not 0 <= peer < PEERS_MAX:
        raise ConfigError(f"rank {peer} of the job: commlayer supports at most {PEERS_MAX} ranks; use a smaller world")


def _check(
    fields: Mapping[str, Any], expected: Mapping[str, Callable[[Any], bool]], members: Members, rank: int
) -> None:
    for name, is_good in expected.items():
        if name not in fields or not is_good(fields[name]):
            raise _error(members, rank, name, fields.get(name, "missing"))


def _error(members: Members, rank: int, name: str, value: object) -> CommError:
    return CommError(
        f"{members.who}: {members.name(rank)} describes itself with {name}={value!r}: it runs another version of "
        f"commlayer, or another program has written to the job's Store; install the same version on all ranks"
    )
