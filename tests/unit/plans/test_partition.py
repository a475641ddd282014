from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.plans.partition import ALIGNMENT_BYTES, MESSAGE_LIMIT_BYTES, SEGMENT_LIMIT, Range, partition, segments

ITEMSIZES = st.sampled_from((1, 2, 4, 8, 16))


def covers(ranges: Sequence[Range], whole: Range) -> None:
    end = whole.offset
    for offset, length in ranges:
        assert offset == end
        assert length >= 0
        end += length
    assert end == whole.offset + whole.length


@given(offset=st.integers(0, 9), numel=st.integers(0, 5000), itemsize=ITEMSIZES, parts=st.integers(1, 70))
def test_partition_covers_the_whole_in_whole_elements(offset: int, numel: int, itemsize: int, parts: int) -> None:
    whole = Range(offset * itemsize, numel * itemsize)
    ranges = partition(whole, parts, itemsize)
    assert len(ranges) == parts
    covers(ranges, whole)
    assert all(length % itemsize == 0 for _, length in ranges)
    longest, shortest = max(r.length for r in ranges), min(r.length for r in ranges)
    if whole.length >= parts * ALIGNMENT_BYTES:
        assert all((start - whole.offset) % ALIGNMENT_BYTES == 0 for start, _ in ranges)
        assert longest - shortest < 2 * ALIGNMENT_BYTES
    else:
        assert longest - shortest <= itemsize


@given(numel=st.integers(0, 5000), itemsize=ITEMSIZES, segment_bytes=st.integers(1, 9000), longest=st.integers(1, 300))
def test_segments_are_never_empty_nor_too_long(numel: int, itemsize: int, segment_bytes: int, longest: int) -> None:
    longest_bytes = longest // 16 * 64 or 16
    whole = Range(0, numel * itemsize)
    ranges = segments(whole, itemsize, min(segment_bytes, longest_bytes), longest_bytes)
    covers(ranges, whole)
    assert all(0 < length <= longest_bytes for _, length in ranges)


def test_many_segments_become_longer_ones_until_messages_get_too_long() -> None:
    assert len(segments(Range(0, 1 << 30), 4, 128 << 10, MESSAGE_LIMIT_BYTES)) == SEGMENT_LIMIT
    ranges = segments(Range(0, 1 << 40), 4, 128 << 10, MESSAGE_LIMIT_BYTES)
    assert {r.length for r in ranges} == {MESSAGE_LIMIT_BYTES}


@pytest.mark.parametrize("length", [64, 1000, 4096, 65_000 * 8, 100_000 * 8])
def test_no_segment_is_shorter_than_the_least_unless_all_is(length: int) -> None:
    least = 256 << 10
    pieces = segments(Range(0, length), 8, 4096, 1 << 20, least_bytes=least)
    assert min(piece.length for piece in pieces) >= min(length, least) - 64
    assert sum(piece.length for piece in pieces) == length
    assert len(pieces) == max(length // least, 1)
