"""`Host`: an engine whose operations a test ends."""

import threading
import time
from collections.abc import Callable, Sequence
from ctypes import c_int32
from typing import Any

import torch
from torch import Tensor

from commlayer.errors import CommError
from commlayer.frontend.device.pinned_handle import PinnedHandle
from commlayer.frontend.work.context import Words, current_words
from commlayer.frontend.work.work import CommWork
from commlayer.transport.base import Handle
from tests.fake_transport import FakeHandle


class Host:
    """An engine: doubles its inputs into its outputs once the test ends an operation."""

    def __init__(self) -> None:
        self.started: list[list[float]] = []
        self.failure: CommError | None = None
        self._begun = threading.Semaphore(0)
        self._last = threading.Thread()
        """It waits for the gate of the latest operation, behind those before."""
        self._last.start()
        self._ends: list[Callable[[], None]] = []

    def double(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> CommWork:
        handle: Any = FakeHandle()
        words = current_words()

        def begin() -> None:
            self.started.append(inputs[0].tolist() if inputs else [])
            self._begun.release()

        def end() -> None:
            for given, result in zip(inputs or outputs, outputs, strict=True):
                if self.failure is None:
                    result.copy_(given * 2 if inputs else torch.full_like(result, 5))
                elif words is not None:
                    result.view(torch.uint8).fill_(0xFF)  # NaN
            write_done(words)
            handle.end(self.failure)

        self._ends.append(end)
        if words is None or not inputs:
            begin()
        else:
            self._last = when_open(words, begin, self._last)
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


def when_open(words: Words | None, begin: Callable[[], object], previous: threading.Thread) -> threading.Thread:
    """Begins an operation when its gate is open, and those before it have begun. As the engine, it calls no driver."""

    def wait() -> None:
        previous.join()
        while words is not None and not c_int32.from_address(words.gate).value:
            time.sleep(0.0002)
        begin()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def write_done(words: Words | None) -> None:
    """The operation is over."""
    if words is not None:
        c_int32.from_address(words.done).value = 1


def handle_of(work: CommWork) -> PinnedHandle:
    assert isinstance(work.handle, PinnedHandle)
    return work.handle


def comes(is_so: Callable[[], object]) -> bool:
    """Waits until that is so, 10 s at most."""
    end_s = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.001)
    return True
