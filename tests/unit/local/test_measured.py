"""`Measured`: rate and latency of the link, from two averages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.frontend.local.measured import Measured

SITES, VALUES, FRAGMENTS = 4, 1_000_000, 4


def seconds(values: float, value_bytes: float, rate: float, latency_s: float) -> float:
    """Of an average of values."""
    return latency_s + 2 * (SITES - 1) / SITES * values * value_bytes / rate


def measured(rate: float, latency_s: float, step_s: float = 0.1, value_bytes: float = 0.5) -> Measured:
    whole_s = seconds(VALUES, 4, rate, latency_s)
    part_s = seconds(VALUES / FRAGMENTS, value_bytes, rate, latency_s)
    return Measured.of(SITES, VALUES, value_bytes, whole_s, part_s, step_s, FRAGMENTS)


@given(rate=st.floats(1e5, 1e10), latency_s=st.floats(0, 1))
def test_two_averages_tell_rate_and_latency(rate: float, latency_s: float) -> None:
    found = measured(rate, latency_s)
    assert found.rate == pytest.approx(rate, rel=1e-3)
    assert found.latency_s == pytest.approx(latency_s, abs=1e-6)
    assert found.average_s == pytest.approx(seconds(VALUES, 4, rate, latency_s), rel=1e-3)


def test_a_short_average_that_takes_longer_than_the_long_one_is_all_latency() -> None:
    found = Measured.of(SITES, VALUES, 0.5, 0.2, 0.3, 0.1, FRAGMENTS)
    assert found.rate == pytest.approx(2 * (SITES - 1) / SITES * VALUES * 4 / 0.2)
    assert 0.25 < found.latency_s < 0.3
    assert found.every == FRAGMENTS * -(-(found.latency_s + 0.025 / FRAGMENTS) // 0.1)


def test_a_fast_link_stays_exact_unless_its_latency_is_long() -> None:
    assert measured(1e9, 0.001).every == 1
    assert measured(1e9, 0.02).every == 1
    assert measured(1e9, 0.03).every == 2
    assert measured(1e9, 0.2).every == 12
    assert Measured.of(1, VALUES, 0.5, 1e-3, 1e-3, 0.1, FRAGMENTS).every == 0
