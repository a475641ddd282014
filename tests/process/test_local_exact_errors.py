"""Faults of exact steps: each is a typed error on all ranks, before anything hangs."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import commlayer
from commlayer.frontend.local import bucket
from tests import ranks
from tests.process.test_local_exact import BYTES, SIZE, exact, sgd
from tests.process.test_local_steps import Net, loss_of, train


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_scales_that_differ_are_refused(rank: int, size: int) -> None:
    model = Net()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0 if rank else 1024.0)
    with (
        pytest.raises(commlayer.ConfigError, match="loss scale differs: 1024 on rank 0, 512 on rank 1"),
        exact(model, optimizer),
    ):
        scaler.scale(loss_of(model, rank, 0)).backward()
    dist.barrier()


def train_with_fewer_passes(rank: int, *, goes_on: bool) -> None:
    """The third step has two backward passes instead of four, and rank 1 overflows there."""
    model = Net()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with exact(model, optimizer):
        for step, passes in enumerate((4, 4, 2, 4, 4) if goes_on else (4, 4, 2)):
            optimizer.zero_grad()
            for _ in range(passes):
                factor = torch.inf if (rank, step) == (1, 2) else 1
                scaler.scale(loss_of(model, rank, step) * factor).backward()
            scaler.step(optimizer)
            scaler.update()


@pytest.mark.parametrize("goes_on", [False, True])
@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_a_step_of_fewer_passes_that_one_grad_scaler_skips(rank: int, size: int, goes_on: bool) -> None:
    found = "loss scale differs: 1024 on rank 0, 512 on rank 1" if goes_on else "rank 1 has ended"
    text = f"{found}.*the GradScaler of another one has skipped .*make equally many backward passes in each step"
    with pytest.raises(commlayer.CommError, match=text):
        train_with_fewer_passes(rank, goes_on=goes_on)
    dist.barrier()


def train_unevenly(rank: int) -> None:
    """Rank 1 makes two backward passes in the second step."""
    model = Net()
    optimizer = sgd(model)
    with exact(model, optimizer):
        for step in range(3):
            optimizer.zero_grad()
            for _ in range(1 + (rank == 1 and step == 1)):
                loss_of(model, rank, step).backward()
            optimizer.step()


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_backward_passes_that_differ_are_refused(rank: int, size: int) -> None:
    with pytest.raises(commlayer.CommError, match=r"the number of the step differs: .* equally many backward passes"):
        train_unevenly(rank)
    dist.barrier()


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_policies_that_are_refused(rank: int, size: int) -> None:
    for codecs, optimizer, text in (
        (("bf16", "int8"), torch.optim.SGD, "policy differs: .*bf16.* on rank 0, .*int8.* on rank 1"),
        (("sign", "sign"), torch.optim.Adam, "sign"),
    ):
        model, policy = Net(), commlayer.Policy(codec=codecs[rank])
        stepped = optimizer(model.parameters(), lr=0.01)
        with pytest.raises(commlayer.ConfigError, match=text), exact(model, stepped, policy=policy):
            pass
        dist.barrier()


def train_and_destroy(rank: int) -> None:
    """Rank 0 destroys all groups after two of four steps."""
    model = Net()
    optimizer = sgd(model)
    with exact(model, optimizer):
        train(model, optimizer, rank, range(2))
        if rank == 0:
            dist.destroy_process_group()
        train(model, optimizer, rank, range(2, 4))


@ranks.on(2, environ=ranks.NETWORK)
def test_a_script_that_destroys_its_groups_is_told_so(rank: int, size: int) -> None:
    ranks.init(rank, size)
    text = "no operation may follow destroy_process_group" if rank == 0 else "culprit: rank 0 on "
    with pytest.raises(commlayer.CommError, match=f"^rank {rank} of group .*{text}"):
        train_and_destroy(rank)


def leaving(rank: int, size: int, codec: str, weighted: bool) -> str:
    with ranks.job(rank, size):
        model = Net()
        optimizer = sgd(model)
        policy = commlayer.Policy(codec=codec)
        samples = (lambda: 1.0) if weighted else None
        with pytest.raises(commlayer.CommError) as error, exact(model, optimizer, policy=policy, samples=samples):
            train(model, optimizer, rank, range(4 if rank else 5))  # auto decides in the fifth
        return str(error.value)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("codec", ["none", "int4", "auto"])
def test_a_rank_that_leaves_early_is_named_on_all(codec: str, weighted: bool) -> None:
    for text in ranks.run(leaving, 2, codec, weighted, environ=ranks.NETWORK):
        assert "rank 1 has ended `with LocalSteps(...)`, and others make another exact step" in text


def train_until(rank: int, at: int, codec: str) -> None:
    """Rank 1 dies in the backward pass of a step, while the gradients of the last layer are on their way."""

    def die(gradient: Tensor) -> Tensor:
        if (rank, local.steps) == (1, at):
            os.kill(os.getpid(), signal.SIGKILL)
        return gradient

    model = Net()
    optimizer = sgd(model)
    next(model.parameters()).register_hook(die)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket, "BYTES", BYTES)
        with exact(model, optimizer, policy=commlayer.Policy(codec=codec)) as local:
            train(model, optimizer, rank, range(8))


def dying(rank: int, size: int, at: int, codec: str) -> str:
    ranks.init(rank, size)
    with pytest.raises(commlayer.PeerLostError, match="rank 1") as error:
        train_until(rank, at, codec)
    return type(error.value).__name__


@pytest.mark.parametrize("codec", ["none", "int4"])
@pytest.mark.parametrize("at", [0, 4])
def test_a_site_that_dies_in_its_backward_pass_is_an_error_on_all_others(at: int, codec: str) -> None:
    found = ranks.outcomes(dying, SIZE, at, codec, environ=ranks.UDP)
    assert [found[0].result, found[2].result] == ["PeerLostError"] * 2, found
