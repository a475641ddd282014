"""Sums whose shares change while a job runs: exact, equal on all ranks, and the same bits where that was asked for."""

import functools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import commlayer
from commlayer.frontend.group import shares
from commlayer.loss import operation_policy
from commlayer.plans.weights import EQUAL, Weights
from commlayer.transport.base import Qos
from tests import ranks
from tests.drawn import alike

DRAWN = alike(25)


class Sum(NamedTuple):
    """One all-reduce of a program."""

    numel: int
    dtype: torch.dtype
    is_async: bool
    is_average: bool
    policy: commlayer.Policy | None


POLICIES = (None, commlayer.Policy(codec="bf16"), commlayer.Policy(codec="int8"), commlayer.Policy(loss_bound=0.1))
SUMS = st.builds(
    Sum,
    numel=st.sampled_from([1, 1000, 65_536, 65_537, 200_001, 400_000, 1_500_000]),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.int32]),
    is_async=st.booleans(),
    is_average=st.booleans(),
    policy=st.sampled_from(POLICIES),
)


def other_rates(group: Any, rank: int) -> None:
    """From here on, the group measures other rates at each exchange, now and then none, and exchanges them often."""
    vars(shares).update(EVERY=5, LEAD=2)
    chance = random.Random(rank)  # any rates
    group._native.rates = lambda: (200.0, chance.choice((0.0, 100.0, 50.0, 25.0, 70.0, 180.0, 190.0, 200.0)))


def made(policy: commlayer.Policy) -> Any:
    return dist.new_group(pg_options=commlayer.Options(policy))


def run(group: Any, program: list[Sum], value: Callable[[Sum], Tensor]) -> list[Tensor]:
    """The results of a program. Those of a codec or a loss bound are all-reduced as hooks do it."""
    results: list[Tensor] = []
    works = []
    for call in program:
        tensor = value(call)
        is_average = call.is_average and call.dtype != torch.int32
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG if is_average else dist.ReduceOp.SUM)
        options.asyncOp = call.is_async
        if call.policy is not None and call.dtype == torch.float32:
            work = group.allreduce_from(tensor, tensor, options, policy=call.policy, key=len(results))
        else:
            work = group.allreduce([tensor], options)
        works.append(work)
        if not call.is_async:
            work.wait()
        results.append(tensor)
    for work in works:
        work.wait()
    return results


@ranks.on(3, ranks.run_job, environ=ranks.UDP)
def test_drawn_programs_have_the_same_bits_whatever_the_shares(rank: int, size: int) -> None:
    equal, changing = (made(commlayer.Policy(deterministic=True)) for _ in range(2))
    other_rates(changing, rank)
    used = set()

    @DRAWN
    @given(program=st.lists(SUMS.filter(lambda call: call.policy != POLICIES[3]), max_size=12), seed=st.integers(0, 99))
    def check(program: list[Sum], seed: int) -> None:
        def value(call: Sum) -> Tensor:
            generator = torch.Generator().manual_seed(seed * size + rank)
            return torch.randn(call.numel, generator=generator).mul(1000).to(call.dtype)

        for one, other in zip(run(equal, program, value), run(changing, program, value), strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        used.add(changing._submitter._shares._present.weights)

    check()
    assert len(used) > 2
    dist.barrier()


@ranks.on(3, ranks.run_job, environ=ranks.UDP)
def test_drawn_programs_are_exact_and_equal_everywhere(rank: int, size: int) -> None:
    vars(operation_policy)["Qos"] = functools.partial(Qos, deadline_us=0)  # a busy machine must not look like a loss
    group = made(commlayer.Policy())
    other_rates(group, rank)
    used = set()

    @DRAWN
    @given(program=st.lists(SUMS.filter(lambda call: call.policy != POLICIES[2]), max_size=12))
    def check(program: list[Sum]) -> None:
        def value(call: Sum) -> Tensor:
            return ((torch.arange(call.numel) % 7 + rank) * 3).to(call.dtype)  # sums are whole numbers below 256

        for call, result in zip(program, run(group, program, value), strict=True):
            exact = (torch.arange(call.numel) % 7 * size + 3) * 3
            if call.is_average and call.dtype != torch.int32:
                exact = exact.div(size)
            torch.testing.assert_close(result, exact.to(call.dtype), rtol=0, atol=0)
        used.add(group._submitter._shares._present.weights)

    check()
    assert len(used) > 2
    dist.barrier()


@ranks.on(3, ranks.run_job, environ=ranks.UDP)
def test_ranks_with_other_weights_are_named(rank: int, size: int) -> None:
    group: Any = dist.group.WORLD
    group._submitter._shares._present = Weights((128, 128, 64), 1) if rank == 1 else EQUAL
    with pytest.raises(commlayer.MismatchError) as caught:
        dist.all_reduce(torch.ones(100_000))
    text = str(caught.value)
    assert "ranks 0, 2 called all_reduce 1 of float32 [100000], SUM in" in text
    assert "rank 1 called all_reduce 1 of float32 [100000], SUM, shards 128:128:64 in" in text
    assert caught.value.culprit == 1
    ranks.meet("all have their error", size)


@ranks.on(3, ranks.run_job, environ=ranks.UDP)
def test_a_store_that_is_gone_is_an_error_with_a_remedy(rank: int, size: int) -> None:
    class Gone:
        def compare_set(self, *_: str) -> bytes:
            raise RuntimeError("connection reset by peer")

    group: Any = dist.group.WORLD
    group._native.rates = lambda: (100.0, 50.0 if rank == 1 else 100.0)
    group._submitter._shares._store = Gone()
    for _ in range(2):
        dist.all_reduce(torch.ones(100_000))
    with pytest.raises(commlayer.CommError, match=rf"rank {rank}.*Store does not answer.*connection reset"):
        dist.all_reduce(torch.ones(100_000))
    ranks.meet("all have their error", size)


@ranks.on(2, ranks.run_job, environ=ranks.UDP)
def test_two_hosts_exchange_no_rates(rank: int, size: int) -> None:
    group: Any = dist.group.WORLD
    assert group._submitter._shares is None
