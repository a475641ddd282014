"""Deliveries of bytes from rank to rank: all-to-all, gather, scatter, all-gather of unequal sizes.

One algorithm serves all of them, for any lengths and any set of hosts. A rank knows the lengths that it sends to and
receives from each rank, and no lengths between others. Its plan depends on nothing else, and the plans of two ranks
agree because both cut the same length in the same way. If two ranks differ in a length, both fail with a mismatch.

A rank of another host gets a message, or several if it is long. The last is shorter than the longest possible one, and
has no bytes if it must: so a message that comes tells all that its sender has, and its receiver compares the lengths.

Ranks of this host exchange through staging, in rounds, with a part for each of them: in round k a rank writes, posts
k + 1, awaits the posts of the ranks that write for it, and copies out. A rank has as many rounds as its longest pair
needs. Then it posts the rest, for ranks with more rounds: so all counters of the host rise equally, although no rank
knows the number of rounds. In the first round a rank tells each other one number for both lengths of their pair, which
the other compares before it copies. Nobody waits for a rank that sends it nothing in any case, as the root of a gather.

Round k uses the memory of round k - 2. Its reader has left that when it posts k, so the writer awaits that post. No
rank waits for a round later than its own, so no rank waits for ever.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from ..errors import ConfigError
from .direct import others
from .hierarchical import Hosts as Hosts
from .host import SLOTS, staging_area
from .partition import ALIGNMENT_BYTES, MESSAGE_LIMIT_BYTES, Range
from .plan import NUMBER_BYTES, POSTS_LIMIT, Buffer, Plan, PlanBuilder, sign

INPUT, OUTPUT, STAGING = Buffer.INPUT, Buffer.OUTPUT, Buffer.STAGING

Lengths = Sequence[int | None]
"""Bytes by rank; None: none, and both ranks of the pair know that, whatever their arguments are."""

NUMBER_LIMIT = 1 << 63
"""Numbers of a plan are below it."""


def deliver(
    rank: int,
    hosts: Hosts,
    sent: Lengths,
    received: Lengths,
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
    pairs = list(_pairs(sent, received, same=same))
    if sent[rank]:
        b.copy(INPUT, pairs[rank].sent.offset, OUTPUT, *pairs[rank].received)
    local = next(host for host in hosts if rank in host)
    for peer in others(range(len(sent)), rank):
        if peer not in local:
            if sent[peer] is not None:
                _send(b, peer, pairs[peer].sent)
            if received[peer] is not None:
                _receive(b, peer, pairs[peer].received)
    if len(hosts) < len(sent):
        with b.chain():
            _deliver_here(b, {peer: pairs[peer] for peer in local}, staging_bytes, same)
            b.post_rest()
    return dataclasses.replace(b.build(), signature=sign(same, *what) if what else 0)


class Pair(NamedTuple):
    """This rank and another one."""

    sent: Range
    """In INPUT, for the other rank."""
    received: Range
    """In OUTPUT, from the other rank."""
    tells: bool
    """Whether this rank might send something: then it tells the other one both lengths."""
    hears: bool
    """Whether the other rank might: then this one waits for it and compares."""

    @property
    def told(self) -> int:
        """One number for both lengths. Two pairs of lengths below 2 GiB never have the same."""
        return (self.sent.length + (self.received.length << 31)) % NUMBER_LIMIT

    @property
    def expected(self) -> int:
        """The number that the other rank tells."""
        return (self.received.length + (self.sent.length << 31)) % NUMBER_LIMIT


def _pairs(sent: Lengths, received: Lengths, *, same: bool) -> Iterator[Pair]:
    to_peer = [length or 0 for length in sent]
    from_peer = [length or 0 for length in received]
    offsets = [0] * len(sent) if same else [0, *accumulate(to_peer)]
    for peer, offset in zip(range(len(sent)), accumulate(from_peer, initial=0), strict=False):
        outgoing, incoming = Range(offsets[peer], to_peer[peer]), Range(offset, from_peer[peer])
        yield Pair(outgoing, incoming, tells=sent[peer] is not None, hears=received[peer] is not None)


def _deliver_here(b: PlanBuilder, pairs: Mapping[int, Pair], staging_bytes: int, same: bool) -> None:
    """`pairs`: with each rank of this host."""
    local = list(pairs)
    numbers = {peer: index * NUMBER_BYTES for index, peer in enumerate(local)}
    first = -(-len(local) * NUMBER_BYTES // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    slot_bytes, part_bytes = staging_area(max(staging_bytes - first, 0), 1, 1 if same else len(local), 1)
    place = {peer: first if same else first + index * part_bytes for index, peer in enumerate(local)}
    peers = [local[i] for i in others(local, local.index(b.rank))]
    outgoing = {peer: _parts(pairs[peer].sent, part_bytes) for peer in peers}
    incoming = {peer: _parts(pairs[peer].received, part_bytes) for peer in peers}
    rounds = max(map(len, [*outgoing.values(), *incoming.values()]), default=0)
    rounds = rounds or int(any(pairs[peer].tells or pairs[peer].hears for peer in peers))
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
        for peer in peers if k == 0 else ():
            if pairs[peer].tells:
                b.tell(pairs[peer].told, numbers[peer])
        b.post()
        for peer in peers:
            hears = k == 0 and pairs[peer].hears
            if hears or k < len(incoming[peer]):
                b.await_(peer, k + 1)
            if hears:
                b.check(peer, pairs[peer].expected, numbers[b.rank])
            if k < len(incoming[peer]):
                b.copy(STAGING, slot + place[b.rank], OUTPUT, *incoming[peer][k], staging_of=peer)


def _send(b: PlanBuilder, peer: int, whole: Range) -> None:
    for part in _parts(whole, MESSAGE_LIMIT_BYTES):
        b.send(peer, INPUT, *part)
    if whole.length % MESSAGE_LIMIT_BYTES == 0:
        b.send_nothing(peer)


def _receive(b: PlanBuilder, peer: int, whole: Range) -> None:
    for part in _parts(whole, MESSAGE_LIMIT_BYTES):
        b.recv_copy(peer, OUTPUT, *part)
    if whole.length % MESSAGE_LIMIT_BYTES == 0:
        b.recv_nothing(peer)


def _parts(whole: Range, limit_bytes: int) -> list[Range]:
    """Cuts a range into parts of this length, the last one perhaps shorter. Both ranks of a pair cut alike."""
    end = whole.offset + whole.length
    return [Range(at, min(limit_bytes, end - at)) for at in range(whole.offset, end, limit_bytes)]
