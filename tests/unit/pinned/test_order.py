"""Pinned copies on a fake of CUDA, whose streams are threads: too early gives wrong values, too late is a fault."""

import time
from collections.abc import Sequence

from torch import Tensor

from commlayer.frontend.device.pinned import PinnedCopies
from commlayer.frontend.work.context import NeedsHostError, current_words
from commlayer.frontend.work.work import CommWork
from tests.fake_cuda import FakeCuda
from tests.unit.pinned.host import Host, comes, handle_of


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
    assert cuda.waits == 1


def test_an_operation_that_is_over_is_copied_before_anybody_waits(
    cuda: FakeCuda, pinned: PinnedCopies, host: Host
) -> None:
    tensor = cuda.tensor(1, 2)
    work = pinned.run(host.double, [tensor], [tensor])
    tried = cuda.waits
    host.end()
    assert work.is_completed() or comes(work.is_completed)
    work.wait()
    assert cuda.read(tensor) == [2.0, 4.0]
    assert cuda.waits == tried


def test_operations_start_in_the_order_of_the_calls_with_and_without_a_device(cuda: FakeCuda, host: Host) -> None:
    pinned = PinnedCopies(cuda, stream_wait=False)
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
    pinned.close()


def test_an_operation_behind_one_that_the_host_starts_has_no_words(
    cuda: FakeCuda, pinned: PinnedCopies, host: Host
) -> None:
    """Its turn comes once this thread has started the other one, which needs the driver and the interpreter."""
    opened = cuda.gate()
    tensors = [cuda.tensor(value) for value in (1, 2)]
    first = pinned.run(host.double, [tensors[0]], [tensors[0]], needs_host=True)
    second = pinned.run(host.double, [tensors[1]], [tensors[1]])
    assert handle_of(first).words() is handle_of(second).words() is None
    opened.set()
    host.end(0)
    host.end(1)
    second.wait()
    assert cuda.read(tensors[1]) == [4.0]


def test_an_operation_that_needs_the_host_is_started_by_it(cuda: FakeCuda, pinned: PinnedCopies, host: Host) -> None:
    def call(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> CommWork:
        if current_words() is not None:
            raise NeedsHostError
        return host.double(inputs, outputs)

    tensor = cuda.tensor(3)
    work = pinned.run(call, [tensor], [tensor])
    assert handle_of(work).words() is None
    host.end()
    work.wait()
    assert cuda.read(tensor) == [6.0]


def test_a_receive_starts_at_once(cuda: FakeCuda, pinned: PinnedCopies, host: Host) -> None:
    opened = cuda.gate()
    first = pinned.run(host.double, [cuda.tensor(1)], [cuda.tensor(0)])
    target = cuda.tensor(0, 0)
    receive = pinned.run(host.double, [], [target], at_once=True)
    assert host.started == [[]]
    host.end(1)
    opened.set()
    receive.wait()
    assert cuda.read(target) == [5.0, 5.0]
    host.end(0)
    first.wait()
