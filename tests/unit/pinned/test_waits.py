"""The host goes on where streams wait for operations; elsewhere it blocks."""

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch

from commlayer.errors import OperationTimeoutError
from commlayer.frontend.device.accelerator import waits_for_words
from commlayer.frontend.device.pinned import PinnedCopies
from tests.fake_cuda import FakeCuda
from tests.unit.pinned.host import Host, comes, handle_of


def test_wait_returns_while_the_operation_is_in_flight(cuda: FakeCuda, pinned: PinnedCopies, host: Host) -> None:
    tensors = [cuda.tensor(number, number) for number in range(20)]
    works = [pinned.run(host.double, [tensor], [tensor]) for tensor in tensors]
    for work in works:
        work.wait()
    host.started_by_now(20)
    for index in reversed(range(20)):  # the most urgent one last
        host.finish(index)
    assert [cuda.read(tensor) for tensor in tensors] == [[2.0 * number, 2.0 * number] for number in range(20)]
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
    assert handle_of(work).done() or comes(work.is_completed)
    assert cuda.read(tensor) == [2.0]


def test_an_operation_without_a_device_blocks(pinned: PinnedCopies, host: Host) -> None:
    work = pinned.run(lambda *_: host.double([torch.ones(1)], [torch.zeros(1)]), [], [])
    threading.Timer(0.05, host.end).start()
    work.wait()
    assert work.is_completed()


@pytest.mark.parametrize("words", ["refuse", "block", "hang", "ignore"])
def test_where_streams_cannot_wait_the_thread_does(
    words: Any, host: Host, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commlayer.frontend.device.accelerator.RESCUE_S", 0.1)
    monkeypatch.setattr("commlayer.frontend.device.accelerator.TRIAL_S", 0.5)
    cuda = FakeCuda(words=words)
    pinned = PinnedCopies(cuda, stream_wait=True)
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
    "hang": "cuStreamWaitValue32 blocks the thread that enqueues the next operation",
    "ignore": "cuStreamWaitValue32 does not make the stream wait",
}


def test_the_current_stream_is_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default stream may be one of old programs, which waits for all others."""

    class Legacy(FakeCuda):
        def wait_word(self, stream: Any, word: Any) -> None:
            self.words = "block" if stream is self._default else "wait"
            super().wait_word(stream, word)

    monkeypatch.setattr("commlayer.frontend.device.accelerator.RESCUE_S", 0.1)
    cuda = Legacy()
    assert not waits_for_words(cuda, torch.device("cpu"))
    cuda.close()


def test_the_setting_makes_the_thread_wait(cuda: FakeCuda, host: Host) -> None:
    pinned = PinnedCopies(cuda, stream_wait=False)
    tensor = cuda.tensor(1)
    work = pinned.run(host.double, [tensor], [tensor])
    threading.Timer(0.05, host.end).start()
    work.wait()
    assert cuda.read(tensor) == [2.0]
    assert cuda.waits == 0
    pinned.close()
