"""`VirtualHook`: averages the gradients of ranks that share one process, as the DDP hook does over a network.

Codecs, owners, rotations, fine parameters, feedback and the order of additions are those of the hook and of its plans
with `deterministic=True`, so the averages have the same bits: tests/engine/test_virtual_ranks.py compares them with
plans, tests/process/test_virtual_ranks.py with the hook. The interpreter of tests/virtual.py runs the plans
themselves; here the gradients of all ranks are the rows of one array, and one call encodes a whole row, which takes a
hundredth of the time.

Contributions may be lost: each packet by itself, with the same probability. A packet of the next step with a part of a
lost contribution is protected, as in the hook.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from commlayer.compress.codec import ENCODED, FINE, CodecPair, codec_at
from commlayer.compress.fine import Fine, cut
from commlayer.config import Policy
from commlayer.plans.codec import CODECS, VALUE_BYTES, Codec
from commlayer.plans.encoded import exchanges
from commlayer.plans.partition import Range, partition
from commlayer.plans.settings import Settings
from commlayer.transport import kernels

Array = npt.NDArray[np.float32]

PACKET_BYTES = 1432
"""Payload of a full packet at an MTU of 1500."""


class Part(NamedTuple):
    """A packet's values in the contribution of a rank."""

    rank: int
    values: slice


def mean_into(rows: Array, mean: Array) -> None:
    """The mean of the rows, which are added up in the order of the ranks, as a plan does with `deterministic=True`."""
    mean[:] = rows[0]
    for row in rows[1:]:
        mean += row
    mean /= len(rows)


