"""Pinned copies on a fake of torch.cuda, where a stream sees only the work that it has been made to wait for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from commlayer.errors import CommError
from commlayer.frontend.pinned import PinnedCopies
from commlayer.frontend.work import CommWork
from commlayer.transport.base import Handle
from tests.fake_transport import FakeHandle


class FakeStream:
    """Tasks that run as late as possible: when a thread waits for an event after them."""

    def __init__(self, device: Any = None) -> None:
        self.device = device
        self.tasks: list[Callable[[], object]] = []
        self.done = 0
        self.lock = threading.RLock()

    def run(self, until: int) -> None:
        with self.lock:
            while self.done < until:
                self.done += 1
                self.tasks[self.done - 1]()

    def wait_event(self, event: FakeEvent) -> None:
        self.tasks.append(event.synchronize)

    def wait_stream(self, stream: FakeStream) -> None:
        event = FakeEvent()
        event.record(stream)
        self.wait_event(event)


class FakeEvent:
    def record(self, stream: FakeStream) -> None:
        self.stream, self.position = stream, len(stream.tasks)

    def synchronize(self) -> None:
        self.stream.run(self.position)

    def query(self) -> bool:
        return self.stream.done >= self.position


class Enqueue(TorchFunctionMode):
    """Puts copies into a stream instead of doing them."""

    def __init__(self, stream: FakeStream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_:
            self.stream.tasks.append(lambda: func(*args, **(kwargs or {})))
            return args[0]
        return func(*args, **(kwargs or {}))


class FakeCuda:
    """The part of torch.cuda that PinnedCopies uses, with the CPU as the device."""

    Stream, Event = FakeStream, FakeEvent

    def __init__(self) -> None:
        self.current = FakeStream()

    def current_stream(self, device: Any = None) -> FakeStream:  # noqa: ARG002
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        with Enqueue(stream):
            yield


class Host:
    """An engine: doubles its inputs into its outputs when told to go on."""

    def __init__(self) -> None:
        self.started: list[list[float]] = []
        self.handles: list[FakeHandle] = []
        self.begun = threading.Semaphore(0)
        self.failure: CommError | None = None

    def double(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> CommWork:
        handle: Any = FakeHandle()
        self.started.append(inputs[0].tolist())
        self.handles.append(handle)
        for given, result in zip(inputs, outputs, strict=True):
            result.copy_(given * 2)
        self.begun.release()
        typed: Handle = handle
        return CommWork(typed, list(outputs))

    def end(self, index: int = 0) -> None:
        assert self.begun.acquire(timeout=10)
        self.handles[index].end(self.failure)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    monkeypatch.setattr(Tensor, "record_stream", lambda *_: None)  # for torch's allocator; refuses the fake stream
    return FakeCuda()


@pytest.fixture
def pinned(cuda: FakeCuda) -> Iterator[PinnedCopies]:
    made = PinnedCopies(cuda, device_type="cpu")
    yield made
    made.close()


def test_inputs_are_copied_after_their_kernels_and_results_before_later_ones(
    cuda: FakeCuda, pinned: PinnedCopies
) -> None:
    host = Host()
    tensor = torch.zeros(3)
    cuda.current.tasks.append(lambda: tensor.fill_(3))  # a kernel of the caller's, not run so far
    work = pinned.run(host.double, [tensor], [tensor])
    host.end()
    work.wait()
    seen: list[float] = []
    cuda.current.tasks.append(lambda: seen.extend(tensor.tolist()))
    assert not work.is_completed()
    cuda.current.run(len(cuda.current.tasks))
    assert host.started == [[3.0, 3.0, 3.0]]
    assert seen == [6.0, 6.0, 6.0]
    assert work.is_completed()
    assert work.is_success()
    assert work.result() == [tensor]


def test_results_do_not_overwrite_memory_that_the_caller_still_reads(cuda: FakeCuda, pinned: PinnedCopies) -> None:
    host = Host()
    source, target = torch.ones(2), torch.full((2,), 7.0)
    read: list[float] = []
    cuda.current.tasks.append(lambda: read.extend(target.tolist()))
    work = pinned.run(host.double, [source], [target])
    host.end()
    work.wait()
    cuda.current.run(len(cuda.current.tasks))
    assert read == [7.0, 7.0]
    assert target.tolist() == [2.0, 2.0]


def test_operations_start_in_the_order_of_the_calls_with_and_without_a_device(cuda: FakeCuda) -> None:
    pinned = PinnedCopies(cuda, device_type="cpu")
    host, go = Host(), threading.Event()
    cuda.current.tasks.append(lambda: go.wait(10))
    first = pinned.run(host.double, [torch.ones(1)], [torch.zeros(1)])
    assert pinned.busy
    order: list[str] = []

    def plain(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> CommWork:
        assert not inputs
        assert not outputs
        order.append("after" if host.started else "before")
        return CommWork(None, [])

    second = pinned.run(plain, [], [])
    go.set()
    second.wait()
    assert order == ["after"]
    assert not pinned.busy
    host.end()
    first.wait()
    pinned.close()


def test_a_failure_is_raised_by_wait_and_by_the_future(pinned: PinnedCopies) -> None:
    host = Host()
    host.failure = CommError("rank 1 died")
    work = pinned.run(host.double, [torch.ones(1)], [torch.zeros(1)])
    host.end()
    with pytest.raises(CommError, match="rank 1 died"):
        work.wait()
    with pytest.raises(RuntimeError, match="rank 1 died"):
        work.get_future().wait()
    assert isinstance(work.exception(), CommError)
    assert work.is_completed()
    assert not work.is_success()


def test_a_refusal_is_raised_by_wait(pinned: PinnedCopies) -> None:
    def refuse(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> CommWork:
        raise ValueError("no such thing")

    work = pinned.run(refuse, [torch.ones(1)], [])
    with pytest.raises(ValueError, match="no such thing"):
        work.wait()
    assert not pinned.busy


def test_two_devices_in_one_operation_are_refused(cuda: FakeCuda) -> None:
    pinned = PinnedCopies(cuda, device_type="cpu")
    with pytest.raises(ValueError, match="cpu, cpu:1"):
        pinned.run(lambda *_: CommWork(None, []), [torch.ones(1), OnDevice(torch.ones(1))], [])


class OnDevice(Tensor):
    """Says that it is somewhere else."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cpu", 1)
