"""Bounds on clocks from operations: which end cannot come before which start.

A collective cannot end on a rank before all ranks whose data it needs have submitted it; a receive cannot end before
its send was submitted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeVar

from .align import Matrix, bound, unbounded
from .operation import Key, Operation, Record

FROM_ALL = ("all_reduce", "all_gather", "reduce_scatter", "barrier")
"""A rank that ends one of these has data of every rank, or of a barrier its sign."""

EVEN = "all_to_all"
"""Needs every rank if all parts are equal; else some may be empty, which the files do not tell."""

FROM_ROOT = ("broadcast", "scatter")
TO_ROOT = ("reduce", "gather")

RESOLUTION_NS = 1000
"""Times are rounded: the bounds are wider by this. A double has the seconds since 1970 in steps of 240 ns."""

Member = tuple[int, Operation]
"""The number of a file, and an operation in it."""

Pair = tuple[object, ...]
"""Names a message on both ranks."""

K = TypeVar("K")


def bounds(records: Sequence[Record]) -> Matrix:
    """The bounds of the files' clocks, for `align.solve`."""
    found = unbounded(len(records))
    for members in shared(records).values():
        _same_call(found, members)
        if not members[0][1].is_message:
            _collective(found, members)
    clocks = {id(operation): number for number, record in enumerate(records) for operation in record.operations}
    for sent, received in message_pairs(operation for record in records for operation in record.operations):
        _bound(found, [(clocks[id(received)], received)], [(clocks[id(sent)], sent)])
    return found


def shared(records: Sequence[Record]) -> dict[Key, list[Member]]:
    """The operations in several files by name. A message has the files of one rank."""
    found: dict[Key, list[Member]] = defaultdict(list)
    for number, record in enumerate(records):
        for key, call in unique([(operation.key, operation) for operation in record.operations]):
            found[key].append((number, call))
    return {key: members for key, members in found.items() if len(members) > 1}


def unique(items: Sequence[tuple[K, Operation]]) -> list[tuple[K, Operation]]:
    """Those whose key occurs once: a later group of the same name begins to count from 1 again."""
    counts = Counter(key for key, _ in items)
    return [(key, item) for key, item in items if counts[key] == 1]


def message_pairs(operations: Iterable[Operation]) -> list[tuple[Operation, Operation]]:
    """Pairs of a send and its receive. Those that a receive from any rank could have taken are left out."""
    sides: dict[str, list[tuple[Pair, Operation]]] = {"send": [], "receive": []}
    wild = set()
    for operation in operations:
        if operation.is_message and operation.peer is None:
            wild.add((operation.group, operation.ranks, operation.rank, operation.tag))
        elif operation.is_message and operation.ordinal is not None:
            ends = (operation.rank, operation.peer) if operation.name == "send" else (operation.peer, operation.rank)
            sides[operation.name].append(
                ((operation.group, operation.ranks, *ends, operation.tag, operation.ordinal), operation)
            )
    received = dict(unique(sides["receive"]))
    pairs = [(sent, received[key]) for key, sent in unique(sides["send"]) if key in received]
    return [
        (sent, reached)
        for sent, reached in pairs
        if (reached.group, reached.ranks, reached.rank, reached.tag) not in wild
    ]


def _same_call(found: Matrix, members: Sequence[Member]) -> None:
    """Two files of one rank have the same call: it came between `entered_ns` and `submitted_ns` of both."""
    for one, here in members:
        for other, there in members:
            if one != other and here.rank == there.rank:
                bound(found, [one], [here.submitted_ns + RESOLUTION_NS], [other], [there.entered_ns])


def _collective(found: Matrix, members: Sequence[Member]) -> None:
    name, root = members[0][1].name, members[0][1].root
    if len({(operation.name, operation.root) for _, operation in members}) > 1:
        return  # the ranks called different operations
    takers = [member for member in members if member[1].outputs or name == "barrier"]
    givers = [member for member in members if (member[1].inputs and member[1].nbytes) or name == "barrier"]
    if name in FROM_ALL or (name == EVEN and _is_even(members)):
        _bound(found, takers, givers)
    elif name in FROM_ROOT and root is not None:
        _bound(found, takers, [giver for giver in givers if giver[1].rank == root])
    elif name in TO_ROOT and root is not None:
        _bound(found, [taker for taker in takers if taker[1].rank == root], givers)


def _bound(found: Matrix, later: Sequence[Member], earlier: Sequence[Member]) -> None:
    ended = [
        (number, operation.ended_ns + RESOLUTION_NS) for number, operation in later if operation.ended_ns is not None
    ]
    if ended and earlier:
        clocks, ends = zip(*ended, strict=True)
        bound(
            found, clocks, ends, [number for number, _ in earlier], [operation.submitted_ns for _, operation in earlier]
        )


def _is_even(members: Sequence[Member]) -> bool:
    """Whether all ranks send and receive the same number of elements: a sign that their parts are equal."""
    counts = {operation.inputs for _, operation in members} | {operation.outputs for _, operation in members}
    return len(counts) == 1 and counts != {0}
