"""Algorithms for several hosts: shared memory within a host, the network between hosts.

Data crosses the network once per host, not once per rank. For the all-reduce every host has the same number of owners:
the number of ranks of the smallest host. A segment is reduced to the owners within each host, then over the network
between the owners of the same shard, and then spread within each host. The steps within the host are one chain, which
works on a later segment than the network: up to `NETWORK_LAG` + 1 segments are on the network at a time.

`hosts` are the group ranks by host. All ranks of the group post equally often.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

from ..errors import ConfigError
from . import direct, grid
from .codec import Codec, Encoding
from .host import SLOTS, add_parts, await_all, staged_broadcast, staged_reduce, staging_area
from .partition import (
    ALIGNMENT_BYTES,
    MESSAGE_LIMIT_BYTES,
    SHORT_MESSAGE_BYTES,
    Range,
    longest_whole,
    partition,
    segments,
)
from .plan import Buffer, Plan, PlanBuilder
from .settings import Settings
from .window import Window

INPUT, OUTPUT, SCRATCH, STAGING = Buffer.INPUT, Buffer.OUTPUT, Buffer.SCRATCH, Buffer.STAGING

NETWORK_LAG = 8
"""Segments on the network after the one that comes back next: enough to fill a long or fast path until then."""

Hosts = tuple[tuple[int, ...], ...]


def all_reduce(rank: int, hosts: Hosts, numel: int, itemsize: int, divisor: int, settings: Settings) -> Plan:
    """All-reduces OUTPUT, in place."""
    b = PlanBuilder(rank, sum(map(len, hosts)))
    local, me, owners, members = _share(rank, hosts)
    slot_bytes, longest = staging_area(settings.staging_bytes, 2, 1, itemsize)
    messages = owners * len(hosts)
    # A short message takes one network step, as in select.py, but only among the owners of a shard.
    is_short = settings.is_short(len(hosts), numel * itemsize) and numel * itemsize <= longest
    if settings.segment_for(messages) > longest and longest // messages < SHORT_MESSAGE_BYTES and not is_short:
        return _long_all_reduce(rank, hosts, numel, itemsize, divisor, settings)
    segment_bytes = min(settings.segment_for(messages), longest)
    pieces = segments(Range(0, numel * itemsize), itemsize, segment_bytes, longest)
    window = None
    if settings.deterministic and members and not is_short:
        shards = [partition(piece, owners, itemsize)[me] for piece in pieces]
        owned = [partition(shard, len(hosts), itemsize, settings.weights)[members.index(rank)] for shard in shards]
        window = direct.ordered_window(b, len(hosts), owned)

    def finish(_: Buffer, own: Range, after: Sequence[int]) -> list[int]:
        if grid.sums(len(hosts), own.length, settings):
            return _grid(b, members, own, itemsize, divisor, settings, after)
        if is_short:
            return direct.exchange_segment(b, members, own, divisor=divisor, after=after)
        shards = partition(own, len(hosts), itemsize, settings.weights)
        return direct.all_reduce_segment(b, members, shards, divisor=divisor, window=window, after=after)

    lag = min(NETWORK_LAG, len(pieces) - 1)
    staged_reduce(b, local, owners, pieces, itemsize, slot_bytes, finish, lag=lag, ordered=settings.deterministic)
    return b.build()


def _long_all_reduce(rank: int, hosts: Hosts, numel: int, itemsize: int, divisor: int, settings: Settings) -> Plan:
    """All-reduces OUTPUT, in place, in segments that go through staging in several rounds: so many owners share them
    that the messages of shorter ones would be shorter than a packet."""
    b = PlanBuilder(rank, sum(map(len, hosts)))
    local, me, owners, members = _share(rank, hosts)
    messages = owners * len(hosts)
    longest = owners * longest_whole(len(hosts), settings.weights)
    pieces = segments(Range(0, numel * itemsize), itemsize, min(settings.segment_for(messages), longest), longest)
    cuts = [partition(piece, owners, itemsize) for piece in pieces]
    shards = [partition(cut[me], len(hosts), itemsize, settings.weights) for cut in cuts] if members else []
    window = None
    if settings.deterministic and members:
        owned = [shard[members.index(rank)] for shard in shards]
        window = direct.ordered_window(b, len(hosts), owned)

    def between(i: int, after: Sequence[int]) -> list[int]:
        own = cuts[i][me]
        if grid.sums(len(hosts), own.length, settings):
            return _grid(b, members, own, itemsize, divisor, settings, after)
        return direct.all_reduce_segment(b, members, shards[i], divisor=divisor, window=window, after=after)

    reduce_and_spread(b, local, cuts, itemsize, settings, between if members else None, source=OUTPUT)
    return b.build()


def _grid(
    b: PlanBuilder,
    members: Sequence[int],
    own: Range,
    itemsize: int,
    divisor: int,
    settings: Settings,
    after: Sequence[int],
) -> list[int]:
    limit_bytes = settings.exchange_limit_bytes
    return grid.all_reduce_segment(b, members, own, itemsize, limit_bytes, divisor=divisor, after=after)


def partial_all_reduce(rank: int, hosts: Hosts, numel: int, itemsize: int, divisor: int, settings: Settings) -> Plan:
    """All-reduces INPUT into OUTPUT, which may be the same memory; contributions of hosts may be lost, and with
    `partial_results` results, too.

    The sum of a host crosses the network, so that sum is counted or lost. Each owner makes it in its INPUT: in its own
    shard INPUT holds the host's sum afterwards, elsewhere its former values. So a lost contribution is still there,
    once: the owner can contribute it again for its whole host.

    Segments are as long as the messages between hosts need (see `direct.partial_all_reduce`), so each takes several
    rounds through staging, on its way there and back. A round is: copy to staging; post; await all; read. A slot is
    written again in round k + 2, after awaiting all posts of k + 1, which follow the reading of k.
    """
    b = PlanBuilder(rank, sum(map(len, hosts)))
    local, me, owners, members = _share(rank, hosts)
    messages = owners * len(hosts)
    longest = owners * longest_whole(len(hosts), settings.weights)
    segment_bytes = min(max(settings.segment_for(messages), settings.partial_message_bytes * messages), longest)
    cuts = [
        partition(piece, owners, itemsize)
        for piece in segments(Range(0, numel * itemsize), itemsize, segment_bytes, longest)
    ]

    def between(i: int, after: Sequence[int]) -> list[int]:
        # Rescaling counts ranks; a policy asks for it only if all hosts have equally many.
        return direct.partial_all_reduce_segment(
            b,
            members,
            partition(cuts[i][me], len(hosts), itemsize, settings.weights),
            divisor=divisor,
            partial_results=settings.partial_results,
            after=after,
            weight=len(local),
        )

    reduce_and_spread(b, local, cuts, itemsize, settings, between if members else None)
    return dataclasses.replace(b.build(), partial=True)  # ranks that own nothing have no partial steps


def reduce_and_spread(
    b: PlanBuilder,
    local: Sequence[int],
    cuts: Sequence[Sequence[Range]],
    itemsize: int,
    settings: Settings,
    between: Callable[[int, Sequence[int]], list[int]] | None,
    *,
    source: Buffer = INPUT,
) -> None:
    """Reduces each segment to the host's owners in `source`, has `between` all-reduce it over the network, and spreads
    OUTPUT within the host.

    cuts[i] are the shards of segment i by owner, the first ranks of `local`. between(i, after) adds the network's steps
    for this rank's shard, which is ready after the steps `after`, and returns the last ones; None: this rank owns none.
    """
    me, owners = local.index(b.rank), len(cuts[0]) if cuts else 1
    peers = [peer for peer in local if peer != b.rank]
    slot_bytes, part_bytes = staging_area(settings.staging_bytes, 1, owners, itemsize)
    head_at = b.scratch(part_bytes) if settings.deterministic else None
    chain = b.chain()

    def rounds(shards: Sequence[Range]) -> Iterator[tuple[int, list[Range]]]:
        """The slot of each round, and its part of each owner's shard, perhaps an empty one."""
        for at in range(0, max(shard.length for shard in shards), part_bytes):
            yield (
                b.posts % SLOTS * slot_bytes,
                [Range(shard.offset + at, max(min(part_bytes, shard.length - at), 0)) for shard in shards],
            )

    def reduce_here(shards: Sequence[Range]) -> None:
        for slot, parts in rounds(shards):
            for j, part in enumerate(parts if peers else ()):
                if j != me and part.length:
                    b.copy(source, part.offset, STAGING, slot + j * part_bytes, part.length)
            b.post()
            await_all(b, peers, b.posts)
            if peers and me < owners and parts[me].length:
                add_parts(b, local, slot + me * part_bytes, source, parts[me], head_at)

    def spread_here(shards: Sequence[Range], done: Sequence[int]) -> None:
        for slot, parts in rounds(shards):
            if peers and me < owners and parts[me].length:
                b.copy(OUTPUT, parts[me].offset, STAGING, slot, parts[me].length, done)
            b.post()
            await_all(b, peers, b.posts)
            for j, part in enumerate(parts):
                if j != me and part.length:
                    b.copy(STAGING, slot, OUTPUT, *part, staging_of=local[j])

    results: list[list[int]] = []
    lag = min(NETWORK_LAG, len(cuts) - 1)
    for i in range(len(cuts) + lag):
        if i < len(cuts):
            with chain:
                reduce_here(cuts[i])
            results.append(between(i, chain.tail) if between else [])
        if i >= lag:
            with chain:
                spread_here(cuts[i - lag], results[i - lag])


