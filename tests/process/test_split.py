"""`dist.split_group`, which torch has for CPUs since 2.15, and commlayer with every torch."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlayer
from commlayer.errors import ConfigError
from commlayer.frontend.group.backend import CommProcessGroup
from tests import ranks

OUTSIDE: tuple[Any, ...] = (None, dist.GroupMember.NON_GROUP_MEMBER)


def total(rank: int, group: Any) -> float:
    tensor = torch.tensor([float(10**rank)])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


@ranks.on(4, ranks.run_job)
def test_every_rank_gets_the_group_of_its_list(rank: int, size: int) -> None:
    group = dist.split_group(dist.group.WORLD, [[0, 2], [1, 3]])
    assert isinstance(group, CommProcessGroup)
    assert total(rank, group) == (101.0, 1010.0)[rank % 2]
    assert dist.get_process_group_ranks(group) == [rank % 2, rank % 2 + 2]
    assert (dist.get_rank(group), dist.get_world_size(group)) == (rank // 2, 2)
    assert dist.get_backend(group) == "commlayer"
    dist.barrier(group)
    dist.destroy_process_group(group)
    assert total(rank, None) == 1111.0


@ranks.on(3, ranks.run_job)
def test_the_order_of_a_list_does_not_matter(rank: int, size: int) -> None:
    """torch sorts the lists, too."""
    group: Any = dist.split_group(split_ranks=[[2, 0, 1]])
    assert dist.get_process_group_ranks(group) == [0, 1, 2]
    assert group.rank() == dist.get_rank(group) == rank
    assert total(rank, group) == 111.0


@ranks.on(3, ranks.run_job)
def test_a_rank_in_no_list_gets_no_group(rank: int, size: int) -> None:
    for _ in range(2):  # the second time under another name
        group = dist.split_group(split_ranks=[[0, 1]])
        if rank == 2:
            assert group in OUTSIDE
        else:
            assert total(rank, group) == 11.0


@ranks.on(4, ranks.run_job)
def test_ranks_are_those_of_the_parent(rank: int, size: int) -> None:
    parent = dist.new_group([1, 2, 3])
    dist.new_group([0, 1])  # the ranks now have different numbers of groups, from which torch 2.13 makes names
    if rank == 0:
        return
    group = dist.split_group(parent, [[0], [1, 2]])
    assert dist.get_process_group_ranks(group) == ([1] if rank == 1 else [2, 3])
    assert total(rank, group) == (10.0 if rank == 1 else 1100.0)


@ranks.on(2, ranks.run_job)
def test_the_policy_is_the_parents_or_that_of_the_options(rank: int, size: int) -> None:
    parent = dist.new_group([0, 1], pg_options=commlayer.Options(commlayer.Policy(deterministic=True, priority=3)))
    heir: Any = dist.split_group(parent, [[0, 1]])
    assert heir.policy == commlayer.Policy(deterministic=True, priority=3)
    own: Any = dist.split_group(
        parent,
        [[0, 1]],
        timeout=timedelta(seconds=17),
        pg_options=commlayer.Options(commlayer.Policy(priority=1)),
        group_desc="halves",
    )
    assert (own.policy, own.group_desc) == (commlayer.Policy(priority=1), "halves")
    assert own._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=17)
    assert total(rank, heir) == total(rank, own) == 11.0


@ranks.on(2, ranks.run_job)
def test_wrong_arguments_are_named(rank: int, size: int) -> None:
    with pytest.raises(ConfigError, match="pg_options"):
        dist.split_group(split_ranks=[[0, 1]], pg_options="fast")
    with pytest.raises(ValueError, match="split_ranks"):
        dist.split_group(split_ranks=[])
    with pytest.raises(ValueError, match="no rank 5"):
        dist.split_group(split_ranks=[[0, 5]])
    with pytest.raises(ValueError, match=r"duplicate|twice"):
        dist.split_group(split_ranks=[[0, 0], [1, 1]])
    with pytest.raises(ValueError, match="nccl"):
        dist.split_group(split_ranks=[[0, 1]], backend="nccl")
    assert total(rank, dist.split_group(split_ranks=[[0, 1]], backend="commlayer")) == 11.0


@ranks.on(2, ranks.run_job)
def test_a_group_splits_by_its_method(rank: int, size: int) -> None:
    world: Any = dist.group.WORLD
    group = world.split_group([1])
    assert (group is None) == (rank == 0)
    if group is not None:
        assert group.size() == 1
        group.shutdown()
