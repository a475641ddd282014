"""`Accelerator`: streams, events and pinned memory of a kind of device. `Cuda` is CUDA's; tests have a fake.

A stream that waits for a word in host memory is needed where the host shall not wait for the network. `waits_for_words`
tries that on each device, because a driver may refuse it, or accept it and then block the calling thread.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from .driver import Driver, DriverError

log = logging.getLogger("commlayer")

TRIAL_S = 0.02
"""Time that a stream has to come to the end of a trial, if it does not wait."""

RESCUE_S = 5.0
"""Time after which a trial gives up, for a thread that the driver blocks."""


class Event(Protocol):
    """A place in a stream."""

    def record(self, stream: Any) -> None:
        """Puts the event behind all work that the stream has so far."""

    def query(self) -> bool:
        """Whether the device has come to it; True if it was never recorded."""

    def synchronize(self) -> None:
        """Blocks the calling thread until the device has come to it."""


class Stream(Protocol):
    """Work that a device does in order."""

    def wait_event(self, event: Any) -> None:
        """Later work waits for the event."""

    def wait_stream(self, stream: Any) -> None:
        """Later work waits for all that the other stream has so far."""


class Accelerator(Protocol):
    """The functions of `torch.cuda` and of the driver that pinned copies use."""

    def has(self, tensor: Tensor) -> bool:
        """Whether the tensor is on such a device."""

    def current_stream(self, device: torch.device) -> Any:
        """The current stream of the calling thread."""

    def side_stream(self, device: torch.device) -> Any:
        """Another stream."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Makes a stream the current one."""

    def event(self) -> Any:
        """A new event."""

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Pinned host memory. It may be used again as soon as no tensor refers to it."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies between the device and pinned memory, on the current stream of the device."""

    def wait_word(self, stream: Any, word: Tensor) -> None:
        """Later work of the stream waits until `word`, an int32 in pinned memory, is at least 1.

        Raises DriverError if the driver cannot do that.
        """

    def is_capturing(self) -> bool:
        """Whether the current stream records a graph."""


class Cuda:
    """CUDA, by `torch.cuda` and libcuda."""

    def __init__(self) -> None:
        self._driver: Driver | None = None

    def has(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def current_stream(self, device: torch.device) -> Any:
        return torch.cuda.current_stream(device)

    def side_stream(self, device: torch.device) -> Any:
        return torch.cuda.Stream(device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def event(self) -> Any:
        return torch.cuda.Event(blocking=True)  # a thread that waits for it sleeps

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.no_grad():
            target.copy_(source, non_blocking=True)

    def wait_word(self, stream: Any, word: Tensor) -> None:
        if self._driver is None:
            self._driver = Driver()
        with torch.cuda.device(stream.device):
            self._driver.wait_value(stream.cuda_stream, word.data_ptr(), 1)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()


CUDA = Cuda()


_known: weakref.WeakKeyDictionary[Accelerator, dict[torch.device, bool]] = weakref.WeakKeyDictionary()


def waits_for_words(accelerator: Accelerator, device: torch.device) -> bool:
    """Whether streams of this device can wait for words of host memory. The log says so, once per device."""
    known = _known.setdefault(accelerator, {})
    if device in known:
        return known[device]
    fault = _fault(accelerator, device)
    known[device] = fault is None
    if fault is None:
        log.info("%s: streams wait for operations (cuStreamWaitValue32)", device)
    else:
        log.warning("%s: wait() of an operation blocks the calling thread: %s", device, fault)
    return fault is None


def _fault(accelerator: Accelerator, device: torch.device) -> str | None:
    """The reason for which a stream cannot wait for a word; None: it can."""
    stream, ended = accelerator.side_stream(device), accelerator.event()
    word = accelerator.pinned((1,), torch.int32).zero_()
    source = accelerator.pinned((1,), torch.int32).zero_()
    rescue = threading.Timer(RESCUE_S, word.fill_, (1,))
    with accelerator.on(stream):
        target = torch.zeros(1, dtype=torch.int32, device=device)
        accelerator.copy(target, source)
        target.add_(1)  # loads the kernel, which may wait for the device
        try:
            accelerator.wait_word(stream, word)
        except DriverError as error:
            return str(error)
        rescue.start()
        accelerator.copy(target, source)
        target.add_(1)
        ended.record(stream)
    has_blocked = bool(word.item())
    time.sleep(TRIAL_S)
    has_waited = not ended.query()
    rescue.cancel()
    word.fill_(1)
    ended.synchronize()
    if has_blocked:
        return "cuStreamWaitValue32 blocks the thread that enqueues the next operation"
    return None if has_waited else "cuStreamWaitValue32 does not make the stream wait"
