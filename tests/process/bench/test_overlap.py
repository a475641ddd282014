"""The baselines of bench/overlap.py: the hooks of `overlap` on gloo, DeAR, and hooks that reduce nothing."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bench.jobs.data_parallel import (
    COSTS,
    DEAR,
    DEAR_GLOO,
    FIFO,
    GLOO,
    HOOKS,
    OURS,
    STOCK,
    Job,
    hooks_of,
    measure_costs,
    reduce_nothing,
)
from tests import ranks


def trained(rank: int, system: str, **options: Any) -> tuple[list[Tensor], int]:
    """Parameters after some steps, and the bytes of gradients that commlayer has averaged."""
    torch.manual_seed(1)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), gradient_as_bucket_view=True, bucket_cap_mb=1e-4
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(2 + rank)
    with hooks_of(system, model, optimizer, **options) as handle:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    averaged = handle.state.averaged_bytes if handle is not None else 0
    return [parameter.detach() for parameter in model.parameters()], averaged


@pytest.mark.parametrize("system", [HOOKS, FIFO, DEAR_GLOO])
@ranks.on(2, ranks.run_gloo)
def test_hooks_train_as_ddp_does(rank: int, size: int, system: str) -> None:
    """`overlap, one class` beside it, which makes a commlayer group."""
    plain, _ = trained(rank, GLOO)
    ours, averaged = trained(rank, system)
    assert all(map(torch.equal, plain, ours))
    assert (averaged > 0) == (system == FIFO)
    dist.barrier()


@ranks.on(3, ranks.run_job)
def test_dear_trains_as_ddp_does(rank: int, size: int) -> None:
    """DeAR runs on commlayer; the shards of three ranks are padded."""
    plain, _ = trained(rank, STOCK)
    ours, averaged = trained(rank, DEAR)
    assert averaged == 0
    for one, other in zip(plain, ours, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-7)
    dist.barrier()


@ranks.on(2, ranks.run_job)
def test_costs_are_those_of_a_step_without_reductions(rank: int, size: int) -> None:
    for system in (STOCK, OURS):
        own, _ = trained(rank, system, reduce=reduce_nothing)
        others = [torch.empty_like(own[0]) for _ in range(size)]
        dist.all_gather(others, own[0].contiguous())
        assert not torch.equal(*others)
    costs = measure_costs(Job(COSTS, steps=1, forward_s=0.001), width=64)["costs"]
    for computed in (costs["plain"], costs["deferred"]):
        assert computed["forward_s"] > 0.008
        assert computed["backward_s"] > 0.016
    assert 0 < costs["reduce_s"] <= costs["class_reduce_s"]
    assert costs["latency_s"] <= costs["class_latency_s"]
