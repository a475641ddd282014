"""Making groups: sockets and Store traffic grow with the ranks, not with their square; gloo connects when needed."""

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlayer  # noqa: F401  # registers the backend
from bench.start_up import Counting, descriptors
from tests import ranks

SIZE = 6
GROUPS = 4


class Mortal(Counting):
    """A Store in Python, which may be gone."""

    gone = False

    def _count(self, *args: Any, **kwargs: Any) -> None:
        if self.gone:
            raise RuntimeError("the Store is gone")
        super()._count(*args, **kwargs)


def start(rank: int, size: int) -> tuple[Mortal, list[Any]]:
    """WORLD behind a Store in Python, and further groups."""
    store = Mortal(ranks.store())
    dist.init_process_group("commlayer", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
    dist.all_reduce(torch.ones(10))
    return store, [dist.new_group() for _ in range(GROUPS)]


def sparse_sum(group: Any, rank: int, size: int) -> None:
    """A collective of gloo's."""
    tensor = torch.eye(size)[rank : rank + 1].to_sparse()
    dist.all_reduce(tensor, group=group)
    assert tensor.to_dense().tolist() == [[1.0] * size]


def _groups(rank: int, size: int) -> tuple[int, dict[str, int]]:
    """Descriptors and Store traffic of GROUPS further groups."""
    store = Mortal(ranks.store())
    dist.init_process_group("commlayer", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
    dist.all_reduce(torch.ones(10))
    before, counted = descriptors(), store.counts.copy()
    groups: list[Any] = [dist.new_group() for _ in range(GROUPS)]
    opened, used = descriptors() - before, dict(store.counts - counted)
    for group in groups:
        tensor = torch.ones(10)
        dist.all_reduce(tensor, group=group)
        assert tensor[0].item() == size
    dist.destroy_process_group()
    return opened, used


def test_groups_need_no_socket_per_rank_and_no_description_of_each() -> None:
    for rank, (opened, used) in enumerate(ranks.run(_groups, SIZE)):
        assert opened <= 4 * GROUPS  # not SIZE - 1 each beside those of gloo's device
        if rank > 0:
            assert used["read_bytes"] < GROUPS * 2000  # the descriptions of all ranks, about 5 KB, as one value
            assert used["requests"] < GROUPS * 40


@ranks.on(3)
def test_gloo_connects_in_every_group_though_the_store_is_gone(rank: int, size: int) -> None:
    store, groups = start(rank, size)
    ranks.meet("started", size)
    store.gone = True
    for group in (None, *groups):
        sparse_sum(group, rank, size)
    store.gone = False
    dist.destroy_process_group()


@ranks.on(3)
def test_a_group_that_ends_leaves_the_connections_of_others(rank: int, size: int) -> None:
    _, groups = start(rank, size)
    sparse_sum(groups[0], rank, size)
    sparse_sum(groups[1], rank, size)
    dist.destroy_process_group(groups[0])
    dist.destroy_process_group(groups[2])  # never used
    sparse_sum(groups[1], rank, size)
    sparse_sum(groups[3], rank, size)
    sparse_sum(None, rank, size)
    dist.destroy_process_group()


@ranks.on(3)
def test_groups_connect_from_several_threads_in_any_order(rank: int, size: int) -> None:
    _, groups = start(rank, size)
    order = groups[rank:] + groups[:rank]
    failures: list[BaseException] = []

    def use(group: Any) -> None:
        try:
            for _ in range(5):
                sparse_sum(group, rank, size)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=[group]) for group in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    dist.destroy_process_group()


@ranks.on(2)
def test_works_of_groups_that_connect_are_asynchronous(rank: int, size: int) -> None:
    _, groups = start(rank, size)
    tensors = [torch.eye(size)[rank : rank + 1].to_sparse() for _ in groups]
    if rank == 1:
        ranks.store().wait(["submitted"])
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in zip(tensors, groups, strict=True)]
    if rank == 0:
        ranks.store().set("submitted", "1")
    for work in reversed(works):
        work.wait()
    assert [tensor.to_dense().sum().item() for tensor in tensors] == [size] * GROUPS
    dist.destroy_process_group()


@ranks.on(2)
def test_a_first_operation_to_which_a_rank_does_not_come_fails_after_the_timeout(rank: int, size: int) -> None:
    _store, _ = start(rank, size)  # held: torch keeps only its C++ half
    group: Any = dist.new_group(timeout=timedelta(seconds=4))
    if rank == 0:
        begin = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            sparse_sum(group, rank, size)
        took_s = time.monotonic() - begin
        ranks.store().set("failed", "1")
        assert 3.0 < took_s < 40.0, f"{took_s:.1f} s: {caught.value}"
    ranks.store().wait(["failed"], timedelta(seconds=50))
    total = torch.ones(3)
    dist.all_reduce(total, group=group)  # the engine's
    assert total.tolist() == [2.0] * 3
    dist.destroy_process_group()
