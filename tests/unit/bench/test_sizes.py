import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.tools.bench.sizes import format_size, parse_size, sweep


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        *[(text, 4096) for text in ("4096", "4K", "4k", "4KB", "4KiB", " 4K ")],
        *[("0", 0), ("64M", 64 << 20), ("1G", 1 << 30), ("1.5K", 1536), ("8 M", 8 << 20)],
    ],
)
def test_parse_size(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "K", "-1", "4T", "4 4", "0x10", "1.0001K", "4Mbit"])
def test_parse_size_rejects(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


@given(st.integers(0, 1 << 45))
def test_format_size_is_read_back(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes


def test_sweep_by_factor_includes_the_maximum() -> None:
    assert sweep(4096, 65536, factor=4) == [4096, 16384, 65536]


def test_sweep_by_factor_stops_before_the_maximum() -> None:
    assert sweep(1000, 4001, factor=2) == [1000, 2000, 4000]


def test_sweep_by_step() -> None:
    assert sweep(100, 350, step_bytes=100) == [100, 200, 300]


@given(st.integers(1, 1000), st.integers(0, 1000), st.floats(1.001, 10))
def test_sweep_grows_within_its_bounds(min_bytes: int, more: int, factor: float) -> None:
    sizes = sweep(min_bytes, min_bytes + more, factor=factor)
    assert sizes[0] == min_bytes
    assert sizes[-1] <= min_bytes + more
    assert all(later > earlier for earlier, later in itertools.pairwise(sizes))


@pytest.mark.parametrize(
    ("low", "high", "factor"),
    [(0, 10, 2.0), (10, 5, 2.0), (1, 10, 1.0), (1, 10, 0.5), (1, 10, math.inf), (1, 10, math.nan)],
)
def test_sweep_rejects(low: int, high: int, factor: float) -> None:
    with pytest.raises(ValueError, match=r"expected|grow"):
        sweep(low, high, factor=factor)
