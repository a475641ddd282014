"""No order of calls and streams makes two ranks wait for each other."""

import functools
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from commlayer.frontend.device.pinned import PinnedCopies
from commlayer.frontend.work.work import CommWork
from commlayer.transport.base import Handle
from tests.fake_cuda import FakeCuda
from tests.fake_transport import FakeHandle
from tests.unit.pinned.host import Host


@pytest.mark.parametrize("queues", [1, 2, None])
def test_two_ranks_that_exchange_messages_do_not_deadlock(queues: int | None) -> None:
    """They do not even where all streams share one queue: a receive is called and waited for as in any pipeline."""
    ranks = [FakeCuda(queues=queues), FakeCuda(queues=queues)]
    copies = [PinnedCopies(cuda, stream_wait=True) for cuda in ranks]
    boxes = [Mailbox(), Mailbox()]
    tensors = [cuda.tensor(rank + 1.0) for rank, cuda in enumerate(ranks)]
    got = [cuda.tensor(0) for cuda in ranks]
    for _ in range(3):
        works = []
        for rank, pinned in enumerate(copies):
            works.append(pinned.run(boxes[rank].receive, [], [got[rank]], at_once=True))
            works.append(pinned.run(boxes[1 - rank].send, [tensors[rank]], []))
        for work in works:
            work.wait()
        for rank, cuda in enumerate(ranks):
            cuda.launch(functools.partial(step, tensors[rank], got[rank]))
    assert [cuda.read(tensor) for cuda, tensor in zip(ranks, tensors, strict=True)] == [[5.0], [4.0]]
    for pinned in copies:
        pinned.close()


def step(target: Tensor, source: Tensor) -> None:
    target.copy_(source + 1)


class Mailbox:
    """Messages to one rank."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: list[float] = []
        self._receives: list[tuple[Any, Tensor]] = []

    def send(self, inputs: Sequence[Tensor], _: Sequence[Tensor]) -> CommWork:
        with self._lock:
            self._values.append(float(inputs[0]))
        self._match()
        return CommWork(None, [])

    def receive(self, _: Sequence[Tensor], outputs: Sequence[Tensor]) -> CommWork:
        handle: Any = FakeHandle()
        with self._lock:
            self._receives.append((handle, outputs[0]))
        self._match()
        typed: Handle = handle
        return CommWork(typed, list(outputs))

    def _match(self) -> None:
        with self._lock:
            if not self._values or not self._receives:
                return
            (handle, target), value = self._receives.pop(0), self._values.pop(0)
        target.fill_(value)
        handle.end(None)


@pytest.mark.parametrize("queues", [1, None])
def test_a_word_is_written_while_a_thread_enqueues_behind_it(queues: int | None, host: Host) -> None:
    """The stream's queue is full: the calling thread blocks behind the word, and holds nothing that the end needs."""
    cuda = FakeCuda(queues=queues)
    pinned = PinnedCopies(cuda, stream_wait=True)
    tensor = cuda.tensor(1)
    work = pinned.run(host.double, [tensor], [tensor])
    host.started_by_now(1)
    in_copy, go_on = threading.Event(), threading.Event()
    copy = cuda.copy

    def full(target: Tensor, source: Tensor) -> None:
        in_copy.set()
        assert go_on.wait(10)
        copy(target, source)

    cuda.copy = full  # type: ignore[method-assign]
    waiter = threading.Thread(target=work.wait)
    waiter.start()
    assert in_copy.wait(10)
    ender = threading.Thread(target=host.finish, args=(0,))
    ender.start()
    ender.join(10)
    assert not ender.is_alive()
    go_on.set()
    waiter.join(10)
    assert cuda.read(tensor) == [2.0]
    pinned.close()
