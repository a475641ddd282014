"""Errors of a job's operations: call, culprit, attributes, and the calls of the other ranks."""

import pickle
import socket
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlayer
from commlayer.tools.bench.collectives import all_gather_single
from tests import ranks


def error_of(kind: type[commlayer.CommError], operation: Any) -> Any:
    with pytest.raises(kind) as caught:
        operation()
    return caught.value


@ranks.WIRES
@ranks.on(3, environ="wire")
def test_a_mismatch_in_a_subgroup_tells_both_sides(rank: int, size: int) -> None:
    ranks.init(rank, size)
    pair: Any = dist.new_group([1, 2], group_desc="pair")
    if rank > 0:
        dist.all_reduce(torch.ones(5), group=pair)
        error = error_of(
            commlayer.MismatchError, lambda: dist.all_reduce(torch.ones(2, rank), dist.ReduceOp.MAX, group=pair)
        )
        text = str(error)
        who = f"rank {rank} of group '{pair.group_name}' (pair)"
        assert text.startswith(f"{who}: all_reduce 2 of float32 [2, {rank}], MAX: ranks disagree on the operation")
        for number in (1, 2):
            assert f"rank {number} called all_reduce 2 of float32 [2, {number}], MAX" in text
        assert (error.rank, error.culprit, error.host) == (rank, 2, socket.gethostname())
        assert (error.operation, error.sequence, error.group) == ("all_reduce", 2, pair.group_name)
        copy = pickle.loads(pickle.dumps(error))
        assert (str(copy), vars(copy)) == (text, vars(error))
    ranks.store().set(f"told {rank}", "1")
    ranks.store().wait([f"told {member}" for member in range(size)])


@ranks.WIRES
@ranks.on(3, environ="wire")
def test_an_abort_is_told_on_all_ranks(rank: int, size: int) -> None:
    ranks.init(rank, size)
    group: Any = dist.group.WORLD
    ranks.meet("all have their group", size)  # an abort fails what is under way on the peers
    if rank == 1:
        group.abort()
    error = error_of(commlayer.AbortedError, lambda: dist.all_reduce(torch.ones(5)))
    assert f"rank {rank} of group '0'" in str(error)
    assert ("aborted by this rank" if rank == 1 else "rank 1 aborted its process group") in str(error)
    assert error.culprit == 1
    ranks.store().set(f"told {rank}", "1")
    ranks.store().wait([f"told {member}" for member in range(size)])


@ranks.WIRES
@ranks.on(3, environ="wire")
def test_the_reason_of_a_slow_rank_comes_before_its_abort(rank: int, size: int) -> None:
    """The rank that aborts has no processor for longer than the others look for its reason."""
    ranks.init(rank, size)
    group: Any = dist.group.WORLD
    ranks.meet("all have their group", size)
    if rank == 1:
        inquiry = group._native.diagnosis.inquiry
        agree = inquiry._agree

        def late(proposed: Any) -> Any:
            time.sleep(2.0)
            return agree(proposed)

        inquiry._agree = late
        group.abort()
    else:
        error = error_of(commlayer.AbortedError, lambda: dist.all_reduce(torch.ones(5)))
        assert "rank 1 aborted its process group" in str(error)
        assert error.culprit == 1
    ranks.store().set(f"told {rank}", "1")
    ranks.store().wait([f"told {member}" for member in range(size)])


@ranks.on(3)
def test_wrong_arguments_in_a_subgroup_name_the_rank_of_the_job(rank: int, size: int) -> None:
    ranks.init(rank, size)
    pair: Any = dist.new_group([1, 2], group_desc="pair")
    if rank > 0:
        given, splits = torch.ones(4), [5, -1]
        for operation, told in (
            (lambda: dist.all_to_all_single(given, given, splits, splits, pair), "input split sizes [5, -1] contain a"),
            (lambda: pair.send([given], 2, 0), "the group has no rank 2; use 0 to 1"),
        ):
            text = str(error_of(commlayer.ConfigError, operation))
            assert text.startswith(f"rank {rank} of group '{pair.group_name}' (pair): {told}")


@ranks.on(3)
def test_a_monitored_barrier_names_ranks_of_the_job(rank: int, size: int) -> None:
    ranks.init(rank, size)
    pair: Any = dist.new_group([1, 2])
    if rank == 1:
        error = error_of(
            commlayer.OperationTimeoutError, lambda: pair.monitored_barrier(timedelta(seconds=0.5), wait_all_ranks=True)
        )
        assert "rank 1 of group " in str(error)
        assert "monitored_barrier: rank(s) 2 did not call it within 0.5 s; look at their logs" in str(error)
        assert (error.rank, error.culprit, error.operation) == (1, 2, "monitored_barrier")
        ranks.store().set("told", "1")
    ranks.store().wait(["told"])


@ranks.WIRES
@ranks.on(2, environ="wire")
def test_works_have_numbers_types_and_durations(rank: int, size: int) -> None:
    with ranks.job(rank, size):
        group: Any = dist.group.WORLD
        tensor = torch.ones(4)
        before = group._get_sequence_number_for_group()
        other = 1 - rank
        exchange = dist.isend(tensor, other) if rank == 0 else dist.irecv(tensor, other)
        works: list[Any] = [
            dist.all_reduce(tensor, async_op=True),
            all_gather_single(torch.empty(8), tensor, async_op=True),
            dist.all_reduce(torch.ones(0), async_op=True),
            group.allreduce([torch.ones(3)]),
            exchange,
        ]
        for work in works:
            work.wait()
            assert 0.0 <= work._get_duration() < 60e3
        types = [work._get_op_type().name for work in works]
        assert types == ["ALLREDUCE", "ALLGATHER", "ALLREDUCE", "ALLREDUCE", "RECV" if rank else "SEND"]
        assert [work._get_sequence_number() - before for work in works[:4]] == [1, 2, 3, 4]
        assert works[4]._get_sequence_number() == 1
        assert group._get_sequence_number_for_group() == before + 4
