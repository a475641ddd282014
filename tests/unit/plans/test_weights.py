import math
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from commlayer.plans.weights import EQUAL, LEVEL, UNITS, WORTH, Rates, Weights, time_of, weights_for

LINKS = st.lists(st.floats(1e6, 1e9), min_size=3, max_size=12)


def rates(*links: float) -> list[Rates]:
    return [Rates(link, link) for link in links]


@given(links=LINKS)
def test_no_other_shares_are_clearly_faster(links: list[float]) -> None:
    weights = weights_for(rates(*links)).weights
    chosen = time_of(weights, links)
    chance = random.Random(len(links))  # any other shares
    for _ in range(50):
        other = [chance.choice((0, 1, 5, 20, 32)) for _ in links]
        if any(other):
            assert chosen <= time_of(other, links) * LEVEL * 1.05


@given(links=LINKS, present=st.booleans())
def test_weights_change_only_for_a_gain(links: list[float], present: bool) -> None:
    before = Weights(tuple(range(len(links))), 3) if present else EQUAL
    found = weights_for(rates(*links), before)
    if found not in (before, EQUAL):
        fastest = max(links)
        counted = [fastest if link * LEVEL >= fastest else max(link, fastest / 256) for link in links]
        assert time_of(found.weights, counted) < WORTH * time_of(before.weights, counted)
        assert max(found.weights) == UNITS
        assert min(found.weights) >= 0
        assert time_of(found.weights, counted, found.segments) < WORTH * time_of((), counted)


def test_a_host_at_half_the_rate_owns_nothing() -> None:
    assert weights_for(rates(200, 100, 200, 200)) == ((128, 0, 128, 128), 3)
    assert weights_for(rates(200, 200, 100, 100)) == ((128, 128, 0, 0), 3)
    assert time_of((), (200, 100, 200, 200)) / time_of((128, 0, 128, 128), (200, 100, 200, 200)) == pytest.approx(1.5)


def test_few_segments_have_equal_shares() -> None:
    """In one segment nothing overlaps: 8 MiB on four emulated hosts, one of them at half rate, took 983 ms with a loss
    bound (then 3 segments), and 16-bit values 720 ms (1 segment), where equal shares take 1,084 and 540."""
    links = (200.0, 100.0, 200.0, 200.0)
    times = [time_of((128, 0, 128, 128), links, segments) / time_of((), links) for segments in (1, 3, 32)]
    assert times == pytest.approx([720 / 540, 983 / 1084, 754 / 1084], rel=0.03)


def test_shares_that_have_become_worse_than_equal_ones_end() -> None:
    """A host that owned nothing is as fast as others again, and one is faster than the rest by too little for shares of
    its own. The shares of before would take 1.667, equal ones 1.5, the best ones 1.429."""
    before = Weights((128, 128, 128, 0), 3)
    assert weights_for(rates(1.2, 1, 1, 1), before) == EQUAL
    assert weights_for(rates(1.2, 1, 1, 1)) == EQUAL
    assert weights_for(rates(1, 1, 1, 0.5), before) == before


def test_a_host_that_is_a_little_slower_owns_a_little() -> None:
    weights = weights_for(rates(100, 80, 100, 100)).weights
    assert 0 < weights[1] < 64
    assert weights[0] == weights[2] == weights[3] == 128


@pytest.mark.parametrize("links", [(100, 100, 100), (100, 114, 107, 100), (1e9,) * 64])
def test_level_links_have_equal_shares(links: tuple[float, ...]) -> None:
    assert weights_for(rates(*links)) == EQUAL
    assert weights_for(rates(*links), Weights(tuple(range(len(links))), 1)) == EQUAL


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf, -math.inf, 1e300])
@pytest.mark.parametrize("present", [EQUAL, Weights((128, 0, 128, 128), 3)])
def test_unknown_and_absurd_rates_change_nothing(wrong: float, present: Weights) -> None:
    for rate in (Rates(wrong, 100), Rates(100, wrong)):
        assert weights_for([*rates(100, 50, 100), rate], present) == present


def test_a_rate_that_is_nearly_nothing_leaves_the_others_their_proportion() -> None:
    assert weights_for(rates(100, 1e-9, 100, 50)) == weights_for(rates(100, 1, 100, 50))


def test_two_hosts_and_one_always_share_equally() -> None:
    assert weights_for(rates(100, 1)) == weights_for(rates(1)) == EQUAL


def test_what_the_others_cannot_send_is_no_limit_of_a_port() -> None:
    """A fast host among slow ones receives no more than they send."""
    fast = [Rates(1000, 250), *rates(250, 250, 250)]
    assert weights_for(fast).weights == (128, 0, 0, 0)
    busy = [Rates(1000, 500), *rates(1000, 1000, 1000)]
    assert weights_for(busy).weights == (0, 128, 128, 128)


def test_level_links_whose_sending_is_overrated_unequally_are_level() -> None:
    """The rates were measured on four emulated hosts of 200 Mbit/s (delivered, arrived)."""
    found = [Rates(235, 194), Rates(190, 194), Rates(206, 193), Rates(221, 195)]
    assert weights_for(found) == EQUAL


@given(links=LINKS, noise=st.lists(st.floats(0.985, 1.015), min_size=12, max_size=12))
@example([446830791.0, 965016491.0, 446830791.0, 848978498.0], [1.0, 1.01171875, *[1.0] * 10])
@example([1000.0, 500.0, 870.0, 500.0], [1.015, *[1.0] * 11])
def test_shares_do_not_go_to_and_fro(links: list[float], noise: list[float]) -> None:
    """Where the same links, measured again, get other shares, one is near LEVEL of the fastest; the new ones stay."""
    weights = weights_for(rates(*links))
    again = weights_for(rates(*(link * error for link, error in zip(links, noise, strict=False))), weights)
    if weights != EQUAL and max(links) > 1.25 * min(links):
        assert weights_for(rates(*links), again) == again
        if all(abs(max(links) / link / LEVEL - 1) > 0.04 for link in links):
            assert again == weights
