"""The content of a state in memory: its digest, and its parts, which are those of a `Whole` state, or of the `Code` of
its difference to another one."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import random
import struct
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ..transport import kernels
from .layout import Layout, Region
from .parts import PART_MOST_BYTES, next_bytes, part_bytes_for

KEY_WORDS = 512
SUMS_CHUNK_BYTES = 65536
SLACK_BYTES = 64
"""Room beyond its end that a code needs while it is made (native/kernels/difference.h)."""

BLOCK_VALUES = 1 << 15
"""Values that are coded together (native/kernels/difference.h)."""

LEAST_VALUES = 1 << 10
"""Least values of a part of a code, but for the last of a region."""

SAMPLES = 64
"""Blocks that are coded to estimate the length of a code."""

_key = torch.frombuffer(bytearray(hashlib.shake_128(b"commlayer publish").digest(4 * KEY_WORDS)), dtype=torch.uint8)

TAG_BYTES = 8
TAGGED = 64
"""Parts whose tags are made at once: those of a long state take longer than a reader waits for an answer."""

_HEAD = struct.Struct(f"<{TAG_BYTES}sQQ")
"""The head of a part of a code: its tag, the place of its first value in the state in bytes, and the number of its
values."""


def tag(piece: Tensor | bytes | memoryview, name: str, number: int) -> bytes:
    """The checksum of a part of a content. `name`: of the content. A part that has changed keeps its own with a chance
    of about 2^-60; see `digest`."""
    sums = np.zeros(2 * -(-len(piece) // SUMS_CHUNK_BYTES), np.uint64)
    kernels.sums(_address(piece), len(piece), _key.data_ptr(), sums.ctypes.data)
    return hashlib.blake2s(
        sums.tobytes(), key=name.encode()[:32], salt=struct.pack("<Q", number), digest_size=TAG_BYTES
    ).digest()


def digest(layout: Layout, memory: Tensor) -> str:
    """32 hex digits of the names, types, shapes and values of a state. States that differ by a defect or by damage have
    the same digest with a chance of about 2^-63; it is no protection against those who make two states on purpose."""
    sums = torch.empty(2 * -(-layout.bytes // SUMS_CHUNK_BYTES), dtype=torch.int64, device="cpu")
    kernels.sums(memory.data_ptr(), layout.bytes, _key.data_ptr(), sums.data_ptr())
    return hashlib.blake2s(sums.numpy().tobytes(), key=bytes.fromhex(layout.fingerprint), digest_size=16).hexdigest()


def copy(target: Tensor, source: Tensor | memoryview) -> None:
    """Copies memory in the calling thread alone. Raises ValueError if one is longer than the other."""
    if target.nbytes != source.nbytes:
        raise ValueError(f"{source.nbytes} bytes for a place of {target.nbytes}")
    ctypes.memmove(target.data_ptr(), _address(source), source.nbytes)


def is_same(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one type and shape have the same bits."""
    ours, theirs = (given.detach().cpu().contiguous().view(-1).view(torch.uint8) for given in (tensor, other))
    return torch.equal(ours, theirs)


def _address(memory: Tensor | bytes | memoryview) -> int:
    return memory.data_ptr() if isinstance(memory, Tensor) else int(np.frombuffer(memory, np.uint8).ctypes.data)


class Whole:
    """A state, cut into parts."""

    is_ended = True

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._block = memory.numpy().data
        self.size = size = len(memory)
        part_bytes = part_bytes_for(size)
        self._ends = [0]
        while self._ends[-1] < size:
            left = size - self._ends[-1]
            self._ends.append(size - left + min(left, next_bytes(left, part_bytes)))
        self._tags: dict[tuple[str, int], bytes] = {}

    @property
    def parts(self) -> int:
        """Their number."""
        return len(self._ends) - 1

    def span(self, number: int) -> slice:
        """The place of a part in the state. Raises ValueError if there is none of this number."""
        if not 0 <= number < self.parts:
            raise ValueError(f"part {number} of {self.parts}")
        return slice(self._ends[number], self._ends[number + 1])

    def part(self, number: int) -> memoryview:
        """The bytes of a part."""
        return self._block[self.span(number)]

    def tags(self, name: str) -> Iterator[bytes]:
        """The checksums of all parts, in order, those of TAGGED parts at a time. They are made once."""
        for first in range(0, self.parts, TAGGED):
            if (name, first) not in self._tags:
                numbers = range(first, min(first + TAGGED, self.parts))
                self._tags[name, first] = b"".join(tag(self.part(number), name, number) for number in numbers)
            yield self._tags[name, first]


