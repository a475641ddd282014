"""Training does not depend on `torch.set_default_dtype` and `torch.set_default_device`.

The device `meta` stands for a GPU: its tensors have no memory that the engine or a kernel could read.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from tests import ranks

STEPS = 10


def trained(rank: int, size: int, train: Callable[[nn.Module, Iterator[Tensor]], Any]) -> list[Tensor]:
    """The weights after a training with the defaults as they are."""
    drawn = torch.Generator(device="cpu").manual_seed(rank)
    kind = {"dtype": torch.float32, "device": "cpu"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 96, **kind), nn.ReLU(), nn.Linear(96, 32, **kind))  # type: ignore[arg-type]
    train(net, (torch.randn(4, 64, generator=drawn, **kind) for _ in range(STEPS)))  # type: ignore[call-overload]
    return [parameter.detach().clone() for parameter in net.parameters()]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def hook(codec: str, net: nn.Module, batches: Iterable[Tensor]) -> None:
    model, optimizer = DistributedDataParallel(net), sgd(net)
    policy = commlayer.Policy(codec=codec, exact_steps=0)
    model.register_comm_hook(commlayer.HookState(policy, optimizer=optimizer), commlayer.allreduce_hook)
    for batch in batches:
        step(model, optimizer, batch)


def local_steps(codec: str, net: nn.Module, batches: Iterable[Tensor]) -> None:
    optimizer = sgd(net)
    with commlayer.LocalSteps(net, optimizer, every=4, fragments=2, codec=codec, exact_steps=2):
        for batch in batches:
            step(net, optimizer, batch)


def elastic(codec: str, net: nn.Module, batches: Iterator[Tensor]) -> None:
    with commlayer.elastic(net, sgd(net), codec=codec, clip_norm=1.0) as job:
        for _ in job.sampler(range(8 * STEPS), 8, by_speed=False):
            net(next(batches)).square().mean().backward()
            job.step()


def publish(_: str, net: nn.Module, batches: Iterable[Tensor]) -> None:
    """The reader's weights go back into the model."""
    address = f"127.0.0.1:{20_000 + os.getpid() % 10_000}"
    with commlayer.publish(net, address) as publisher, commlayer.subscribe(address) as readers:
        for number, batch in enumerate(batches):
            step(net, sgd(net), batch)
            publisher.commit(number)
            version = readers.latest(20.0)
            assert version is not None
            for parameter in net.parameters():
                parameter.data.zero_()
            version.apply(net)


PROGRAMS: list[tuple[Callable[..., None], str]] = [
    *((hook, codec) for codec in ("int8", "powersgd:2", "topk:0.05", "auto")),
    *((local_steps, codec) for codec in ("none", "int4-int8")),
    *((elastic, codec) for codec in ("none", "bf16")),
    (publish, ""),
]


@pytest.mark.parametrize(
    ("program", "codec"), PROGRAMS, ids=[f"{program.__name__} {codec}".strip() for program, codec in PROGRAMS]
)
@ranks.on(2, environ=ranks.UDP)
def test_training_has_the_same_bits_with_other_defaults(
    rank: int, size: int, program: Callable[..., None], codec: str
) -> None:
    with ranks.job(rank, size):
        usual = trained(rank, size, lambda net, batches: program(codec, net, batches))
        for dtype in (torch.float64, torch.bfloat16):
            torch.set_default_dtype(dtype)
            found = trained(rank, size, lambda net, batches: program(codec, net, batches))
            torch.set_default_dtype(torch.float32)
            assert all(map(torch.equal, found, usual)), dtype
        torch.set_default_device("meta")
        found = trained(rank, size, lambda net, batches: program(codec, net, batches))
        torch.set_default_device(None)
        assert all(map(torch.equal, found, usual))
