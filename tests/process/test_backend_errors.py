"""A failed operation is a RuntimeError with its text, for every way to wait: never a crash, never silence.

Each case is a process of its own, because what is guarded against ends the process (see work.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import commlayer
from tests import fake_transport, ranks

TEXT = "peer 1 is lost: it has been silent for 10 s"


def wait() -> None:
    dist.all_reduce(torch.ones(3))


def wait_later() -> None:
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work is not None
    work.wait()


def future() -> None:
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work is not None
    work.get_future().wait()


def then() -> None:
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work is not None
    work.get_future().then(lambda done: done.value()[0] * 2).wait()


def functional() -> None:
    funcol.wait_tensor(funcol.all_reduce(torch.ones(3), "sum", [0]))


def coalesced() -> None:
    tensors = [torch.ones(3), torch.ones(4)]
    for tensor in funcol.all_gather_into_tensor_coalesced(tensors, [0]):
        funcol.wait_tensor(tensor)


def ddp(model: DistributedDataParallel) -> None:
    model(torch.ones(2, 4)).sum().backward()


def ddp_hook(model: DistributedDataParallel) -> None:
    model.register_comm_hook(commlayer.HookState(), commlayer.allreduce_hook)
    model(torch.ones(2, 4)).sum().backward()


def ddp_hook_of_torch(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))
    model(torch.ones(2, 4)).sum().backward()


def _fail(rank: int, size: int, fails: Callable[..., None], delay_s: float) -> str:
    fake_transport.install()
    ranks.init(rank, size)
    arguments = []
    if fails.__name__.startswith("ddp"):
        arguments = [DistributedDataParallel(torch.nn.Linear(4, 4))]
    group: Any = dist.group.WORLD
    group._native.failure = commlayer.PeerLostError(TEXT)
    group._native.delay_s = delay_s
    with pytest.raises(RuntimeError) as caught:
        fails(*arguments)
    return str(caught.value)


@pytest.mark.parametrize("delay_s", [0.0, 0.3], ids=["at once", "later"])
@pytest.mark.parametrize(
    "fails",
    [wait, wait_later, future, then, functional, coalesced, ddp, ddp_hook, ddp_hook_of_torch],
    ids=lambda function: function.__name__,
)
def test_a_failure_is_an_error_with_its_text(fails: Callable[..., None], delay_s: float) -> None:
    (outcome,) = ranks.outcomes(_fail, 1, fails, delay_s)
    assert outcome.error is None
    assert outcome.exit_code == 0
    assert TEXT in outcome.result
