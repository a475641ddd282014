"""All ranks hear what each of them says, also in a group that torch does not know."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

import commlayer
from commlayer.frontend.group.backend import CommProcessGroup
from commlayer.frontend.group.told import divided, done_by_all, told_by_all
from tests import ranks


@ranks.on(3)
def test_all_hear_what_each_one_says(rank: int, size: int) -> None:
    group = CommProcessGroup(ranks.store(), rank, size, timedelta(seconds=20), "unknown")
    assert told_by_all(group, {"rank": rank, "long": "x" * 1000 * rank}) == [
        {"rank": rank, "long": "x" * 1000 * rank} for rank in range(size)
    ]
    assert told_by_all(group, None) == [None] * size
    assert not dist.is_initialized()
    group.shutdown()


def test_parts_are_equal_or_not() -> None:
    assert divided([[0, 2], [1, 3], [0, 2], [1, 3]]) == ([[0, 2], [1, 3]], True)
    assert divided([[0], [1, 2], [1, 2]]) == ([[0], [1, 2]], False)
    assert divided([[0, 1], [0, 1], [1, 2]]) == ([[0, 1], [1, 2]], False)


@ranks.on(2)
def test_all_do_it_or_none(rank: int, size: int) -> None:
    group = CommProcessGroup(ranks.store(), rank, size, timedelta(seconds=20), "unknown")
    assert done_by_all(group, lambda: 10 * rank) == [0, 10]

    def fail() -> int:
        if rank == 1:
            raise commlayer.ConfigError("rank 1: a wrong batch")
        return rank

    with pytest.raises(commlayer.ConfigError, match="rank 1: a wrong batch"):
        done_by_all(group, fail)
    assert done_by_all(group, lambda: None) == [None, None]  # the group goes on
    group.shutdown()
