"""`Accelerator`: streams, events and pinned memory of a kind of device; tests have a fake.

`Current` is that of this machine, whatever it is, by `torch.accelerator`. Only words are CUDA's: `Cuda` adds them. A
stream rings a gate, a word in host memory, when its copies are over, and waits for another word, which the engine
writes. `waits_for_words` tries that on each device, because a driver may refuse it, or accept it and then block the
calling thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
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


def write_word(word: Tensor, value: int = 1) -> None:
    """Writes the first int32 of host memory by its address: torch's own writes fail in `torch.inference_mode`."""
    ctypes.c_int32.from_address(word.data_ptr()).value = value


def read_word(word: Tensor) -> int:
    """The first int32 of host memory, as it is now."""
    return int(ctypes.c_int32.from_address(word.data_ptr()).value)


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

    def synchronize(self) -> None:
        """Blocks the calling thread until the work that it has so far is over."""


class Accelerator(Protocol):
    """The functions of a device and its driver that pinned copies use."""

    def has(self, tensor: Tensor) -> bool:
        """Whether the tensor is on such a device."""

    def at(self, device: torch.device) -> AbstractContextManager[Any]:
        """Makes a device the current one of the calling thread."""

    def current_stream(self, device: torch.device) -> Any:
        """The current stream of the calling thread."""

    def side_stream(self, device: torch.device) -> Any:
        """Another stream."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Makes a stream, and its device, the current one. It may be entered by several threads at once."""

    def event(self) -> Any:
        """A new event."""

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Pinned host memory. It may be used again as soon as no tensor refers to it."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies between the device and pinned memory, on the current stream of the device."""

    def write_word(self, stream: Any, word: Tensor) -> None:
        """Writes 1 to `word`, an int32 in pinned memory, behind all work that the stream has so far.

        Raises DriverError if the driver cannot do that.
        """

    def wait_word(self, stream: Any, word: Tensor) -> None:
        """Later work of the stream waits until `word`, an int32 in pinned memory, is at least 1.

        Raises DriverError if the driver cannot do that.
        """

    def is_capturing(self) -> bool:
        """Whether the current stream records a graph."""


class Current:
    """The accelerator of this machine, by `torch.accelerator`."""

    @functools.cached_property
    def kind(self) -> str:
        """Its type: "cuda", "xpu"; empty: there is none."""
        found = torch.accelerator.current_accelerator()
        return "" if found is None else found.type

    def has(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.kind

    def at(self, device: torch.device) -> AbstractContextManager[Any]:
        # On leaving it takes care to make no context on the device before, which a new thread has never used.
        return torch.accelerator.device_index(device.index)

    def current_stream(self, device: torch.device) -> Any:
        return torch.accelerator.current_stream(device)

    def side_stream(self, device: torch.device) -> Any:
        return torch.Stream(device)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        # A torch.Stream as a context keeps the stream before in itself, where two threads overwrite each other's.
        with self.at(stream.device):
            before = self.current_stream(stream.device)
            torch.accelerator.set_stream(stream)
            try:
                yield
            finally:
                torch.accelerator.set_stream(before)

    def event(self) -> Any:
        return torch.Event(self.kind)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.no_grad():
            target.copy_(source, non_blocking=True)

    def write_word(self, stream: Any, word: Tensor) -> None:  # noqa: ARG002
        raise DriverError(f"streams of {self.kind or 'no device'} do not write words of host memory")

    def wait_word(self, stream: Any, word: Tensor) -> None:  # noqa: ARG002
        raise DriverError(f"streams of {self.kind or 'no device'} do not wait for words of host memory")

    def is_capturing(self) -> bool:
        return False


class Cuda(Current):
    """CUDA, which also has words. Its own events let a thread that waits sleep; torch.Event spins."""

    @functools.cached_property
    def _driver(self) -> Driver:
        return Driver()

    def current_stream(self, device: torch.device) -> Any:
        return torch.cuda.current_stream(device)

    def side_stream(self, device: torch.device) -> Any:
        return torch.cuda.Stream(device)

    def event(self) -> Any:
        return torch.cuda.Event(blocking=True)

    def write_word(self, stream: Any, word: Tensor) -> None:
        with self.at(stream.device):
            self._driver.write_value(stream.cuda_stream, word.data_ptr(), 1)

    def wait_word(self, stream: Any, word: Tensor) -> None:
        with self.at(stream.device):
            self._driver.wait_value(stream.cuda_stream, word.data_ptr(), 1)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()


@functools.cache
def current() -> Accelerator:
    """The accelerator of this machine."""
    found = torch.accelerator.current_accelerator()
    return Cuda() if found is not None and found.type == "cuda" else Current()


_known: weakref.WeakKeyDictionary[Accelerator, dict[torch.device, bool]] = weakref.WeakKeyDictionary()


def waits_for_words(accelerator: Accelerator, device: torch.device) -> bool:
    """Whether streams of this device can wait for words of host memory. The log says so, once per device."""
    known = _known.setdefault(accelerator, {})
    if device in known:
        return known[device]
    with accelerator.at(device):
        fault = _fault(accelerator, device)
    known[device] = fault is None
    if fault is None:
        log.info("%s: streams wait for operations (cuStreamWaitValue32)", device)
    else:
        log.warning("%s: wait() of an operation blocks the calling thread: %s", device, fault)
    return fault is None


def _fault(accelerator: Accelerator, device: torch.device) -> str | None:
    """The reason for which streams cannot work with words; None: they can. It waits for the current stream."""
    for stream in (accelerator.side_stream(device), accelerator.current_stream(device)):
        fault = _fault_of(accelerator, device, stream)
        if fault is not None:
            return fault
    return None


def _fault_of(accelerator: Accelerator, device: torch.device, stream: Any) -> str | None:
    ended, gate, word, source = accelerator.event(), *(accelerator.pinned((1,), torch.int32) for _ in range(3))
    for memory in (gate, word, source):
        write_word(memory, 0)
    rescue = threading.Timer(RESCUE_S, write_word, (word,))
    with accelerator.on(stream):
        target = torch.zeros(1, dtype=torch.int32, device=device)
        accelerator.copy(target, source)
        target.add_(1)  # loads the kernel, which may wait for the device
        stream.synchronize()
        rescue.start()  # before the wait: a driver may block the very call that asks for it
        try:
            accelerator.write_word(stream, gate)
            accelerator.wait_word(stream, word)
            accelerator.copy(target, source)
            target.add_(1)
            ended.record(stream)
        except DriverError as error:
            rescue.cancel()
            return str(error)
    has_blocked = read_word(word) != 0
    time.sleep(TRIAL_S)
    has_rung, has_waited = _by(lambda: read_word(gate) != 0), not ended.query()
    rescue.cancel()
    write_word(word)
    ended.synchronize()
    if has_blocked:
        return "cuStreamWaitValue32 blocks the thread that enqueues the next operation"
    if not has_waited:
        return "cuStreamWaitValue32 does not make the stream wait"
    return None if has_rung else "cuStreamWriteValue32 does not write the word"


def _by(is_so: Callable[[], bool]) -> bool:
    """Whether that becomes so within RESCUE_S."""
    end_s = time.monotonic() + RESCUE_S
    while not is_so() and time.monotonic() < end_s:
        time.sleep(0.001)
    return is_so()
