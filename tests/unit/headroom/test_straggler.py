"""The slowest rank, and whether chance explains it."""

import random

import pytest

from commlayer.tools.headroom.straggler import CHANCE, straggler


def test_the_slowest_rank_is_compared_with_the_others() -> None:
    found = straggler([[0.3] * 12, [0.3] * 12, [0.3] * 12, [0.4] * 12])
    assert (found.rank, found.is_same) == (3, True)
    assert found.longer_s == pytest.approx(0.1)  # and not 0.075, beside a mean that it is part of


def test_the_slowest_rank_of_a_step_may_be_another_in_each() -> None:
    found = straggler([[0.3, 0.4] * 6, [0.4, 0.3] * 6, [0.3] * 12])
    assert not found.is_same
    assert found.slowest_s == pytest.approx(0.1)
    assert found.longer_s == pytest.approx(0.025)


def test_few_steps_prove_nothing() -> None:
    assert not straggler([[0.3] * 5, [0.4] * 5]).is_same
    assert straggler([[0.3] * 6, [0.4] * 6]).is_same


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_equal_ranks_are_rarely_called_slow(ranks: int) -> None:
    draw = random.Random(14)
    jobs = 400
    named = sum(straggler([[draw.random() for _ in range(12)] for _ in range(ranks)]).is_same for _ in range(jobs))
    assert named <= CHANCE * jobs


def test_a_slow_rank_is_seen_through_noise() -> None:
    """Steps of 0.30 to 0.40 s, and 0.10 s longer on one of four ranks."""
    draw = random.Random(14)
    steps_s = [[0.1 * (rank == 2) + 0.3 + 0.1 * draw.random() for _ in range(12)] for rank in range(4)]
    found = straggler(steps_s)
    assert (found.rank, found.is_same) == (2, True)
    assert found.longer_s == pytest.approx(0.1, abs=0.03)


def test_one_rank_is_nobody_s_straggler() -> None:
    assert straggler([[0.3] * 12]).is_same is False
