"""Making groups: descriptors and Store traffic do not grow with the square of the ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import commlayer  # noqa: F401  # registers the backend
from bench.start_up import Counting, descriptors
from tests import ranks

SIZE = 6
GROUPS = 4


def _groups(rank: int, size: int) -> tuple[int, dict[str, int]]:
    """Descriptors and Store traffic of GROUPS further groups."""
    store = Counting(ranks.store())
    timeout = timedelta(seconds=30)
    dist.init_process_group("commlayer", store=store, rank=rank, world_size=size, timeout=timeout)
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
        assert opened <= 2 * GROUPS  # not SIZE - 1 each
        if rank > 0:
            assert used["read_bytes"] < GROUPS * 1600  # the descriptions of all ranks, about 5 KB, as one value
            assert used["requests"] < GROUPS * 40
