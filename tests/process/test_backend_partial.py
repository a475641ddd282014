"""Groups with a loss bound on a network without losses: partial operations, refusals, and exact training."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.frontend.group.backend import CommProcessGroup
from commlayer.loss import operation_policy
from commlayer.tools.bench.papers import policy_of
from commlayer.transport.base import Qos
from tests import ranks

NUMEL = 300_000


def make(**policy: Any) -> CommProcessGroup:
    group = dist.new_group(backend="commlayer", pg_options=commlayer.Options(commlayer.Policy(**policy)))
    assert isinstance(group, CommProcessGroup)
    return group


def options(op: Any = dist.ReduceOp.SUM) -> Any:
    made = dist.AllreduceOptions()
    made.reduceOp = dist.ReduceOp(op)
    return made


@ranks.on(3, ranks.run_job, environ=ranks.NETWORK)
def test_results_without_losses_are_exact(rank: int, size: int) -> None:
    for treatment in ("feedback", "rescale", "zero"):
        group = make(loss_bound=0.1 if treatment == "zero" else 1e-6, treatment=treatment)
        assert group.can_lose
        source = torch.arange(NUMEL, dtype=torch.float64) + rank
        target = torch.empty_like(source)
        work = group.allreduce_from(source, target, options())
        assert work.missing() == []
        exact = size * torch.arange(NUMEL) + sum(range(size))
        assert torch.equal(target, exact.double())
        assert torch.equal(source, torch.arange(NUMEL) + float(rank))
        small = torch.ones(3)
        assert group.allreduce_from(small, torch.empty(3), options(dist.ReduceOp.AVG)).result()[0].tolist() == [1.0] * 3
        for tensor in (source.clone(), torch.arange(NUMEL) + rank, (source + 1j).to(torch.complex64)):
            dist.all_reduce(tensor, group=group)  # in place, for any type
            assert torch.equal(tensor.real.to(torch.float32), exact.float())
        shard = torch.empty(NUMEL // size)
        dist.reduce_scatter_tensor(shard, torch.full((NUMEL // size * size,), 2.0), dist.ReduceOp.AVG, group=group)
        assert torch.equal(shard, torch.full_like(shard, 2.0))


@ranks.on(2, ranks.run_job)
def test_shared_memory_loses_nothing(rank: int, size: int) -> None:
    group = make(loss_bound=0.1)
    assert not group.can_lose
    target = torch.empty(NUMEL)
    assert group.allreduce_from(torch.ones(NUMEL), target, options()).missing() == []
    assert (target == size).all()


def test_options_want_a_policy() -> None:
    wrong: Any = "loss_bound=0.01"
    with pytest.raises(commlayer.ConfigError, match=r"Options\('loss_bound=0.01'\): pass a policy"):
        commlayer.Options(wrong)
    assert commlayer.Options().policy == commlayer.Policy()


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_operations_that_need_all_their_parts_are_refused(rank: int, size: int) -> None:
    group = make(loss_bound=0.1)
    integers = torch.zeros(8, dtype=torch.int32)
    strided = torch.zeros(8, 2)[:, 0]
    who = rf"rank {rank} of group '\d'"
    for source, target, op in (
        (integers, integers, dist.ReduceOp.SUM),
        (torch.zeros(8), torch.zeros(8), dist.ReduceOp.MAX),
        (strided, strided, dist.ReduceOp.SUM),
        (torch.zeros(8), torch.zeros(9), dist.ReduceOp.SUM),
    ):
        with pytest.raises(
            commlayer.ConfigError,
            match=rf"{who}: {op.name} of .*needs sums or averages of dense floating.*use allreduce",
        ):
            group.allreduce_from(source, target, options(op))
    policy = commlayer.Policy(loss_bound=0.1, treatment="rescale")
    with pytest.raises(
        commlayer.ConfigError,
        match=rf"{who}: SUM of torch.int32: bounded .*loss_bound=0",
    ):
        group.allreduce([integers], options(), policy=policy)
    with pytest.raises(commlayer.ConfigError, match=rf"{who}: MAX of torch.float32: bounded loss"):
        group.allreduce([torch.zeros(8)], options(dist.ReduceOp.MAX), policy=policy)


@ranks.on(2, environ=ranks.NETWORK)
def test_training_with_feedback_is_that_without_where_nothing_is_lost(rank: int, size: int) -> None:
    vars(operation_policy)["Qos"] = functools.partial(Qos, deadline_us=0)  # a busy machine must not look like a loss
    results = []
    for policy in (commlayer.Policy(), commlayer.Policy(loss_bound=0.1)):
        ranks.init(rank, size)
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 100)))
        model.register_comm_hook(commlayer.HookState(policy), commlayer.allreduce_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 300, generator=generator)).square().mean().backward()
            optimizer.step()
        results.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
        dist.barrier()
        dist.destroy_process_group()
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("environ", [{}, ranks.NETWORK], ids=["one host", "network"])
@ranks.on(2, ranks.run_job, environ="environ")
def test_ranks_with_different_loss_bounds_get_an_error(rank: int, size: int) -> None:
    for wanted in (
        ({"loss_bound": 0.1}, {"loss_bound": 0.05}),
        ({"loss_bound": 0.1}, {"loss_bound": 0.10001}),  # the plans are the same
        ({"loss_bound": 0.1}, {"loss_bound": 0.1, "treatment": "rescale"}),
        ({"loss_bound": 0.1, "treatment": "zero"}, {"loss_bound": 0.1, "partial_results": True}),
        ({"loss_bound": 0.1}, {}),
    ):
        policy = policy_of(wanted[rank])  # of the operation: those of a group are compared when it is made
        group = make()
        with pytest.raises(commlayer.MismatchError, match=f"rank {rank} "):
            group.allreduce_from(torch.ones(NUMEL), torch.empty(NUMEL), options(), policy=policy).wait()
        group = make()
        with pytest.raises(commlayer.MismatchError, match=f"rank {rank} "):
            group.allreduce([torch.ones(NUMEL)], options(), policy=policy).wait()
        dist.barrier()
