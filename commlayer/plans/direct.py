"""Direct algorithms over the network: every rank sends to every other, in one or two network steps.

The all-reduce is the reduce-scatter + all-gather of Rabenseifner ("Optimization of Collective Reduction Operations",
2004), with a direct exchange for each half. Every rank owns one shard; all ranks send their part of a shard to its
owner, which reduces them and sends the result back. Each rank sends 2 (n-1)/n of the data, the least possible, in two
network steps.

Each segment does this by itself: the gather half of one overlaps the reduce half of the next.

Functions named `*_segment` add the steps of one segment between some of the ranks (`members`, in the same order on all
ranks) to a plan. The hierarchical algorithms use them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .codec import Encoding
from .partition import MESSAGE_LIMIT_BYTES, SHORT_MESSAGE_BYTES, Range, longest_whole, partition, segments
from .plan import Buffer, Plan, PlanBuilder
from .settings import Settings
from .window import Window

INPUT, OUTPUT, SCRATCH = Buffer.INPUT, Buffer.OUTPUT, Buffer.SCRATCH

BARRIER_BYTES = 8
"""Payload of barrier messages. It has no meaning, but a packet with a payload is handled like every other."""

ORDERED_SEGMENTS = 16
"""Segments in flight when rank-ordered reduction needs scratch: about 2 MiB of it in small worlds."""

ORDERED_BYTES = 32 << 20
"""That scratch in large worlds, whose segments are long; two segments in any case."""

Route = Sequence[int]
"""The ranks that get the messages of this rank, where these are not the members from which it gets its own."""


def all_reduce(rank: int, world_size: int, numel: int, itemsize: int, divisor: int, settings: Settings) -> Plan:
    """All-reduces OUTPUT, in place."""
    b = PlanBuilder(rank, world_size)
    members = range(world_size)
    packet, segment_bytes = settings.packet_bytes, settings.segment_for(world_size)
    longest = longest_whole(world_size, settings.weights, unit=packet)
    pieces = segments(Range(0, numel * itemsize), itemsize, segment_bytes, longest, unit=world_size * packet)
    cuts = [partition(piece, world_size, itemsize, settings.weights, unit=packet) for piece in pieces]
    owned = [shards[rank] for shards in cuts]
    window = ordered_window(b, world_size, owned) if _ordered(world_size, settings) else None
    for shards in cuts:
        all_reduce_segment(b, members, shards, divisor=divisor, window=window)
    return b.build()


def partial_all_reduce(rank: int, world_size: int, numel: int, itemsize: int, divisor: int, settings: Settings) -> Plan:
    """All-reduces INPUT into OUTPUT, which may be the same memory; contributions may be lost, and with
    `partial_results` results, too.

    If INPUT is memory of its own, lost contributions are still there in the end. The plan has SCALE steps even if there
    is nothing to divide: in them the executor makes up for absent contributions.
    """
    b = PlanBuilder(rank, world_size)
    members = range(world_size)
    longest = longest_whole(world_size, settings.weights)
    least = settings.partial_message_bytes * world_size
    segment_bytes = min(max(settings.segment_for(world_size), least), longest)
    for piece in segments(Range(0, numel * itemsize), itemsize, segment_bytes, longest, least_bytes=least):
        shards = partition(piece, world_size, itemsize, settings.weights)
        partial_all_reduce_segment(b, members, shards, divisor=divisor, partial_results=settings.partial_results)
    return b.build()


def partial_all_reduce_segment(
    b: PlanBuilder,
    members: Sequence[int],
    shards: Sequence[Range],
    *,
    divisor: int,
    partial_results: bool,
    after: Sequence[int] = (),
    weight: int = 1,
) -> list[int]:
    """All-reduces ranges of INPUT into those of OUTPUT and may lose contributions; arguments as of all_reduce_segment.

    Each member contributes the sum of `weight` ranks.
    """
    me = members.index(b.rank)
    own = shards[me]
    for i in others(members, me):
        if shards[i].length:
            b.send(members[i], INPUT, *shards[i], after, partial=True)
    done: list[int] = []
    if own.length:
        done = [b.copy(INPUT, own.offset, OUTPUT, *own, after)]
        done += [b.recv_reduce(members[i], OUTPUT, *own, done[:1], partial=True) for i in others(members, me)]
        done = [b.scale(OUTPUT, *own, divisor, done, weight=weight)]
        for i in others(members, me):
            b.send(members[i], OUTPUT, *own, done, partial=partial_results)
    # If INPUT is OUTPUT, a result overwrites memory that this rank's own send of that shard reads. As in
    # all_reduce_segment, the owner has ended that message before and counts nothing more of it.
    received = [i for i in others(members, me) if shards[i].length]
    return done + [b.recv_copy(members[i], OUTPUT, *shards[i], partial=partial_results) for i in received]


def all_reduce_segment(
    b: PlanBuilder,
    members: Sequence[int],
    shards: Sequence[Range],
    *,
    divisor: int,
    window: Window | None,
    after: Sequence[int] = (),
    between: Callable[[Range, Sequence[int]], list[int]] | None = None,
) -> list[int]:
    """All-reduces ranges of OUTPUT; members[i] owns shards[i]. Returns the steps after which the result is there.

    This rank's own contribution is ready after the steps `after`. between(own shard, after) adds the steps that turn
    the sum of the members into the result, before it is divided, and returns the last ones.
    """
    me = members.index(b.rank)
    own = shards[me]
    for i in others(members, me):
        if shards[i].length:
            b.send(members[i], OUTPUT, *shards[i], after)
    done = list(after)
    if own.length:
        done = reduce_segment(b, members, own, window=window, after=after)
        if between is not None:
            done = between(own, done)
        if divisor > 1:
            done = [b.scale(OUTPUT, *own, divisor, done)]
        for i in others(members, me):
            b.send(members[i], OUTPUT, *own, done)
    # A result overwrites memory that this rank's own send of that shard reads. It need not wait for that send: the
    # owner sends the result only when it has every byte of all ranks, and drops late retransmissions.
    return done + [b.recv_copy(members[i], OUTPUT, *shards[i]) for i in others(members, me) if shards[i].length]


def reduce_segment(
    b: PlanBuilder,
    members: Sequence[int],
    own: Range,
    *,
    window: Window | None,
    begin: Sequence[int] = (),
    after: Sequence[int] = (),
    target: Buffer = OUTPUT,
    partial: bool = False,
    encoding: Encoding | None = None,
) -> list[int]:
    """Reduces the other members' parts into a range of `target`; returns the steps after which all are in.

    This rank's own part is there after `begin`, and complete after `after`. Without a window, peers' parts are reduced
    as they come, perhaps before `after`; with one, they are reduced after it. Then the sum is ((0 + 1) + 2) + ... in
    the order of the members, whichever of them makes it: a + b and b + a have the same bits.
    """
    me = members.index(b.rank)
    if window is None:
        peers = [members[i] for i in others(members, me)]
        received = [b.recv_reduce(peer, target, *own, begin, partial=partial, encoding=encoding) for peer in peers]
        return [*after, *received]
    slot, free = window.take()
    copied = {}
    for i in others(members, me):
        where = slot + i * own.length
        copied[i] = b.recv_copy(members[i], SCRATCH, where, own.length, free, partial=partial, encoding=encoding)
    before: list[int] = []
    for i in range(me):  # this member's part comes after the sum of these
        before = [*before, copied[i]]
        if i > 0:
            before = [b.reduce(SCRATCH, slot + i * own.length, SCRATCH, slot, own.length, before)]
    done = [*begin, *after]
    if me > 0:
        done = [b.reduce(SCRATCH, slot, target, *own, [*done, *before])]
    for i in range(me + 1, len(members)):
        done = [b.reduce(SCRATCH, slot + i * own.length, target, *own, [*done, copied[i]])]
    window.release(done)
    return done


def ordered_window(b: PlanBuilder, members: int, owned: Sequence[Range]) -> Window:
    """The scratch for ordered reduction of these ranges: room for each member's contribution."""
    slot_bytes = members * max((own.length for own in owned), default=0)
    slots = min(ORDERED_SEGMENTS, max(ORDERED_BYTES // max(slot_bytes, 1), 2))
    return Window(b, slot_bytes, min(slots, max(len(owned), 1)))


def exchange(rank: int, world_size: int, numel: int, itemsize: int, divisor: int) -> Plan:
    """All-reduces OUTPUT in place in one network step, for short messages."""
    b = PlanBuilder(rank, world_size)
    if numel:
        exchange_segment(b, range(world_size), Range(0, numel * itemsize), divisor=divisor)
    return b.build()


def exchange_segment(
    b: PlanBuilder,
    members: Sequence[int],
    piece: Range,
    *,
    divisor: int,
    after: Sequence[int] = (),
    route: Route | None = None,
) -> list[int]:
    """All-reduces a range of OUTPUT by sending all of it to every other member; arguments as of all_reduce_segment.

    `route`: sends it to these ranks instead. Each member reduces the first member's + the second's + ... in that order,
    so all replicas have the same bits.
    """
    me = members.index(b.rank)
    slots = [b.scratch(piece.length) for _ in members]
    # The sends read a copy: OUTPUT may be overwritten before they are acknowledged.
    arrived = {me: b.copy(OUTPUT, piece.offset, SCRATCH, slots[me], piece.length, after)}
    for receiver in _receivers(members, me, route):
        b.send(receiver, SCRATCH, slots[me], piece.length, [arrived[me]])
    for i in others(members, me):
        arrived[i] = b.recv_copy(members[i], SCRATCH, slots[i], piece.length)
    done = [arrived[me]] if me == 0 else [b.copy(SCRATCH, slots[0], OUTPUT, *piece, [arrived[0], arrived[me]])]
    for i in range(1, len(members)):
        done = [b.reduce(SCRATCH, slots[i], OUTPUT, *piece, [*done, arrived[i]])]
    if divisor > 1:
        done = [b.scale(OUTPUT, *piece, divisor, done)]
    return done


def reduce_scatter(rank: int, world_size: int, numel: int, itemsize: int, divisor: int, settings: Settings) -> Plan:
    """Reduces INPUT of world_size x numel elements into OUTPUT of numel, which may be this rank's part of INPUT."""
    b = PlanBuilder(rank, world_size)
    members = range(world_size)
    length = numel * itemsize
    partial = settings.partial
    pieces = per_rank_segments(length, world_size, itemsize, settings)
    window = ordered_window(b, world_size, pieces) if _ordered(world_size, settings) and not partial else None
    for piece in pieces:
        for peer in others(members, rank):
            b.send(peer, INPUT, peer * length + piece.offset, piece.length, partial=partial)
        own = b.copy(INPUT, rank * length + piece.offset, OUTPUT, *piece)
        done = reduce_segment(b, members, piece, window=window, begin=[own], partial=partial)
        if divisor > 1 or partial:
            b.scale(OUTPUT, *piece, divisor, done)
    return b.build()


def all_gather(rank: int, world_size: int, numel: int, itemsize: int, settings: Settings) -> Plan:
    """Gathers INPUT of numel elements into OUTPUT of world_size x numel; INPUT may be its own place in OUTPUT."""
    b = PlanBuilder(rank, world_size)
    length = numel * itemsize
    for piece in per_rank_segments(length, world_size, itemsize, settings):
        for peer in others(range(world_size), rank):
            b.send(peer, INPUT, *piece)
        b.copy(INPUT, piece.offset, OUTPUT, rank * length + piece.offset, piece.length)
        for peer in others(range(world_size), rank):
            b.recv_copy(peer, OUTPUT, peer * length + piece.offset, piece.length)
    return b.build()


def broadcast(rank: int, world_size: int, numel: int, itemsize: int, root: int, settings: Settings) -> Plan:
    """Copies the root's OUTPUT to that of all ranks."""
    b = PlanBuilder(rank, world_size)
    for piece in broadcast_pieces(numel * itemsize, itemsize, world_size, settings):
        broadcast_segment(b, range(world_size), piece, itemsize, root=root)
    return b.build()


def broadcast_pieces(length: int, itemsize: int, members: int, settings: Settings) -> list[Range]:
    """The segments of a broadcast of `length` bytes: each receiver gets no short message of one."""
    segment_bytes = max(settings.segment_bytes, SHORT_MESSAGE_BYTES * (members - 1))
    return segments(Range(0, length), itemsize, segment_bytes, MESSAGE_LIMIT_BYTES)


SCATTER_LIMIT_BYTES = 16 << 10
"""A shorter broadcast segment goes whole to each member: in one network step instead of two."""


def broadcast_segment(
    b: PlanBuilder, members: Sequence[int], piece: Range, itemsize: int, *, root: int, after: Sequence[int] = ()
) -> list[int]:
    """Copies the root's range of OUTPUT, which is there after `after`, to all members; returns the steps after which it
    is there.

    Longer segments are scattered by the root and then gathered from one another by the others, so that the root sends
    everything once and not once per member (van de Geijn's scatter/all-gather broadcast).
    """
    receivers = [member for member in members if member != root]
    if piece.length < SCATTER_LIMIT_BYTES or len(receivers) == 1:
        if b.rank != root:
            return [b.recv_copy(root, OUTPUT, *piece)]
        for receiver in receivers:
            b.send(receiver, OUTPUT, *piece, after)
        return []
    shards = partition(piece, len(receivers), itemsize)
    if b.rank == root:
        for receiver, shard in zip(receivers, shards, strict=True):
            b.send(receiver, OUTPUT, *shard, after)
        return []
    me = receivers.index(b.rank)
    own = b.recv_copy(root, OUTPUT, *shards[me])
    for i in others(receivers, me):
        b.send(receivers[i], OUTPUT, *shards[me], [own])
    return [own] + [b.recv_copy(receivers[i], OUTPUT, *shards[i]) for i in others(receivers, me)]


def reduce(rank: int, world_size: int, numel: int, itemsize: int, divisor: int, root: int, settings: Settings) -> Plan:
    """Reduces all ranks' OUTPUT into the root's OUTPUT; the others keep theirs.

    The mirror image of the broadcast: the members except the root reduce a shard of a longer segment each, and the root
    gathers the shards. So it receives the data once, not once per member.
    """
    b = PlanBuilder(rank, world_size)
    members = range(world_size)
    pieces = segments(Range(0, numel * itemsize), itemsize, settings.segment_bytes, MESSAGE_LIMIT_BYTES)
    short = not pieces or pieces[0].length < SCATTER_LIMIT_BYTES
    owners = [root] if short or world_size == 2 else [member for member in members if member != root]
    cuts = [dict(zip(owners, partition(piece, len(owners), itemsize), strict=True)) for piece in pieces]
    owned = [shards[rank] for shards in cuts if rank in shards]
    window = ordered_window(b, world_size, owned) if owned and _ordered(world_size, settings) else None
    sums = Window(b, max((own.length for own in owned if rank != root), default=0), ORDERED_SEGMENTS)
    for shards in cuts:
        for peer in others(members, rank):
            if peer in shards and shards[peer].length:
                b.send(peer, OUTPUT, *shards[peer])
        own = shards.get(rank, Range(0, 0))
        if rank != root and own.length:
            at, free = sums.take()
            here = Range(at, own.length)
            began = b.copy(OUTPUT, own.offset, SCRATCH, *here, free)
            done = reduce_segment(b, members, here, window=window, begin=[began], target=SCRATCH)
            if divisor > 1:
                done = [b.scale(SCRATCH, *here, divisor, [began, *done])]
            sums.release([b.send(root, SCRATCH, *here, [began, *done])])
        elif rank == root and own.length:
            done = reduce_segment(b, members, own, window=window)
            if divisor > 1:
                b.scale(OUTPUT, *own, divisor, done)
        if rank == root:
            # The owner has this rank's part of that range before it sends the result, as in all_reduce_segment.
            for owner, shard in shards.items():
                if owner != root and shard.length:
                    b.recv_copy(owner, OUTPUT, *shard)
    return b.build()


def barrier(rank: int, world_size: int) -> Plan:
    """Ends on no rank before it has begun on all."""
    b = PlanBuilder(rank, world_size)
    barrier_segment(b, range(world_size))
    return b.build()


def barrier_segment(
    b: PlanBuilder, members: Sequence[int], after: Sequence[int] = (), *, route: Route | None = None
) -> list[int]:
    """Tells every member that `after` is done; returns the steps after which all members have told so. `route`: tells
    these ranks instead."""
    mine = b.scratch(BARRIER_BYTES)
    me = members.index(b.rank)
    for receiver in _receivers(members, me, route):
        b.send(receiver, SCRATCH, mine, BARRIER_BYTES, after)
    return [b.recv_copy(members[i], SCRATCH, b.scratch(BARRIER_BYTES), BARRIER_BYTES) for i in others(members, me)]


def per_rank_segments(length: int, world_size: int, itemsize: int, settings: Settings) -> list[Range]:
    """Cuts each rank's part so that the segments of all ranks together have the usual size."""
    least = settings.partial_message_bytes
    segment_bytes = max(settings.segment_for(world_size) // world_size, least, 1)
    unit = 0 if settings.partial else settings.packet_bytes  # a shorter last segment could lose no packet
    return segments(Range(0, length), itemsize, segment_bytes, MESSAGE_LIMIT_BYTES, least_bytes=least, unit=unit)


def _ordered(world_size: int, settings: Settings) -> bool:
    """Whether the order of reduction matters: two contributions give the same sum in either order."""
    return settings.deterministic and world_size > 2


def others(members: Sequence[object], me: int) -> range | list[int]:
    """The indices of the other members, beginning after `me`: each rank begins with another peer, none is flooded."""
    n = len(members)
    return [(me + i) % n for i in range(1, n)]


def _receivers(members: Sequence[int], me: int, route: Route | None) -> Route:
    return [members[i] for i in others(members, me)] if route is None else route
