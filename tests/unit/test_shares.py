"""The ranks of a group, in any order, agree on the shares of the hosts."""

import ctypes
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.errors import CommError
from commlayer.frontend.group import shares
from commlayer.frontend.group.shares import EVERY, FIRST, FRESH_S, LEAD, LEAST_BYTES, TRIAL, TRIAL_MOST, Shares
from commlayer.plans.settings import Settings
from commlayer.transport.base import Request

LENGTH = 8 << 20
FLAT = ((0,), (1,), (2,), (3,))


class Exchange:
    """An all-gather, which ends when all ranks have begun it."""

    def __init__(self, size: int) -> None:
        self.requests: dict[int, Request] = {}
        self.size = size
        self.is_failed = False

    def add(self, rank: int, request: Request) -> None:
        self.requests[rank] = request
        if len(self.requests) == self.size:
            sent = [(ctypes.c_double * 2).from_address(self.requests[member].source) for member in range(self.size)]
            for other in self.requests.values():
                received = (ctypes.c_double * (2 * self.size)).from_address(other.target)
                received[:] = [value for pair in sent for value in pair]

    def done(self) -> bool:
        return len(self.requests) == self.size or self.is_failed

    def failed(self) -> bool:
        return self.is_failed


class World:
    """The ranks of a job in one thread, and its Store."""

    def __init__(self, hosts: tuple[tuple[int, ...], ...] = FLAT, settings: Settings | None = None) -> None:
        self.hosts, self.settings = hosts, settings or Settings()
        self.size = sum(map(len, hosts))
        self.exchanges: list[Exchange] = []
        self.begun = [0] * self.size
        self.rates: Callable[[int, int], tuple[float, float]] = lambda _rank, _exchange: (100.0, 100.0)
        self.keys: dict[str, str] = {}
        self.is_store_gone = False
        self.results: list[list[tuple[int, ...]]] = [[] for _ in range(self.size)]
        self.shares = [self.shares_of(rank) for rank in range(self.size)]

    def shares_of(self, rank: int) -> Shares:
        world = self

        class Group:
            size, hosts, who = world.size, world.hosts, f"rank {rank}"

            def rates(self) -> tuple[float, float]:
                return world.rates(rank, world.begun[rank])

            def submit(self, request: Request) -> Exchange:
                if world.begun[rank] == len(world.exchanges):
                    world.exchanges.append(Exchange(world.size))
                exchange = world.exchanges[world.begun[rank]]
                world.begun[rank] += 1
                exchange.add(rank, request)
                return exchange

        group = Group()
        group.rank = rank  # type: ignore[attr-defined]
        return Shares(cast(Any, group), self.settings, self, lambda: 30.0)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self.is_store_gone:
            raise RuntimeError("connection reset")
        assert expected == ""
        return self.keys.setdefault(key, desired).encode()

    def delete_key(self, key: str) -> bool:
        if self.is_store_gone:
            raise RuntimeError("connection reset")
        return self.keys.pop(key, None) is not None

    def call(self, rank: int, length: int = LENGTH, **fields: Any) -> None:
        settings = dataclasses.replace(self.settings, **fields)
        self.results[rank].append(self.shares[rank].weights(length, settings))

    def all_call(self, times: int = 1) -> None:
        for _ in range(times):
            for rank in range(self.size):
                self.call(rank)

    def check(self) -> list[tuple[int, ...]]:
        """All ranks have the same weights for every all-reduce that they have both called. Returns the longest list."""
        longest = max(self.results, key=len)
        for result in self.results:
            assert result == longest[: len(result)]
        return longest


@pytest.fixture(autouse=True)
def nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "LATE_S", 0.0)


def slow(host: int) -> Callable[[int, int], tuple[float, float]]:
    return lambda rank, _: (100.0, 50.0 if rank == host else 100.0)


RATE = st.one_of(st.sampled_from([0.0, math.nan, math.inf, -1.0, 1e300]), st.floats(10, 200))


@given(
    order=st.lists(st.integers(0, 3), max_size=400),
    rates=st.lists(st.lists(RATE, min_size=4, max_size=4), min_size=1, max_size=6),
    trial=st.sampled_from([1, 2, TRIAL]),
    fresh_s=st.sampled_from([0, FRESH_S, 30 * LENGTH / 200]),
)
def test_all_ranks_have_the_same_weights_in_any_order(
    order: Sequence[int], rates: list[list[float]], trial: int, fresh_s: float
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares, "TRIAL", trial)
        patch.setattr(shares, "FRESH_S", fresh_s)
        all_ranks_have_the_same_weights(order, rates)


