"""Algorithms among the ranks of one host, through staging: memory of each rank that all of them have mapped.

A rank COPYs the data for others into its own staging, POSTs, and AWAITs the others' posts before it reads theirs.
Staging is divided into areas, each with two slots that segments take in turn. The executor keeps consecutive operations
apart: they use alternating halves of the memory, and none starts before all peers have ended the one two before it.
Within an operation, a plan must not write a slot that another rank still reads. Each function says why it does not.

All steps on staging are one chain, since one thread runs them anyway. `local` are the group ranks of this host,
ascending. All ranks post equally often, as the executor requires.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import ConfigError
from .partition import ALIGNMENT_BYTES, MESSAGE_LIMIT_BYTES, Range, partition, segments
from .plan import Buffer, Plan, PlanBuilder
from .settings import Settings
from .window import Window

INPUT, OUTPUT, SCRATCH, STAGING = Buffer.INPUT, Buffer.OUTPUT, Buffer.SCRATCH, Buffer.STAGING

SLOTS = 2

Finish = Callable[[Buffer, Range, Sequence[int]], list[int]]


def all_reduce(rank: int, world_size: int, numel: int, itemsize: int, divisor: int, settings: Settings) -> Plan:
    """All-reduces OUTPUT in place; all ranks get the same bits."""
    b = PlanBuilder(rank, world_size)
    whole, local = Range(0, numel * itemsize), range(world_size)
    if whole.length <= min(settings.small_bytes, settings.staging_bytes):
        _small_all_reduce(b, local, whole, divisor)
        return b.build()

    slot_bytes, longest = staging_area(settings.staging_bytes, 2, 1, itemsize)
    pieces = segments(whole, itemsize, longest, longest)
    finish, ordered = _scale(b, divisor), settings.deterministic
    staged_reduce(b, local, world_size, pieces, itemsize, slot_bytes, finish, ordered=ordered)
    return b.build()


def reduce(rank: int, world_size: int, numel: int, itemsize: int, divisor: int, root: int, settings: Settings) -> Plan:
    """Reduces all ranks' OUTPUT into the root's OUTPUT; the others keep theirs."""
    b = PlanBuilder(rank, world_size)
    whole, local = Range(0, numel * itemsize), range(world_size)
    if 0 < whole.length <= min(settings.small_bytes, settings.staging_bytes):
        with b.chain():
            if rank != root:
                b.copy(OUTPUT, 0, STAGING, 0, whole.length)
            b.post()
            if rank == root:
                for peer in local:
                    if peer != root:
                        b.await_(peer, b.posts)
                        b.reduce(STAGING, 0, OUTPUT, *whole, staging_of=peer)
                if divisor > 1:
                    b.scale(OUTPUT, *whole, divisor)
        return b.build()
    slot_bytes, longest = staging_area(settings.staging_bytes, 2, 1, itemsize)
    pieces = segments(whole, itemsize, longest, longest)
    staged_reduce(b, local, world_size, pieces, itemsize, slot_bytes, _scale(b, divisor), root=root)
    return b.build()


def _scale(b: PlanBuilder, divisor: int) -> Finish:
    def finish(buffer: Buffer, own: Range, after: Sequence[int]) -> list[int]:
        return [b.scale(buffer, *own, divisor, after)] if divisor > 1 else []

    return finish


def _small_all_reduce(b: PlanBuilder, local: Sequence[int], whole: Range, divisor: int) -> None:
    """One synchronisation: each rank reads all inputs and reduces rank 0's + rank 1's + ... in that order."""
    if whole.length == 0:
        return
    with b.chain():
        b.copy(OUTPUT, 0, STAGING, 0, whole.length)
        b.post()
        await_all(b, local, b.posts)
        b.copy(STAGING, 0, OUTPUT, 0, whole.length, staging_of=local[0])
        for peer in local[1:]:
            b.reduce(STAGING, 0, OUTPUT, 0, whole.length, staging_of=peer)
        if divisor > 1:
            b.scale(OUTPUT, 0, whole.length, divisor)


def add_parts(
    b: PlanBuilder,
    local: Sequence[int],
    staged: int,
    target: Buffer,
    own: Range,
    head_at: int | None,
    *,
    posts: int | None = None,
) -> None:
    """Adds the parts of the other local ranks, at `staged` in the staging of each, to this rank's `own` in `target`,
    within a chain. `posts`: awaits so many posts of each rank before its part.

    With `head_at`, room in SCRATCH, the sum is ((0 + 1) + 2) + ... in the order of the ranks, whichever of them makes
    it: a + b and b + a have the same bits.
    """
    me = local.index(b.rank)
    head = local[:me] if head_at is not None and me > 1 else ()
    for peer in local:
        if peer == b.rank:
            continue
        if posts is not None:
            b.await_(peer, posts)
        if head_at is None or peer not in head:
            b.reduce(STAGING, staged, target, *own, staging_of=peer)
        elif peer == head[0]:
            b.copy(STAGING, staged, SCRATCH, head_at, own.length, staging_of=peer)
        else:
            b.reduce(STAGING, staged, SCRATCH, head_at, own.length, staging_of=peer)
        if head_at is not None and head and peer == head[-1]:
            b.reduce(SCRATCH, head_at, target, *own)


def staged_reduce(
    b: PlanBuilder,
    local: Sequence[int],
    owners: int,
    pieces: Sequence[Range],
    itemsize: int,
    slot_bytes: int,
    finish: Finish,
    *,
    lag: int = 0,
    root: int | None = None,
    ordered: bool = False,
) -> None:
    """Reduces segments of all local ranks' OUTPUT into theirs, or only into that of `root`, perhaps on another host.

    The first `owners` local ranks own a shard of each segment. `finish(buffer, own shard, after)` adds the steps that
    turn the sum of this host, which is there after `after`, into the result (scaling, or reduction over hosts), and
    returns the last of them. Up to `lag` segments may be in these steps at a time. A rank that must keep its OUTPUT
    because it is not the root reduces its shard in SCRATCH. `ordered`: see `add_parts`.

    Area A holds contributions, area B results. Iteration i reduces segment i and spreads the result of i - lag:
        contribute i + 1; await all that contributed i; reduce; result of i - lag to B; post; await all; copy out
    Slots are safe:
      - A is written for i + 1 after awaiting the end of iteration i - 1 on all ranks, which had then reduced i - 1;
      - B is written in i after awaiting the same, when all ranks had copied out the result of iteration i - 2.
    """
    if not pieces:
        return
    me = local.index(b.rank)
    peers = [rank for rank in local if rank != b.rank]
    readers = [rank for rank in local if root in (None, rank)]
    cuts = [partition(piece, owners, itemsize) for piece in pieces]
    owned = [shards[me] if me < owners else Range(piece.offset, 0) for piece, shards in zip(pieces, cuts, strict=True)]
    contributed: list[int] = []
    place, aside = OUTPUT, None
    if root not in (None, b.rank):
        place, aside = SCRATCH, Window(b, max(own.length for own in owned), lag + 1)
    head_at = b.scratch(max(own.length for own in owned)) if ordered else None
    results: list[tuple[int, list[int]]] = []  # offset of each segment's shard in `place`, and the steps before it
    chain = b.chain()

    def slot(area: int, segment: int) -> int:
        return (area * SLOTS + segment % SLOTS) * slot_bytes

    def contribute(segment: int) -> None:
        # All but this rank's own shard: the other ranks reduce the other shards.
        piece, own = pieces[segment], owned[segment]
        head = Range(piece.offset, own.offset - piece.offset)
        tail_offset = own.offset + own.length
        tail = Range(tail_offset, piece.offset + piece.length - tail_offset)
        for part in (head, tail):
            if part.length and peers:
                b.copy(OUTPUT, part.offset, STAGING, slot(0, segment) + part.offset - piece.offset, part.length)
        b.post()
        contributed.append(b.posts)

    def reduce_own(segment: int) -> tuple[int, list[int]]:
        own = owned[segment]
        at, free = aside.take() if aside else (own.offset, ())
        if not own.length:
            return at, []
        with chain:
            if aside:
                b.copy(OUTPUT, own.offset, SCRATCH, at, own.length, free)
            staged = slot(0, segment) + own.offset - pieces[segment].offset
            add_parts(b, local, staged, place, Range(at, own.length), head_at, posts=contributed[segment])
        done = finish(place, Range(at, own.length), chain.tail)
        if aside:
            aside.release(done)  # and when it has been copied to area B, which comes earlier in the chain
        return at, done

    with chain:
        contribute(0)
    for i in range(len(pieces) + lag):
        if i + 1 < len(pieces):
            with chain:
                contribute(i + 1)
        if i < len(pieces):
            results.append(reduce_own(i))
        k = i - lag
        with chain:
            if k >= 0 and owned[k].length and any(reader != b.rank for reader in readers):
                at, done = results[k]
                staged = slot(1, k) + owned[k].offset - pieces[k].offset
                b.copy(place, at, STAGING, staged, owned[k].length, done)
            b.post()
            await_all(b, peers, b.posts)
            if k >= 0 and b.rank in readers:
                for j, shard in enumerate(cuts[k]):
                    if j != me and shard.length:
                        staged = slot(1, k) + shard.offset - pieces[k].offset
                        b.copy(STAGING, staged, OUTPUT, *shard, staging_of=local[j])


def reduce_scatter(rank: int, world_size: int, numel: int, itemsize: int, divisor: int, settings: Settings) -> Plan:
    """Reduces INPUT of world_size x numel elements into OUTPUT of numel, which may be this rank's part of INPUT."""
    b = PlanBuilder(rank, world_size)
    local = range(world_size)
    length = numel * itemsize
    slot_bytes, longest = staging_area(settings.staging_bytes, 1, world_size, itemsize)
    # A slot is written again for k + 2, after awaiting all posts of k + 1, which follow the reduction of k.
    with b.chain():
        for k, piece in enumerate(segments(Range(0, length), itemsize, longest, longest)):
            slot = k % SLOTS * slot_bytes
            for peer in local:
                if peer != rank:
                    source = peer * length + piece.offset
                    b.copy(INPUT, source, STAGING, slot + peer * piece.length, piece.length)
            b.post()
            b.copy(INPUT, rank * length + piece.offset, OUTPUT, *piece)
            for peer in local:
                if peer != rank:
                    b.await_(peer, b.posts)
                    b.reduce(STAGING, slot + rank * piece.length, OUTPUT, *piece, staging_of=peer)
            if divisor > 1:
                b.scale(OUTPUT, *piece, divisor)
    return b.build()


