"""A model whose gradients are given, in DDP with the hook: for tests that compare averages with exact ones."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlayer

SHAPES = ((300, 400), (100,), (33, 501), (50_000, 2))
"""The shapes of the parameters."""


class Drift(nn.Module):
    """Its gradients are its inputs, independent of its parameters. None: the parameter is not used."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES)

    def forward(self, directions: Sequence[Tensor | None]) -> Tensor:
        used = zip(self.weights, directions, strict=True)
        return torch.stack([(w * d).sum() for w, d in used if d is not None]).sum()


def directions(rank: int, step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def mean(size: int, step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    every = [directions(rank, step, dtype) for rank in range(size)]
    return [torch.stack(tensors).double().mean(0) for tensors in zip(*every, strict=True)]


def hooked(
    policy: commlayer.Policy,
    dtype: torch.dtype = torch.float32,
    *,
    finds_unused: bool = False,
    bucket_cap_mb: float = 0.6,
    **state: Any,
) -> Any:
    """A `Drift` with the hook, and the hook's state. No codec starts with exact steps.

    With `finds_unused`, DDP keeps the buckets of its first step.
    """
    model = DistributedDataParallel(Drift(dtype), bucket_cap_mb=bucket_cap_mb, find_unused_parameters=finds_unused)
    policy = dataclasses.replace(policy, exact_steps=0)
    made = commlayer.HookState(policy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **state)
    model.register_comm_hook(made, commlayer.allreduce_hook)
    return model, made


def step_of(model: DistributedDataParallel, inputs: Sequence[Tensor | None]) -> list[Tensor]:
    model.zero_grad()
    model(inputs).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def check_equal(tensors: list[Tensor], size: int) -> None:
    """That all ranks have the same bits."""
    for tensor in tensors:
        theirs = [torch.empty_like(tensor) for _ in range(size)]
        dist.all_gather(theirs, tensor)
        assert all(torch.equal(other, tensor) for other in theirs)


def nmse(values: Tensor, exact: Tensor) -> float:
    """The mean squared error in parts of the mean square."""
    return float((values - exact).double().square().mean() / exact.double().square().mean())


def trained(rank: int, policy: commlayer.Policy, steps: int = 120) -> float:
    """The loss of a small network after it has learned another one by SGD; of rank 0's inputs, the same on all."""
    torch.manual_seed(1)
    teacher, model = (nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 32)) for _ in range(2))
    replica = DistributedDataParallel(model, bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    replica.register_comm_hook(commlayer.HookState(policy, optimizer=optimizer), commlayer.allreduce_hook)

    def loss(inputs: Tensor, through: nn.Module) -> Tensor:
        return nn.functional.mse_loss(through(inputs), teacher(inputs).detach())

    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(torch.randn(64, 64, generator=generator), replica).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss(torch.randn(1024, 64, generator=torch.Generator().manual_seed(99)), model))