def reduce(rank: int, hosts: Hosts, numel: int, itemsize: int, divisor: int, root: int, settings: Settings) -> Plan:
    """Reduces all ranks' OUTPUT into the root's OUTPUT; the others keep theirs.

    Each host reduces its own ranks', a shard per owner, and the owners send their shards to those of the root's host.
    """
    b = PlanBuilder(rank, sum(map(len, hosts)))
    local, me, owners, members = _share(rank, hosts)
    slot_bytes, longest = staging_area(settings.staging_bytes, 2, 1, itemsize)
    pieces = segments(Range(0, numel * itemsize), itemsize, min(settings.segment_bytes, longest), longest)
    window = None
    if settings.deterministic and members and root in local:
        owned = [partition(piece, owners, itemsize)[me] for piece in pieces]
        window = direct.ordered_window(b, len(hosts), owned)

    def finish(buffer: Buffer, own: Range, after: Sequence[int]) -> list[int]:
        if root not in local:
            return [b.send(home(hosts, root)[me], buffer, *own, after)]
        # The rank waits for `after`: until then the memory may hold no part to add to.
        done = direct.reduce_segment(b, members, own, window=window, begin=after, after=after, target=buffer)
        return [b.scale(buffer, *own, divisor, done)] if divisor > 1 else done

    lag = min(NETWORK_LAG, len(pieces) - 1)
    staged_reduce(b, local, owners, pieces, itemsize, slot_bytes, finish, lag=lag, root=root)
    return b.build()