def all_gather(rank: int, world_size: int, numel: int, itemsize: int, settings: Settings) -> Plan:
    """Gathers INPUT of numel elements into OUTPUT of world_size x numel; INPUT may be its own place in OUTPUT."""
    b = PlanBuilder(rank, world_size)
    length = numel * itemsize
    slot_bytes, longest = staging_area(settings.staging_bytes, 1, 1, itemsize)
    # A slot is written again for k + 2, after awaiting all posts of k + 1, which follow the copying of k.
    with b.chain():
        for k, piece in enumerate(segments(Range(0, length), itemsize, longest, longest)):
            slot = k % SLOTS * slot_bytes
            b.copy(INPUT, piece.offset, STAGING, slot, piece.length)
            b.post()
            b.copy(INPUT, piece.offset, OUTPUT, rank * length + piece.offset, piece.length)
            for peer in range(world_size):
                if peer != rank:
                    b.await_(peer, b.posts)
                    target = peer * length + piece.offset
                    b.copy(STAGING, slot, OUTPUT, target, piece.length, staging_of=peer)
    return b.build()


def broadcast(rank: int, world_size: int, numel: int, itemsize: int, root: int, settings: Settings) -> Plan:
    """Copies the root's OUTPUT to that of all ranks."""
    b = PlanBuilder(rank, world_size)
    slot_bytes, longest = staging_area(settings.staging_bytes, 1, 1, itemsize)
    pieces = segments(Range(0, numel * itemsize), itemsize, longest, longest)
    staged_broadcast(b, range(world_size), pieces, slot_bytes, [[] for _ in pieces], root=root)
    return b.build()


