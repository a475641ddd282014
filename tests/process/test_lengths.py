"""Ranks that differ in the length of what one of them sends to another: both learn it, with the ranks and values."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import commlayer
from tests import ranks
from tests.drawn import alike

SIZE = 3


def exchange(sent: list[int], received: list[int], group: Any, width: int = 5) -> torch.Tensor:
    output = torch.full((sum(received), width), -1.0)
    rows = torch.cat([torch.full((count, width), float(dist.get_rank() * SIZE + to)) for to, count in enumerate(sent)])
    dist.all_to_all_single(output, rows, received, sent, group=group)
    return output


def more_rows(rank: int, group: Any) -> None:
    exchange([1, 3, 1] if rank == 0 else [1] * 3, [2, 1, 1] if rank == 1 else [1] * 3, group)


def rows_for_none(rank: int, group: Any) -> None:
    exchange([1, 3, 1] if rank == 0 else [1] * 3, [0, 1, 1] if rank == 1 else [1] * 3, group)


def no_rows(rank: int, group: Any) -> None:
    exchange([1, 0, 1] if rank == 0 else [1] * 3, [4, 1, 1] if rank == 1 else [1] * 3, group)


def wide_rows(rank: int, group: Any) -> None:
    """As many rows of another width."""
    exchange([0, 2, 0] if rank == 0 else [0] * 3, [2, 0, 0] if rank == 1 else [0] * 3, group, 6 if rank == 1 else 4)


def lists(rank: int, group: Any) -> None:
    given = [torch.ones(7 if rank == 0 and to == 1 else 2) for to in range(SIZE)]
    dist.all_to_all([torch.empty(2) for _ in range(SIZE)], given, group=group)


def gathered(rank: int, group: Any) -> None:
    taken = [torch.empty(4) for _ in range(SIZE)] if rank == 1 else None
    dist.gather(torch.ones(6 if rank == 0 else 4), taken, 1, group=group)


def scattered(rank: int, group: Any) -> None:
    given = [torch.ones(4) for _ in range(SIZE)] if rank == 0 else None
    dist.scatter(torch.empty(3 if rank == 1 else 4), given, 0, group=group)


def gathered_by_all(rank: int, group: Any) -> None:
    taken = [torch.empty(5 if rank == 1 and source == 0 else source + 1) for source in range(SIZE)]
    dist.all_gather(taken, torch.ones(rank + 1), group=group)


CASES: dict[str, tuple[Callable[[int, Any], None], str]] = {
    "more rows": (more_rows, "sends 3 rows to rank 1, which expects 2"),
    "rows for none": (rows_for_none, "sends 3 rows to rank 1, which expects 0"),
    "no rows": (no_rows, "sends 0 rows to rank 1, which expects 4"),
    "wide rows": (wide_rows, "sends 32 bytes to rank 1, which expects 48"),
    "lists": (lists, "sends 7 elements to rank 1, which expects 2"),
    "gathered": (gathered, "sends 6 elements to rank 1, which expects 4"),
    "scattered": (scattered, "sends 4 elements to rank 1, which expects 3"),
    "gathered by all": (gathered_by_all, "sends 1 elements to rank 1, which expects 5"),
}


@ranks.WIRES
@pytest.mark.parametrize("name", CASES)
@ranks.on(SIZE, environ="wire")
def test_both_ranks_learn_both_lengths(rank: int, size: int, name: str) -> None:
    """The receiver learns it in the call, and within a host both ranks of an all-to-all; the others by the next one."""
    ranks.init(rank, size)
    case, told = CASES[name]
    group = dist.new_group()
    dist.barrier()
    is_mutual = "COMMLAYER_SHM" not in os.environ and name not in ("gathered", "scattered")

    def call() -> None:
        case(rank, group)
        assert rank == 2 or (rank == 0 and not is_mutual), "the rank has not learned it from the call itself"
        dist.barrier(group)

    try:
        with pytest.raises(commlayer.MismatchError) as raised:
            call()
    finally:
        dist.barrier()
    assert f"rank 0 {told}; make their lengths equal" in str(raised.value)
    assert raised.value.culprit == 0


@ranks.WIRES
@ranks.on(2, environ="wire")
def test_several_pairs(rank: int, size: int) -> None:
    ranks.init(rank, size)
    with pytest.raises(commlayer.MismatchError) as raised:
        dist.all_to_all_single(torch.empty(4), torch.ones(3), [2, 2], [2, 1] if rank == 0 else [1, 2])
    both = "rank 0 sends 1 rows to rank 1, which expects 2, rank 1 sends 1 rows to rank 0, which expects 2; make"
    assert both in str(raised.value)


SPLITS = st.lists(st.lists(st.integers(0, 3), min_size=SIZE, max_size=SIZE), min_size=SIZE, max_size=SIZE)


@ranks.WIRES
@ranks.on(SIZE, ranks.run_job, environ="wire")
def test_random_splits_that_fit(rank: int, size: int) -> None:
    """Most with ranks that have nothing for each other: the right calls stay as they are."""

    @alike(150)
    @given(SPLITS, st.sampled_from([1, 40_000]))
    def trial(matrix: list[list[int]], width: int) -> None:
        received = [row[rank] for row in matrix]
        found = exchange(matrix[rank], received, None, width)
        exact = [float(source * SIZE + rank) for source, count in enumerate(received) for _ in range(count)]
        assert torch.equal(found, torch.tensor(exact).view(-1, 1).expand(-1, width))

    trial()
