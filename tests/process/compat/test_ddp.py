"""DistributedDataParallel with uneven inputs and torch's own communication hooks.

tests/process/test_ddp.py has its flags.
"""

import copy
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tests import ranks
from tests.process.compat.gloo import same_as_gloo


class Net(nn.Module):
    """Has a buffer that every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.norm = nn.BatchNorm1d(64)
        self.second = nn.Linear(64, 64)
        self.last = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        x = x + self.second(x).relu()
        return self.last(x)  # type: ignore[no-any-return]


def data(rank: int, step: int) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * rank + step))


def losses_of(model: nn.Module, rank: int, steps: int = 4) -> list[Tensor]:
    """The losses of some steps of training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(data(rank, step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return losses


def train(model: nn.Module, rank: int, steps: int = 4) -> list[Any]:
    """The losses, then the parameters and buffers."""
    return [losses_of(model, rank, steps), list(model.state_dict().values())]


@pytest.mark.parametrize("divide_by_initial_world_size", [True, False])
@ranks.on(3, same_as_gloo)
def test_join_of_uneven_inputs(rank: int, size: int, divide_by_initial_world_size: bool) -> Any:
    """False has C++ wait for a work of ours of which Python holds nothing any more: see frontend/group/submit.py."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 4)))
    with model.join(divide_by_initial_world_size=divide_by_initial_world_size):
        result = train(model, rank, steps=2 + 2 * rank)
    return [result[0], [parameter.detach().clone() for parameter in model.parameters()]]


@ranks.on(2, same_as_gloo)
def test_join_with_many_works_in_flight(rank: int, size: int) -> Any:
    """Hundreds of other one-element works between a forward pass and the backward pass that waits for join's."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 4)))
    with model.join(divide_by_initial_world_size=False):
        result = model(data(rank, 1)).sum()
        works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(600)]
        result.backward()
        for work in works:
            assert work is not None
            work.wait()
    return [parameter.grad for parameter in model.parameters()]


# These are not here, as torch takes them with CUDA only: bf16_compress_hook, and DDP's own mixed precision.
@pytest.mark.parametrize("name", ["allreduce_hook", "fp16_compress_hook", "powerSGD"])
@ranks.on(2, same_as_gloo)
def test_hook(rank: int, size: int, name: str) -> Any:
    model = DistributedDataParallel(Net())
    if name == "powerSGD":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        model.register_comm_hook(None, getattr(default_hooks, name))
    return train(model, rank)


@ranks.on(2, ranks.run_job)
def test_powersgd_of_several_buckets(rank: int, size: int) -> None:
    """It waits for operations in callbacks. With gloo it hangs.

    Rank 1 is late: its operations end at once, those of rank 0 while it starts others. Each rank's gradient of a matrix
    has rank 1, so two columns make exact averages.
    """
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    plain = copy.deepcopy(layers)
    model = DistributedDataParallel(layers, bucket_cap_mb=0.01)
    for layer in list(layers)[1:]:
        layer.register_full_backward_pre_hook(lambda *_: time.sleep(0.01 * rank))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2, warm_start=False)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(6):
        x = torch.randn(1, 64, generator=torch.Generator().manual_seed(100 * rank + step))
        for module in (model, plain):
            module.zero_grad()
            module(x).square().mean().backward()
        for ours, own in zip(layers.parameters(), plain.parameters(), strict=True):
            assert own.grad is not None
            dist.all_reduce(own.grad, dist.ReduceOp.AVG)
            torch.testing.assert_close(ours.grad, own.grad, rtol=1e-3, atol=1e-6)
    assert len(state.error_dict) >= 5  # one per bucket


def _sync_parameters(rank: int, size: int) -> Any:
    torch.manual_seed(rank)  # every rank starts elsewhere: rank 0's parameters count
    model = DistributedDataParallel(Net())
    dist.barrier()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_parameters_of_rank_0_go_to_all() -> None:
    results = same_as_gloo(_sync_parameters, 3)
    assert results[1:] == results[:1] * 2