def staged_broadcast(
    b: PlanBuilder,
    local: Sequence[int],
    pieces: Sequence[Range],
    slot_bytes: int,
    ready: Sequence[Sequence[int]],
    *,
    root: int,
) -> None:
    """Copies ranges of the root's OUTPUT to all local ranks' OUTPUT; at the root, range k is there after ready[k]."""
    peers = [rank for rank in local if rank != b.rank]
    with b.chain():
        for k, piece in enumerate(pieces):
            slot = k % SLOTS * slot_bytes
            if b.rank == root and peers:
                # The slot's last readers post k - 1 when they have copied out segment k - 2.
                if k >= SLOTS:
                    await_all(b, peers, b.posts + 1 - SLOTS)
                b.copy(OUTPUT, piece.offset, STAGING, slot, piece.length, ready[k])
            elif b.rank != root:
                b.await_(root, b.posts + 1)
                b.copy(STAGING, slot, OUTPUT, *piece, staging_of=root)
            b.post()


def barrier(rank: int, world_size: int) -> Plan:
    """Ends on no rank before it has begun on all."""
    b = PlanBuilder(rank, world_size)
    with b.chain():
        b.post()
        await_all(b, [peer for peer in range(world_size) if peer != rank], b.posts)
    return b.build()


def await_all(b: PlanBuilder, ranks: Sequence[int], value: int) -> None:
    """Waits until each of the ranks has posted `value` times."""
    for rank in ranks:
        if rank != b.rank:
            b.await_(rank, value)


def staging_area(staging_bytes: int, areas: int, parts: int, itemsize: int) -> tuple[int, int]:
    """Divides a rank's staging into `areas` areas of two slots, which hold `parts` parts of a segment each.

    Returns the bytes of a slot and the largest bytes of a part. Raises ConfigError if a part would hold no element.
    """
    slot_bytes = staging_bytes // (areas * SLOTS) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    part_bytes = min(slot_bytes // parts, MESSAGE_LIMIT_BYTES)  # a part is a message, too, between hosts
    part_bytes = part_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES or part_bytes // itemsize * itemsize
    if part_bytes == 0:
        raise ConfigError(
            f"staging of {staging_bytes} bytes per rank is too small: each of {areas * SLOTS} slots must hold {parts} "
            f"elements of {itemsize} bytes; use fewer ranks per host"
        )
    return slot_bytes, part_bytes
