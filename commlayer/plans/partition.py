"""Cuts a tensor into shards (one per owner) and segments (units of pipelining)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

ALIGNMENT_BYTES = 64
"""Cuts of large enough parts fall on cache lines, so that two ranks never write one line."""

MESSAGE_LIMIT_BYTES = 16 << 20
"""No message is longer than this."""

SHORT_MESSAGE_BYTES = 4096
"""Shorter messages between hosts are mostly headers and steps."""

SEGMENT_LIMIT = 256
"""A plan gets longer segments rather than more than this, so that its size and build time stay small."""


UNITS_LEAST = 8
"""Parts of fewer units are cut between units no more: they would differ by more than an eighth."""


class Range(NamedTuple):
    """Consecutive bytes of a buffer."""

    offset: int
    length: int


def partition(whole: Range, parts: int, itemsize: int, weights: Sequence[int] = (), *, unit: int = 0) -> list[Range]:
    """Cuts a range of whole elements into `parts` consecutive ranges, as equal as alignment allows. With `weights`, one
    for each part, the lengths are in their proportion. With a `unit` of so many bytes, cuts are between units if the
    parts are long enough.

    With too few elements the last ranges are empty, and those of weight 0 always.
    """
    granule = itemsize
    if unit and unit % itemsize == 0 and whole.length >= parts * UNITS_LEAST * unit:
        granule = unit
    elif ALIGNMENT_BYTES % itemsize == 0 and whole.length >= parts * ALIGNMENT_BYTES:
        granule = ALIGNMENT_BYTES
    count = -(-whole.length // granule)
    if weights:
        total = sum(weights)
        ends = [count * weight // total for weight in accumulate(weights)]
    else:
        least, more = divmod(count, parts)
        ends = [least * part + min(part, more) for part in range(1, parts + 1)]
    ranges = []
    offset, end = whole.offset, whole.offset + whole.length
    for last in ends:
        length = min(whole.offset + last * granule, end) - offset
        ranges.append(Range(offset, length))
        offset += length
    return ranges


def longest_whole(parts: int, weights: Sequence[int] = (), *, unit: int = 0) -> int:
    """The longest range, in bytes, of which no part is longer than a message may be; arguments as of `partition`."""
    limit_bytes = MESSAGE_LIMIT_BYTES - -(-unit // ALIGNMENT_BYTES) * ALIGNMENT_BYTES  # parts are rounded up to units
    if not weights:
        return limit_bytes * parts
    return limit_bytes * sum(weights) // max(weights) // ALIGNMENT_BYTES * ALIGNMENT_BYTES


def segments(
    whole: Range,
    itemsize: int,
    segment_bytes: int,
    longest_bytes: int,
    *,
    least_bytes: int = 1,
    limit: int = SEGMENT_LIMIT,
    unit: int = 0,
) -> list[Range]:
    """Cuts a range into non-empty segments of about `segment_bytes`, at most `limit` of them; `unit` as of `partition`.

    No segment is shorter than `least_bytes`, unless the range is. No segment is longer than `longest_bytes` (a multiple
    of 64, or less than 64), which has precedence over the limit and the least.
    """
    if whole.length == 0:
        return []
    count = min(-(-whole.length // segment_bytes), limit, max(whole.length // max(least_bytes, itemsize), 1))
    count = max(count, -(-whole.length // longest_bytes))
    pieces = partition(whole, count, itemsize, unit=unit)
    return pieces if pieces[0].length <= longest_bytes else partition(whole, count, itemsize)
