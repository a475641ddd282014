"""`Link`: latency and rate from periods with different codecs."""

import pytest

from commlayer.compress.link import LATENCY_MOST, Link


def measured(*periods: tuple[float, float]) -> Link:
    """The link after periods of (bytes, busy time)."""
    link = Link()
    for sent_bytes, busy_s in periods:
        link.measure(sent_bytes, busy_s)
    return link


def busy(sent_bytes: float, rate: float, latency_s: float) -> tuple[float, float]:
    return sent_bytes, latency_s + sent_bytes / rate


@pytest.mark.parametrize("others", [(1e6,), (1e6, 1e6), (1e6, 2e5), (1.9e6, 2e5)])
def test_two_codecs_tell_latency_and_rate_apart(others: tuple[float, ...]) -> None:
    link = measured(*(busy(size, 12.5e6, 0.03) for size in (3e6, *others)))
    assert link.latency_s == pytest.approx(0.03)
    assert 1 / link.seconds_per_byte == pytest.approx(12.5e6)


def test_one_codec_is_taken_for_all_rate() -> None:
    link = measured((1e6, 0.1), (1.2e6, 0.11))
    assert link.latency_s == 0
    assert link.seconds_per_byte == pytest.approx(0.11 / 1.2e6)


def test_a_rate_that_has_changed_meanwhile_tells_nothing_about_latency() -> None:
    link = measured(busy(3e6, 1e8, 0.01), busy(1e6, 1e6, 0.01))
    assert link.latency_s == 0


def test_a_faster_link_shows_although_little_is_sent() -> None:
    link = measured(busy(3e6, 2.5e6, 0.03), busy(2e5, 2.5e6, 0.03), busy(2e5, 125e6, 0.025))
    assert link.latency_s == pytest.approx(LATENCY_MOST * 0.0266)
    assert 1 / link.seconds_per_byte > 100e6
