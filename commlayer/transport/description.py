"""The description by which a process makes itself known to the ranks of a group, see `Engine.describe`.

It comes through the Store, so another version of commlayer, or any program, may have written it. The engine uses its
numbers as they are; so they are checked first.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import CommError, ConfigError

PEERS_MAX = 65535
"""Processes of a job, as packets number them (`CL_PEERS_MAX`)."""

_BELL_BYTES = 31


def _whole(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _text(most: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and len(value.encode()) <= most and "\0" not in value


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


def check_description(description: object, who: str, rank: int) -> None:
    """Raises CommError, which begins with `who` and names the wrong field of the `rank` that sent the description."""
    if not isinstance(description, Mapping):
        raise _error(who, rank, "description", description)
    _check(description, _FIELDS, who, rank)
    for port in description["ports"]:
        if not isinstance(port, Mapping):
            raise _error(who, rank, "port", port)
        _check(port, _PORT_FIELDS, who, rank)


def check_peer(peer: int) -> None:
    """Raises ConfigError if a job can have no process of this number."""
    if not 0 <= peer < PEERS_MAX:
        raise ConfigError(f"rank {peer} of the job: commlayer supports at most {PEERS_MAX} ranks; use a smaller world")


def _check(fields: Mapping[str, Any], expected: Mapping[str, Callable[[Any], bool]], who: str, rank: int) -> None:
    for name, is_good in expected.items():
        if name not in fields or not is_good(fields[name]):
            raise _error(who, rank, name, fields.get(name, "missing"))


def _error(who: str, rank: int, name: str, value: object) -> CommError:
    return CommError(
        f"{who}: rank {rank} describes itself with {name}={value!r}: it runs another version of commlayer, or another "
        f"program has written to the job's Store; install the same version on all ranks"
    )
