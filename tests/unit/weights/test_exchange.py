"""Readers that serve each other, in virtual time (`tests/exchange.py`): who gets what, whatever fails."""

import random
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer.weights.message import SILENT_MS
from tests.exchange import Exchange, Reading

RATE = 20e6 / 8
SLOW = 0.2
LIMIT_S = 300.0


def twice(reading: Reading) -> int:
    """How many parts came to a reader that it had."""
    return len(reading.came) - len(set(reading.came))


@settings(deadline=None, max_examples=50)
@given(data=st.data(), readers=st.integers(1, 18), size=st.integers(1, 600_000), seed=st.integers(0, 1 << 31))
def test_all_that_live_get_all_parts_and_none_twice_without_need(
    data: st.DataObject, readers: int, size: int, seed: int
) -> None:
    """Readers come at any time, are slow, die, and stand still with connections that end or stay."""
    chance = random.Random(seed)
    hosts = range(1, 1 + readers)
    slow = {host for host in hosts if data.draw(st.sampled_from([False] * 4 + [True]))}
    rates = [RATE, *(SLOW * RATE if host in slow else RATE for host in hosts)]
    exchange = Exchange(size, rates, data.draw(st.sampled_from([0.0, 0.02, 0.2])), lambda: chance.uniform(0.3, 3.0))
    usual_s, failed = size / RATE, set()
    begin_s = {host: data.draw(st.sampled_from([0.0] * 6 + [0.3, 0.9])) * usual_s for host in hosts}
    for host in hosts:
        what = data.draw(st.sampled_from(["lives"] * 8 + ["dies", "stands", "stands and ends"]))
        when_s = data.draw(st.floats(0.0, 1.5)) * usual_s
        if what == "lives":
            continue
        failed.add(host)
        if what != "dies":
            exchange.at(when_s, partial(exchange.stuck.add, host))
        if what != "stands":
            end_s = when_s + SILENT_MS / 1e3 * (what != "dies")
            exchange.at(end_s, partial(exchange.end, host))
    for time_s in sorted(set(begin_s.values())):
        exchange.at(time_s, partial(exchange.begin, [host for host in hosts if begin_s[host] == time_s]))
    exchange.run(LIMIT_S)
    for reading in exchange.alive:
        if reading.host in exchange.stuck:
            continue
        assert reading.end_s is not None
        assert reading.book is not None
        assert reading.book.counts is not None
        assert set(reading.came) == set(range(exchange.content.parts))
        assert failed or slow or not reading.turned
        assert twice(reading) <= sum(reading.book.counts[seat] for seat in reading.turned)


@pytest.mark.parametrize("readers", [2, 8, 16])
def test_the_publishers_link_carries_a_version_once(readers: int) -> None:
    exchange = Exchange(4 << 20, [RATE] * (1 + readers))
    exchange.begin(range(1, 1 + readers))
    exchange.run()
    assert (4 << 20) < exchange.wire.sent_bytes < 1.02 * (4 << 20)
    assert all(not twice(reading) and reading.end_s for reading in exchange.readings.values())


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.1])
def test_all_readers_have_a_version_soon_after_a_link_has_carried_it(delay_s: float) -> None:
    """The delays are those of queues in switches: one of 256 packets holds 0.15 s at this rate."""
    size = 12 << 20
    exchange = Exchange(size, [RATE] * 9, delay_s)
    exchange.begin(range(1, 9))
    exchange.run()
    end_s = max(reading.end_s or LIMIT_S for reading in exchange.readings.values())
    assert end_s < 1.06 * size / RATE + 3 * delay_s


def test_a_slow_reader_gets_few_parts_to_pass_on() -> None:
    exchange = Exchange(12 << 20, [RATE, SLOW * RATE, *[RATE] * 7])
    exchange.begin(range(1, 9))
    exchange.run(3 * (12 << 20) / RATE)
    counts = [len(given) for given in exchange.deals[0].given]
    assert counts[0] < 0.5 * counts[1]


@pytest.mark.parametrize(("readers", "hanging"), [(7, 2), (8, 5)])
def test_readers_that_hang_with_living_connections_do_not_stop_the_others(readers: int, hanging: int) -> None:
    usual_s = (12 << 20) / RATE
    exchange = Exchange(12 << 20, [RATE] * (1 + readers))
    exchange.begin(range(1, 1 + readers))
    for host in range(1, 1 + hanging):
        exchange.at(0.3 * usual_s, partial(exchange.stuck.add, host))
    exchange.run(30 * usual_s)
    for reading in exchange.alive:
        assert reading.host in exchange.stuck or reading.end_s is not None
