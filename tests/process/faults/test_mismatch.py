"""Ranks that call different things."""

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from commlayer.tools.bench.collectives import all_gather_single
from tests import ranks

from .scene import SLACK_S, Seen, Site, begin, culprit_of, mark, note, survived, witness

Group = dist.ProcessGroup


def size_of_a_part(odd: bool, group: Group) -> None:
    count = 2000 if odd else 1000
    all_gather_single(torch.empty(count * dist.get_world_size()), torch.ones(count), group=group)


def moved_dtype(odd: bool, group: Group) -> None:
    """No rank computes with them, but a tensor received as another type than it was sent is a bug."""
    dist.broadcast(torch.ones(1000, dtype=torch.int32 if odd else torch.float32), 0, group=group)
    dist.barrier(group)


def moved_dtype_of_a_part(odd: bool, group: Group) -> None:
    part = torch.ones(1000, dtype=torch.float8_e5m2 if odd else torch.bool)
    all_gather_single(part.new_empty(1000 * dist.get_world_size()), part, group=group)


def exchanged_dtype(odd: bool, group: Group) -> None:
    size = dist.get_world_size()
    given = torch.ones(1000 * size, dtype=torch.int64 if odd else torch.float64)
    dist.all_to_all_single(torch.empty_like(given), given, group=group)


def gathered_dtype(odd: bool, group: Group) -> None:
    mine = torch.ones(1000, dtype=torch.int16 if odd else torch.bfloat16)
    size = dist.get_world_size() if dist.get_rank() == 0 else 0
    dist.gather(mine, [torch.empty_like(mine) for _ in range(size)] or None, 0, group=group)
    dist.barrier(group)


def exchange_of_another_kind(odd: bool, group: Group) -> None:
    """The lengths agree between all ranks: only the names differ."""
    given = list(torch.ones(dist.get_world_size(), 1000).unbind())
    taken = [torch.empty(1000) for _ in given]
    if odd:
        dist.all_gather([torch.empty(1000) for _ in given], given[0], group=group)
    else:
        dist.all_to_all(taken, given, group=group)
    dist.barrier(group)


def sent_rows(odd: bool, group: Group) -> None:
    """The last rank sends one row more to rank 0 than that expects."""
    size = dist.get_world_size()
    sent = [2 if odd and to == 0 else 1 for to in range(size)]
    dist.all_to_all_single(torch.empty(size, 5), torch.ones(sum(sent), 5), [1] * size, sent, group=group)
    dist.barrier(group)


def expected_rows(odd: bool, group: Group) -> None:
    """The last rank expects rows of rank 0, which has none for it."""
    size, rank = dist.get_world_size(), dist.get_rank()
    received = [int(source == rank or (odd and source == 0)) for source in range(size)]
    sent = [int(to == rank) for to in range(size)]
    dist.all_to_all_single(torch.empty(sum(received), 5), torch.ones(1, 5), received, sent, group=group)
    dist.barrier(group)


def exchanged_lists(odd: bool, group: Group) -> None:
    size = dist.get_world_size()
    taken = [torch.empty(9 if odd and source == 0 else 4) for source in range(size)]
    dist.all_to_all(taken, list(torch.ones(size, 4).unbind()), group=group)
    dist.barrier(group)


def gathered_lengths(odd: bool, group: Group) -> None:
    mine = torch.ones(7 if odd else 5)
    size = dist.get_world_size() if dist.get_rank() == 0 else 0
    dist.gather(mine, [torch.empty(5) for _ in range(size)] or None, 0, group=group)
    dist.barrier(group)


def scattered_lengths(odd: bool, group: Group) -> None:
    size = dist.get_world_size() if dist.get_rank() == 0 else 0
    dist.scatter(torch.empty(3 if odd else 5), [torch.ones(5) for _ in range(size)] or None, 0, group=group)
    dist.barrier(group)


def gathered_lists(odd: bool, group: Group) -> None:
    """Tensors of unequal lengths, of which the last rank expects another one of rank 0."""
    size, rank = dist.get_world_size(), dist.get_rank()
    taken = [torch.empty(source + (3 if odd and source == 0 else 2)) for source in range(size)]
    dist.all_gather(taken, torch.ones(rank + 2), group=group)
    dist.barrier(group)


def scattered_sums(odd: bool, group: Group) -> None:
    """Lists of unequal lengths: the last rank has another one for rank 0."""
    size, rank = dist.get_world_size(), dist.get_rank()
    given = [torch.ones(to + (4 if odd and to == 0 else 1)) for to in range(size)]
    dist.reduce_scatter(torch.empty(rank + 1), given, group=group)
    dist.barrier(group)


def reduced_lengths(odd: bool, group: Group) -> None:
    dist.reduce(torch.ones(101 if odd else 100), 0, group=group)
    dist.barrier(group)


