"""CUDA tensors on an engine that knows host memory: they go through pinned buffers, on streams of their own.

    caller's stream   ... produce inputs | (goes on)                                   | wait: results are there
    copies out        waits for that, copies to pinned memory
    this thread       waits for the copy, starts the operation
    copies in         once the operation is over: copies from pinned memory

As with NCCL, the caller's stream waits and not the device; unlike there, `wait()` also blocks the calling thread until
the network is done, because the last copy is only enqueued then.

Operations of a process group must start in the order of the calls. So operations on CPU tensors queue behind one on
device tensors that has not started: `PinnedCopies.busy` tells, and `run` takes operations without device tensors, too.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.futures import Future

from ..errors import OperationTimeoutError

Call = Callable[[Sequence[Tensor], Sequence[Tensor]], Work]
"""Starts an operation on host tensors (inputs, outputs); an in-place tensor is the same object in both."""


class PinnedWork(Work):
    """An operation that may not have started yet. Its results are ready for whoever's stream has waited for them."""

    def __init__(self, results: list[Tensor], device: torch.device | None, cuda: Any) -> None:
        super().__init__()
        self._results = results
        self._device = device
        self._cuda = cuda
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._copied: Any = None  # an event; None when nothing was copied to the device
        self._work: Work | None = None
        devices: list[int | str | torch.device] = [] if device is None or device.type == "cpu" else [device]
        self._source: Future[Any] = Future(devices=devices)
        # The child, because only what a callback raises becomes an error in C++: see work.py.
        self._future = self._source.then(lambda done: done.value())

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the operation is over and the copies of its results are enqueued; the current stream waits."""
        timeout_s = timeout.total_seconds() if timeout else None
        if not self._ended.wait(timeout_s):
            raise OperationTimeoutError(f"the operation did not end within {timeout_s} s; it still goes on")
        if self._error is not None:
            raise self._error
        if self._copied is not None:
            self._cuda.current_stream(self._device).wait_event(self._copied)
        return True

    def is_completed(self) -> bool:
        """True once the results are on the device, or the operation has failed. Never blocks."""
        return self._ended.is_set() and (self._error is not None or self._copied is None or self._copied.query())

    def is_success(self) -> bool:
        """True once the results are on the device."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """What the operation failed of; None while it runs, and if it ended well."""
        return self._error if self._ended.is_set() else None

    def result(self) -> list[Tensor]:
        """The results; waits for them as `wait` does."""
        self.wait()
        return self._results

    def synchronize(self) -> None:
        """The same as `wait()`."""
        self.wait()

    def get_future(self) -> Future[Any]:
        """The results as a future; callbacks run on streams that have waited for them."""
        return self._future

    def _source_rank(self) -> int:
        """Of a receive, once it is over: the rank it came from."""
        self.wait()
        return self._work._source_rank()  # type: ignore[union-attr]

    def missing(self) -> list[tuple[int, int]]:
        """See `CommWork.missing`."""
        self.wait()
        return self._work.missing()  # type: ignore[union-attr,no-any-return]

    def started(self, work: Work) -> None:
        """For `PinnedCopies`: the operation on the host."""
        self._work = work

    def end(self, error: BaseException | None, copied: Any = None) -> None:
        """For `PinnedCopies`, once: the operation is over. To be called with the stream current that has the copies."""
        self._error, self._copied = error, copied
        self._ended.set()
        if error is None:
            self._source.set_result(self._results)
        else:
            self._source.set_exception(error)


class PinnedWorks(Work):
    """Several operations on device tensors as one."""

    def __init__(self, works: list[PinnedWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As `PinnedWork.wait`, for each of them, `timeout` in all; raises the first failure."""
        deadline = time.monotonic() + timeout.total_seconds() if timeout else None
        for work in self._works:
            work.wait(None if deadline is None else timedelta(seconds=max(deadline - time.monotonic(), 1e-6)))
        return True

    def is_completed(self) -> bool:
        """True once all are."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """True once all are well."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        """The first failure there is."""
        return next(filter(None, (work.exception() for work in self._works)), None)

    def synchronize(self) -> None:
        """The same as `wait()`."""
        self.wait()


class PinnedCopies:
    """Starts operations on device tensors, in order, from a thread that waits for the copies out.

    `cuda` is `torch.cuda`; tests have a fake of it, whose device tensors are of another `device_type`.
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
        """Whether an operation has been called that has not started."""
        return self._waiting > 0

    def run(self, call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> PinnedWork:
        """Starts `call` on host copies of the tensors when its turn has come; the results go to `outputs`.

        Tensors of the host are handed on as they are. Raises ValueError when there is more than one device.
        """
        devices = {tensor.device for tensor in (*inputs, *outputs) if self._is_there(tensor)}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"tensors on {names} in one operation: move them to one device")
        device = next(iter(devices), None)
        work = PinnedWork(list(outputs), device, self._cuda)
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
                started = call(host_inputs, host_outputs)
            except Exception as error:
                self._has_started()
                work.end(error)
                return
            self._has_started()
            work.started(started)
            started.get_future().add_done_callback(lambda _: self._finish(work, started, device, host, outputs))

        with self._lock:
            self._waiting += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="commlayer-pinned", daemon=True)
                self._thread.start()
            self._queue.put(start)
        return work

    def close(self) -> None:
        """Ends the thread once everything that was called has started."""
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
        work: PinnedWork,
        started: Work,
        device: torch.device | None,
        host: dict[int, Tensor],
        outputs: Sequence[Tensor],
    ) -> None:
        try:
            started.wait()  # it is over; this raises its error, with its type
            if device is None:
                work.end(None)
                return
            _, back = self._side_streams(device)
            # The caller's earlier work on the outputs is over: the operation started after `ready`, which follows it.
            with torch.no_grad(), self._cuda.stream(back):
                for tensor in outputs:
                    if self._is_there(tensor):
                        tensor.copy_(host[id(tensor)], non_blocking=True)
                        tensor.record_stream(back)
                copied = self._cuda.Event()
                copied.record(back)
                work.end(None, copied)
        except Exception as error:
            work.end(error)

    def _side_streams(self, device: torch.device) -> tuple[Any, Any]:
        with self._lock:
            if device not in self._streams:
                self._streams[device] = (self._cuda.Stream(device), self._cuda.Stream(device))
            return self._streams[device]

    def _is_there(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._device_type

    def _pinned(self, tensor: Tensor) -> Tensor:
        """Host memory like the tensor's, from torch's cache of pinned blocks, which knows when a copy is over."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._device_type == "cuda")
