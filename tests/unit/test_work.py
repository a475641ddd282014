"""`CommWork` by itself: results, failures, copies, and who may learn of them when."""

import _thread
import threading
import time
from datetime import timedelta

import pytest
import torch

from commlayer.errors import ConfigError, OperationTimeoutError, PeerLostError
from commlayer.frontend.work.work import CommWork, JoinedHandle
from commlayer.transport.base import Times
from tests.fake_transport import FakeHandle

LOST = PeerLostError("rank 1 is lost")


class Copy:
    """Counts how often a work's results were copied."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def test_a_work_without_operation_is_over() -> None:
    tensor = torch.ones(3)
    work = CommWork(None, [tensor])
    assert work.is_completed()
    assert work.is_success()
    assert work.wait()
    assert work.result() == [tensor]
    assert work.get_future().value() == [tensor]


def test_wait_returns_once_the_operation_is_done() -> None:
    handle = FakeHandle()
    work = CommWork(handle, [torch.ones(1)])
    assert not work.is_completed()
    assert not work.is_success()
    assert work.exception() is None
    threading.Timer(0.05, handle.end, [None]).start()
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()


def test_wait_honours_a_timeout_and_zero_is_none() -> None:
    handle = FakeHandle()
    work = CommWork(handle, [])
    with pytest.raises(OperationTimeoutError, match=r"did not end within 0\.01 s"):
        work.wait(timedelta(milliseconds=10))
    threading.Timer(0.05, handle.end, [None]).start()
    assert work.wait(timedelta(0))


def test_a_failure_is_raised_wherever_one_looks() -> None:
    handle = FakeHandle()
    work = CommWork(handle, [torch.ones(1)])
    future = work.get_future()
    handle.end(LOST)
    for look in (work.wait, work.result, work.synchronize, work.wait):
        with pytest.raises(PeerLostError, match="rank 1 is lost"):
            look()
    with pytest.raises(RuntimeError, match="rank 1 is lost"):
        future.wait()
    with pytest.raises(RuntimeError, match="rank 1 is lost"):
        work.get_future().then(lambda done: done.value()).wait()
    assert work.is_completed()
    assert not work.is_success()
    assert work.exception() is LOST


def test_a_thread_without_python_frames_gets_the_future() -> None:
    """As in the backward pass of a GPU, where C++ asks for it: nothing is above `get_future` on the stack."""
    handle = FakeHandle()
    work = CommWork(handle, [torch.ones(1)])
    _thread.start_new_thread(work.get_future, ())
    end_s = time.monotonic() + 10
    while work._future is None and time.monotonic() < end_s:
        time.sleep(0.001)
    assert work._future is not None
    handle.end(None)
    assert work._future.wait() == work.results


def test_the_future_is_one_and_holds_the_results() -> None:
    handle = FakeHandle()
    tensor = torch.ones(2)
    work = CommWork(handle, [tensor])
    future = work.get_future()
    assert work.get_future() is future
    assert not future.done()
    handle.end(None)
    assert future.wait()[0] is tensor


@pytest.mark.parametrize("order", ["wait", "future", "poll", "all", "result"])
def test_results_are_copied_exactly_once(order: str) -> None:
    handle, copy = FakeHandle(), Copy()
    work = CommWork(handle, [torch.ones(1)], [torch.ones(1)], copy)
    future = work.get_future() if order in ("future", "all") else None
    assert copy.count == 0
    handle.end(None)
    if order in ("wait", "all"):
        work.wait()
    if order in ("poll", "all"):
        assert work.is_completed()
    if order in ("result", "all"):
        work.result()
    if future is not None:
        future.wait()
    assert copy.count == 1
    work.wait()
    work.get_future().wait()
    assert copy.count == 1


def test_results_of_a_failure_are_not_copied() -> None:
    handle, copy = FakeHandle(), Copy()
    work = CommWork(handle, [torch.ones(1)], [torch.ones(1)], copy)
    work.get_future()
    handle.end(LOST)
    assert work.is_completed()
    with pytest.raises(PeerLostError):
        work.wait()
    assert copy.count == 0


def test_a_copy_that_fails_fails_the_future() -> None:
    def copy() -> None:
        raise ValueError("no room")

    handle = FakeHandle()
    future = CommWork(handle, [torch.ones(1)], [], copy).get_future()
    handle.end(None)
    with pytest.raises(RuntimeError, match="no room"):
        future.wait()


def test_many_threads_may_wait() -> None:
    handle, copy = FakeHandle(), Copy()
    work = CommWork(handle, [torch.ones(1)], [torch.ones(1)], copy)
    ended: list[bool] = []
    threads = [threading.Thread(target=lambda: ended.append(work.wait())) for _ in range(8)]
    for thread in threads:
        thread.start()
    work.get_future()
    handle.end(None)
    for thread in threads:
        thread.join()
    assert ended == [True] * 8
    assert copy.count == 1


def test_memory_is_let_go_when_the_operation_is_done() -> None:
    handle = FakeHandle()
    memory = [torch.ones(1)]
    work = CommWork(handle, [], memory)
    assert len(memory) == 1
    handle.end(None)
    work.wait()
    assert memory == []


def test_joined_operations_end_with_the_last() -> None:
    first, second = FakeHandle(), FakeHandle()
    joined = JoinedHandle([first, second])
    heard: list[BaseException | None] = []
    joined.on_done(heard.append)
    second.end(None)
    assert not joined.done()
    with pytest.raises(OperationTimeoutError):
        joined.wait(0.01)
    assert heard == []
    first.end(None)
    joined.wait()
    assert joined.done()
    assert heard == [None]


def test_joined_operations_fail_with_the_first_failure() -> None:
    handles = [FakeHandle(), FakeHandle(), FakeHandle()]
    joined = JoinedHandle(list(handles))
    heard: list[BaseException | None] = []
    joined.on_done(heard.append)
    for handle, error in zip(handles, (None, LOST, None), strict=True):
        handle.end(error)
    with pytest.raises(PeerLostError, match="rank 1 is lost"):
        joined.wait()
    assert heard == [LOST]


def test_joined_operations_have_no_common_input_to_miss_something_of() -> None:
    handles = [FakeHandle(), FakeHandle()]
    for handle in handles:
        handle.end(None)
    with pytest.raises(ConfigError, match="ask the work of each"):
        CommWork(JoinedHandle(list(handles)), []).missing()


def test_times_are_there_once_the_operation_ended() -> None:
    handle = FakeHandle()
    work = CommWork(handle, [])
    assert work.times() is None
    handle.end(LOST, Times(1.0, 2.0, 3.0))
    assert work.times() == (1.0, 2.0, 3.0)
    assert CommWork(None, []).times() is None


def test_joined_works_have_the_outermost_times() -> None:
    handles = [FakeHandle() for _ in range(3)]
    work = CommWork(JoinedHandle(list(handles)), [])
    handles[0].end(None, Times(2.0, 3.0, 9.0))
    handles[1].end(None, Times(1.0, None, 4.0))
    assert work.times() is None
    handles[2].end(None, Times(3.0, 5.0, 6.0))
    assert work.times() == (1.0, 3.0, 9.0)
    nothing = [FakeHandle()]
    nothing[0].end(None, Times(1.0, None, 2.0))
    assert JoinedHandle(list(nothing)).times() == (1.0, None, 2.0)
    assert JoinedHandle([]).times() is None
