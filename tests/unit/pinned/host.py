"""`Host`: an engine whose operations a test ends."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from commlayer.errors import CommError
from commlayer.frontend.device.pinned import PinnedHandle
from commlayer.frontend.work.work import CommWork
from commlayer.transport.base import Handle
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
