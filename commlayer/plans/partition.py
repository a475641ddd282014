"""Cuts a tensor into shards (one per owner) and segments (units of pipelining)."""

from __future__ import annotations

from typing import NamedTuple

ALIGNMENT_BYTES = 64
"""Cuts of large enough parts fall on cache lines, so that two ranks never write one line."""

MESSAGE_LIMIT_BYTES = 16 << 20
"""No message is longer than this."""

SEGMENT_LIMIT = 256
"""A plan gets longer segments rather than more than this, so that its size and build time stay small."""


class Range(NamedTuple):
    """Consecutive bytes of a buffer."""

    offset: int
    length: int


def partition(whole: Range, parts: int, itemsize: int) -> list[Range]:
    """Cuts a range of whole elements into `parts` consecutive ranges, as equal as alignment allows.

    With too few elements the last ranges are empty.
    """
    granule = itemsize
    if ALIGNMENT_BYTES % itemsize == 0 and whole.length >= parts * ALIGNMENT_BYTES:
        granule = ALIGNMENT_BYTES
    each, more = divmod(-(-whole.length // granule), parts)
    ranges = []
    offset, end = whole.offset, whole.offset + whole.length
    for part in range(parts):
        length = min((each + (part < more)) * granule, end - offset)
        ranges.append(Range(offset, length))
        offset += length
    return ranges


def segments(
    whole: Range,
    itemsize: int,
    segment_bytes: int,
    longest_bytes: int,
    *,
    least_bytes: int = 1,
    limit: int = SEGMENT_LIMIT,
) -> list[Range]:
    """Cuts a range into non-empty segments of about `segment_bytes`, at most `limit` of them.

    No segment is shorter than `least_bytes`, unless the range is. No segment is longer than `longest_bytes` (a multiple
    of 64, or less than 64), which has precedence over the limit and the least.
    """
    if whole.length == 0:
        return []
    count = min(-(-whole.length // segment_bytes), limit, max(whole.length // max(least_bytes, itemsize), 1))
    return partition(whole, max(count, -(-whole.length // longest_bytes)), itemsize)
