"""A fake of CUDA for tests of pinned copies: CPU memory for the device, and threads for its streams.

Work of a stream is done in order by a thread, when its turn comes; streams are ordered by events and words alone. So a
copy that reads memory too early finds other values there, and so does one whose pinned memory is used again too early:
memory that nobody refers to any more is overwritten at once. What waits for longer than `PATIENCE_S` is a deadlock:
`synchronize` raises it.

The driver has a lock, which every call takes. `first_use` of a kernel, `free`, a pageable copy (`read_pageable`) and a
launch into a full queue hold it until the device is idle, as CUDA's driver may: a call of another thread waits
meanwhile. If the device waits for that thread, it is a deadlock.

With `queues=1` the device has one queue for all streams, as CUDA_DEVICE_MAX_CONNECTIONS=1 asks for: all work is done in
the order in which it was enqueued, and what waits holds up everything behind it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from commlayer.frontend.device.accelerator import read_word, write_word
from commlayer.frontend.device.driver import DriverError

PATIENCE_S = 10.0
"""Time after which a stream that waits is taken for deadlocked."""

LAG_S = 0.001
"""Time that a copy takes."""

Words = Literal["wait", "refuse", "block", "hang", "ignore"]
"""What the driver does when a stream shall wait for a word: that; an error; it blocks the thread that enqueues the next
work, or the one that asks; nothing."""


class Queue:
    """Does work in order, in a thread."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="fake-cuda", daemon=True).start()

    def put(self, task: Callable[[], object] | None) -> None:
        self._tasks.put(task)

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception as error:
                self._cuda.faults.append(error)


class FakeStream:
    """A stream."""

    def __init__(self, cuda: FakeCuda, work: Queue) -> None:
        self._cuda, self._queue = cuda, work
        self.blocked_by: Tensor | None = None

    def enqueue(self, task: Callable[[], object]) -> None:
        if self.blocked_by is not None:
            word, self.blocked_by = self.blocked_by, None
            _until(lambda: read_word(word) >= 1, "a word that blocks a thread")
        with self._cuda.driver:
            self._queue.put(task)

    def wait_event(self, event: FakeEvent) -> None:
        reached = event.reached
        self.enqueue(lambda: _wait(reached, "an event"))

    def wait_stream(self, stream: FakeStream) -> None:
        event = self._cuda.event()
        event.record(stream)
        self.wait_event(event)

    def synchronize(self) -> None:
        event = self._cuda.event()
        event.record(self)
        event.synchronize()


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.reached = threading.Event()
        self.reached.set()

    def record(self, stream: FakeStream) -> None:
        self.reached = threading.Event()
        stream.enqueue(self.reached.set)

    def query(self) -> bool:
        with self._cuda.driver:
            return self.reached.is_set()

    def synchronize(self) -> None:
        _wait(self.reached, "an event, by a thread of the host")
        with self._cuda.driver:
            pass