class EncodedAverage:
    """Encoded all-reduces of `numel` values by `ranks` hosts of one rank each. `partial`: contributions may be lost.

    Raises ValueError if a plan would cut the values into several segments.
    """

    def __init__(self, ranks: int, numel: int, pair: CodecPair, *, partial: bool = False) -> None:
        self.up, self.down, self.keeps = CODECS[pair.up], CODECS[pair.down], pair.keeps_errors
        self._keeps_sums = pair.keeps_errors and pair.keeps_sums
        self._exchanges = exchanges(ranks, partial=partial)
        if numel * VALUE_BYTES * self.up.block_bytes > Settings().segment_bytes * self.up.block_length:
            raise ValueError(f"{numel} values in {pair.up}: a plan has several segments; use a smaller model")
        block = max(self.up.block_length, self.down.block_length)
        ranges = partition(Range(0, numel * VALUE_BYTES), ranks, block)
        self.shards = [slice(start // VALUE_BYTES, (start + length) // VALUE_BYTES) for start, length in ranges]
        self.kept = np.zeros((ranks, numel), np.float32)
        """What each rank adds to its next contribution: rounding errors and lost values."""
        self._received = np.empty_like(self.kept)  # the contributions as their owners have them
        self._sum, self._result = np.empty((2, numel), np.float32)
        longest = max(codec.encoded_bytes(numel * VALUE_BYTES) for codec in (self.up, self.down))
        self._encoded = np.empty(longest, np.uint8)

    def average(self, rows: Array, key: int, lost: Sequence[Part] = ()) -> Array:
        """The average of the rows, one per rank, as all ranks have it, valid until the next call. Sets `kept`."""
        received, kept, ranks = self._received, self.kept, len(rows)
        for rank, (row, own) in enumerate(zip(rows, self.shards, strict=True)):
            self._code(self.up, row, received[rank], kernels.codec_key(key, rank), 0)
            if not self._exchanges:
                received[rank, own] = row[own]
        if self.keeps:
            np.subtract(rows, received, out=kept)
        else:
            kept[:] = 0
        for part in lost:
            kept[part] = kept[part] + received[part] if self.keeps else rows[part]
            received[part] = -0.0  # added to any value, it leaves its bits
        if self._exchanges:
            mean_into(received, self._result)
            return self._result
        for owner, own in enumerate(self.shards):
            mean, result = self._sum[own], self._result[own]
            mean_into(received[:, own], mean)
            self._code(self.down, mean, result, kernels.codec_key(key, owner), own.start // self.down.block_values)
            if self._keeps_sums:
                kept[owner, own] = (mean - result) * np.float32(ranks)
        return self._result

    def _code(self, codec: Codec, source: Array, target: Array, key: int, block: int) -> None:
        """Encodes and decodes. Blocks are numbered from the start of the buffer: shards need no calls of their own."""
        encoded, count = self._encoded.ctypes.data, len(source)
        if count:
            kernels.encode(codec.number, encoded, source.ctypes.data, count, key=key, block=block)
            kernels.decode(codec.number, target.ctypes.data, encoded, count, key=key, block=block)


class PacketLoss:
    """Draws the contributions that an all-reduce loses: `share` of them in the mean."""

    def __init__(self, shards: Sequence[slice], codec: Codec, share: float, seed: Sequence[int]) -> None:
        step = PACKET_BYTES // codec.block_bytes * codec.block_values
        map_values = PACKET_BYTES // VALUE_BYTES  # the hook's map of protected values has a bit for each so many
        self.packets = [
            [slice(at, min(at + step, shard.stop)) for shard in others for at in range(shard.start, shard.stop, step)]
            for others in ([shard for i, shard in enumerate(shards) if i != rank] for rank in range(len(shards)))
        ]
        self._protects = []  # one per rank: [i, j] is true if packet i is protected after packet j was lost
        for packets in self.packets:
            first = np.array([packet.start // map_values for packet in packets])
            last = np.array([(packet.stop - 1) // map_values for packet in packets])
            self._protects.append((first[:, None] <= last) & (last[:, None] >= first))
        reach = np.concatenate([mask.sum(0) for mask in self._protects]).mean()
        self.probability = share / (1 - share * reach)
        """The probability that an unprotected packet is lost."""
        self._random = np.random.default_rng(seed)
        self._late = [np.zeros(len(packets), bool) for packets in self.packets]

    def draw(self) -> Iterator[Part]:
        """The lost parts of the next all-reduce."""
        for rank, packets in enumerate(self.packets):
            protected = self._protects[rank][:, self._late[rank]].any(1)
            lost = (self._random.random(len(packets)) < self.probability) & ~protected
            self._late[rank] = lost
            for i in np.flatnonzero(lost):
                yield Part(rank, packets[i])


class VirtualHook:
    """The hooks of all ranks for one model, whose gradients are one bucket, in the order of `parameters`.

    `loss` is the share of contributions that are lost, with the treatment `feedback`.
    """

    def __init__(
        self, parameters: Sequence[Tensor], fine: Fine, policy: Policy, ranks: int, loss: float, seed: Sequence[int]
    ) -> None:
        starts = [0, *accumulate(parameter.numel() for parameter in parameters)]
        self.policy, self.ranks, self.size = policy, ranks, starts.pop()
        parts = cut(parameters, starts, self.size, fine)
        self.coarse, self.fine = parts.coarse, [slice(*ends) for ends in parts.fine]
        self.feedback = True
        """False: rounding errors are dropped, which the hook has no setting for."""
        self.sent_values = self.lost_values = 0
        """Counts of contributions, without fine values."""
        self._seed, self._loss = seed, loss
        self._residual = np.zeros((ranks, self.size), np.float32)
        self._averages: dict[tuple[int, str], EncodedAverage] = {}
        self._losses: dict[tuple[int, str], PacketLoss] = {}
        self._fine = EncodedAverage(ranks, sum(end - start for start, end in parts.fine), ENCODED[FINE])

    def average(self, rows: Array, step: int) -> Array:
        """The average of the gradients of all ranks, which are overwritten."""
        codec = codec_at(self.policy, step)
        result = np.empty(self.size, np.float32)
        rows += self._residual
        packed = np.concatenate([rows[:, values] for values in self.fine], axis=1)
        for values in self.fine:
            rows[:, values] = 0
        for number, (start, end) in enumerate(self.coarse):
            average = self._average(number, codec, end - start)
            lost = list(self._losses[number, codec].draw()) if self._loss else []
            key = step << 32 | number
            result[start:end] = average.average(np.ascontiguousarray(rows[:, start:end]), key, lost)
            self._residual[:, start:end] = average.kept
            self.sent_values += (self.ranks - 1) * (end - start)
            self.lost_values += sum(part.values.stop - part.values.start for part in lost)
        fine, at = self._fine.average(packed, 0), 0
        for values in self.fine:
            result[values] = fine[at : at + values.stop - values.start]
            at += values.stop - values.start
            self._residual[:, values] = 0  # the errors of the zeros sent in place of fine values
        return result

    def _average(self, number: int, codec: str, numel: int) -> EncodedAverage:
        """The all-reduce of a coarse stretch. Its rotations depend on the key alone, so it serves every step."""
        if (number, codec) not in self._averages:
            pair = ENCODED[codec]  # the baseline needs no hook
            pair = pair._replace(keeps_errors=pair.keeps_errors and self.feedback)
            average = self._averages[number, codec] = EncodedAverage(self.ranks, numel, pair, partial=self._loss > 0)
            seed = [*self._seed, number]
            self._losses[number, codec] = PacketLoss(average.shards, average.up, self._loss, seed)
        return self._averages[number, codec]
