"""The submitter: its references, plans and coalesced operations, on a group that does nothing by itself."""

import contextvars
import gc
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import AllreduceOptions

from commlayer.errors import PeerLostError
from commlayer.frontend.group import submit as submit_module
from commlayer.frontend.group.submit import DIVIDED_AT, DIVIDED_LEAST_BYTES, SCALARS_KEPT, Submitter
from commlayer.frontend.group.tensors import MOVES, move_kind
from commlayer.frontend.work.context import NeedsHostError, Words, hold_words
from commlayer.plans.settings import Settings
from commlayer.transport.base import MessageRequest, Request, Times
from commlayer.transport.call import Call
from tests.fake_transport import FakeHandle

WHAT = ("scatter", 0, torch.float32)


class StillGroup:
    """Takes every operation and ends none: the test does."""

    rank, size, hosts, interface, staging_bytes = 0, 2, ((0,), (1,)), "lo", 0
    who = "rank 0 of group '0'"

    def __init__(self) -> None:
        self.handles: list[FakeHandle] = []
        self.timeouts_s: list[float] = []
        self.targets: list[int] = []

    def submit(self, request: Request | MessageRequest, call: Any = None) -> FakeHandle:  # noqa: ARG002
        assert request.priority == 3
        self.handles.append(FakeHandle())
        self.timeouts_s.append(request.timeout_s)
        if isinstance(request, Request):
            self.targets.append(request.target)
        return self.handles[-1]

    run = send = receive = submit

    def abort(self, reason: str) -> None: ...

    def close(self) -> None: ...


def submitter_and_group() -> tuple[Submitter, StillGroup]:
    group: Any = StillGroup()
    return Submitter(group, Settings(staging_bytes=0), 3, lambda: timedelta(seconds=5)), group


def broadcast(submitter: Submitter, tensor: torch.Tensor, opts: Any = None, copies: Any = ()) -> Any:
    operations = submitter.collective("broadcast", MOVES[4], tensor.numel(), tensor, tensor)
    call = Call("broadcast", tensor.dtype, [tensor.shape], rank=0)
    return submitter.start(call, operations, opts or AllreduceOptions(), [tensor], [tensor], list(copies))


def test_a_long_receive_holds_no_memory_of_other_operations() -> None:
    submitter, group = submitter_and_group()
    waiting = torch.ones(3)
    submitter.receive([waiting], None, 0)
    seen = []
    for _ in range(5):
        tensor = torch.ones(3)
        seen.append(weakref.ref(tensor))
        broadcast(submitter, tensor)
        group.handles[-1].end(None)
        del tensor
    gc.collect()
    assert sum(ref() is not None for ref in seen) <= 2
    kept = weakref.ref(waiting)
    del waiting
    gc.collect()
    assert kept() is not None
    submitter.forget()
    gc.collect()
    assert kept() is None


def test_plans_are_made_once() -> None:
    submitter, _ = submitter_and_group()
    tensor = torch.ones(7)
    first = submitter.collective("all_reduce", MOVES[4], 7, tensor, tensor)[0].plan
    assert submitter.collective("all_reduce", MOVES[4], 7, tensor, tensor)[0].plan is first
    first = submitter.delivery(WHAT, (4, 8), (4, 0), tensor, tensor)[0].plan
    assert submitter.delivery(WHAT, (4, 8), (4, 0), tensor, tensor)[0].plan is first
    assert submitter.delivery(WHAT, (4, 4), (4, 0), tensor, tensor)[0].plan is not first
    assert submitter.delivery(WHAT, (4, 8), (4, 0), tensor, tensor, same=True)[0].plan is not first


def test_a_signature_names_the_type_of_the_elements() -> None:
    submitter, _ = submitter_and_group()
    tensor = torch.ones(7)
    signatures = set()
    for dtype in (torch.float32, torch.int32, torch.uint32, torch.bool, torch.uint8, torch.float8_e5m2, torch.float64):
        kind = move_kind(dtype)
        assert kind is not None
        signatures.add(submitter.collective("broadcast", kind, 7, tensor, tensor)[0].plan.signature)
        signatures.add(submitter.delivery(("gather", 0, dtype), (4, 0), (4, 8), tensor, tensor)[0].plan.signature)
    assert len(signatures) == 14
    gathers = [submitter.delivery(("gather", 0, torch.bool), (4, n), (4, 8), tensor, tensor) for n in (0, 3)]
    assert len({operations[0].plan.signature for operations in gathers}) == 1  # a rank knows its own lengths only