class FakeCuda:
    """An `Accelerator`. Tensors are on the device once they, or tensors with their memory, were given to `adopt`."""

    def __init__(self, *, queues: int | None = None, words: Words = "wait", lag_s: float = LAG_S) -> None:
        self.words = words
        self.lag_s = lag_s
        self.capturing = False
        self.pinned_left: int | None = None
        """So many more tensors of pinned memory are left; None: as many as the test wants."""
        self.driver = threading.RLock()
        self.faults: list[Exception] = []
        self.waits = 0
        """Waits for words."""
        self._queues = [Queue(self) for _ in range(queues or 0)]
        self._streams: list[FakeStream] = []
        self._local = threading.local()
        self._default = self.side_stream()
        self._adopted: dict[int, Tensor] = {}
        self._allocated: dict[int, Tensor] = {}
        self._free: list[Tensor] = []
        self._lock = threading.RLock()

    # ---- Accelerator ------------------------------------------------------------------------------------------------

    def has(self, tensor: Tensor) -> bool:
        tensor = tensor if tensor.layout is torch.strided else tensor._values()
        address = tensor.untyped_storage().data_ptr()
        return address in self._adopted or address in self._allocated

    def current_stream(self, device: object = None) -> FakeStream:  # noqa: ARG002
        stream: FakeStream = getattr(self._local, "stream", self._default)
        return stream

    def side_stream(self, device: object = None) -> FakeStream:  # noqa: ARG002
        work = self._queues[len(self._streams) % len(self._queues)] if self._queues else Queue(self)
        self._streams.append(FakeStream(self, work))
        return self._streams[-1]

    @contextlib.contextmanager
    def at(self, device: torch.device) -> Iterator[None]:  # noqa: ARG002
        yield

    @contextlib.contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self._local.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._local.stream = before

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self.pinned_left == 0:
            raise RuntimeError("CUDA error: out of memory")
        if self.pinned_left is not None:
            self.pinned_left -= 1
        length = torch.Size(shape).numel() * dtype.itemsize
        with self._lock:
            memory = next((block for block in self._free if len(block) == length), None)
            if memory is None:
                memory = torch.full((length,), 0xA5, dtype=torch.uint8)
            else:
                self._free = [block for block in self._free if block is not memory]
        made = _view(memory, dtype, 0, shape)
        weakref.finalize(made, self._give_back, memory).atexit = False
        return made

    def copy(self, target: Tensor, source: Tensor) -> None:
        to, of = alias(target), alias(source)

        def task() -> None:
            time.sleep(self.lag_s)
            to.copy_(of)

        self.current_stream().enqueue(task)

    def write_word(self, stream: FakeStream, word: Tensor) -> None:
        seen = alias(word)
        stream.enqueue(lambda: write_word(seen))

    def wait_word(self, stream: FakeStream, word: Tensor) -> None:
        if self.words == "refuse":
            raise DriverError("cuStreamWaitValue32: CUDA_ERROR_NOT_SUPPORTED (801)")
        self.waits += 1
        seen = alias(word)
        if self.words != "ignore":
            stream.enqueue(lambda: _until(lambda: read_word(seen) >= 1, "a word"))
        if self.words == "block":
            stream.blocked_by = seen
        if self.words == "hang":
            _until(lambda: read_word(seen) >= 1, "a word, in the call that asks for the wait")

    def is_capturing(self) -> bool:
        return self.capturing

    # ---- for tests --------------------------------------------------------------------------------------------------

    def adopt(self, tensor: Tensor) -> Tensor:
        """Puts a tensor on the device."""
        values = tensor if tensor.layout is torch.strided else tensor._values()
        self._adopted[values.untyped_storage().data_ptr()] = tensor  # kept, so that no other gets its address
        return tensor

    def memory(self, values: Tensor) -> Tensor:
        """A tensor as of the caching allocator: memory that nobody refers to is written by later work of the stream.

        That is the current stream, as with CUDA.
        """
        memory, stream = values.detach().clone().view(torch.uint8), self.current_stream()
        made = _view(memory, values.dtype, 0, values.shape)
        self._allocated[memory.untyped_storage().data_ptr()] = memory
        weakref.finalize(made, stream.enqueue, lambda: memory.fill_(0xA5)).atexit = False
        return made

    def tensor(self, *values: float) -> Tensor:
        return self.adopt(torch.tensor(values, dtype=torch.float32))

    def drain(self) -> None:
        """Holds the driver's lock until the device is idle. Raises what went wrong until then."""
        with self.driver:
            for stream in list(self._streams):
                reached = threading.Event()
                stream._queue.put(reached.set)
                if not reached.wait(PATIENCE_S):
                    self.faults.append(RuntimeError("deadlock: the driver waits for the device"))
        self.check()

    first_use = free = read_pageable = launch_into_full_queue = drain

    def close(self) -> None:
        """Ends the threads of the streams."""
        for stream in self._streams:
            stream._queue.put(None)

    def launch(self, kernel: Callable[[], object]) -> None:
        """Enqueues a kernel on the current stream."""
        self.current_stream().enqueue(kernel)

    def gate(self) -> threading.Event:
        """Holds the current stream until the returned event is set."""
        opened = threading.Event()
        self.launch(lambda: _wait(opened, "a gate"))
        return opened

    def read(self, tensor: Tensor) -> list[float]:
        """The values of a tensor, as a kernel on the current stream sees them. Raises what went wrong until then."""
        seen: list[float] = []
        self.launch(lambda: seen.extend(tensor.detach().reshape(-1).tolist()))
        self.current_stream().synchronize()
        self.check()
        return seen

    def synchronize(self) -> None:
        """Waits for all streams. Raises what went wrong."""
        for stream in list(self._streams):
            stream.synchronize()
        self.check()

    def check(self) -> None:
        """Raises what went wrong in a stream."""
        if self.faults:
            raise self.faults[0]

    def _give_back(self, memory: Tensor) -> None:
        memory.fill_(0xA5)
        with self._lock:
            self._free.append(memory)


def alias(tensor: Tensor) -> Tensor:
    """The memory of a tensor, without a reference to the tensor. Any thread may write it, in any mode."""
    with torch.inference_mode(mode=False):
        return _view(tensor, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())


def _view(
    of: Tensor, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int] | None = None
) -> Tensor:
    """The same memory as a tensor of its own."""
    made: Any = torch.empty(0, dtype=dtype)
    storage = of.detach().untyped_storage()
    return made.set_(storage, offset, tuple(shape), *([] if stride is None else [stride]))  # type: ignore[no-any-return]


def _wait(event: threading.Event, what: str) -> None:
    if not event.wait(PATIENCE_S):
        raise RuntimeError(f"deadlock: waits for {what}")


def _until(is_so: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > end_s:
            raise RuntimeError(f"deadlock: waits for {what}")
        time.sleep(0.0005)
