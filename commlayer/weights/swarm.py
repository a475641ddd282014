"""Who gives which part of a content to whom: readers serve each other, so that a link carries a version once.

The publisher deals the parts among a group of readers, as the seats of a round: each gets its own part from the
publisher, and the others' from them. A later group gets its parts from an earlier one, seat by seat. A reader that
comes late gets all from those that hold the content.
"""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Iterable, Sequence

from ..telemetry import curve
from .parts import PUBLISHER

SEATS_MOST = 16
"""Readers of a group: each has a connection to all others."""

SHARED_LEAST_BYTES = 1 << 20
"""Shorter contents go from the publisher to each reader."""

LEFT_OUT_S = 60.0
"""Time for which a reader that has failed others serves nobody."""


@dataclasses.dataclass(eq=False)
class Reader:
    """A reader, as the publisher knows it."""

    descriptor: int
    """The descriptor of its connection."""
    address: str = ""
    """Where it serves others; empty: nowhere."""
    sent: str = ""
    """The name of the content that it was sent last."""
    states: tuple[str, ...] = ()
    """The digests of the version that it holds, and of the one before: names of whole states."""
    load: float = 0.0
    """The contents that it was asked to give to readers that came late."""
    serves_from_s: float = 0.0
    """It serves nobody before this time."""
    shares_from_s: float = 0.0
    """It gets all parts from the publisher before this time: it did not reach the others."""

    def holds(self, digest: str) -> None:
        """It holds a version, and keeps the one before; empty: it does not trust its versions."""
        if not digest:
            self.states = ()
        elif digest not in self.states[-1:]:
            self.states = (*self.states[-1:], digest)

    def gives(self, name: str) -> bool:
        """Whether it has a content, or gets it now."""
        return name == self.sent or name in self.states

    def serves(self, now_s: float) -> bool:
        """Whether others may ask it."""
        return bool(self.address) and now_s >= max(self.serves_from_s, self.shares_from_s)

    def shares(self, now_s: float) -> bool:
        """Whether it may ask others."""
        return bool(self.address) and now_s >= self.shares_from_s


def address_of(text: str) -> str:
    """The address at which a reader says that it serves. Raises ValueError unless it is a number and a port."""
    host, port = curve.split(text)
    return f"[{host}]:{port}" if ipaddress.ip_address(host).version == 6 else f"{host}:{port}"


def is_loopback(address: str) -> bool:
    """Whether only readers on its host reach it."""
    return ipaddress.ip_address(curve.split(address)[0]).is_loopback


def deal(asking: Sequence[Reader], holders: Iterable[Reader], now_s: float) -> list[list[str]]:
    """The sources of each reader that asks for a content, in their order. `holders`: readers that may give it, or will.

    Readers on loopback and others do not reach each other, so they are dealt separately.
    """
    found: dict[int, list[str]] = {number: [PUBLISHER] for number in range(len(asking))}
    able = [reader for reader in holders if reader.serves(now_s) and reader not in asking]
    for side in (False, True):
        own = [
            number
            for number, reader in enumerate(asking)
            if reader.shares(now_s) and is_loopback(reader.address) == side
        ]
        givers = [number for number in own if asking[number].serves(now_s)]
        first = sorted(
            (reader for reader in able if is_loopback(reader.address) == side), key=lambda reader: reader.load
        )
        if len(givers) > 1:
            groups = _groups([asking[number] for number in givers])
            members = iter(givers)
            for place, group in enumerate(groups):
                parents = groups[(place - 1) // 2] if place else first[:SEATS_MOST]
                for seat in range(len(group)):
                    sources = [reader.address for reader in group]
                    sources[seat] = _asked(parents[seat % len(parents)], len(group)) if parents else PUBLISHER
                    found[next(members)] = sources
            first = groups[0]
            own = [number for number in own if number not in givers]
        elif not first:
            first = [asking[number] for number in givers]
        for number in own:
            givers_to_it = [reader for reader in first if reader is not asking[number]][:SEATS_MOST]
            if givers_to_it:
                found[number] = [_asked(reader, len(givers_to_it)) for reader in givers_to_it]
    return [found[number] for number in range(len(asking))]


def _groups(readers: list[Reader]) -> list[list[Reader]]:
    """Groups of about one size."""
    count = -(-len(readers) // SEATS_MOST)
    return [readers[place * len(readers) // count : (place + 1) * len(readers) // count] for place in range(count)]


def _asked(reader: Reader, seats: int) -> str:
    reader.load += 1 / seats
    return reader.address