def reduce_scatter(
    rank: int, hosts: Hosts, numel: int, itemsize: int, divisor: int, settings: Settings, codec: Codec | None = None
) -> Plan:
    """Reduces INPUT of world size x numel elements into OUTPUT of numel, which may be this rank's part of INPUT.

    With a codec, messages are encoded; each has the sum of a host.
    """
    world_size = sum(map(len, hosts))
    b = PlanBuilder(rank, world_size)
    local = home(hosts, rank)
    peers = [peer for peer in local if peer != rank]
    mine = set(clients(hosts, rank))
    members = [delegate(host, local.index(rank)) for host in hosts]
    length = numel * itemsize
    slot_bytes, room, pieces = _rank_pieces(hosts, length, itemsize, world_size, settings, codec)
    longest = max((piece.length for piece in pieces), default=0)
    # Each host begins with the hosts after it, so that none is flooded, and ends with its own ranks.
    after = hosts.index(local) + 1
    order = [other for host in (*hosts[after:], *hosts[:after]) for other in host]
    batches = [order[first : first + room] for first in range(0, world_size, room)]
    most = max(sum(other in mine for other in batch) for batch in batches)
    window = direct.ordered_window(b, len(hosts), pieces) if settings.deterministic else None
    sums = Window(b, most * longest if peers else 0, NETWORK_LAG)
    encoded = Window(b, codec.encoded_bytes(longest) if codec else 0, NETWORK_LAG * most)
    chain = b.chain()

    def reduce_here(destination: int, piece: Range, staged: int, target: Buffer, at: int, free: Sequence[int]) -> int:
        with chain:
            began = b.copy(INPUT, destination * length + piece.offset, target, at, piece.length, free)
            for peer in peers:
                b.reduce(STAGING, staged, target, at, piece.length, staging_of=peer)
        return began

    def encoding_of(destination: int, piece: Range) -> Encoding | None:
        """Blocks of different destinations have different numbers."""
        if codec is None:
            return None
        return Encoding(
            codec, (destination * codec.encoded_bytes(length) + codec.encoded_bytes(piece.offset)) // codec.block_bytes
        )

    # A slot is written again for k + 2, after awaiting all posts of k + 1, which follow the reduction of k.
    for k, (piece, batch) in enumerate(itertools.product(pieces, batches)):
        staged = {other: k % SLOTS * slot_bytes + i * piece.length for i, other in enumerate(batch)}
        with chain:
            for other in batch if peers else ():
                if other not in mine:
                    b.copy(INPUT, other * length + piece.offset, STAGING, staged[other], piece.length)
            if len(hosts) < world_size:
                b.post()
            await_all(b, peers, b.posts)
        remote = [other for other in batch if other in mine and other != rank]
        place, free = sums.take() if remote else (0, ())
        read: list[int] = []
        for i, other in enumerate(remote):
            values = Range(other * length + piece.offset, piece.length)
            source, part, ready = INPUT, values, chain.tail[:0]
            if peers:
                source, part = SCRATCH, Range(place + i * piece.length, piece.length)
                reduce_here(other, piece, staged[other], source, part.offset, free)
                ready = chain.tail
            encoding = encoding_of(other, piece)
            if encoding is None:
                read.append(b.send(other, source, *part, ready))
                continue
            at, busy = encoded.take()
            read.append(b.encode(encoding, source, *part, at, [*ready, *busy]))
            sent = b.send(other, SCRATCH, at, piece.length, read[-1:], encoding=encoding, values=values.offset)
            encoded.release([sent])
        if remote:
            sums.release(read)
        if rank in staged:
            began = reduce_here(rank, piece, staged[rank], OUTPUT, piece.offset, ())
            done = direct.reduce_segment(
                b, members, piece, window=window, begin=[began], after=chain.tail, encoding=encoding_of(rank, piece)
            )
            if divisor > 1:
                b.scale(OUTPUT, *piece, divisor, done)
    return b.build()


