"""Incarnations: two processes that lost each other begin anew when they meet in a new group.

A process or its network may pause for longer than the peer timeout. Then the others have lost it, for all their groups.
It lives, though, and comes to the start of the next group. There each rank tells the others the incarnations of its
peers (`native/protocol/revival.h`), and every two ranks agree on the one that they begin.
"""

from __future__ import annotations

from collections.abc import Mapping

Incarnations = Mapping[str, tuple[int, bool]]
"""Each peer's incarnation at one end, and whether it lives there, by its number. A peer that is not among them is in
its first one and lives."""

MOST = 0xFFFF
"""The epoch of packets has 16 bits: beyond it, packets of former incarnations would count as new."""


def agreed(own: Incarnations, own_peer: int, theirs: Incarnations, their_peer: int) -> int:
    """The incarnation in which the processes `own_peer` and `their_peer` are from now on; both compute the same."""
    ends = [own.get(str(their_peer), (0, True)), theirs.get(str(own_peer), (0, True))]
    latest = max(number for number, _ in ends)
    return latest + any(number == latest and not lives for number, lives in ends)
