"""`CommWork`: an operation in flight, as a `Work` of torch.

Two things keep a failure from crashing or vanishing in C++ (`tests/process/test_backend_errors.py` tests each of them):
the class derives from `Work`, and its future is the child of another one, because `Future.set_exception` stores the
exception as an ordinary value, while an exception raised in a `then` callback becomes a real C++ error.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import Work, _register_work
from torch.futures import Future

from ...dynamo import untraced
from ...errors import ConfigError
from ...telemetry.meter import meter
from ...transport.base import Handle, ReceiveHandle, Times
from ...transport.call import Call

HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
HOOKS_THAT_WAIT = frozenset({f"{HOOKS}.powerSGD_hook", f"{HOOKS}.quantization_hooks"})
"""Modules of torch whose hooks start an operation in a callback, and wait for it there."""

OpType: Any = _distributed_c10d.OpType  # type: ignore[attr-defined]  # not in the stub

OP_TYPES = {
    "all_reduce": OpType.ALLREDUCE,
    "reduce": OpType.REDUCE,
    "reduce_scatter": OpType.REDUCE_SCATTER,
    "all_gather": OpType.ALLGATHER,
    "broadcast": OpType.BROADCAST,
    "gather": OpType.GATHER,
    "scatter": OpType.SCATTER,
    "all_to_all": OpType.ALLTOALL,
    "barrier": OpType.BARRIER,
    "send": OpType.SEND,
    "receive": OpType.RECV,
}
"""torch's types of operations, by the names of calls."""


@untraced
class CommWork(Work):
    """A submitted collective; `handle` None: it has ended well.

    `results` are the caller's tensors, the value of the future; `device` is theirs (None: the CPU). `memory` is
    everything that the engine may touch; it is kept alive until the operation is done. `finish` copies temporaries to
    the caller's tensors; it runs once, in the first thread that learns that the operation is done.
    """

    def __init__(
        self,
        handle: Handle | None,
        results: list[torch.Tensor],
        memory: list[torch.Tensor] | None = None,
        finish: Callable[[], None] | None = None,
        device: torch.device | None = None,
        call: Call | None = None,
    ) -> None:
        super().__init__()
        self.handle = handle
        self.results = results
        self.device = device
        self._memory = memory
        self._finish = finish
        self._lock = threading.Lock()
        self._future: Future[Any] | None = None
        self.waited = False
        """Whether `wait` has returned."""
        self.call = call
        """The call whose operation this is; None of a work of several calls."""
        self.kept: tuple[tuple[int, int], ...] = ()
        """See `Collectives.all_reduce_from`."""
        self._is_registered = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the results are there. Raises the operation's error, or OperationTimeoutError.

        With tensors on a device the current stream waits, see `pinned.py`; with a timeout, the calling thread, too.

        No timeout is None in Python, and a timedelta of 0 in C++.
        """
        if self.handle is not None:
            timeout_s = timeout.total_seconds() if timeout else None
            if meter.is_on and not self.handle.done():
                self._wait_metered(timeout_s)
            else:
                self.handle.wait(timeout_s)
            self.waited = True
            self.settle()
            if self._future is not None:
                self._future.wait()  # it may complete a moment later, and C++ takes its value after this
            if self._is_registered:
                self._unregister()
        return True

    def register(self) -> None:
        """Lets torch's `wait_tensor` wait for this operation, as code compiled within
        `allow_inflight_collective_as_graph_input_ctx` calls it for the results. torch keeps the work until then."""
        if self.handle is None:
            return
        self._is_registered = True
        for tensor in self.results:
            _register_work(tensor, self)

    def _unregister(self) -> None:
        """It has ended: torch lets go of it, and of the memory of its results."""
        self._is_registered = False  # `wait_tensor` calls `wait`
        for tensor in self.results:
            torch.ops._c10d_functional.wait_tensor(tensor)

    def _wait_metered(self, timeout_s: float | None) -> None:
        """Waits, and tells the meter how long that took."""
        assert self.handle is not None  # noqa: S101  # wait() has looked
        if self.call is not None:
            self.call.is_waited = True
        with meter.waiting():
            self.handle.wait(timeout_s)

    def is_completed(self) -> bool:
        """True once the operation ended, well or not. Never blocks on the network."""
        if self.handle is None:
            return True
        if not self.handle.done():
            return False
        if self.exception() is None:
            self.settle()
        return True

    def is_success(self) -> bool:
        """True once the operation ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """The operation's error; None while it runs, and if it ended well."""
        if self.handle is None or not self.handle.done():
            return None
        try:
            self.handle.wait(0.0)
        except Exception as error:
            return error
        return None

    def result(self) -> list[torch.Tensor]:
        """The results; waits for them."""
        self.wait()
        return self.results

    def synchronize(self) -> None:
        """The same as `wait()`."""
        self.wait()

    def missing(self) -> list[tuple[int, int]]:
        """(offset, length) in bytes of contributions that were not counted; waits for the results."""
        self.wait()
        return [] if self.handle is None else self.handle.missing()

    def times(self) -> Times | None:
        """The times at which the operation was submitted, moved its first byte, and ended; of several operations the
        earliest, the earliest and the latest. None while it runs, and if it ended within its call (`async_op=False`).

        With tensors on a device, the times are those of the operation on host memory.
        """
        return None if self.handle is None else self.handle.times()

    def _get_op_type(self) -> Any:
        """torch's type of the operation."""
        return OpType.COALESCED if self.call is None else OP_TYPES[self.call.name]

    def _get_duration(self) -> float:
        """Milliseconds from the call to its end. Raises RuntimeError while it runs."""
        times = self.call.times() if self.call is not None else self.times()
        if times is None:
            raise RuntimeError("the operation is still in flight and has no duration yet; wait for it first")
        return (times.ended_s - times.submitted_s) * 1e3

    def _get_sequence_number(self) -> int:
        """The number of its call in the group; 0 of a work of several calls."""
        return 0 if self.call is None else self.call.sequence

    def get_future(self) -> Future[Any]:
        """The results as a future of a list of tensors. Its callbacks run on the completion thread.

        For HOOKS_THAT_WAIT it waits for the results first, so that callbacks run at once, in the calling thread. On the
        completion thread, the operations of one bucket's callbacks would mix with those of the next buckets in another
        order on each rank. (Streams keep NCCL's in order.)
        """
        caller = sys._getframe().f_back  # None: C++ calls, on a thread without Python frames, as a GPU's backward does
        if self.handle is not None and caller is not None and caller.f_globals.get("__name__") in HOOKS_THAT_WAIT:
            with contextlib.suppress(Exception):  # the future has it
                self.handle.wait()
        with self._lock:
            if self._future is not None:
                return self._future
            on_cpu = self.device is None or self.device.type == "cpu"
            source: Future[Any] = Future(devices=[] if on_cpu else [self.device])  # type: ignore[list-item]
            self._future = source.then(lambda done: done.value())
        if self.handle is None:
            source.set_result(self.results)
        else:
            self.handle.on_done(lambda error: self._complete(source, error))
        return self._future

    def _complete(self, source: Future[Any], error: BaseException | None) -> None:
        if error is None:
            try:
                if self.device is not None and self.handle is not None:
                    self.handle.wait()  # several operations may have their results on different streams
                self.settle()
            except Exception as failure:
                error = failure
        if error is None:
            source.set_result(self.results)
        else:
            source.set_exception(error)

    def settle(self) -> None:
        """Runs `finish`, once. It is for callers that know that the operation ended well."""
        if self._finish is not None:  # until it has run: other threads wait for that
            with self._lock:
                if self._finish is not None:
                    self._finish()
                    self._finish = None
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.clear()