def test_nothing_to_move_is_nothing_to_do_unless_others_may_move_something() -> None:
    submitter, _ = submitter_and_group()
    empty = torch.ones(0)
    assert submitter.collective("all_reduce", MOVES[4], 0, empty, empty) == []
    assert len(submitter.delivery(WHAT, (0, 0), (0, 0), empty, empty)) == 1
    assert len(submitter.barrier()) == 1


def test_coalesced_operations_have_one_work() -> None:
    submitter, group = submitter_and_group()
    flat, column = torch.arange(3.0), torch.zeros(3, 2)[:, 0]
    submitter.begin_coalescing()
    first = broadcast(submitter, torch.ones(2))
    broadcast(submitter, flat, copies=[(flat, [column])])
    submitter.receive([torch.ones(2)], 1, 0)
    work = submitter.end_coalescing()
    broadcast(submitter, flat)
    for handle in group.handles[:2]:
        handle.end(None)
    assert first.is_completed()
    assert not work.is_completed()
    group.handles[2].end(None)
    assert work.wait()
    assert column.tolist() == [0.0, 1.0, 2.0]
    submitter.begin_coalescing()
    assert submitter.end_coalescing().wait()


def test_a_coalesced_work_has_the_first_failure() -> None:
    submitter, group = submitter_and_group()
    submitter.begin_coalescing()
    broadcast(submitter, torch.ones(2))
    broadcast(submitter, torch.ones(2))
    work = submitter.end_coalescing()
    group.handles[0].end(None)
    group.handles[1].end(PeerLostError("rank 1 is lost"))
    with pytest.raises(PeerLostError, match="rank 1 is lost"):
        work.wait()


def test_timeouts() -> None:
    submitter, group = submitter_and_group()
    opts = AllreduceOptions()
    opts.timeout = timedelta(seconds=2)
    broadcast(submitter, torch.ones(2))
    broadcast(submitter, torch.ones(2), opts)
    submitter.send([torch.ones(2)], 1, 0)
    assert group.timeouts_s == [5.0, 2.0, 5.0]


def test_a_scalars_work_is_kept_until_a_wait() -> None:
    """C++ may hold one, and waits for ever when ours is gone."""
    submitter, group = submitter_and_group()

    def start() -> weakref.ref[Any]:
        work = broadcast(submitter, torch.ones(1))
        group.handles[-1].end(None)
        return weakref.ref(work)

    first = start()
    for _ in range(5 * SCALARS_KEPT):
        start()
    assert first() is not None
    later = [start() for _ in range(5 * SCALARS_KEPT)]
    for reference in later:
        work = reference()
        assert work is not None
        work.wait()
    del work
    for _ in range(20 * SCALARS_KEPT):
        work = start()()
        assert work is not None
        work.wait()
    assert first() is not None
    assert sum(reference() is not None for reference in later) < 2 * SCALARS_KEPT


def test_scalars_without_a_wait_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit_module, "UNWAITED_MAX", 1000)
    submitter, _ = submitter_and_group()
    for _ in range(3000):
        broadcast(submitter, torch.ones(1))
    assert len(submitter._scalars) <= 1000


def test_calls_are_noted_with_their_times() -> None:
    submitter, group = submitter_and_group()
    begin_s = time.monotonic()
    broadcast(submitter, torch.ones(2))
    receiving = torch.ones(3)
    submitter.send([receiving], 1, 5)
    submitter.receive([receiving], None, 5)
    empty = torch.ones(0)
    submitter.start(Call("all_reduce", empty.dtype, [empty.shape]), [], AllreduceOptions(), [empty], [empty], [])
    calls = list(submitter.calls.latest)
    assert [call.title() for call in calls] == ["broadcast 1", "send 1", "receive 2", "all_reduce 2"]
    assert [call.arguments() for call in calls] == [
        "of float32 [2] from rank 0",
        "of float32 [3] to rank 1, tag 5",
        "of float32 [3] from any rank, tag 5",
        "of float32 [0]",
    ]
    assert begin_s <= calls[0].submitted_s <= calls[3].submitted_s <= time.monotonic()
    assert calls[0].times() is None
    group.handles[0].end(None, Times(1.0, 2.0, 3.0))
    assert calls[0].times() == Times(1.0, 2.0, 3.0)
    assert calls[3].elapsed_s() == 0.0