def collective(odd: bool, group: Group) -> None:
    tensor = torch.ones(1000)
    if odd:
        dist.broadcast(tensor, 0, group=group)
    else:
        dist.all_reduce(tensor, group=group)


def order(odd: bool, group: Group) -> None:
    tensor = torch.ones(1000)
    if odd:
        dist.barrier(group)
    dist.all_reduce(tensor, group=group)
    dist.barrier(group)


def submitted(odd: bool, group: Group) -> None:
    works = [dist.all_reduce(torch.ones(200_000 + odd * i), group=group, async_op=True) for i in range(5)]
    for work in works:
        assert work is not None
        work.wait()


def root(odd: bool, group: Group) -> None:
    """No rank waits for a root that the others do not know of: the next operation finds the mismatch."""
    dist.broadcast(torch.ones(1000), dist.get_world_size() - 1 if odd else 0, group=group)
    dist.barrier(group)


CASES: dict[str, Callable[[bool, Group], object]] = {
    "size small": lambda odd, group: dist.all_reduce(torch.ones(101 if odd else 100), group=group),
    "size large": lambda odd, group: dist.all_reduce(torch.ones(3 << 20 if odd else 4 << 20), group=group),
    "size of a part": size_of_a_part,
    "dtype": lambda odd, group: dist.all_reduce(torch.ones(9, dtype=(torch.float32, torch.int32)[odd]), group=group),
    "moved dtype": moved_dtype,
    "moved dtype of a part": moved_dtype_of_a_part,
    "exchanged dtype": exchanged_dtype,
    "gathered dtype": gathered_dtype,
    "exchange of another kind": exchange_of_another_kind,
    "reduction": lambda odd, group: dist.all_reduce(torch.ones(9), (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[odd], group),
    "average": lambda odd, group: dist.all_reduce(
        torch.ones(300_000), dist.ReduceOp.AVG if odd else dist.ReduceOp.SUM, group
    ),
    "sent rows": sent_rows,
    "expected rows": expected_rows,
    "exchanged lists": exchanged_lists,
    "gathered lengths": gathered_lengths,
    "scattered lengths": scattered_lengths,
    "gathered lists": gathered_lists,
    "scattered sums": scattered_sums,
    "reduced lengths": reduced_lengths,
    "collective": collective,
    "order": order,
    "submitted": submitted,
    "root": root,
    # Each rank waits for another one, and none sends.
    "root of nobody": lambda _, group: dist.broadcast(
        torch.ones(1000), (dist.get_rank() + 1) % dist.get_world_size(), group
    ),
}


def _mismatched(rank: int, size: int) -> dict[str, Seen]:
    begin(rank, size)
    seen = {}
    for name, case in CASES.items():
        group = dist.new_group()
        assert isinstance(group, Group)
        if rank == 0:
            mark()
        dist.barrier()  # not on the group: a rank that is slow to end it would see the failure there
        seen[name] = witness(lambda: case(rank == size - 1, group))  # noqa: B023
        dist.barrier()
    return seen


@pytest.mark.parametrize("name", ["one host", "network", pytest.param("two hosts", marks=pytest.mark.needs_root)])
def test_every_rank_learns_it(request: pytest.FixtureRequest, name: str) -> None:
    hosts = {"one host": (0, 0), "network": (0, 0, 0), "two hosts": (0, 0, 1, 1)}[name]
    network = request.getfixturevalue("network") if name == "two hosts" else None
    site = Site(name, hosts, network, ranks.UDP if name == "network" else {})
    by_rank = survived(site.outcomes(_mismatched))
    for case in CASES:
        seen: dict[int, Seen] = {rank: cases[case] for rank, cases in by_rank.items()}  # type: ignore[index]
        for rank, outcome in seen.items():
            assert outcome.error == "MismatchError", (case, rank, outcome)
            assert "ranks disagree on the operation after " in outcome.text, (case, rank, outcome)
            assert f"culprit: rank {rank} on" not in outcome.text  # but: this one
            assert "call the same operations in the same order on all ranks" in outcome.text
            assert outcome.seconds < SLACK_S
        assert len({culprit_of(outcome) for outcome in seen.values()}) == 1, (case, seen)
        note(f"another {case} on one rank", f"{name}, {site.size} ranks", seen)


@pytest.mark.parametrize("environ", [{}, ranks.UDP], ids=["one host", "network"])
@ranks.on(3, environ="environ")
def test_ranks_that_agree_are_left_alone(rank: int, size: int) -> float:
    """Calls that are the same, on ranks that are late."""
    begin(rank, size)
    for case in list(CASES.values())[:-1]:
        group = dist.new_group()
        assert isinstance(group, Group)
        if rank == 1:
            time.sleep(0.01)
        case(False, group)
        dist.barrier(group)
    return 0.0
