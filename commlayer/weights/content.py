"""The content of a state in memory: its digest, and its difference to another one."""

from __future__ import annotations

import ctypes
import hashlib
import struct

import numpy as np
import torch
from torch import Tensor

from ..transport import kernels
from .layout import Layout

KEY_WORDS = 512
SUMS_CHUNK_BYTES = 65536
SLACK_BYTES = 64
"""Room beyond its end that a code needs while it is made (native/kernels/difference.h)."""

_key = torch.frombuffer(bytearray(hashlib.shake_128(b"commlayer publish").digest(4 * KEY_WORDS)), dtype=torch.uint8)
_LENGTH = struct.Struct("<Q")

TAG_BYTES = 8
_FACTORS = np.frombuffer(hashlib.shake_128(b"commlayer tags").digest(64), np.uint64) | np.uint64(1)


def tags(memory: Tensor | bytes | memoryview, part_bytes: int) -> bytes:
    """The checksums of the parts of a content, TAG_BYTES of each. `part_bytes`: SUMS_CHUNK_BYTES, or two or four times
    as many. A part that has changed keeps its own with a chance of about 2^-60; see `digest`."""
    per_part = 2 * (part_bytes // SUMS_CHUNK_BYTES)
    length = len(memory)
    found = np.zeros((-(-length // part_bytes), per_part), np.uint64)
    kernels.sums(_address(memory), length, _key.data_ptr(), found.ctypes.data)
    return bytes((found * _FACTORS[:per_part]).sum(1, dtype=np.uint64).tobytes())


def digest(layout: Layout, memory: Tensor) -> str:
    """32 hex digits of the names, types, shapes and values of a state. States that differ by a defect or by damage have
    the same digest with a chance of about 2^-63; it is no protection against those who make two states on purpose."""
    sums = torch.empty(2 * -(-layout.bytes // SUMS_CHUNK_BYTES), dtype=torch.int64)
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


def room(layout: Layout) -> Tensor:
    """Memory for the code of any difference that is shorter than the state. What is not used costs no memory."""
    return torch.empty(layout.bytes + SLACK_BYTES, dtype=torch.uint8)


def encode(layout: Layout, base: Tensor, memory: Tensor, room: Tensor) -> bytes | None:
    """The difference of one state to another; None if it is not shorter than the state. Of each region: the length of
    its code in 8 bytes, and the code (native/kernels/difference.h)."""
    parts: list[bytes] = []
    left = layout.bytes
    for region in layout.regions:
        length = kernels.encode_difference(
            base.data_ptr() + region.offset,
            memory.data_ptr() + region.offset,
            region.values,
            region.width,
            room.data_ptr(),
            left + SLACK_BYTES,
        )
        if length is None or length + _LENGTH.size > left:
            return None
        left -= length + _LENGTH.size
        parts += [_LENGTH.pack(length), room[:length].numpy().tobytes()]
    return b"".join(parts)


def apply(layout: Layout, memory: Tensor, code: bytes | memoryview, *, is_back: bool = False) -> bool:
    """Turns the base in memory into the state of a difference; with `is_back`, that state into the base. False: the
    code is none of this layout, and the memory has no meaning now."""
    source, at = _address(code), 0
    for region in layout.regions:
        if len(code) - at < _LENGTH.size:
            return False
        (length,) = _LENGTH.unpack_from(code, at)
        at += _LENGTH.size
        if length > len(code) - at:
            return False
        if not kernels.apply_difference(
            memory.data_ptr() + region.offset,
            region.values,
            region.width,
            source + at,
            length,
            is_back=is_back,
        ):
            return False
        at += length
    return at == len(code)
