"""COMMLAYER_THREADS=2: a second engine carries half of each long operation. Results, errors, counters: as of one."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import commlayer
from commlayer.errors import AbortedError, ConfigError, MismatchError, PeerLostError
from commlayer.transport.native import Engine
from tests import ranks
from tests.drawn import alike
from tests.process.test_shares import POLICIES, Sum, made, other_rates, run

TWO = {**ranks.UDP, "COMMLAYER_THREADS": "2"}
DRAWN = alike(40)
LONG = 1 << 19
SUMS = st.builds(
    Sum,
    numel=st.sampled_from([1000, 262_143, 262_144, 300_001, 700_001, 1_500_000]),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.int32]),
    is_async=st.booleans(),
    is_average=st.booleans(),
    policy=st.sampled_from(POLICIES),
)


def second() -> Engine:
    engine = Engine.current()
    assert engine is not None
    assert engine.second is not None
    return engine.second


def alone(group: Any) -> Any:
    """The group, with one engine for all."""
    group._submitter._second = None
    return group


def threads() -> int:
    """The threads of the engines in this process."""
    return sum((task / "comm").read_text() == "commlayer\n" for task in Path("/proc/self/task").iterdir())


def reduce_until_it_fails(numel: int) -> None:
    for _ in range(100):
        dist.all_reduce(torch.ones(numel))


def value(call: Sum, rank: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(call.numel, generator=generator).mul(1000).to(call.dtype)


@pytest.mark.parametrize("shares", ["equal", "changing"])
@ranks.on(3, ranks.run_job, environ=TWO)
def test_drawn_programs_have_the_bits_of_one_thread(rank: int, size: int, shares: str) -> None:
    one, two = (made(commlayer.Policy(deterministic=True)) for _ in range(2))
    alone(one)
    if shares == "changing":
        other_rates(two, rank)
    before = second().stats()["operations_done"]

    @DRAWN
    @given(
        program=st.lists(SUMS.map(lambda call: call._replace(policy=None)), min_size=1, max_size=8),
        seed=st.integers(0, 99),
    )
    def check(program: list[Sum], seed: int) -> None:
        wanted = run(one, program, lambda call: value(call, rank, seed))
        for found, expected in zip(run(two, program, lambda call: value(call, rank, seed)), wanted, strict=True):
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))

    check()
    divided = second().stats()["operations_done"] - before
    assert divided > 20, divided
    dist.barrier()


@ranks.on(3, ranks.run_job, environ=TWO)
def test_drawn_programs_are_near_the_sums_and_equal_everywhere(rank: int, size: int) -> None:
    group = made(commlayer.Policy())

    @DRAWN
    @given(program=st.lists(SUMS, max_size=5), seed=st.integers(0, 99))
    def check(program: list[Sum], seed: int) -> None:
        results = run(group, program, lambda call: value(call, rank, seed))
        for call, result in zip(program, results, strict=True):
            exact = torch.stack([value(call, other, seed).double() for other in range(size)]).sum(0)
            if call.is_average and call.dtype != torch.int32:
                exact /= size
            error = (result.double() - exact).norm() / exact.norm()
            assert error < (0.02 if call.dtype in (torch.float32, torch.bfloat16) else 1e-6), call
            if call.policy is None or not call.policy.loss_bound:
                others = [torch.empty_like(result) for _ in range(size)]
                dist.all_gather(others, result)
                assert all(torch.equal(other.view(torch.uint8), result.view(torch.uint8)) for other in others)

    check()
    dist.barrier()


@ranks.on(2, ranks.run_job, environ=TWO)
def test_broadcast_and_reduce_are_divided(rank: int, size: int) -> None:
    done = second().stats()["operations_done"]
    for nbytes, dtype in ((1 << 20, torch.complex128), (1 << 20, torch.uint8), (3 << 20, torch.float32)):
        count = nbytes // dtype.itemsize + 1
        tensor = (torch.arange(count) % 50 + rank).to(dtype)
        dist.broadcast(tensor, 1)
        assert torch.equal(tensor, (torch.arange(count) % 50 + 1).to(dtype))
        dist.reduce(tensor, 0)
        assert rank or torch.equal(tensor, 2 * (torch.arange(count) % 50 + 1).to(dtype))
    assert second().stats()["operations_done"] == done + 6
    assert commlayer.stats()["operations_done"] >= done + 12
    dist.barrier()


@ranks.on(2, ranks.run_job, environ=TWO)
def test_operations_that_may_lose_stay_whole(rank: int, size: int) -> None:
    group = made(commlayer.Policy(loss_bound=0.1, treatment="rescale"))
    done = second().stats()["operations_done"]
    dist.all_reduce(torch.ones(LONG), group=group)
    assert second().stats()["operations_done"] == done
    dist.barrier()


@ranks.on(2, ranks.run_job, environ=TWO)
def test_counters_and_paths_are_sums(rank: int, size: int) -> None:
    sent = commlayer.stats()["payload_bytes_sent"], second().stats()["payload_bytes_sent"]
    dist.all_reduce(torch.ones(4 * LONG))
    dist.barrier()
    own = second().stats()["payload_bytes_sent"] - sent[1]
    assert 8 * LONG <= own <= 9 * LONG  # half of the bytes of the tensor
    assert commlayer.stats()["payload_bytes_sent"] - sent[0] >= 1.9 * own
    other = 1 - rank
    assert len(commlayer.paths(other)) == 1
    of_second = second().routes.paths(other)[0]["packets_sent"]
    assert commlayer.paths(other)[0]["packets_sent"] >= 1.5 * of_second
    dist.barrier()


@ranks.on(2, environ=TWO)
def test_the_second_engine_ends_with_the_first(rank: int, size: int) -> None:
    before = threads()
    for _ in range(3):
        with ranks.job(rank, size):
            dist.all_reduce(torch.ones(LONG))
            engine = second()
        with pytest.raises(commlayer.CommError, match="closed"):
            engine.stats()
    assert threads() == before


@ranks.on(2, environ=TWO)
def test_groups_of_one_host_have_one_engine(rank: int, size: int) -> None:
    os.environ["COMMLAYER_SHM"] = "1"
    with ranks.job(rank, size):
        group: Any = dist.group.WORLD
        assert group._native.second is None
        tensor = torch.ones(LONG)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((LONG,), 2.0))


def dies(rank: int, size: int) -> None:
    ranks.init(rank, size)
    dist.all_reduce(torch.ones(LONG))
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        reduce_until_it_fails(LONG)
    assert time.monotonic() - begin < 20
    assert caught.value.culprit == 2
    begin = time.monotonic()
    with pytest.raises(PeerLostError):
        dist.all_reduce(torch.ones(LONG))
    with pytest.raises(PeerLostError):
        dist.all_reduce(torch.ones(1))
    assert time.monotonic() - begin < 5
    dist.destroy_process_group()


def test_a_death_is_an_error_on_all_within_seconds() -> None:
    ranks.results(ranks.outcomes(dies, 3, environ=TWO), {2})


def dies_unseen_by_the_first(rank: int, size: int) -> None:
    ranks.init(rank, size)
    group: Any = dist.group.WORLD
    submitter = group._submitter
    submitter._group, submitter._second = submitter._second, submitter._group  # whole operations go to the second one
    dist.all_reduce(torch.ones(10))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError, match=r"rank 0 of group .*culprit: rank 1"):
        reduce_until_it_fails(10)
    assert group._native.status()[1] == 1
    assert group._native.lost() == [1]
    dist.destroy_process_group()


def test_a_death_that_only_the_second_engine_notices() -> None:
    ranks.results(ranks.outcomes(dies_unseen_by_the_first, 2, environ=TWO), {1})


@ranks.on(2, environ=TWO)
def test_abort_ends_both_parts(rank: int, size: int) -> None:
    ranks.init(rank, size)
    dist.all_reduce(torch.ones(LONG))
    if rank == 0:
        work = dist.all_reduce(torch.ones(LONG), async_op=True)
        assert work is not None
        timer = threading.Timer(0.5, dist.group.WORLD.abort)  # type: ignore[union-attr]
        timer.start()
        with pytest.raises(AbortedError):
            work.wait()
        timer.join()
    else:
        group: Any = dist.group.WORLD
        end = time.monotonic() + 20
        while not group._native.status()[0] and time.monotonic() < end:
            time.sleep(0.01)
        with pytest.raises(AbortedError):
            dist.all_reduce(torch.ones(LONG))
    dist.destroy_process_group()
    ranks.init(rank, size)
    tensor = torch.ones(LONG)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((LONG,), 2.0))
    dist.destroy_process_group()


@ranks.on(2, ranks.run_job, environ=TWO)
def test_operations_of_other_sizes_are_a_mismatch(rank: int, size: int) -> None:
    group = made(commlayer.Policy())
    begin = time.monotonic()
    with pytest.raises(MismatchError):  # one is divided, one is not
        dist.all_reduce(torch.ones(LONG if rank else 1000), group=group)
    if rank == 0:
        dist.destroy_process_group(group)  # and is silent about it
    assert time.monotonic() - begin < 20
    dist.barrier()


@ranks.on(2, ranks.run_job, environ=TWO)
def test_a_group_whose_second_end_has_failed_is_of_no_use(rank: int, size: int) -> None:
    group: Any = made(commlayer.Policy())
    dist.all_reduce(torch.ones(LONG), group=group)
    dist.barrier()
    if rank == 0:
        group._native.second._fail()
    with pytest.raises(AbortedError):
        dist.all_reduce(torch.ones(LONG), group=group)
    with pytest.raises(AbortedError):
        dist.all_reduce(torch.ones(1), group=group)
    dist.all_reduce(torch.ones(LONG))  # other groups go on
    dist.barrier()


@ranks.on(2, ranks.run_job, environ=TWO)
def test_a_call_that_is_never_waited_for_is_done_when_a_part_fails(rank: int, size: int) -> None:
    group: Any = made(commlayer.Policy())
    if rank == 1:
        work = dist.all_reduce(torch.ones(LONG), group=group, async_op=True)
        assert work is not None
        group._native._fail()
        end = time.monotonic() + 10
        while not work.is_completed() and time.monotonic() < end:
            time.sleep(0.01)
        assert work.is_completed()
    dist.barrier()


@ranks.on(2, ranks.run_job, environ=TWO)
def test_a_part_in_flight_does_not_hide_the_failure_of_the_other(rank: int, size: int) -> None:
    group: Any = made(commlayer.Policy())
    if rank == 1:
        work = group.allreduce([torch.ones(LONG)])
        native = group._native
        native.second._fail()
        end = time.monotonic() + 10
        while not native.second.status()[0] and time.monotonic() < end:
            time.sleep(0.01)
        assert native.status()[0] == native.second.status()[0] != ""
        begin = time.monotonic()
        with pytest.raises(AbortedError):
            work.wait(timedelta(seconds=0.3))
        assert time.monotonic() - begin < 5
        assert isinstance(work.exception(), AbortedError)
    dist.barrier()


@ranks.on(2, ranks.run_job, environ=TWO)
def test_sums_of_lists_are_divided_whether_a_rank_waits_or_not(rank: int, size: int) -> None:
    for lengths in ((LONG, 10), (10, LONG)):
        output = torch.zeros(lengths[rank])
        inputs = [torch.full((length,), rank + 1.0) for length in lengths]
        work = dist.reduce_scatter(output, inputs, async_op=rank == 0)
        if work is not None:
            work.wait()
        assert torch.equal(output, torch.full_like(output, 3.0))
    dist.barrier()


def start(rank: int, size: int) -> None:
    os.environ["COMMLAYER_THREADS"] = str(rank + 1)
    with pytest.raises(ConfigError, match=r"COMMLAYER_THREADS differs .*: 1 on rank\(s\) 0; 2 on rank\(s\) 1; "):
        ranks.init(rank, size)


def test_ranks_with_other_numbers_of_threads_do_not_start() -> None:
    ranks.run(start, 2, environ=ranks.UDP)
