from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.plans.partition import (
    ALIGNMENT_BYTES,
    MESSAGE_LIMIT_BYTES,
    SEGMENT_LIMIT,
    UNITS_LEAST,
    Range,
    longest_whole,
    partition,
    segments,
)

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


@given(
    offset=st.integers(0, 9),
    numel=st.integers(0, 5000),
    itemsize=ITEMSIZES,
    weights=st.lists(st.integers(0, 40), min_size=1, max_size=20).filter(any),
)
def test_parts_are_in_proportion_to_their_weights(offset: int, numel: int, itemsize: int, weights: list[int]) -> None:
    whole = Range(offset * itemsize, numel * itemsize)
    ranges = partition(whole, len(weights), itemsize, weights)
    covers(ranges, whole)
    granule = ALIGNMENT_BYTES if whole.length >= len(weights) * ALIGNMENT_BYTES else itemsize
    for (_, length), weight in zip(ranges, weights, strict=True):
        assert length % itemsize == 0
        assert length == 0 or weight > 0
        assert abs(length - whole.length * weight / sum(weights)) <= 2 * granule


@given(parts=st.integers(1, 40))
def test_equal_weights_are_as_good_as_none(parts: int) -> None:
    whole = Range(0, parts * 6400)
    assert partition(whole, parts, 4, [7] * parts) == partition(whole, parts, 4)
    assert longest_whole(parts, [7] * parts) == longest_whole(parts)


@given(weights=st.lists(st.integers(0, 40), min_size=1, max_size=20).filter(any))
def test_no_part_of_the_longest_whole_is_too_long_for_a_message(weights: list[int]) -> None:
    whole = Range(0, longest_whole(len(weights), weights))
    longest = max(length for _, length in partition(whole, len(weights), 4, weights))
    assert MESSAGE_LIMIT_BYTES // 2 < longest <= MESSAGE_LIMIT_BYTES


@given(numel=st.integers(0, 5000), itemsize=ITEMSIZES, segment_bytes=st.integers(1, 9000), longest=st.integers(1, 300))
def test_segments_are_never_empty_nor_too_long(numel: int, itemsize: int, segment_bytes: int, longest: int) -> None:
    longest_bytes = longest // 16 * 64 or 16
    whole = Range(0, numel * itemsize)
    ranges = segments(whole, itemsize, min(segment_bytes, longest_bytes), longest_bytes)
    covers(ranges, whole)
    assert all(0 < length <= longest_bytes for _, length in ranges)


@given(numel=st.integers(0, 5000), parts=st.integers(1, 40), unit=st.sampled_from((8, 24, 40)))
def test_long_parts_are_cut_between_units(numel: int, parts: int, unit: int) -> None:
    whole = Range(3, 8 * numel)
    ranges = partition(whole, parts, 8, unit=unit)
    covers(ranges, whole)
    if whole.length < parts * UNITS_LEAST * unit:
        assert ranges == partition(whole, parts, 8)
        return
    assert all((offset - whole.offset) % unit == 0 for offset, _ in ranges)
    lengths = [length for _, length in ranges]
    assert max(lengths) - min(lengths[:-1], default=0) <= unit or parts == 1
    assert min(lengths) * (UNITS_LEAST + 1) >= max(lengths) * (UNITS_LEAST - 1)


def test_segments_of_units_are_no_longer_than_a_message() -> None:
    limit = MESSAGE_LIMIT_BYTES
    for unit in (8, 1432, 8928):
        ranges = segments(Range(0, 300 * limit), 8, 4096, limit, unit=unit)
        assert max(r.length for r in ranges) <= limit
        for weights in ([], [1, 2, 3]):
            parts = partition(Range(0, longest_whole(3, weights, unit=unit)), 3, 8, weights, unit=unit)
            assert limit - 2 * 8928 < max(r.length for r in parts) <= limit


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