class ReceiveWork(CommWork):
    """A receive in flight."""

    def _source_rank(self) -> int:
        """The group rank of the sender; waits for the message. `dist.recv` calls it by this name."""
        self.wait()
        handle = cast(ReceiveHandle, self.handle)
        return handle.source


class JoinedHandle:
    """Several operations as one `Handle`: it is done when all are, and fails with the first failure."""

    def __init__(self, handles: list[Handle]) -> None:
        self._handles = handles

    def done(self) -> bool:
        """True once every operation ended."""
        return all(handle.done() for handle in self._handles)

    def failed(self) -> bool:
        """True once an operation ended with an error."""
        return any(handle.failed() for handle in self._handles)

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits for every operation, `timeout_s` in all, then raises the first failure."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        failures = [self._failure(handle, deadline) for handle in self._handles]
        for failure in failures:
            if failure is not None:
                raise failure

    @staticmethod
    def _failure(handle: Handle, deadline: float | None) -> Exception | None:
        try:
            handle.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except Exception as error:
            return error
        return None

    def missing(self) -> list[tuple[int, int]]:
        """Raises ConfigError: an offset would not tell which of several inputs it is in."""
        raise ConfigError(
            "a work of several operations has no common input: ask the work of each operation for `missing()`"
        )

    def times(self) -> Times | None:
        """The earliest submission, the earliest first byte and the latest end."""
        times = [spent for handle in self._handles if (spent := handle.times()) is not None]
        if len(times) < len(self._handles) or not times:
            return None
        first = min((part.first_byte_s for part in times if part.first_byte_s is not None), default=None)
        return Times(min(part.submitted_s for part in times), first, max(part.ended_s for part in times))

    def on_done(self, callback: Callable[[BaseException | None], None]) -> None:
        """Calls `callback` once, when the last operation ends."""
        lock = threading.Lock()
        left = len(self._handles)
        failure: BaseException | None = None

        def one_done(error: BaseException | None) -> None:
            nonlocal left, failure
            with lock:
                left -= 1
                failure = failure or error
                last = left == 0
            if last:
                callback(failure)

        for handle in self._handles:
            handle.on_done(one_done)


class DividedHandle(JoinedHandle):
    """The parts of one operation, of which nothing may be lost, on two engines.

    Once a failure of a part is known, its group ends the other part, too (`NativeGroup.fail_other`)."""

    def done(self) -> bool:
        # `failed` ends the other part of an operation that has failed: a caller who only polls waits for that.
        return super().done() or (self.failed() and super().done())

    def wait(self, timeout_s: float | None = None) -> None:
        """As of any `JoinedHandle`, but a part that is still in flight does not hide the failure of the other."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        failures = [(self._failure(handle, deadline), handle.failed()) for handle in self._handles]
        for failure, _ in sorted(failures, key=lambda pair: not pair[1]):
            if failure is not None:
                raise failure

    def missing(self) -> list[tuple[int, int]]:
        self.wait(0.0)
        return []


def join(works: list[CommWork]) -> CommWork:
    """Several works as one, with the results of all."""
    handles = [work.handle for work in works if work.handle is not None]

    def settle() -> None:
        for work in works:
            work.settle()

    results = [tensor for work in works for tensor in work.results]
    device = next((work.device for work in works if work.device is not None), None)
    return CommWork(JoinedHandle(handles) if handles else None, results, None, settle, device)
