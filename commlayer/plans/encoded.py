"""Collectives of float32 whose messages are encoded: contributions by one codec, results by the same or another one.

For an all-reduce, every rank encodes its contribution to a shard once. The owner adds the decoded ones to its own in
float32, and encodes the sum once. All ranks decode that, the owner too, so all have the same bits. Several hosts of
several ranks add up within each host first; the host's sum is encoded. The reduce-scatter is the first half of that,
and the all-gather the second.

Two hosts send each other their whole contributions instead, and each decodes and adds both. That takes one network step
instead of two, no sum is rounded, and where contributions are shorter than sums, fewer bytes travel.

A ring would encode again at every hop, so there is none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..errors import ConfigError
from . import direct, hierarchical
from .codec import CODECS, VALUE_BYTES, Codec, Encoding
from .direct import ORDERED_BYTES, ORDERED_SEGMENTS, others
from .hierarchical import Hosts
from .partition import Range, longest_whole, partition, segments
from .plan import Buffer, Plan, PlanBuilder
from .settings import Settings
from .window import Window

INPUT, OUTPUT, SCRATCH = Buffer.INPUT, Buffer.OUTPUT, Buffer.SCRATCH


def all_reduce(rank: int, hosts: Hosts, numel: int, itemsize: int, divisor: int, settings: Settings) -> Plan:
    """All-reduces INPUT into OUTPUT, which may be the same memory unless the settings keep errors.

    Raises ConfigError for settings without codecs, and for elements that are not of 4 bytes.
    """
    up, down = codecs = _codecs("an all-reduce", itemsize, settings)
    b = PlanBuilder(rank, sum(map(len, hosts)))
    block = max(codec.block_length for codec in codecs)
    owners = min(map(len, hosts))
    # Once encoded, messages are as long as those of other plans. All are cut between blocks.
    shrinks = up.block_length / up.block_bytes
    is_exchange = exchanges(len(hosts), partial=settings.partial)
    parts, weights = (1, ()) if is_exchange else (len(hosts), settings.weights)  # of the range of an owner
    messages = owners * parts
    unit = 0 if settings.partial else _packet_length(codecs, settings)
    longest = owners * longest_whole(parts, weights, unit=unit)
    least = max(int(settings.partial_message_bytes * shrinks), block) * messages
    segment_bytes = min(max(int(settings.segment_for(messages) * shrinks), least), longest)
    pieces = segments(
        Range(0, numel * itemsize), block * messages, segment_bytes, longest, least_bytes=least, unit=unit * messages
    )
    cuts = [partition(piece, owners, block, unit=unit * parts) for piece in pieces]
    local = hierarchical.home(hosts, rank)
    me = local.index(rank)
    members = [host[me] for host in hosts] if me < owners else []
    mine = [partition(shards[me], parts, block, weights, unit=unit) for shards in cuts] if members else []
    network: _Exchange | _Network
    if is_exchange:
        network = _Exchange(b, members, mine, up, divisor, settings)
    else:
        network = _Network(b, members, mine, (up, down), divisor, len(local), settings)
    if len(local) == 1:
        for shards in mine:
            network.all_reduce(shards)
    else:
        between = (lambda i, after: network.all_reduce(mine[i], after)) if members else None
        hierarchical.reduce_and_spread(b, local, cuts, itemsize, settings, between)
    # Ranks that own nothing have no such steps, but the operation is the same.
    return dataclasses.replace(b.build(), encodes=True, partial=settings.partial)


def reduce_scatter(rank: int, hosts: Hosts, numel: int, itemsize: int, divisor: int, settings: Settings) -> Plan:
    """Reduces INPUT of world size x numel elements into OUTPUT of numel; contributions have the first codec.

    The settings keep no errors and allow no loss. Raises ConfigError as `all_reduce` does.
    """
    up, _ = _codecs("a reduce-scatter", itemsize, settings)
    return hierarchical.reduce_scatter(rank, hosts, numel, itemsize, divisor, settings, up)


def all_gather(rank: int, hosts: Hosts, numel: int, itemsize: int, settings: Settings) -> Plan:
    """Gathers INPUT of numel elements, in the second codec, into OUTPUT of world size x numel: equal on all ranks.

    Raises ConfigError as `all_reduce` does.
    """
    _, down = _codecs("an all-gather", itemsize, settings)
    return hierarchical.all_gather(rank, hosts, numel, itemsize, settings, down)


def _codecs(what: str, itemsize: int, settings: Settings) -> tuple[Codec, Codec]:
    if settings.codecs is None or itemsize != VALUE_BYTES:
        raise ConfigError(f"{what} of elements of {itemsize} bytes with codecs={settings.codecs}: use float32")
    up, down = settings.codecs
    return CODECS[up], CODECS[down]


def _packet_length(codecs: tuple[Codec, Codec], settings: Settings) -> int:
    """Bytes of values in a full packet, which holds whole blocks; 0 if the two codecs differ in it.

    0 also if the plan is deterministic: an owner encodes nothing of its own contribution, so the bits of the result
    depend on the cuts, and the size of packets, which is measured, may be another in the next run."""
    if settings.deterministic:
        return 0
    up, down = (settings.packet_bytes // codec.block_bytes * codec.block_length for codec in codecs)
    return up if up == down else 0


def exchanges(hosts: int, *, partial: bool) -> bool:
    """Whether an encoded all-reduce takes one network step: two hosts exchange their contributions. Not if these may be
    lost (`partial`), since a host that misses one would have another result."""
    return hosts == 2 and not partial


def bytes_per_value(codecs: tuple[str, str], hosts: int, *, partial: bool = False) -> float:
    """Bytes that a value of an all-reduce takes on the wire, as part of contributions and of sums. Each of the hosts
    sends (hosts - 1) / hosts of that. `partial`: contributions may be lost."""
    up, down = (CODECS[name].block_bytes / CODECS[name].block_values for name in codecs)
    return 2 * up if exchanges(hosts, partial=partial) else up + down


class _Exchange:
    """The steps of a plan that cross the network, between two `members`: all-reduces of `cuts`, each of one range, in
    this order."""

    def __init__(
        self,
        b: PlanBuilder,
        members: Sequence[int],
        cuts: Sequence[Sequence[Range]],
        up: Codec,
        divisor: int,
        settings: Settings,
    ) -> None:
        self.b, self.up, self.divisor, self.keeps = b, up, divisor, settings.keep_errors
        self.peers = [member for member in members if member != b.rank]
        encoded = max((up.encoded_bytes(whole.length) for (whole,) in cuts), default=0)
        slots = min(ORDERED_SEGMENTS, max(ORDERED_BYTES // max(encoded, 1), 2), max(len(cuts), 1))
        self.encoded = Window(b, encoded, slots)

    def all_reduce(self, ranges: Sequence[Range], after: Sequence[int] = ()) -> list[int]:
        """All-reduces the one range; returns the steps after which OUTPUT has it.

        This rank's own contribution is in INPUT after the steps `after`. It counts as encoded here, too, so that both
        members add the same two numbers. The sum of two does not depend on their order (but for which NaN it is).
        """
        b, (whole,) = self.b, ranges
        if not whole.length:
            return []
        (peer,) = self.peers
        at, free = self.encoded.take()
        encoding = Encoding(self.up, whole.offset // self.up.block_length, self.keeps)
        decoding = encoding._replace(keeps=False)
        contributed = b.encode(encoding, INPUT, *whole, at, [*after, *free])
        sent = b.send(peer, SCRATCH, at, whole.length, [contributed], encoding=encoding, values=whole.offset)
        own = b.copy(SCRATCH, at, OUTPUT, *whole, [contributed], encoding=decoding)
        self.encoded.release([sent, own])
        done = [b.recv_reduce(peer, OUTPUT, *whole, [own], encoding=decoding)]
        return [b.scale(OUTPUT, *whole, self.divisor, done)] if self.divisor > 1 else done


class _Network:
    """The steps of a plan that cross the network: all-reduces of `cuts`, in this order, between `members`."""

    def __init__(
        self,
        b: PlanBuilder,
        members: Sequence[int],
        cuts: Sequence[Sequence[Range]],
        codecs: tuple[Codec, Codec],
        divisor: int,
        weight: int,
        settings: Settings,
    ) -> None:
        self.b, self.members, self.divisor, self.weight = b, members, divisor, weight
        self.up, self.down = codecs
        self.partial, self.keeps = settings.partial, settings.keep_errors
        self.keeps_sums = settings.keep_errors and settings.keep_sums
        self.ordered = settings.deterministic and len(members) > 2
        self.me = members.index(b.rank) if members else 0
        encoded = max(map(self._encoded_bytes, cuts), default=0)
        owned = max((shards[self.me].length for shards in cuts), default=0) * len(members)
        slots = min(ORDERED_SEGMENTS, max(ORDERED_BYTES // max(encoded, owned, 1), 2), max(len(cuts), 1))
        self.encoded = Window(b, encoded, slots)
        self.decoded = Window(b, owned if self.ordered else 0, slots)

    def _encoded_bytes(self, shards: Sequence[Range]) -> int:
        """Scratch for one segment: the encoded parts of the others' shards, and the encoded sum of the own one."""
        return sum(
            (self.down if i == self.me else self.up).encoded_bytes(shard.length) for i, shard in enumerate(shards)
        )

    def all_reduce(self, shards: Sequence[Range], after: Sequence[int] = ()) -> list[int]:
        """All-reduces the shards, of which members[i] owns shards[i]; returns the steps after which OUTPUT has them.

        This rank's own contribution is in INPUT after the steps `after`.
        """
        b, members, me, up, down = self.b, self.members, self.me, self.up, self.down
        own = shards[me]
        at, free = self.encoded.take()
        read: list[int] = []
        contributed = {}
        for i in others(members, me):
            if shards[i].length:
                encoding = Encoding(up, shards[i].offset // up.block_length, self.keeps)
                contributed[i] = b.encode(encoding, INPUT, *shards[i], at, [*after, *free])
                read.append(
                    b.send(
                        members[i],
                        SCRATCH,
                        at,
                        shards[i].length,
                        [contributed[i]],
                        partial=self.partial,
                        encoding=encoding,
                        values=shards[i].offset,
                    )
                )
                at += up.encoded_bytes(shards[i].length)
        done: list[int] = []
        if own.length:
            encoding = Encoding(down, own.offset // down.block_length, self.keeps_sums)
            summed = self._sum(own, after)
            result = b.encode(encoding, OUTPUT, *own, at, [*summed, *free], factor=self.divisor)
            results = encoding._replace(keeps=False)
            read += [
                b.send(members[i], SCRATCH, at, own.length, [result], encoding=results) for i in others(members, me)
            ]
            done.append(b.copy(SCRATCH, at, OUTPUT, *own, [result], encoding=encoding))
        self.encoded.release([*read, *done])
        for i, encoded in contributed.items():  # INPUT may be OUTPUT
            encoding = Encoding(down, shards[i].offset // down.block_length)
            done.append(b.recv_copy(members[i], OUTPUT, *shards[i], [encoded], encoding=encoding))
        return done

    def _sum(self, own: Range, after: Sequence[int]) -> list[int]:
        """Adds the contributions to the shard `own` up in OUTPUT."""
        b = self.b
        encoding = Encoding(self.up, own.offset // self.up.block_length)
        begun = [b.copy(INPUT, own.offset, OUTPUT, *own, after)]
        done = direct.reduce_segment(
            b,
            self.members,
            own,
            window=self.decoded if self.ordered else None,
            begin=begun,
            after=begun,
            partial=self.partial,
            encoding=encoding,
        )
        if self.divisor > 1 or self.partial:
            done = [b.scale(OUTPUT, *own, self.divisor, done, weight=self.weight)]
        return done