class Code:
    """The code of a difference. Another thread may read the parts that are here, while one adds others."""

    def __init__(self, expected_bytes: int = 0) -> None:
        self._expected_bytes = expected_bytes
        self._parts: dict[int, bytes] = {}
        self._bytes = 0
        self.is_ended = False
        """Whether all parts are here."""

    @property
    def size(self) -> int:
        """The length of all parts, or what it will be about."""
        return self._bytes if self.is_ended else max(self._bytes, self._expected_bytes)

    @property
    def parts(self) -> int:
        """The number of the parts that are here."""
        return len(self._parts)

    def add(self, number: int, piece: bytes) -> None:
        """Takes a part."""
        self._bytes += len(piece)
        self._parts[number] = piece

    def part(self, number: int) -> bytes:
        """The bytes of a part that is here."""
        return self._parts[number]


Content = Whole | Code


def room() -> Tensor:
    """Memory for one part of a code while it is made."""
    return torch.empty(PART_MOST_BYTES + SLACK_BYTES, dtype=torch.uint8, device="cpu")


def _encoded(base: Tensor, memory: Tensor, at: int, values: int, width: int, room: Tensor) -> int | None:
    return kernels.encode_difference(
        base.data_ptr() + at, memory.data_ptr() + at, values, width, room.data_ptr(), len(room)
    )


def estimate(layout: Layout, base: Tensor, memory: Tensor, room: Tensor) -> int:
    """The length of the code of a difference, from that of some of its blocks: one of each of SAMPLES stretches of a
    region, if it has so many."""
    chance, found = random.Random(layout.bytes), 0.0  # noqa: S311
    for region in layout.regions:
        blocks = -(-region.values // BLOCK_VALUES)
        samples = min(blocks, SAMPLES)
        ends = [sample * blocks // samples for sample in range(samples + 1)]
        coded = values = 0
        for first, end in itertools.pairwise(ends):
            at = chance.randrange(first, end) * BLOCK_VALUES
            count = min(BLOCK_VALUES, region.values - at)
            length = _encoded(base, memory, region.offset + at * region.width, count, region.width, room)
            coded += count * region.width if length is None else length
            values += count
        found += coded * region.values / values
    return int(found)


def encode(layout: Layout, base: Tensor, memory: Tensor, name: str, expected_bytes: int) -> Iterator[bytes]:
    """The parts of the code of a difference, in order. Each is the code of some values of one region
    (native/kernels/difference.h), with a head, and stands for itself. `expected_bytes`: about the length of all."""
    part_bytes, space, number = part_bytes_for(expected_bytes), room(), 0
    rate = expected_bytes / max(layout.bytes, 1)
    for region in layout.regions:
        at = 0
        while at < region.values:
            place = region.offset + at * region.width
            wanted = next_bytes((layout.bytes - place) * rate, part_bytes) / max(rate, 1e-5)
            values = _rounded(int(wanted) // region.width, region, at)
            while (length := _encoded(base, memory, place, values, region.width, space)) is None:
                values = _rounded(values // 2, region, at)
            code = space[:length].numpy().tobytes()
            head = _HEAD.pack(bytes(TAG_BYTES), place, values)[TAG_BYTES:]
            yield tag(head + code, name, number) + head + code
            rate += (length / (values * region.width) - rate) / 2
            at, number = at + values, number + 1


def _rounded(values: int, region: Region, at: int) -> int:
    """A number of values that is left in a region, in whole blocks if it has some."""
    whole = values - values % BLOCK_VALUES
    return min(max(whole or values, LEAST_VALUES), region.values - at)


def is_intact(piece: bytes | memoryview, name: str, number: int) -> bool:
    """Whether this is the part of a code with this number."""
    view = memoryview(piece)
    return len(view) > _HEAD.size and tag(view[TAG_BYTES:], name, number) == view[:TAG_BYTES]


def apply(
    layout: Layout, memory: Tensor, piece: bytes | memoryview, base: Tensor | None = None, *, is_back: bool = False
) -> bool:
    """Changes the values of a part of a code in memory from those of the base to those of the state; with `is_back`,
    the other way. `base`: they are taken from there first. False: it is no part of this layout, and the memory has no
    meaning now."""
    if len(piece) <= _HEAD.size:
        return False
    _, place, values = _HEAD.unpack_from(piece)
    for region in layout.regions:
        at = place - region.offset
        if 0 <= at < region.values * region.width:
            break
    else:
        return False
    if at % region.width or not 0 < values <= region.values - at // region.width:
        return False
    if base is not None:
        span = slice(place, place + values * region.width)
        copy(memory[span], base[span])
    return kernels.apply_difference(
        memory.data_ptr() + place,
        values,
        region.width,
        _address(piece) + _HEAD.size,
        len(piece) - _HEAD.size,
        is_back=is_back,
    )
