"""Means of torch to find a fault: monitored barriers, and checks of every collective in debug mode."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.process.compat.gloo import assert_same
from tests.process.compat.test_ddp import Net, train


def _monitored(rank: int, size: int) -> str:
    ranks.init(rank, size)
    group: Any = dist.group.WORLD
    group.monitored_barrier(timedelta(seconds=20))
    with pytest.raises(ValueError, match="only implemented for GLOO"):
        dist.monitored_barrier()  # torch asks for the backend's name: the group's own method is the way
    if rank == 1:
        ranks.store().wait(["named"])
        return ""
    with pytest.raises(RuntimeError) as caught:
        group.monitored_barrier(timedelta(seconds=1), wait_all_ranks=True)
    if rank == 0:
        ranks.store().set("named", "1")
    return str(caught.value)


def test_monitored_barrier_names_the_missing_rank() -> None:
    assert "Rank 1 failed to pass monitoredBarrier" in ranks.run(_monitored, 2)[0].replace("Ranks", "Rank")


def _detail(rank: int, size: int, backend: str) -> Any:
    if backend == "commlayer":
        dist.set_debug_level(dist.DebugLevel.DETAIL)  # with gloo, DDP dies when the level comes this way
    ranks.init(rank, size, backend)
    torch.manual_seed(7)
    model = torch.nn.parallel.DistributedDataParallel(Net(), find_unused_parameters=True)
    losses, state = train(model, rank)
    tensor = torch.ones(4) * rank
    dist.all_reduce(tensor, group=dist.new_group([0, 1]))
    dist.barrier()
    dist.destroy_process_group()
    return [[loss.item() for loss in losses], [each.tolist() for each in state], tensor.tolist()]


def test_debug_mode_detail() -> None:
    assert_same(ranks.run(_detail, 2, "commlayer"), ranks.run(_detail, 2, "gloo"))
