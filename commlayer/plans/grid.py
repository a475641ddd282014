"""Two-level algorithms between many members, for short messages: the members stand in rows, of about as many members as
there are rows. A member exchanges messages with its row, and then with one member of each other row.

With n members, `direct` sends each member 2 (n - 1) messages, and a short one costs as much as a packet. Here it is
about 4 sqrt(n), in two more network steps. (Rows and columns of a grid: van de Geijn, "On global combine operations",
1994.)

The functions add steps to a plan, as those of `direct` with the same names do. Members of a row have the same sum, bit
for bit, so those of a column may each use another member's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from . import direct
from .direct import Route
from .partition import Range, partition
from .plan import Buffer, Plan, PlanBuilder
from .settings import Settings

OUTPUT = Buffer.OUTPUT

MEMBERS_LEAST = 129
"""With fewer members, the steps that `direct` saves may be worth more than the packets that a grid saves: so many are
faster on a grid where a step takes less than 150 us, at 0.7 us for a packet (docs/scale.md)."""

PART_BYTES = 1024
"""Longer parts of a tensor, one for each member, fill the packets of `direct`."""


def serves(members: int, length: int) -> bool:
    """Whether a grid is faster than `direct` for so many members and a tensor of `length` bytes."""
    return members >= MEMBERS_LEAST and length < members * PART_BYTES


def sums(members: int, length: int, settings: Settings) -> bool:
    """Whether an all-reduce uses a grid. One that is deterministic does not: it adds in the order of the members, and
    not by rows."""
    return settings.algorithm == "auto" and not settings.deterministic and serves(members, length)


def all_reduce(rank: int, world_size: int, numel: int, itemsize: int, divisor: int, settings: Settings) -> Plan:
    """All-reduces OUTPUT, in place."""
    b = PlanBuilder(rank, world_size)
    whole = Range(0, numel * itemsize)
    all_reduce_segment(b, range(world_size), whole, itemsize, settings.exchange_limit_bytes, divisor=divisor)
    return b.build()


def all_reduce_segment(
    b: PlanBuilder,
    members: Sequence[int],
    piece: Range,
    itemsize: int,
    exchange_limit_bytes: int,
    *,
    divisor: int,
    after: Sequence[int] = (),
) -> list[int]:
    """All-reduces a range of OUTPUT; returns the steps after which the result is there.

    This rank's own contribution is ready after the steps `after`. In two network steps if a member then sends no more
    than `exchange_limit_bytes`, else in four.
    """
    rows = rows_of(members)
    row, place = _stand(b, rows)
    if piece.length == 0:
        return list(after)
    if (len(rows) + max(map(len, rows)) - 2) * piece.length <= exchange_limit_bytes:
        summed = direct.exchange_segment(b, row, piece, divisor=1, after=after)
        column, route = _column(rows, row, place)
        return direct.exchange_segment(b, column, piece, divisor=divisor, after=summed, route=route)
    # The first members of each row own a shard of it, the same ones in all rows.
    owners = min(map(len, rows))
    shards = partition(piece, owners, itemsize) + [Range(piece.offset, 0)] * (len(row) - owners)

    def between(own: Range, summed: Sequence[int]) -> list[int]:
        column = [row[place] for row in rows]
        parts = partition(own, len(rows), itemsize)
        return direct.all_reduce_segment(b, column, parts, divisor=divisor, window=None, after=summed)

    return direct.all_reduce_segment(b, row, shards, divisor=1, window=None, after=after, between=between)


def broadcast(rank: int, world_size: int, numel: int, itemsize: int, root: int, settings: Settings) -> Plan:
    """Copies the root's OUTPUT to that of all ranks."""
    b = PlanBuilder(rank, world_size)
    for piece in direct.broadcast_pieces(numel * itemsize, itemsize, world_size, settings):
        broadcast_segment(b, range(world_size), piece, itemsize, root=root)
    return b.build()


def broadcast_segment(b: PlanBuilder, members: Sequence[int], piece: Range, itemsize: int, *, root: int) -> list[int]:
    """Copies the root's range of OUTPUT to all members; returns the steps after which it is there."""
    rows = rows_of(members)
    row, _ = _stand(b, rows)
    heads = [root if root in row else row[0] for row in rows]
    head = heads[rows.index(row)]
    came: list[int] = []
    if b.rank == head and len(rows) > 1:
        came = direct.broadcast_segment(b, heads, piece, itemsize, root=root)
    if len(row) == 1:
        return came
    return came + direct.broadcast_segment(b, row, piece, itemsize, root=head, after=came)


def barrier(rank: int, world_size: int) -> Plan:
    """Ends on no rank before it has begun on all."""
    b = PlanBuilder(rank, world_size)
    barrier_segment(b, range(world_size))
    return b.build()


def barrier_segment(b: PlanBuilder, members: Sequence[int], after: Sequence[int] = ()) -> list[int]:
    """Tells every member that `after` is done; returns the steps after which all members have told so."""
    rows = rows_of(members)
    row, place = _stand(b, rows)
    heard = direct.barrier_segment(b, row, after)
    column, route = _column(rows, row, place)
    return heard + direct.barrier_segment(b, column, [*after, *heard], route=route)


def rows_of(members: Sequence[int]) -> list[Sequence[int]]:
    """The rows of a grid. Their lengths differ by one at most."""
    count = math.isqrt(len(members))
    cuts = [len(members) * row // count for row in range(count + 1)]
    return [members[first:end] for first, end in itertools.pairwise(cuts)]


def _stand(b: PlanBuilder, rows: Sequence[Sequence[int]]) -> tuple[Sequence[int], int]:
    """This rank's row, and its place in the row."""
    row = next(row for row in rows if b.rank in row)
    return row, row.index(b.rank)


def _column(rows: Sequence[Sequence[int]], row: Sequence[int], place: int) -> tuple[list[int], Route]:
    """The member of each row whose messages this rank gets, itself in its own; and the ranks that get its messages.

    Where a row has a member more than others, these have none at its place. Members at different places serve it, so
    that none serves many.
    """
    mine = rows.index(row)
    column = [row[place] if place < len(row) else row[mine % len(row)] for row in rows]
    receivers: list[int] = []
    for i in direct.others(rows, mine):
        other = rows[i]
        receivers += other[place : place + 1]
        if len(other) > len(row) and place == i % len(row):
            receivers.append(other[-1])
    return column, receivers