def all_ranks_have_the_same_weights(order: Sequence[int], rates: list[list[float]]) -> None:
    world = World()
    world.rates = lambda rank, exchange: (200.0, rates[exchange % len(rates)][rank])
    for rank in order:
        world.call(rank)
    for rank in range(4):  # those that are behind come after the others have changed their weights
        while len(world.results[rank]) < max(map(len, world.results)):
            world.call(rank)
    weights = world.check()
    changes = [at for at in range(1, len(weights)) if weights[at] != weights[at - 1]]
    assert all((at - FIRST) % EVERY == 0 for at in changes)
    assert len(world.keys) <= len(world.results[0]) // EVERY + 1


def test_a_slow_host_owns_nothing_from_the_third_on() -> None:
    world = World()
    world.rates = slow(2)
    world.all_call(60)
    assert world.check() == [()] * 2 + [(128, 128, 0, 128)] * 58


def test_level_hosts_never_ask_the_store() -> None:
    world = World()
    world.is_store_gone = True
    world.all_call(100)
    assert set(world.check()) == {()}
    assert len(world.exchanges) == 1 + (98 + LEAD) // EVERY


def test_a_rate_that_changes_in_every_step_changes_few_plans() -> None:
    world = World()
    world.rates = lambda rank, exchange: (100.0, 50.0 if rank == exchange % 4 else 100.0)
    world.all_call(200)
    weights = world.check()
    assert 1 < sum(weights[at] != weights[at - 1] for at in range(1, 200)) <= 200 // EVERY


def test_a_host_that_recovers_gets_its_share_back() -> None:
    world = World()
    world.rates = lambda rank, exchange: (100.0, 50.0 if rank == 1 and exchange == 0 else 100.0)
    world.all_call(40)
    assert world.check() == [()] * 2 + [(128, 0, 128, 128)] * 20 + [()] * 18


def test_shares_that_the_rates_only_seem_to_confirm_end() -> None:
    """No link is full, so a host's rates follow what it carries: at first, by chance, host 1 seemed slower."""

    def rates(rank: int, exchange: int) -> tuple[float, float]:
        if exchange == 0:
            return (100.0, 50.0 if rank == 1 else 100.0)
        weights = world.results[0][-1] or (1,) * 4
        rate = 100 * (1 + 2 * weights[rank] / sum(weights)) / (1 + 2 * max(weights) / sum(weights))
        return (rate, rate)

    world = World()
    world.rates = rates
    world.all_call((TRIAL + 40) * EVERY)
    weights = world.check()
    assert weights[FIRST : FIRST + TRIAL * EVERY] == [(128, 0, 128, 128)] * (TRIAL * EVERY)
    assert set(weights[FIRST + TRIAL * EVERY :]) == {()}


