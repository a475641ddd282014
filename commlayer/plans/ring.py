"""Ring algorithms over the network: every rank sends only to the next one.

The bandwidth-optimal ring of Patarasuk and Yuan ("Bandwidth optimal all-reduce algorithms for clusters of
workstations", 2009). It takes 2 (n-1) network steps instead of two, but each rank has only one sender in a world of any
size, and the order of reduction is fixed: results are reproducible.

A tensor has one chunk per rank. A chunk travels as two or more segments, so one is on its way while another is
reduced.
"""

from __future__ import annotations

from .partition import MESSAGE_LIMIT_BYTES, SEGMENT_LIMIT, Range, partition, segments
from .plan import Buffer, Plan, PlanBuilder
from .settings import Settings

INPUT, OUTPUT, SCRATCH = Buffer.INPUT, Buffer.OUTPUT, Buffer.SCRATCH

LEAST_SEGMENTS = 2
"""Segments per chunk, so that the link is busy while the processor reduces."""

LEAST_SEGMENT_BYTES = 4096
"""Shorter chunks are not split: the additional packets would take longer than the split hides."""


def all_reduce(rank: int, world_size: int, numel: int, itemsize: int, divisor: int, settings: Settings) -> Plan:
    """All-reduces OUTPUT, in place."""
    b = PlanBuilder(rank, world_size)
    n, right, left = world_size, (rank + 1) % world_size, (rank - 1) % world_size
    chunks = [
        _segments(chunk, world_size, itemsize, settings)
        for chunk in partition(Range(0, numel * itemsize), world_size, itemsize)
    ]
    # The steps that must end before a segment of the current chunk is sent on; the first chunk is this rank's own.
    ready: list[list[int]] = [[] for _ in chunks[rank]]
    for step in range(2 * (n - 1)):
        gather = step >= n - 1
        for piece, done in zip(chunks[(rank - step) % n], ready, strict=True):
            b.send(right, OUTPUT, *piece, done)
        # The gathered chunk overwrites memory that a send of the reduce half reads. It need not wait for that send: a
        # chunk is complete only after the receiver of that send has all of it.
        arriving = chunks[(rank - step - 1) % n]
        receive = b.recv_copy if gather else b.recv_reduce
        ready = [[receive(left, OUTPUT, *piece)] for piece in arriving]
        if step == n - 2 and divisor > 1:
            ready = [[b.scale(OUTPUT, *piece, divisor, done)] for piece, done in zip(arriving, ready, strict=True)]
    return b.build()


def reduce_scatter(rank: int, world_size: int, numel: int, itemsize: int, divisor: int, settings: Settings) -> Plan:
    """Reduces INPUT of world_size x numel elements into OUTPUT of numel, which may be this rank's part of INPUT."""
    b = PlanBuilder(rank, world_size)
    n, right, left = world_size, (rank + 1) % world_size, (rank - 1) % world_size
    length = numel * itemsize
    pieces = _segments(Range(0, length), world_size, itemsize, settings)
    # A chunk on its way takes one of two places in scratch. The last one to come is this rank's own, for OUTPUT.
    places = [b.scratch(length) for _ in range(min(2, n - 2))]
    ready: list[list[int]] = [[] for _ in pieces]
    sent: list[list[list[int]]] = [[[] for _ in pieces] for _ in places]
    source, at = INPUT, (rank - 1) % n * length
    for step in range(n - 1):
        last = step == n - 2
        target, to = (OUTPUT, 0) if last else (SCRATCH, places[step % 2])
        chunk = (rank - step - 2) % n * length
        arrived = []
        for i, piece in enumerate(pieces):
            send = b.send(right, source, at + piece.offset, piece.length, ready[i])
            if source == SCRATCH:
                sent[(step - 1) % 2][i] = [send]
            free = [] if last else sent[step % 2][i]
            own = b.copy(INPUT, chunk + piece.offset, target, to + piece.offset, piece.length, free)
            arrived.append([b.recv_reduce(left, target, to + piece.offset, piece.length, [own])])
        source, at, ready = target, to, arrived
    if divisor > 1:
        for piece, done in zip(pieces, ready, strict=True):
            b.scale(OUTPUT, *piece, divisor, done)
    return b.build()


def all_gather(rank: int, world_size: int, numel: int, itemsize: int, settings: Settings) -> Plan:
    """Gathers INPUT of numel elements into OUTPUT of world_size x numel; INPUT may be its own place in OUTPUT."""
    b = PlanBuilder(rank, world_size)
    n, right, left = world_size, (rank + 1) % world_size, (rank - 1) % world_size
    length = numel * itemsize
    pieces = _segments(Range(0, length), world_size, itemsize, settings)
    ready: list[list[int]] = [[] for _ in pieces]
    source, at = INPUT, 0
    for step in range(n - 1):
        for piece, done in zip(pieces, ready, strict=True):
            b.send(right, source, at + piece.offset, piece.length, done)
        source, at = OUTPUT, (rank - step - 1) % n * length
        ready = [[b.recv_copy(left, OUTPUT, at + piece.offset, piece.length)] for piece in pieces]
    for piece in pieces:
        b.copy(INPUT, piece.offset, OUTPUT, rank * length + piece.offset, piece.length)
    return b.build()


def _segments(chunk: Range, world_size: int, itemsize: int, settings: Settings) -> list[Range]:
    part_bytes = max(chunk.length // LEAST_SEGMENTS, LEAST_SEGMENT_BYTES)
    limit = max(SEGMENT_LIMIT // world_size, LEAST_SEGMENTS)
    return segments(chunk, itemsize, min(settings.segment_bytes, part_bytes), MESSAGE_LIMIT_BYTES, limit=limit)
