"""Pinned copies on a fake of CUDA, whose streams are threads: too early gives wrong values, too late is a fault."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from commlayer.errors import CommError, ConfigError, OperationTimeoutError
from commlayer.frontend.pinned import PinnedCopies, PinnedHandle
from commlayer.frontend.transfer import Transfer
from commlayer.frontend.work import CommWork, join
from commlayer.transport.base import Handle
from tests.fake_cuda import FakeCuda, alias
from tests.fake_transport import FakeHandle


class Host:
    """An engine: doubles its inputs into its outputs once the test ends an operation."""

    def __init__(self) -> None:
        self.started: list[list[float]] = []
        self.failure: CommError | None = None
        self._begun = threading.Semaphore(0)
        self._ends: list[Callable[[], None]] = []

    def double(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> CommWork:
        handle: Any = FakeHandle()
        self.started.append(inputs[0].tolist() if inputs else [])

        def end() -> None:
            if self.failure is None:
                for given, result in zip(inputs or outputs, outputs, strict=True):
                    result.copy_(given * 2 if inputs else torch.full_like(result, 5))
            handle.end(self.failure)

        self._ends.append(end)
        self._begun.release()
        typed: Handle = handle
        return CommWork(typed, list(outputs))

    def started_by_now(self, count: int) -> None:
        """Waits until that many more operations have started."""
        for _ in range(count):
            assert self._begun.acquire(timeout=10)

    def finish(self, index: int) -> None:
        self._ends[index]()

    def end(self, index: int = 0) -> None:
        self.started_by_now(1)
        self.finish(index)


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def pinned(cuda: FakeCuda) -> Iterator[PinnedCopies]:
    made = PinnedCopies(cuda)
    yield made
    made.close()
    cuda.synchronize()


def handle_of(work: CommWork) -> PinnedHandle:
    assert isinstance(work.handle, PinnedHandle)
    return work.handle


# ---- order ----------------------------------------------------------------------------------------------------------


def test_inputs_are_copied_after_their_kernels_and_results_before_later_ones(
    cuda: FakeCuda, pinned: PinnedCopies, host: Host
) -> None:
    tensor = cuda.tensor(0, 0, 0)
    opened = cuda.gate()
    cuda.launch(lambda: tensor.fill_(3))
    work = pinned.run(host.double, [tensor], [tensor])
    work.wait()
    seen: list[float] = []
    cuda.launch(lambda: seen.extend(tensor.tolist()))
    assert not work.is_completed()
    opened.set()
    host.end()
    cuda.synchronize()
    assert host.started == [[3.0, 3.0, 3.0]]
    assert seen == [6.0, 6.0, 6.0]
    assert work.is_completed()
    assert work.is_success()
    assert work.result() == [tensor]


def test_the_copies_back_wait_for_what_still_reads_the_results(
    cuda: FakeCuda, pinned: PinnedCopies, host: Host
) -> None:
    target = cuda.tensor(7, 7)
    reader, read = cuda.side_stream(), []
    with cuda.on(reader):
        opened = cuda.gate()
        cuda.launch(lambda: read.extend(target.tolist()))
        first = pinned.run(host.double, [], [target], at_once=True)  # a receive starts before the reader has ended
        second = pinned.run(host.double, [], [target], at_once=True)
    first.wait()  # the copies back are behind the word
    host.started_by_now(2)
    host.finish(0)
    host.finish(1)  # these ones are enqueued by the thread that ends the operation
    time.sleep(0.02)
    opened.set()
    second.wait()
    assert cuda.read(target) == [5.0, 5.0]
    assert read == [7.0, 7.0]


def test_several_streams_may_wait_for_one_operation(cuda: FakeCuda, pinned: PinnedCopies, host: Host) -> None:
    tensor = cuda.tensor(1, 2)
    work = pinned.run(host.double, [tensor], [tensor])
    seen: list[list[float]] = []
    streams = [cuda.side_stream() for _ in range(3)]
    for stream in streams:
        with cuda.on(stream):
            work.wait()
            cuda.launch(lambda: seen.append(tensor.tolist()))
    host.end()
    for stream in streams:
        stream.synchronize()
    assert seen == 3 * [[2.0, 4.0]]
    assert cuda.waits == 2  # that of the trial, and one here


def test_an_operation_that_is_over_is_copied_before_anybody_waits(
    cuda: FakeCuda, pinned: PinnedCopies, host: Host
) -> None:
    tensor = cuda.tensor(1, 2)
    work = pinned.run(host.double, [tensor], [tensor])
    tried = cuda.waits
    host.end()
    assert work.is_completed() or _comes(work.is_completed)
    work.wait()
    assert cuda.read(tensor) == [2.0, 4.0]
    assert cuda.waits == tried


def test_operations_start_in_the_order_of_the_calls_with_and_without_a_device(
    cuda: FakeCuda, pinned: PinnedCopies, host: Host
) -> None:
    opened = cuda.gate()
    first = pinned.run(host.double, [cuda.tensor(1)], [cuda.tensor(0)])
    assert pinned.busy
    order: list[str] = []

    def plain(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> CommWork:
        assert not inputs
        assert not outputs
        assert not pinned.busy  # what this thread starts now is in its turn
        order.append("after" if host.started else "before")
        return CommWork(None, [])

    second = pinned.run(plain, [], [])
    opened.set()
    second.wait()
    assert order == ["after"]
    assert not pinned.busy
    host.end()
    first.wait()


def test_a_receive_starts_at_once(cuda: FakeCuda, pinned: PinnedCopies, host: Host) -> None:
    opened = cuda.gate()
    first = pinned.run(host.double, [cuda.tensor(1)], [cuda.tensor(0)])
    target = cuda.tensor(0, 0)
    receive = pinned.run(host.double, [], [target], at_once=True)
    assert host.started == [[]]
    host.end(0)
    opened.set()
    receive.wait()
    assert cuda.read(target) == [5.0, 5.0]
    host.end(1)
    first.wait()


# ---- the host goes on -----------------------------------------------------------------------------------------------


def test_wait_returns_while_the_operation_is_in_flight(cuda: FakeCuda, pinned: PinnedCopies, host: Host) -> None:
    tensors = [cuda.tensor(each, each) for each in range(20)]
    works = [pinned.run(host.double, [tensor], [tensor]) for tensor in tensors]
    for work in works:
        work.wait()
    host.started_by_now(20)
    for index in reversed(range(20)):  # the most urgent one last
        host.finish(index)
    assert [cuda.read(tensor) for tensor in tensors] == [[2.0 * each, 2.0 * each] for each in range(20)]
    assert all(work.is_success() for work in works)


def test_wait_with_a_timeout_blocks_until_the_operation_is_over(
    cuda: FakeCuda, pinned: PinnedCopies, host: Host
) -> None:
    tensor = cuda.tensor(1)
    work = pinned.run(host.double, [tensor], [tensor])
    with pytest.raises(OperationTimeoutError, match="still goes on"):
        work.wait(timedelta(milliseconds=10))
    assert not work.is_completed()
    assert work.exception() is None
    host.end()
    work.wait(timedelta(seconds=10))
    assert handle_of(work).done() or _comes(work.is_completed)
    assert cuda.read(tensor) == [2.0]


def test_an_operation_without_a_device_blocks(pinned: PinnedCopies, host: Host) -> None:
    work = pinned.run(lambda *_: host.double([torch.ones(1)], [torch.zeros(1)]), [], [])
    threading.Timer(0.05, host.end).start()
    work.wait()
    assert work.is_completed()


@pytest.mark.parametrize("words", ["refuse", "block", "ignore"])
def test_where_streams_cannot_wait_the_thread_does(
    words: Any, host: Host, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commlayer.frontend.accelerator.RESCUE_S", 0.1)
    monkeypatch.setattr("commlayer.frontend.accelerator.TRIAL_S", 0.5)
    cuda = FakeCuda(words=words)
    pinned = PinnedCopies(cuda)
    for number in range(2):
        tensor = cuda.tensor(1, 2)
        work = pinned.run(host.double, [tensor], [tensor])
        waiter = threading.Thread(target=work.wait)
        waiter.start()
        waiter.join(0.05)
        assert waiter.is_alive()
        host.end(number)
        waiter.join(10)
        work.wait()
        assert cuda.read(tensor) == [2.0, 4.0]
    assert [record.message for record in caplog.records if "blocks the calling thread" in record.message] == [
        f"cpu: wait() of an operation blocks the calling thread: {REASONS[words]}"
    ]
    pinned.close()


REASONS = {
    "refuse": "cuStreamWaitValue32: CUDA_ERROR_NOT_SUPPORTED (801)",
    "block": "cuStreamWaitValue32 blocks the thread that enqueues the next operation",
    "ignore": "cuStreamWaitValue32 does not make the stream wait",
}


def test_the_setting_makes_the_thread_wait(cuda: FakeCuda, host: Host) -> None:
    pinned = PinnedCopies(cuda, stream_wait=False)
    tensor = cuda.tensor(1)
    work = pinned.run(host.double, [tensor], [tensor])
    threading.Timer(0.05, host.end).start()
    work.wait()
    assert cuda.read(tensor) == [2.0]
    assert cuda.waits == 0
    pinned.close()


# ---- deadlock -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queues", [1, 2, None])
def test_two_ranks_that_exchange_messages_do_not_deadlock(queues: int | None) -> None:
    """Even where all streams share one queue: a receive is called and waited for as in any pipeline."""
    ranks = [FakeCuda(queues=queues), FakeCuda(queues=queues)]
    copies = [PinnedCopies(cuda) for cuda in ranks]
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
    pinned = PinnedCopies(cuda)
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


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_pinned_memory_is_not_used_again_before_the_copies_are_over(host: Host) -> None:
    cuda = FakeCuda(lag_s=0.01)
    pinned = PinnedCopies(cuda)
    seen = []
    for number in range(20):
        tensor = cuda.tensor(number, number)
        pinned.run(host.double, [tensor], [tensor]).wait()
        host.end(number)
        seen.append(tensor)
    assert [cuda.read(tensor) for tensor in seen] == [[2.0 * each, 2.0 * each] for each in range(20)]
    assert _comes(lambda: pinned.run(lambda *_: CommWork(None, []), [], []).wait() and not pinned._in_flight)
    assert len(cuda._free) >= 1
    pinned.close()


def test_the_callers_tensors_live_until_the_copies_are_over(
    cuda: FakeCuda, pinned: PinnedCopies, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As record_stream() would have it: the allocator may give memory that nobody refers to to another kernel."""
    source, target = cuda.pinned((2,), torch.float32), cuda.pinned((2,), torch.float32)  # overwritten when it is freed
    source.fill_(1)
    own = {tensor.untyped_storage().data_ptr() for tensor in (source, target)}
    monkeypatch.setattr(cuda, "has", lambda tensor: tensor.untyped_storage().data_ptr() in own)
    opened = cuda.gate()
    out = alias(target)
    pinned.run(host.double, [source], [target]).wait()
    del source, target
    opened.set()
    host.end()
    assert cuda.read(out) == [2.0, 2.0]
    assert host.started == [[1.0, 1.0]]


