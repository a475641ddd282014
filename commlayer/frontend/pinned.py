"""CUDA tensors on an engine that reaches only host memory: pinned copies, on streams of their own.

    caller's stream   ... produce inputs | (goes on)                                   | wait: results are there
    copies out        waits for that, copies to pinned memory
    this thread       waits for the copy, starts the operation
    copies in         once the operation is over: copies from pinned memory

As with NCCL, the caller's stream waits, not the whole device. Unlike NCCL, `wait()` also blocks the calling thread
until the network is done, because only then the last copy is enqueued.

Operations of a process group must start in the order of the calls. So operations on CPU tensors queue behind one on
device tensors that has not started: `PinnedCopies.busy` tells, and `run` takes operations without device tensors, too.
"""

from __future__ import annotations

import contextlib
import contextvars
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from ..errors import OperationTimeoutError
from ..transport.base import Times
from .work import CommWork, ReceiveWork

Call = Callable[[Sequence[Tensor], Sequence[Tensor]], Work]
"""Starts an operation on host tensors (inputs, outputs). An in-place tensor is the same object in both."""


class PinnedHandle:
    """A `base.ReceiveHandle`: an operation on device tensors, which may not have started yet.

    It is done once its results are on the device, or it has failed.
    """

    def __init__(self, device: torch.device | None, cuda: Any) -> None:
        self._device = device
        self._cuda = cuda
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._callbacks: list[Callable[[BaseException | None], None]] = []
        self._error: BaseException | None = None
        self._copied: tuple[Any, Any] | None = None  # the stream of the copies to the device, and their event
        self.work: Work | None = None
        """The operation on host memory, once it has started."""

    def done(self) -> bool:
        return self._ended.is_set() and (self._error is not None or self._copied is None or self._copied[1].query())

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks until the operation is over and the copies of its results are enqueued; the current stream waits for
        the copies. Raises as `base.Handle.wait`."""
        if not self._ended.wait(timeout_s):
            raise OperationTimeoutError(f"the operation did not end within {timeout_s} s; it still goes on")
        if self._error is not None:
            raise self._error
        if self._copied is not None:
            self._cuda.current_stream(self._device).wait_event(self._copied[1])

    def missing(self) -> list[tuple[int, int]]:
        return self.work.missing() if isinstance(self.work, CommWork) else []  # gloo loses nothing

    def times(self) -> Times | None:
        return self.work.times() if isinstance(self.work, CommWork) else None

    @property
    def source(self) -> int:
        return self.work._source_rank()  # type: ignore[union-attr]

    def on_done(self, callback: Callable[[BaseException | None], None]) -> None:
        """See `base.Handle.on_done`; it runs with the stream current that has the copies, which may not be over."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        self._call(callback)

    def end(self, error: BaseException | None, copied: tuple[Any, Any] | None = None) -> None:
        """For `PinnedCopies`, once: the operation is over; `copied` is the stream of the copies and their event."""
        with self._lock:
            self._error, self._copied = error, copied
            self._ended.set()
        for callback in self._callbacks:
            self._call(callback)

    def _call(self, callback: Callable[[BaseException | None], None]) -> None:
        with self._cuda.stream(self._copied[0]) if self._copied else contextlib.nullcontext():
            callback(self._error)


class PinnedCopies:
    """Starts operations on device tensors, in the order of the calls, from a thread that waits for the copies out.

    `cuda` is `torch.cuda`, or a fake of it in tests, with another `device_type`.
    """

    def __init__(self, cuda: Any = torch.cuda, device_type: str = "cuda") -> None:
        self._cuda = cuda
        self._device_type = device_type
        self._streams: dict[torch.device, tuple[Any, Any]] = {}
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._waiting = 0
        self._lock = threading.Lock()

    @property
    def busy(self) -> bool:
        """Whether an operation that was called has not started."""
        return self._waiting > 0

    def run(self, call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> CommWork:
        """Starts `call` on pinned copies of the tensors when its turn comes, and copies the results to `outputs`.

        Host tensors are passed on as they are, and so is the caller's context (`priority.py`). Raises ValueError if the
        tensors are on more than one device.
        """
        context = contextvars.copy_context()
        devices = {tensor.device for tensor in (*inputs, *outputs) if self._is_there(tensor)}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"tensors on {names} in one operation: move them to one device")
        device = next(iter(devices), None)
        handle = PinnedHandle(device, self._cuda)
        host: dict[int, Tensor] = {}
        ready = None
        if device is not None:
            out, _ = self._side_streams(device)
            out.wait_stream(self._cuda.current_stream(device))
            with self._cuda.stream(out):
                for tensor in inputs:
                    if self._is_there(tensor):
                        host[id(tensor)] = self._pinned(tensor)
                        host[id(tensor)].copy_(tensor.detach(), non_blocking=True)
                        tensor.record_stream(out)
                ready = self._cuda.Event()
                ready.record(out)
            for tensor in outputs:
                if self._is_there(tensor) and id(tensor) not in host:
                    host[id(tensor)] = self._pinned(tensor)
        host_inputs = [host.get(id(tensor), tensor) for tensor in inputs]
        host_outputs = [host.get(id(tensor), tensor) for tensor in outputs]

        def start() -> None:
            try:
                if ready is not None:
                    ready.synchronize()
                started = context.run(call, host_inputs, host_outputs)
            except Exception as error:
                self._has_started()
                handle.end(error)
                return
            self._has_started()
            handle.work = started
            started.get_future().add_done_callback(lambda _: self._finish(handle, started, device, host, outputs))

        with self._lock:
            self._waiting += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="commlayer-pinned", daemon=True)
                self._thread.start()
            self._queue.put(start)
        return ReceiveWork(handle, list(outputs), device=device)

    def close(self) -> None:
        """Ends the thread once every operation that was called has started."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()

    def _serve(self) -> None:
        while (start := self._queue.get()) is not None:
            start()

    def _has_started(self) -> None:
        with self._lock:
            self._waiting -= 1

    def _finish(
        self,
        handle: PinnedHandle,
        started: Work,
        device: torch.device | None,
        host: dict[int, Tensor],
        outputs: Sequence[Tensor],
    ) -> None:
        try:
            started.wait()  # it is over; this raises its error
            if device is None:
                handle.end(None)
                return
            _, back = self._side_streams(device)
            # The caller's earlier kernels on the outputs are over: they precede `ready`, and the operation follows it.
            with torch.no_grad(), self._cuda.stream(back):
                for tensor in outputs:
                    if self._is_there(tensor):
                        tensor.copy_(host[id(tensor)], non_blocking=True)
                        tensor.record_stream(back)
                copied = self._cuda.Event()
                copied.record(back)
            handle.end(None, (back, copied))
        except Exception as error:
            handle.end(error)

    def _side_streams(self, device: torch.device) -> tuple[Any, Any]:
        with self._lock:
            if device not in self._streams:
                self._streams[device] = (self._cuda.Stream(device), self._cuda.Stream(device))
            return self._streams[device]

    def _is_there(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._device_type

    def _pinned(self, tensor: Tensor) -> Tensor:
        """Pinned host memory of the tensor's shape. torch's cache of pinned blocks knows when a copy is over."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._device_type == "cuda")
