"""CUDA tensors through the whole backend, on a fake of a GPU: the checks of `python -m tests.gpu`, and training."""

import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.frontend.gradients import started
from commlayer.frontend.gradients.ddp import check_dense
from commlayer.frontend.overlap import ddp as overlap_ddp
from tests import ranks
from tests.gpu.checks import CHECKS, ON_GPUS, UNTIDY
from tests.gpu.lab import FakeGpu, Lab


@pytest.mark.parametrize("queues", [1, None])
@pytest.mark.parametrize("name", CHECKS)
@ranks.on(2, ranks.run_job)
def test_check(rank: int, size: int, name: str, queues: int | None) -> None:
    lab = FakeGpu(queues=queues)
    lab.stage()
    CHECKS[name](lab, rank, size)


@pytest.mark.parametrize("name", CHECKS)
@ranks.on(2, ranks.run_job)
def test_check_where_wait_blocks(rank: int, size: int, name: str) -> None:
    lab = FakeGpu(stream_wait=False)
    lab.stage()
    CHECKS[name](lab, rank, size)


@pytest.mark.parametrize("name", ON_GPUS)
@ranks.on(2, ranks.run_job)
def test_checks_that_need_a_gpu_hold_on_the_host(rank: int, size: int, name: str) -> None:
    ON_GPUS[name](Lab(), rank, size)


@pytest.mark.parametrize("stream_wait", [True, False])
@ranks.on(2, ranks.run)
def test_a_process_ends_without_destroy(rank: int, size: int, stream_wait: bool) -> None:
    ranks.init(rank, size)
    lab = FakeGpu(stream_wait=stream_wait)
    lab.stage()
    UNTIDY["left"](lab, rank, size)


@pytest.mark.parametrize("stream_wait", [True, False])
def test_a_rank_is_killed(stream_wait: bool) -> None:
    ended = ranks.outcomes(killed, 2, stream_wait)
    assert ended[0].error is None
    assert ended[1].exit_code == -signal.SIGKILL


def killed(rank: int, size: int, stream_wait: bool) -> None:
    ranks.init(rank, size)
    lab = FakeGpu(stream_wait=stream_wait)
    lab.stage()
    UNTIDY["killed"](lab, rank, size)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(6))

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            values = torch.tanh(layer(values))
        return values


def train(
    lab: FakeGpu | None, rank: int, policy: commlayer.Policy, *, overlapped: bool = False, staleness: int = 0
) -> tuple[list[Tensor], dict[str, Any], int]:
    """Some steps: the parameters, and state and counter of the hook."""
    torch.manual_seed(1)
    model = DistributedDataParallel(Net(), gradient_as_bucket_view=True, bucket_cap_mb=0.005)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = commlayer.HookState(policy, optimizer=optimizer)
    if lab is not None:
        lab.stage(state.group())
    handle = None
    if overlapped:
        with pytest.MonkeyPatch.context() as patch:
            if lab is not None:
                patch_overlap(patch, lab)
            handle = commlayer.overlap(model, optimizer, state=state, staleness=staleness)
            loop(lab, rank, model, optimizer)
            handle.finish()
            handle.remove()
    else:
        hook = commlayer.allreduce_hook
        model.register_comm_hook(state, hook if lab is None else lab.hook(hook))
        loop(lab, rank, model, optimizer)
    saved = state.state_dict()
    if lab is not None:
        lab.order()
    return [parameter.detach().clone() for parameter in model.parameters()], saved, state.averaged_bytes


def patch_overlap(patch: pytest.MonkeyPatch, lab: FakeGpu) -> None:
    """Buckets are on the device, and the host makes steps at once that a GPU would make in the order of its stream."""
    wait = started.Started.wait

    def adopt(bucket: dist.GradBucket) -> None:
        lab.cuda.adopt(bucket.buffer())
        check_dense(bucket)

    def ordered(average: started.Started) -> None:
        wait(average)
        lab.order()

    patch.setattr(overlap_ddp, "check_dense", adopt)
    patch.setattr(started.Started, "wait", ordered)


def loop(lab: FakeGpu | None, rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 24, generator=generator)).square().mean().backward()
        if lab is not None:
            lab.order()
        optimizer.step()


POLICIES = {
    "none": commlayer.Policy(deterministic=True),
    "bf16": commlayer.Policy(codec="bf16"),
    "int4": commlayer.Policy(codec="int4"),
    "sign": commlayer.Policy(codec="sign", exact_steps=1),
    "powersgd": commlayer.Policy(codec="powersgd:2", exact_steps=1),
    "topk": commlayer.Policy(codec="topk:0.1", exact_steps=1),
    "losses": commlayer.Policy(loss_bound=0.1, deterministic=False),
    "auto": commlayer.Policy(codec="auto"),
}


@pytest.mark.parametrize("name", POLICIES)
@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_training_is_that_of_the_host(rank: int, size: int, name: str) -> None:
    mine, kept, averaged = train(FakeGpu(), rank, POLICIES[name])
    theirs, expected, counted = train(None, rank, POLICIES[name])
    assert averaged == counted > 0
    assert kept["steps"] == expected["steps"] == 5
    if name == "auto":  # which chooses by the clock
        return
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert str(kept["feedback"]) == str(expected["feedback"])


@pytest.mark.parametrize("queues", [1, None])
@pytest.mark.parametrize("staleness", [0, 1])
@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_gradients_travel_during_the_next_forward_pass(
    rank: int, size: int, staleness: int, queues: int | None
) -> None:
    policy = POLICIES["none"]
    mine, _, _ = train(FakeGpu(queues=queues), rank, policy, overlapped=True, staleness=staleness)
    theirs, _, _ = train(None, rank, policy, overlapped=True, staleness=staleness)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