# ---- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream_wait", [True, False])
def test_a_known_failure_is_raised_by_wait_and_by_the_future(cuda: FakeCuda, host: Host, stream_wait: bool) -> None:
    pinned = PinnedCopies(cuda, stream_wait=stream_wait)
    host.failure = CommError("rank 1 died")
    work = pinned.run(host.double, [cuda.tensor(1)], [cuda.tensor(0)])
    host.end()
    assert _comes(work.is_completed)
    with pytest.raises(CommError, match="rank 1 died"):
        work.wait()
    with pytest.raises(RuntimeError, match="rank 1 died"):
        work.get_future().wait()
    assert isinstance(work.exception(), CommError)
    assert work.is_completed()
    assert not work.is_success()
    pinned.run(lambda *_: CommWork(None, []), [], []).wait()  # it was told already
    pinned.close()


def test_a_failure_behind_a_stream_lets_it_go_on_with_nan_and_is_raised_by_the_next_call(
    cuda: FakeCuda, pinned: PinnedCopies, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    tensor = cuda.tensor(1, 2)
    work = pinned.run(host.double, [tensor], [tensor])
    work.wait()
    host.failure = CommError("rank 1 died")
    host.end()
    assert all(value != value for value in cuda.read(tensor))
    assert "rank 1 died" in caplog.text
    with pytest.raises(CommError, match="rank 1 died"):
        pinned.run(host.double, [tensor], [tensor])
    pinned.run(lambda *_: CommWork(None, []), [], []).wait()  # once
    assert isinstance(work.exception(), CommError)
    assert work.is_completed()
    assert not work.is_success()
    with pytest.raises(CommError, match="rank 1 died"):
        work.wait()


def test_a_failure_that_the_caller_has_seen_is_not_raised_again(
    cuda: FakeCuda, pinned: PinnedCopies, host: Host
) -> None:
    tensor = cuda.tensor(1)
    work = pinned.run(host.double, [tensor], [tensor])
    work.wait()
    host.failure = CommError("rank 1 died")
    host.end()
    assert _comes(lambda: isinstance(work.exception(), CommError))
    pinned.run(lambda *_: CommWork(None, []), [], []).wait()


def test_a_refusal_is_raised_and_lets_the_stream_go_on(cuda: FakeCuda, pinned: PinnedCopies) -> None:
    def refuse(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> CommWork:
        raise ValueError("no such thing")

    opened = cuda.gate()
    tensor = cuda.tensor(1)
    work = pinned.run(refuse, [tensor], [tensor])
    work.wait()
    opened.set()
    assert all(value != value for value in cuda.read(tensor))
    with pytest.raises(ValueError, match="no such thing"):
        work.wait()
    assert not pinned.busy
    with pytest.raises(ValueError, match="no such thing"):
        pinned.run(refuse, [], [cuda.tensor(1)], at_once=True)


def test_the_stream_goes_on_whatever_fails(
    cuda: FakeCuda, pinned: PinnedCopies, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no NaN in this type")

    class WithoutFuture(CommWork):
        get_future = fail  # type: ignore[assignment]

    monkeypatch.setattr(Transfer, "spoil", fail)
    first, second = cuda.tensor(1), cuda.tensor(2)
    works = [
        pinned.run(host.double, [first], [first]),
        pinned.run(lambda *_: WithoutFuture(None, []), [second], [second]),
    ]
    for work in works:
        work.wait()
    host.failure = CommError("rank 1 died")
    host.end()
    cuda.synchronize()
    assert [str(work.exception()) for work in works] == ["rank 1 died", "no NaN in this type"]


def test_two_devices_in_one_operation_are_refused(cuda: FakeCuda, pinned: PinnedCopies) -> None:
    with pytest.raises(ValueError, match="cpu, cpu:1"):
        pinned.run(lambda *_: CommWork(None, []), [cuda.tensor(1), OnDevice(cuda.tensor(1))], [])


class OnDevice(Tensor):
    """Says that it is somewhere else."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cpu", 1)


def test_a_graph_is_refused(cuda: FakeCuda, pinned: PinnedCopies) -> None:
    cuda.capturing = True
    with pytest.raises(ConfigError, match="while a CUDA graph is recorded"):
        pinned.run(lambda *_: CommWork(None, []), [cuda.tensor(1)], [])


def test_what_a_stream_waits_for_is_over_before_the_group_ends(
    cuda: FakeCuda, pinned: PinnedCopies, host: Host
) -> None:
    tensor = cuda.tensor(1)
    pinned.run(host.double, [tensor], [tensor]).wait()
    with cuda.on(cuda.side_stream()):
        pinned.run(host.double, [cuda.tensor(1)], [cuda.tensor(1)])  # nobody waits for this one
    host.started_by_now(2)
    settler = threading.Thread(target=pinned.settle)
    settler.start()
    settler.join(0.05)
    assert settler.is_alive()
    host.finish(0)
    settler.join(10)
    assert not settler.is_alive()
    assert cuda.read(tensor) == [2.0]
    host.finish(1)


def test_streams_go_on_when_the_process_ends(cuda: FakeCuda, host: Host) -> None:
    pinned = PinnedCopies(cuda)
    tensor = cuda.tensor(1)
    pinned.run(host.double, [tensor], [tensor]).wait()
    host.started_by_now(1)
    pinned._at_exit()
    cuda.synchronize()
    host.finish(0)


# ---- futures --------------------------------------------------------------------------------------------------------


def test_a_future_has_the_results_in_the_order_of_streams(cuda: FakeCuda, pinned: PinnedCopies, host: Host) -> None:
    tensor = cuda.tensor(1, 2)
    work = pinned.run(host.double, [tensor], [tensor])
    seen: list[float] = []
    done = work.get_future().then(lambda value: cuda.launch(lambda: seen.extend(value.value()[0].tolist())))
    assert not done.done()
    host.end()
    done.wait()
    cuda.synchronize()
    assert seen == [2.0, 4.0]


def test_a_wait_completes_the_future_too(cuda: FakeCuda, pinned: PinnedCopies, host: Host) -> None:
    tensor = cuda.tensor(1, 2)
    work = pinned.run(host.double, [tensor], [tensor])
    seen: list[float] = []
    done = work.get_future().then(lambda value: cuda.launch(lambda: seen.extend(value.value()[0].tolist())))
    work.wait()
    assert done.done()
    host.end()
    cuda.synchronize()
    assert seen == [2.0, 4.0]


def test_a_future_of_several_operations_has_all_results(cuda: FakeCuda, pinned: PinnedCopies, host: Host) -> None:
    """One result comes by the stream that waits, the other by the thread that ends the operation."""
    slow, fast = cuda.tensor(1), cuda.tensor(2)
    works: list[CommWork] = [pinned.run(host.double, [each], [each]) for each in (slow, fast)]
    host.started_by_now(2)
    seen: list[float] = []
    joined = join(works)
    done = joined.get_future().then(
        lambda value: cuda.launch(lambda: seen.extend(float(each) for each in value.value()))
    )
    stream = cuda.side_stream()
    with cuda.on(stream):
        works[0].wait()
    host.finish(1)
    done.wait()
    host.finish(0)
    cuda.synchronize()
    assert seen == [2.0, 4.0]


@pytest.mark.parametrize("queues", [1, None])
def test_a_future_made_in_a_backward_pass_completes_at_its_end(host: Host, queues: int | None) -> None:
    """As DDP's futures: the host does not wait, and no stream does before all kernels of the pass are enqueued."""
    cuda = FakeCuda(queues=queues)
    pinned = PinnedCopies(cuda)
    tensor, later = cuda.tensor(1, 2), cuda.tensor(3)
    works: list[CommWork] = []
    waits: list[int] = []

    def hook(_: Tensor) -> None:
        works.append(pinned.run(host.double, [tensor], [tensor]))
        works[0].get_future()
        waits.append(cuda.waits)
        works.append(pinned.run(host.double, [later], [later]))  # its inputs must not be behind the first wait

    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(hook)
    leaf.sum().backward()
    assert works[0].get_future().done()
    assert not works[0].is_completed()
    assert waits == [1]
    assert cuda.waits == 2
    host.started_by_now(2)
    host.finish(0)
    host.finish(1)
    assert cuda.read(tensor) == [2.0, 4.0]
    works[1].wait()
    assert cuda.read(later) == [6.0]
    pinned.close()


def test_a_future_waited_for_within_the_backward_pass_blocks(cuda: FakeCuda, pinned: PinnedCopies, host: Host) -> None:
    """As in DDP's first step with static_graph: whichever comes first completes it."""
    tensor = cuda.tensor(1)
    leaf = torch.ones(2, requires_grad=True)

    def hook(_: Tensor) -> None:
        work = pinned.run(host.double, [tensor], [tensor])
        threading.Timer(0.05, host.end).start()
        work.get_future().wait()

    leaf.register_hook(hook)
    leaf.sum().backward()
    cuda.synchronize()  # a future of torch would let the current stream wait
    assert cuda.read(tensor) == [2.0]


def _comes(is_so: Callable[[], object]) -> bool:
    end_s = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.001)
    return True
