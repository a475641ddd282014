"""Deliveries of bytes from rank to rank: all-to-all, gather, scatter, all-gather of unequal sizes.

One algorithm serves all of them, for any lengths and any set of hosts. A rank knows the lengths that it sends to and
receives from each rank, and no lengths between others. Its plan depends on nothing else, and the plans of two ranks
agree because both cut the same length in the same way.

A rank of another host gets a message, or several if it is long. Ranks of this host exchange through staging, in
rounds, with a part for each of them: in round k a rank writes, posts k + 1, awaits the posts of the ranks that write
for it, and copies out. A rank has as many rounds as its longest pair needs. Then it posts the rest, for ranks with more
rounds: so all counters of the host rise equally, although no rank knows the number of rounds.

Round k uses the memory of round k - 2. Its reader has left that when it posts k, so the writer awaits that post. No
rank waits for a round later than its own, so no rank waits for ever.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate

from ..errors import ConfigError
from .direct import others
from .hierarchical import Hosts as Hosts
from .host import SLOTS, staging_area
from .partition import MESSAGE_LIMIT_BYTES, Range
from .plan import POSTS_LIMIT, Buffer, Plan, PlanBuilder, sign

INPUT, OUTPUT, STAGING = Buffer.INPUT, Buffer.OUTPUT, Buffer.STAGING


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
    rank or to several; sent[r] is then its length or 0. All ranks must agree on `hosts`, `staging_bytes` and `same`.
    `what` identifies the collective and its element type: ranks with another one get MismatchError. (): not compared.

    Raises ConfigError if the staging is too small for the length.
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
            f"rank {b.rank}: a delivery through staging of {staging_bytes} bytes takes {rounds} rounds, and fewer than "
            f"{POSTS_LIMIT} are possible; deliver less at once"
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
    """Cuts a range into parts of this length, the last one perhaps shorter. Both ranks of a pair cut alike."""
    end = whole.offset + whole.length
    return [Range(at, min(limit_bytes, end - at)) for at in range(whole.offset, end, limit_bytes)]