def all_gather(
    rank: int, hosts: Hosts, numel: int, itemsize: int, settings: Settings, codec: Codec | None = None
) -> Plan:
    """Gathers INPUT of numel elements into OUTPUT of world size x numel; INPUT may be its own place in OUTPUT.

    With a codec, each rank encodes its part once, and all ranks decode that, also this rank and those of its host.
    """
    world_size = sum(map(len, hosts))
    b = PlanBuilder(rank, world_size)
    local = home(hosts, rank)
    peers = [peer for peer in local if peer != rank]
    length = numel * itemsize
    carried = {member: clients(hosts, member) for member in local}
    after = hosts.index(local) + 1  # each host sends to the one after it first, so that none is flooded
    delegates = [delegate(host, local.index(rank)) for host in (*hosts[after:], *hosts[: after - 1])]
    most = len(clients(hosts, min(hosts, key=len)[0]))  # that any rank has
    slot_bytes, room, pieces = _rank_pieces(hosts, length, itemsize, most, settings, codec)
    longest = max((piece.length for piece in pieces), default=0)
    encoded = Window(b, codec.encoded_bytes(longest) if codec else 0, NETWORK_LAG)
    chain = b.chain()
    rounds = 0
    for piece in pieces:
        own = Range(rank * length + piece.offset, piece.length)
        encoding = codec and Encoding(codec, piece.offset // codec.block_length)
        if encoding is None:
            there = {rank: b.copy(INPUT, piece.offset, OUTPUT, *own)}
            for other in delegates:
                b.send(other, INPUT, *piece)
        else:
            at, free = encoded.take()
            made = [b.encode(encoding, INPUT, *piece, at, free)]
            there = {rank: b.copy(SCRATCH, at, OUTPUT, *own, made, encoding=encoding)}
            sent = [
                b.send(other, SCRATCH, at, piece.length, made, encoding=encoding, values=piece.offset)
                for other in delegates
            ]
            encoded.release([*sent, there[rank]])
        for other in carried[rank]:
            if other != rank:
                target = other * length + piece.offset
                there[other] = b.recv_copy(other, OUTPUT, target, piece.length, encoding=encoding)
        if len(hosts) == world_size:
            continue
        # A slot is written again for k + 2, after awaiting all posts of k + 1, which follow the copying of k.
        for first in range(0, most, room):
            staged = rounds % SLOTS * slot_bytes
            rounds += 1
            with chain:
                for i, other in enumerate(carried[rank][first : first + room] if peers else ()):
                    source = other * length + piece.offset
                    b.copy(OUTPUT, source, STAGING, staged + i * piece.length, piece.length, [there[other]])
                b.post()
                for peer in peers:
                    b.await_(peer, b.posts)
                    for i, other in enumerate(carried[peer][first : first + room]):
                        target = other * length + piece.offset
                        b.copy(STAGING, staged + i * piece.length, OUTPUT, target, piece.length, staging_of=peer)
    return b.build()


def _rank_pieces(
    hosts: Hosts, length: int, itemsize: int, parts: int, settings: Settings, codec: Codec | None
) -> tuple[int, int, list[Range]]:
    """Bytes of a staging slot, ranks whose segments fit into it, and the segments of each rank's `length` bytes.

    All `parts` ranks fit, unless segments would be shorter than usual then, and messages between hosts, too. With a
    codec they begin at blocks, and have the usual length once encoded.
    """
    world_size = sum(map(len, hosts))
    slot_bytes, longest, segment_bytes = 0, MESSAGE_LIMIT_BYTES, settings.segment_for(world_size) // world_size
    granule = itemsize if codec is None else codec.block_length
    if codec is not None:
        segment_bytes = segment_bytes * codec.block_length // codec.block_bytes
    if len(hosts) < world_size:
        slot_bytes, whole = staging_area(settings.staging_bytes, 1, 1, itemsize)
        fits = whole // parts // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        least = max(segment_bytes, granule, ALIGNMENT_BYTES) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        longest = max(fits, min(least, whole))
    if codec is not None:
        longest -= longest % codec.block_length
        if longest == 0:
            raise ConfigError(
                f"staging of {settings.staging_bytes} bytes per rank is too small for blocks of {codec.block_length} "
                "bytes"
            )
    pieces = segments(Range(0, length), granule, min(max(segment_bytes, 1), longest), longest)
    room = slot_bytes // max(piece.length for piece in pieces) if slot_bytes and pieces else parts
    return slot_bytes, min(room, parts), pieces


def broadcast(rank: int, hosts: Hosts, numel: int, itemsize: int, root: int, settings: Settings) -> Plan:
    """Copies the root's OUTPUT to that of all ranks."""
    b = PlanBuilder(rank, sum(map(len, hosts)))
    local = home(hosts, rank)
    leaders = [root if root in host else host[0] for host in hosts]
    leader = leaders[hosts.index(local)]
    slot_bytes, longest = staging_area(settings.staging_bytes, 1, 1, itemsize)
    pieces: list[Range] = []
    ready: list[list[int]] = []
    length = numel * itemsize
    module = grid if grid.serves(len(hosts), length) else direct
    for segment in direct.broadcast_pieces(length, itemsize, len(hosts), settings):
        parts = segments(segment, itemsize, min(settings.segment_bytes, longest), longest)
        came = module.broadcast_segment(b, leaders, segment, itemsize, root=root) if rank == leader else []
        pieces += parts
        ready += [came] * len(parts)
    staged_broadcast(b, local, pieces, slot_bytes, ready, root=leader)
    return b.build()


def barrier(rank: int, hosts: Hosts) -> Plan:
    """Ends on no rank before it has begun on all."""
    b = PlanBuilder(rank, sum(map(len, hosts)))
    local = home(hosts, rank)
    chain = b.chain()
    with chain:
        b.post()
    heard: list[int] = []
    if rank == local[0]:
        with chain:
            await_all(b, local, b.posts)
        module = grid if grid.serves(len(hosts), 0) else direct
        heard = module.barrier_segment(b, [host[0] for host in hosts], chain.tail)
    with chain:
        b.post(heard)
        if rank != local[0]:
            b.await_(local[0], b.posts)
    return b.build()


def _share(rank: int, hosts: Hosts) -> tuple[tuple[int, ...], int, int, list[int]]:
    """The ranks of this host, the place of `rank` among them, how many of them own shards, and the ranks of all hosts
    that own the same shards as `rank`; [] if it owns none."""
    local = home(hosts, rank)
    me = local.index(rank)
    owners = min(map(len, hosts))
    return local, me, owners, [host[me] for host in hosts] if me < owners else []


def home(hosts: Hosts, rank: int) -> tuple[int, ...]:
    """The ranks on the host of `rank`."""
    return next(host for host in hosts if rank in host)


def delegate(host: tuple[int, ...], place: int) -> int:
    """The rank on `host` that handles the part of a rank in the network; `place`: of that rank on its own host."""
    return host[place % len(host)]


def clients(hosts: Hosts, rank: int) -> list[int]:
    """The ranks for which `rank` is the delegate on its host: itself, and some of every other host."""
    local = home(hosts, rank)
    return [other for host in hosts for other in host[local.index(rank) :: len(local)]]