class LookingGroup(StillGroup):
    """Notes what `look` finds when an operation starts; a failing one refuses every operation."""

    is_failing = False

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.look: Any = None

    def submit(self, request: Request | MessageRequest, call: Any = None) -> FakeHandle:
        self.seen.append(self.look())
        if self.is_failing:
            raise PeerLostError("rank 1 is lost")
        return super().submit(request, call)

    run = send = receive = submit


@pytest.mark.parametrize("hosts", [((0,), (1,)), ((0, 1),)])
def test_packets_leave_before_the_callers_are_noted(hosts: tuple[tuple[int, ...], ...]) -> None:
    """Those that watch find a call before it starts, and the callers of one that blocks."""
    group: Any = LookingGroup()
    group.hosts = hosts
    submitter = Submitter(group, Settings(), 3, lambda: timedelta(seconds=5))
    group.look = lambda: (len(submitter.calls.latest), sum(bool(call.frames) for call in submitter.calls.latest))
    submitter.send([torch.ones(2)], 1, 0)
    submitter.receive([torch.ones(2)], 1, 0)
    opts = AllreduceOptions()
    for opts.asyncOp in (True, False):
        broadcast(submitter, torch.ones(2), opts)
    assert group.seen == [(1, 0), (2, 1), (3, 2), (4, 4)]


def test_a_call_that_cannot_start_is_kept() -> None:
    group: Any = LookingGroup()
    group.is_failing = True
    submitter = Submitter(group, Settings(), 3, lambda: timedelta(seconds=5))
    group.look = lambda: (len(submitter.calls.latest), sum(bool(call.frames) for call in submitter.calls.latest))
    for start in (
        lambda: submitter.send([torch.ones(2)], 1, 0),
        lambda: submitter.receive([torch.ones(2)], 1, 0),
        lambda: broadcast(submitter, torch.ones(2)),
    ):
        with pytest.raises(PeerLostError):
            start()
    assert [call.title() for call in submitter.calls.latest] == ["send 1", "receive 2", "broadcast 1"]
    assert all(call.is_failed for call in submitter.calls.latest)


@pytest.mark.parametrize(("short_of", "parts"), [(0, 2), (1, 1)])
def test_long_operations_are_divided_between_two_engines(short_of: int, parts: int) -> None:
    engines: list[Any] = [StillGroup(), StillGroup()]
    submitter = Submitter(engines[0], Settings(staging_bytes=0), 3, lambda: timedelta(seconds=5), second=engines[1])
    tensor = torch.ones(DIVIDED_LEAST_BYTES // 4 - short_of)
    opts = AllreduceOptions()
    opts.asyncOp = False  # a call that waits starts both parts, too
    work = broadcast(submitter, tensor, opts)
    assert [len(engine.handles) for engine in engines] == [1, parts - 1]
    if parts == 1:
        return
    assert engines[0].targets == [tensor.data_ptr()]
    assert engines[1].targets == [tensor[tensor.numel() // 2 :].data_ptr()]
    assert (tensor.numel() // 2) % DIVIDED_AT == 0
    engines[0].handles[0].end(None)
    assert not work.is_completed()
    engines[1].handles[0].end(None)
    assert work.is_completed()
    assert work.missing() == []


def test_words_of_a_device_are_refused_before_a_long_operation_starts() -> None:
    """Whether a rank has words depends on the moment, so they must not decide whether it divides an operation."""
    engines: list[Any] = [StillGroup(), StillGroup()]
    submitter = Submitter(engines[0], Settings(staging_bytes=0), 3, lambda: timedelta(seconds=5), second=engines[1])
    tensor = torch.ones(DIVIDED_LEAST_BYTES)
    context = contextvars.copy_context()
    context.run(hold_words, Words(1, 2, frozenset({tensor.data_ptr()})))
    with pytest.raises(NeedsHostError):
        context.run(submitter.collective, "broadcast", MOVES[4], tensor.numel(), tensor, tensor)
    assert len(context.run(submitter.collective, "broadcast", MOVES[4], 10, tensor, tensor)) == 1
    assert len(submitter.collective("broadcast", MOVES[4], tensor.numel(), tensor, tensor)) == 2
