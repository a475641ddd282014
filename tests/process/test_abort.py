"""`abort()`: it ends everything at once, and the process may join another job, with fewer ranks or more."""

import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlayer
from commlayer.frontend.group.backend import CommProcessGroup
from commlayer.transport.flight import recorder
from tests import ranks


def world() -> CommProcessGroup:
    group: Any = dist.group.WORLD
    assert isinstance(group, CommProcessGroup)
    return group


def total(value: float = 1.0) -> float:
    tensor = torch.full((1000,), value)
    dist.all_reduce(tensor)
    return tensor[0].item()


def abort_alone() -> None:
    """All that torchft does: of groups that torch knows, `_abort_process_group` also forgets them."""
    dist.distributed_c10d._abort_process_group()


def abort_and_destroy() -> None:
    group = world()
    for _ in range(2):
        group.abort()
    assert group.closed
    with pytest.raises(commlayer.AbortedError, match=r"the group was aborted.*\(culprit: rank \d"):
        total()
    dist.destroy_process_group()
    group.shutdown()
    group.abort()


@pytest.mark.parametrize("end", [abort_alone, abort_and_destroy])
@ranks.WIRES
@ranks.on(2, environ="wire")
def test_a_process_can_join_another_job_after_abort(rank: int, size: int, end: Callable[[], None]) -> None:
    for life in range(2):
        ranks.init(rank, size)
        dist.new_group()
        assert total(life + 1.0) == 2 * (life + 1)
        ranks.meet(f"end of life {life}", size)
        end()
    assert threading.active_count() == 1


@ranks.WIRES
@ranks.on(2, environ="wire")
def test_abort_ends_the_wait_of_another_thread(rank: int, size: int) -> None:
    ranks.init(rank, size)
    group = world()
    works = [group.barrier() for _ in range(2)]
    for work in works:
        work.wait()
    if rank == 0:
        work = group.allreduce([torch.ones(1000)])
        failures: list[BaseException] = []
        group.allreduce([torch.ones(2)]).get_future().add_done_callback(lambda done: failures.append(_error_of(done)))
        timer = threading.Timer(0.2, group.abort)
        timer.start()
        own = r"rank 0 of group '0'.*: the group was aborted by this rank after .* \(culprit: rank 0, this one\); make"
        with pytest.raises(commlayer.AbortedError, match=own):
            work.wait()
        timer.join()
        assert len(failures) == 1
        assert "aborted" in str(failures[0])
        work = group = None  # type: ignore[assignment]
    else:
        ranks.store().wait(["aborted"])
        told = r"the group was aborted.*\(culprit: rank 0 on .*; rank 0 aborted"
        with pytest.raises(commlayer.AbortedError, match=told):
            group.allreduce([torch.ones(1000)]).wait()
    ranks.store().set("aborted", "1")
    abort_alone()
    ranks.init(rank, size)
    assert total() == 2.0
    dist.destroy_process_group()


def _error_of(done: torch.futures.Future[Any]) -> BaseException:
    with pytest.raises(RuntimeError) as caught:
        done.value()
    return caught.value


def _life(number: int, rank: int, size: int) -> None:
    store = dist.PrefixStore(f"life {number}", ranks.store())
    ranks.init(rank, size, store=store, timeout=timedelta(seconds=20))


@ranks.WIRES
@ranks.on(3, environ="wire")
def test_the_others_go_on_without_a_killed_rank_and_it_joins_again(rank: int, size: int) -> None:
    os.environ["COMMLAYER_PEER_TIMEOUT_S"] = "1"
    if rank == 2 and (child := os.fork()) != 0:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    else:
        _life(0, rank, size)
        assert total() == 3.0
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(commlayer.PeerLostError, match=r"\(culprit: rank 2 on "):
            list(map(total, range(1000)))
        abort_alone()
        _life(1, rank, 2)
        assert total() == 2.0
        ranks.meet("end of life 1", 2)
        abort_alone()
    _life(2, rank, size)
    assert total() == 3.0
    dist.destroy_process_group()


@ranks.on(2)
def test_a_group_of_the_former_job_is_named(rank: int, size: int) -> None:
    """Such a group is one that torch does not know, and destroys with no other."""
    ranks.init(rank, size)
    store = dist.PrefixStore("own", ranks.store())
    group = CommProcessGroup(store, rank, size, timedelta(seconds=20), "own", [0, 1])
    dist.destroy_process_group()
    with pytest.raises(commlayer.CommError, match="still has a group of another job, or of this job's former WORLD"):
        ranks.init(rank, size)
    group.abort()
    ranks.init(rank, size)
    assert total() == 2.0
    dist.destroy_process_group()


@ranks.on(2)
def test_a_group_can_be_a_job_of_its_own(rank: int, size: int) -> None:
    """It shares no engine and no key with WORLD, so each can end before the other."""
    ranks.init(rank, size)
    groups = []
    for number in range(2):
        store = dist.PrefixStore(f"job {number}", ranks.store())
        # In this job the ranks count the other way.
        group = CommProcessGroup(store, 1 - rank, size, timedelta(seconds=20), "own", own_job=True)
        tensor = torch.full((100,), float(rank + 1))
        group.broadcast([tensor], root=0).wait()
        assert tensor[0].item() == 2.0
        groups.append(group)
    assert total() == 2.0
    groups[0].abort()
    dist.destroy_process_group()
    groups[1].barrier().wait()
    ranks.init(rank, size)
    assert total() == 2.0
    groups[1].shutdown()
    dist.destroy_process_group()
    assert threading.active_count() == 1


@ranks.on(2)
def test_an_aborted_group_is_freed(rank: int, size: int) -> None:
    """torchft aborts one at each quorum. Its calls stay in the flight record, as far as those of closed groups do."""
    for _ in range(3):
        store = dist.PrefixStore("alone", dist.HashStore())
        group = CommProcessGroup(store, 0, 1, timedelta(seconds=30), "torchft", own_job=True)
        group.allreduce([torch.ones(4)]).wait()
        group.abort()
        assert not recorder.groups()
        found = recorder.dump("a test")
        assert found["pg_status"]["torchft"]["failure"] == "the group was aborted"
        assert found["entries"]
        gone = weakref.ref(group._native)
        del group
        gc.collect()
        assert gone() is None