def test_a_host_that_is_slow_pays_ever_less_for_trials() -> None:
    world = World()
    world.rates = slow(1)
    world.all_call(40 * TRIAL * EVERY)
    weights = world.check()
    trials = [at for at in range(FIRST + 1, len(weights)) if weights[at - 1] and not weights[at]]
    waits = [(after - before) // EVERY - 1 for before, after in itertools.pairwise([FIRST - EVERY, *trials])]
    assert waits == [min(TRIAL << number, TRIAL_MOST) for number in range(len(waits))]
    assert all(set(weights[at : at + EVERY]) == {()} and weights[at + EVERY] for at in trials)


@pytest.mark.parametrize("lengths", [13, 30])
def test_rates_from_before_a_change_do_not_count(lengths: int) -> None:
    """The peaks of 2.4 s take so many all-reduces here. The first exchange after a change follows the twelfth."""
    rate = lengths * LENGTH / FRESH_S
    world = World()
    world.rates = lambda rank, exchange: (rate, rate / 2 if (rank == 1) == (exchange == 0) else rate)
    world.all_call(80)
    weights = world.check()
    assert weights == [()] * 2 + [(128, 0, 128, 128)] * 40 + [weights[42]] * 38
    assert weights[42] not in {(), (128, 0, 128, 128)}


def test_a_long_return_delays_the_next_one() -> None:
    """Rates count 60 all-reduces after a change. The exchange after the 72nd is the first one then: four periods."""
    rate = 60 * LENGTH / FRESH_S
    world = World()
    world.rates = lambda rank, _: (rate, rate / 2 if rank == 1 else rate)
    world.all_call(200 * EVERY)
    weights = world.check()
    changes = [at for at in range(FIRST + 1, len(weights)) if weights[at] != weights[at - 1]]
    periods = [(after - before) // EVERY for before, after in itertools.pairwise([FIRST, *changes])]
    assert periods == [TRIAL, 4, 2 * TRIAL * 4, 4]


def test_a_rank_that_is_behind_keeps_the_weights_of_all() -> None:
    """Rank 3 has not begun the exchange when the others need it: nobody waits, and all keep what they have."""
    world = World()
    world.rates = slow(1)
    for rank in range(3):
        for _ in range(10):
            world.call(rank)
    assert world.keys
    for _ in range(10):
        world.call(3)
    assert world.check() == [()] * 10
    world.all_call(30)
    assert world.check()[FIRST + EVERY :] == [(128, 0, 128, 128)] * (40 - FIRST - EVERY)
    assert "0" not in world.keys  # nobody asks for it any more


def test_a_rank_that_has_seen_the_rates_yields_to_one_that_has_not() -> None:
    world = World()
    world.rates = slow(1)
    world.all_call(2)
    assert world.exchanges[0].done()
    world.exchanges[0].size = 5  # rank 0 does not know yet that all have begun it
    world.call(0)
    world.exchanges[0].size = 4
    for rank in (1, 2, 3):
        world.call(rank)
    assert world.check() == [()] * 3


def test_two_ranks_on_each_host_count_together() -> None:
    world = World(((0, 1), (2, 3), (4, 5)), Settings(staging_bytes=2 << 20))
    world.rates = lambda rank, _: (50.0, 25.0 if rank in (2, 3) else 50.0)
    world.all_call(5)
    assert world.check()[2:] == [(128, 0, 128)] * 3


def test_short_all_reduces_and_those_without_shards_do_not_count() -> None:
    world = World(settings=Settings(algorithm="ring"))
    world.all_call(50)
    assert not world.exchanges
    world = World()
    for rank in range(4):
        for _ in range(50):
            world.call(rank, 4096)
    assert not world.exchanges


def test_all_reduces_of_few_segments_count_and_have_equal_shares() -> None:
    world = World()
    world.rates = slow(3)
    world.all_call(5)
    for rank in range(4):
        world.call(rank, LEAST_BYTES)
        world.call(rank, 8 << 20, partial=True, partial_message_bytes=1 << 20)
        world.call(rank, 8 << 20, codecs=("bf16", "bf16"))
    assert world.check()[5:] == [(), (), (128, 128, 128, 0)]


def test_encoded_sums_that_must_have_the_same_bits_keep_equal_shares() -> None:
    world = World(settings=Settings(deterministic=True))
    world.rates = slow(0)
    for number in range(10):
        for rank in range(4):
            world.call(rank, codecs=None if number % 2 else ("int8", "int8"))
    weights = world.check()
    assert not any(weights[::2])
    assert weights[3::2] == [(0, 128, 128, 128)] * 4


def test_a_store_that_is_gone_is_an_error_with_a_remedy() -> None:
    world = World()
    world.rates = slow(1)
    world.all_call(2)
    world.is_store_gone = True
    with pytest.raises(CommError, match=r"rank 0: the job's Store does not answer.*look at its log"):
        world.call(0)


def test_a_failed_group_changes_nothing() -> None:
    world = World()
    world.rates = slow(1)
    world.all_call(2)
    world.exchanges[0].is_failed = True
    world.is_store_gone = True
    world.all_call()
    assert set(world.check()) == {()}


def test_the_memory_of_an_exchange_lives_until_it_has_ended() -> None:
    world = World()
    for _ in range(10):
        world.call(0)
    held = world.exchanges[0].requests[0]
    for rank in (1, 2, 3):
        world.call(rank)
        world.call(rank)
    received = np.ctypeslib.as_array((ctypes.c_double * 8).from_address(held.target))
    assert received.tolist() == [100.0] * 8
    assert world.shares[0]._late
