"""What a context gives to the operations that start in it: their class, and their name in traces."""

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import AllreduceOptions

import commlayer
from commlayer.frontend.device.pinned import PinnedCopies
from commlayer.frontend.group.submit import Submitter
from commlayer.frontend.group.tensors import MOVES
from commlayer.frontend.work.context import current_label, current_priority, labelled
from commlayer.frontend.work.work import CommWork
from commlayer.plans.settings import Settings
from commlayer.transport.base import MessageRequest, Request
from commlayer.transport.call import Call
from tests.fake_transport import FakeHandle


class NotingGroup:
    """Notes the class of each operation, which ends at once."""

    rank, size, hosts, interface, staging_bytes = 0, 2, ((0,), (1,)), "lo", 0

    def __init__(self) -> None:
        self.classes: list[int] = []

    def submit(self, request: Request | MessageRequest, **_: Any) -> FakeHandle:
        self.classes.append(request.priority)
        handle = FakeHandle()
        handle.end(None)
        return handle

    run = send = receive = submit


def submitter_and_group() -> tuple[Submitter, NotingGroup]:
    group: Any = NotingGroup()
    return Submitter(group, Settings(staging_bytes=0), 3, lambda: timedelta(seconds=5)), group


def start_one_of_each(submitter: Submitter, priority: int | None = None) -> None:
    tensor, opts = torch.ones(4), AllreduceOptions()
    operations = submitter.collective("broadcast", MOVES[4], 4, tensor, tensor)
    for opts.asyncOp in (True, False):
        call = Call("broadcast", tensor.dtype, [tensor.shape], rank=0)
        submitter.start(call, operations, opts, [tensor], [tensor], [], priority=priority)
    if priority is None:
        submitter.send([tensor], 1, 0)
        submitter.receive([tensor], 1, 0)


def test_the_context_replaces_the_class_of_the_group() -> None:
    submitter, group = submitter_and_group()
    start_one_of_each(submitter)
    with commlayer.priority(0):
        start_one_of_each(submitter)
    start_one_of_each(submitter)
    assert group.classes == [3] * 4 + [0] * 4 + [3] * 4


def test_the_policy_of_an_operation_counts_more_than_the_context() -> None:
    submitter, group = submitter_and_group()
    with commlayer.priority(0):
        start_one_of_each(submitter, priority=6)
    assert group.classes == [6, 6]


def test_the_innermost_context_counts() -> None:
    with commlayer.priority(5):
        with commlayer.priority(1):
            assert current_priority() == 1
        assert current_priority() == 5
        with pytest.raises(KeyError), commlayer.priority(2):
            raise KeyError
        assert current_priority() == 5
    assert current_priority() is None


def test_a_context_can_be_entered_again_and_decorates() -> None:
    @commlayer.priority(7)
    def ask() -> int | None:
        return current_priority()

    assert (ask(), ask(), current_priority()) == (7, 7, None)


def test_threads_begin_without_a_context() -> None:
    seen = []
    with commlayer.priority(1):
        thread = threading.Thread(target=lambda: seen.append(current_priority()))
        thread.start()
        thread.join()
        assert current_priority() == 1
    assert seen == [None]


def test_backward_on_the_cpu_runs_in_the_context() -> None:
    seen = []
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(lambda _: seen.append(current_priority()))
    with commlayer.priority(1):
        leaf.sum().backward()
    assert seen == [1]


def test_operations_that_start_later_have_the_context_of_their_call() -> None:
    seen: list[int | None] = []
    pinned = PinnedCopies()

    def call(*_: Any) -> CommWork:
        seen.append(current_priority())
        return CommWork(None, [])

    with commlayer.priority(2):
        first = pinned.run(call, [], [])
    second = pinned.run(call, [], [])
    first.wait()
    second.wait()
    pinned.close()
    assert seen == [2, None]


@pytest.mark.parametrize("value", [-1, 8, 1.5, "0", None, True])
def test_a_wrong_class_is_refused_by_name(value: Any) -> None:
    with pytest.raises(commlayer.ConfigError) as caught, commlayer.priority(value):
        pass
    assert f"priority({value!r}): use a whole number, 0 (most urgent) to 7" in str(caught.value)


def test_the_outermost_name_counts() -> None:
    """A pipeline names a segment, whose gradients then travel as a bucket."""
    assert current_label() == ""
    with labelled("segment 1 of stage 0"):
        with labelled("bucket 0"):
            assert current_label() == "segment 1 of stage 0"
        assert current_label() == "segment 1 of stage 0"
    with labelled("bucket 1"):
        assert current_label() == "bucket 1"
    assert current_label() == ""
