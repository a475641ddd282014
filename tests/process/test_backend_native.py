"""The process group on the native engine, in real processes: over shared memory and over UDP."""

import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlayer
from tests import conformance, ranks


def _conformance(rank: int, size: int, dtypes: Sequence[torch.dtype], algorithm: Any = "auto") -> None:
    with ranks.job(rank, size, pg_options=commlayer.Options(commlayer.Policy(algorithm=algorithm))):
        for number, case in enumerate(conformance.cases(dtypes=dtypes)):
            conformance.check(case, async_op=number % 2 == 0)
        dist.barrier()


@ranks.WIRES
@pytest.mark.parametrize("size", conformance.WORLDS)
def test_every_collective_is_right(wire: dict[str, str], size: int) -> None:
    # All types where every path of a plan is taken first; elsewhere one that computes and one that is odd.
    dtypes = conformance.DTYPES if size in (2, 3) else (torch.int16, torch.bool)
    ranks.run(_conformance, size, dtypes, environ=wire)


@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_each_algorithm_is_right_over_udp(algorithm: str) -> None:
    ranks.run(_conformance, 3, (torch.int16, torch.bool), algorithm, environ=ranks.UDP)


@ranks.WIRES
@ranks.on(3, ranks.run_job, environ="wire")
def test_many_operations_of_several_groups_in_flight(rank: int, size: int) -> None:
    groups = [None, dist.new_group(), dist.new_group([0, 1])]
    tensors = [torch.full((1 + 997 * i,), float(rank + i)) for i in range(60)]
    works = []
    for i, tensor in enumerate(tensors):
        if not (i % 3 == 2 and rank == 2):
            works.append(dist.all_reduce(tensor, group=groups[i % 3], async_op=True))
    for work in reversed(works):
        assert work is not None
        work.wait()
    for i, tensor in enumerate(tensors):
        members = [0, 1] if i % 3 == 2 else [0, 1, 2]
        expected = sum(member + i for member in members) if rank in members else rank + i
        assert torch.equal(tensor, torch.full_like(tensor, float(expected))), i
    dist.barrier()


@ranks.WIRES
@ranks.on(3, environ="wire")
def test_init_and_destroy_again_in_one_process(rank: int, size: int) -> None:
    store = ranks.store()
    for life in range(4):  # in one Store, whose keys outlive each
        ranks.init(rank, size, store=store)
        world: Any = dist.group.WORLD
        tensor = torch.full((1000,), float(life))
        dist.all_reduce(tensor)
        assert tensor[0].item() == life * size
        group = dist.new_group([0, 1])
        if rank < 2:
            dist.all_reduce(tensor, group=group)
            assert tensor[0].item() == 2 * life * size
            dist.destroy_process_group(group)
        dist.barrier()
        dist.destroy_process_group()
        assert not dist.is_initialized()
        assert world.closed
        world.shutdown()


@ranks.WIRES
@ranks.on(3, environ="wire")
def test_a_rank_that_has_done_its_part_may_leave(rank: int, size: int) -> None:
    ranks.init(rank, size)
    tensor = torch.full((3000,), float(rank))
    if rank != 0:
        time.sleep(0.5)  # the message of rank 0 is there; rank 0 itself has left
    for _ in range(5):
        dist.broadcast(tensor, 0)
    assert tensor.sum().item() == 0.0
    dist.destroy_process_group()


@ranks.WIRES
@ranks.on(2, environ="wire")
def test_an_operation_ends_at_its_timeout(rank: int, size: int) -> None:
    ranks.init(rank, size)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))  # the start may take longer
    if rank == 1:
        ranks.store().wait(["rank 0 gave up"])
        return
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work is not None
    with pytest.raises(commlayer.OperationTimeoutError, match=r"rank 0 of group '0'.*raise the timeout"):
        work.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), commlayer.OperationTimeoutError)
    with pytest.raises(RuntimeError, match="timed out"):
        work.get_future().wait()
    ranks.store().set("rank 0 gave up", "1")


@ranks.WIRES
@ranks.on(2, ranks.run_job, environ="wire")
def test_a_wait_that_ends_early_leaves_the_operation_alone(rank: int, size: int) -> None:
    store = ranks.store()
    if rank == 1:
        store.wait(["rank 0 waited"])
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    if rank == 0:
        assert not work.is_completed()
        assert not work.get_future().done()
        with pytest.raises(commlayer.OperationTimeoutError, match=r"0\.05 s"):
            work.wait(timedelta(milliseconds=50))
        store.set("rank 0 waited", "1")
    assert work.wait()  # the operation went on; gloo's would have ended
    assert work.is_success()
    assert tensor.tolist() == [2.0] * 3
    dist.barrier()


def _without_destroy(rank: int, size: int) -> None:
    ranks.init(rank, size)
    dist.all_reduce(torch.ones(3), async_op=True)
    dist.barrier()


@ranks.WIRES
def test_a_process_may_end_without_destroying_its_group(wire: dict[str, str]) -> None:
    for outcome in ranks.outcomes(_without_destroy, 2, environ=wire):
        assert (outcome.error, outcome.exit_code) == (None, 0)


TORCHRUN_JOB = """
import torch, torch.distributed as dist
import commlayer

for life in range(2):
    dist.init_process_group("commlayer")
    tensor = torch.full((100,), float(life + 1))
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    print(f"life {life}: {tensor[0].item()}", flush=True)
"""


def test_torchrun(tmp_path: Path) -> None:
    """Its Store outlives the process groups of the job, keys and all."""
    job = tmp_path / "job.py"
    job.write_text(TORCHRUN_JOB)
    output = ranks.torchrun(job)
    # This counts, and does not compare: the lines of the two processes may run into each other.
    assert [output.count(line) for line in ("life 0: 2.0", "life 1: 4.0")] == [2, 2], output
