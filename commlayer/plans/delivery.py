"""Deliveries: bytes that go unchanged from rank to rank. All-to-all, gather, scatter, all-gather of unequal sizes.

One algorithm for all of them, for any lengths and any set of hosts. A rank knows what it sends to each rank and what
it gets from each, and nothing of what the others exchange; so its plan depends on nothing else, and the two plans of
a pair agree because they cut the same length in the same way.

To a rank of another host goes a message (several, when it is long). To the ranks of this host go rounds through
staging, a part for each of them: in round k a rank writes, posts k + 1, awaits the posts of those who write for it,
and copies out. It has as many rounds as its longest pair needs, and then posts the rest, for those who have more:
so the operation is as long for the host's counters on every rank, though nobody knows how many rounds there are.

A part's place is that of round k - 2, which its reader has left when it posts k: that is awaited before writing. Nobody
waits for anything that comes later than its own round, so nobody waits for ever.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate

from ..errors import ConfigError
from .direct import others
from .host import SLOTS, staging_area
from .partition import MESSAGE_LIMIT_BYTES, Range
from .plan import POSTS_LIMIT, Buffer, Plan, PlanBuilder, sign

INPUT, OUTPUT, STAGING = Buffer.INPUT, Buffer.OUTPUT, Buffer.STAGING

Hosts = tuple[tuple[int, ...], ...]


def deliver(
    rank: int,
    hosts: Hosts,
    sent: Sequence[int],
    received: Sequence[int],
    staging_bytes: int,
    *,
    same: bool = False,
    what: tuple[object, ...] = (),
) -> Plan:
    """INPUT, sent[r] bytes of it to rank r, one after the other; OUTPUT, received[r] bytes from rank r, likewise.

    sent[rank] equals received[rank]; the two may be the same memory. `same`: every rank sends all of its INPUT, to one
    rank or to several; sent[r] is then its length or 0. All ranks must agree in `hosts`, `staging_bytes` and `same`.
    `what` is called, and with which element type: ranks with something else get MismatchError; (): it is not compared.
    """
    b = PlanBuilder(rank, len(sent))
    offsets = [0, *accumulate(received)]
    from_peer = [Range(offset, length) for offset, length in zip(offsets, received, strict=False)]
    offsets = [0] * len(sent) if same else [0, *accumulate(sent)]
    to_peer = [Range(offset, length) for offset, length in zip(offsets, sent, strict=False)]
    if sent[rank]:
        b.copy(INPUT, to_peer[rank].offset, OUTPUT, *from_peer[rank])
    local = next(host for host in hosts if rank in host)
    for peer in others(range(len(sent)), rank):
        if peer not in local:
            for part in _parts(to_peer[peer], MESSAGE_LIMIT_BYTES):
                b.send(peer, INPUT, *part)
            for part in _parts(from_peer[peer], MESSAGE_LIMIT_BYTES):
                b.recv_copy(peer, OUTPUT, *part)
    if len(hosts) < len(sent):
        with b.chain():
            _deliver_here(b, local, to_peer, from_peer, staging_bytes, same)
            b.post_rest()
    return dataclasses.replace(b.build(), signature=sign(same, *what) if what else 0)


def _deliver_here(
    b: PlanBuilder,
    local: Sequence[int],
    to_peer: Sequence[Range],
    from_peer: Sequence[Range],
    staging_bytes: int,
    same: bool,
) -> None:
    slot_bytes, part_bytes = staging_area(staging_bytes, 1, 1 if same else len(local), 1)
    place = {peer: 0 if same else index * part_bytes for index, peer in enumerate(local)}
    peers = [local[i] for i in others(local, local.index(b.rank))]
    outgoing = {peer: _parts(to_peer[peer], part_bytes) for peer in peers}
    incoming = {peer: _parts(from_peer[peer], part_bytes) for peer in peers}
    rounds = max(map(len, [*outgoing.values(), *incoming.values()]), default=0)
    if rounds >= POSTS_LIMIT:
        raise ConfigError(
            f"rank {b.rank}: {rounds} rounds through staging of {staging_bytes} bytes are too many; raise its size"
        )
    for k in range(rounds):
        slot = k % SLOTS * slot_bytes
        readers = [peer for peer in peers if k < len(outgoing[peer])]
        if k >= SLOTS:
            for peer in readers:
                b.await_(peer, k)
        for peer in readers[:1] if same else readers:
            source, length = outgoing[peer][k]
            b.copy(INPUT, source, STAGING, slot + place[peer], length)
        b.post()
        for peer in peers:
            if k < len(incoming[peer]):
                b.await_(peer, k + 1)
                b.copy(STAGING, slot + place[b.rank], OUTPUT, *incoming[peer][k], staging_of=peer)


def _parts(whole: Range, limit_bytes: int) -> list[Range]:
    """Cuts a range into parts of this length, the last one perhaps shorter: what a pair agrees on."""
    end = whole.offset + whole.length
    return [Range(at, min(limit_bytes, end - at)) for at in range(whole.offset, end, limit_bytes)]
