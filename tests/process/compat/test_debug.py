"""Means of torch to find a fault: checks of every collective in debug mode."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.process.compat.gloo import assert_same
from tests.process.compat.test_ddp import Net, train


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
    return [[loss.item() for loss in losses], [parameter.tolist() for parameter in state], tensor.tolist()]


def test_debug_mode_detail() -> None:
    assert_same(ranks.run(_detail, 2, "commlayer"), ranks.run(_detail, 2, "gloo"))


def _detail_of_failures(rank: int, size: int) -> tuple[str, int]:
    dist.set_debug_level_from_env()  # this process was forked from one that had read it before
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    ranks.init(rank, size)
    group: Any = dist.group.WORLD
    group._set_sequence_number_for_group()
    dist.barrier()
    assert group._get_sequence_number_for_group() == 1
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(3 + rank))
    return str(caught.value), caught.value.culprit  # type: ignore[attr-defined]


def test_debug_mode_detail_by_its_variable() -> None:
    """The checks of DETAIL are those of the engine: both sides of a mismatch, by number."""
    found = ranks.run(_detail_of_failures, 2, environ={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    for text, culprit in found:
        for rank in range(2):
            place = rf"_detail_of_failures \({re.escape(__file__)}:\d+\)"
            assert re.search(rf"rank {rank} called all_reduce 2 of float32 \[{3 + rank}\], SUM in {place}; ", text)
        assert culprit == 1
