"""A failed operation is a RuntimeError with its text, for every way to wait: never a crash, never silence.

Each case is a process of its own, because what is guarded against ends the process (see work.py).
"""

import os
import signal
import time
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


def start() -> Any:
    return dist.all_reduce(torch.ones(3), async_op=True)


def functional() -> None:
    funcol.wait_tensor(funcol.all_reduce(torch.ones(3), "sum", list(range(dist.get_world_size()))))


def coalesced() -> None:
    tensors = [torch.ones(3), torch.ones(4)]
    for tensor in funcol.all_gather_into_tensor_coalesced(tensors, list(range(dist.get_world_size()))):
        funcol.wait_tensor(tensor)


def ddp(model: DistributedDataParallel) -> None:
    model(torch.ones(2, 4)).sum().backward()


def ddp_hook(model: DistributedDataParallel) -> None:
    model.register_comm_hook(commlayer.HookState(), commlayer.allreduce_hook)
    ddp(model)


def ddp_hook_of_torch(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))
    ddp(model)


OPERATIONS: dict[str, Callable[..., object]] = {
    "wait": lambda: dist.all_reduce(torch.ones(3)),
    "wait_later": lambda: start().wait(),
    "future": lambda: start().get_future().wait(),
    "then": lambda: start().get_future().then(lambda done: done.value()[0] * 2).wait(),
    "functional": functional,
    "coalesced": coalesced,
    "ddp": ddp,
    "ddp_hook": ddp_hook,
    "ddp_hook_of_torch": ddp_hook_of_torch,
}


def models(name: str) -> list[DistributedDataParallel]:
    """The argument of an operation of DDP."""
    return [DistributedDataParallel(torch.nn.Linear(4, 4))] if name.startswith("ddp") else []


def error_of(name: str, arguments: list[DistributedDataParallel]) -> str:
    with pytest.raises(RuntimeError) as caught:
        OPERATIONS[name](*arguments)
    return str(caught.value)


def _fail(rank: int, size: int, name: str, delay_s: float) -> str:
    fake_transport.install()
    ranks.init(rank, size)
    arguments = models(name)
    group: Any = dist.group.WORLD
    group._native.failure = commlayer.PeerLostError(TEXT)
    group._native.delay_s = delay_s
    return error_of(name, arguments)


@pytest.mark.parametrize("delay_s", [0.0, 0.3], ids=["at once", "later"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_failure_is_an_error_with_its_text(name: str, delay_s: float) -> None:
    (outcome,) = ranks.outcomes(_fail, 1, name, delay_s)
    assert outcome.error is None
    assert outcome.exit_code == 0
    assert TEXT in outcome.result


def _killed(rank: int, size: int, name: str) -> str:
    ranks.init(rank, size)
    arguments = models(name)
    for model in arguments:
        ddp(model)
    dist.barrier()
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of(name, arguments)


@pytest.mark.parametrize("shm", ["1", "0"], ids=["shm", "udp"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_killed_peer_is_an_error_with_its_rank(shm: str, name: str) -> None:
    environ = {"COMMLAYER_SHM": shm, "COMMLAYER_IFNAME": "lo", "COMMLAYER_PEER_TIMEOUT_S": "1"}
    survivor, killed = ranks.outcomes(_killed, 2, name, environ=environ)
    assert killed.exit_code == -signal.SIGKILL
    assert survivor.error is None
    assert survivor.exit_code == 0
    assert "peer died or stopped answering after " in survivor.result
    assert "(culprit: rank 1 on " in survivor.result


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_results_need_a_place_for_each_value(rank: int, size: int) -> None:
    """All elements of an expanded tensor are one. Nothing is sent: the next call is right."""
    with pytest.raises(commlayer.ConfigError, match=r"shape \(3,\) goes to a tensor whose elements share memory"):
        dist.all_reduce(torch.ones(1).expand(3))
    values = torch.ones(3)
    dist.all_reduce(values)
    assert values.tolist() == [2.0] * 3
