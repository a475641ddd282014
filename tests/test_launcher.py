"""What the launcher keeps, forgets and joins, on a group that does nothing by itself."""

from __future__ import annotations

import gc
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import AllreduceOptions

from commlayer.errors import PeerLostError
from commlayer.launcher import Launcher
from commlayer.plans.settings import Settings
from commlayer.tensors import MOVES
from tests.fake_transport import FakeHandle


class StillGroup:
    """Takes every operation and ends none: the test does."""

    rank, size, hosts, interface, staging_bytes = 0, 2, ((0,), (1,)), "lo", 0

    def __init__(self) -> None:
        self.handles: list[FakeHandle] = []
        self.timeouts_s: list[float] = []

    def submit(self, *_: Any, timeout_s: float, priority: int = 0) -> FakeHandle:
        assert priority == 3
        self.handles.append(FakeHandle())
        self.timeouts_s.append(timeout_s)
        return self.handles[-1]

    run = send = receive = submit

    def abort(self, reason: str) -> None: ...

    def close(self) -> None: ...


def launcher_and_group() -> tuple[Launcher, StillGroup]:
    group: Any = StillGroup()
    return Launcher(group, Settings(staging_bytes=0), 3, lambda: timedelta(seconds=5)), group


def broadcast(launcher: Launcher, tensor: torch.Tensor, opts: Any = None, copies: Any = ()) -> Any:
    launches = launcher.collective("broadcast", MOVES[4], tensor.numel(), tensor, tensor)
    return launcher.start(launches, opts or AllreduceOptions(), [tensor], [tensor], list(copies))


def test_a_receive_that_waits_for_long_holds_nobody_elses_memory() -> None:
    launcher, group = launcher_and_group()
    waiting = torch.ones(3)
    launcher.receive(waiting, waiting, None, 0)
    seen = []
    for _ in range(5):
        tensor = torch.ones(3)
        seen.append(weakref.ref(tensor))
        broadcast(launcher, tensor)
        group.handles[-1].end(None)
        del tensor
    gc.collect()
    assert sum(ref() is not None for ref in seen) <= 2
    kept = weakref.ref(waiting)
    del waiting
    gc.collect()
    assert kept() is not None
    launcher.forget()
    gc.collect()
    assert kept() is None


def test_plans_are_made_once() -> None:
    launcher, _ = launcher_and_group()
    tensor = torch.ones(7)
    first = launcher.collective("all_reduce", MOVES[4], 7, tensor, tensor)[0].plan
    assert launcher.collective("all_reduce", MOVES[4], 7, tensor, tensor)[0].plan is first
    first = launcher.delivery((4, 8), (4, 0), tensor, tensor)[0].plan
    assert launcher.delivery((4, 8), (4, 0), tensor, tensor)[0].plan is first
    assert launcher.delivery((4, 4), (4, 0), tensor, tensor)[0].plan is not first
    assert launcher.delivery((4, 8), (4, 0), tensor, tensor, same=True)[0].plan is not first


def test_nothing_to_move_is_nothing_to_do_unless_others_may_move_something() -> None:
    launcher, _ = launcher_and_group()
    empty = torch.ones(0)
    assert launcher.collective("all_reduce", MOVES[4], 0, empty, empty) == []
    assert len(launcher.delivery((0, 0), (0, 0), empty, empty)) == 1
    assert len(launcher.barrier()) == 1


def test_coalesced_operations_have_one_work() -> None:
    launcher, group = launcher_and_group()
    flat, column = torch.arange(3.0), torch.zeros(3, 2)[:, 0]
    launcher.begin_coalescing()
    first = broadcast(launcher, torch.ones(2))
    broadcast(launcher, flat, copies=[(flat, [column])])
    launcher.receive(column, column, 1, 0)
    work = launcher.end_coalescing()
    broadcast(launcher, flat)
    for handle in group.handles[:2]:
        handle.end(None)
    assert first.is_completed()
    assert not work.is_completed()
    group.handles[2].end(None)
    assert work.wait()
    assert column.tolist() == [0.0, 1.0, 2.0]
    launcher.begin_coalescing()
    assert launcher.end_coalescing().wait()


def test_a_coalesced_work_has_the_first_failure() -> None:
    launcher, group = launcher_and_group()
    launcher.begin_coalescing()
    broadcast(launcher, torch.ones(2))
    broadcast(launcher, torch.ones(2))
    work = launcher.end_coalescing()
    group.handles[0].end(None)
    group.handles[1].end(PeerLostError("rank 1 is lost"))
    with pytest.raises(PeerLostError, match="rank 1 is lost"):
        work.wait()


def test_timeouts() -> None:
    launcher, group = launcher_and_group()
    opts = AllreduceOptions()
    opts.timeout = timedelta(seconds=2)
    broadcast(launcher, torch.ones(2))
    broadcast(launcher, torch.ones(2), opts)
    launcher.send(torch.ones(2), torch.ones(2), 1, 0)
    assert group.timeouts_s == [5.0, 2.0, 5.0]
