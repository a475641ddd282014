"""CUDA tensors on an engine that reaches only host memory: pinned copies, on streams of their own.

    calling thread     starts the copies to pinned memory (`transfer.py`), goes on
    this thread        waits for the copies, starts the operations in the order of the calls
    wait()             lets the current stream wait: for a word in host memory, then copies the results back
    completion thread  once the operation is over: writes the word, or copies back if no stream waits so far

As with NCCL, the caller's stream waits: neither the device nor the calling thread does. Where a stream cannot wait for
a word (`accelerator.waits_for_words`), `wait()` blocks the calling thread until the operation is over.

This cannot deadlock where a `wait()` that blocks its thread does not. A stream is given a word to wait for by `wait()`
alone (or at the end of the backward pass, see `PinnedHandle.on_done`). Even if all streams share one queue of the
device, only work that the program enqueues after `wait()` is behind it. The copies out of all operations called before
it are in front of it. The word is always written: by the thread that ends the operation, well or not.

Operations of a process group must start in the order of the calls. So operations on CPU tensors queue behind one on
device tensors that has not started: `PinnedCopies.busy` tells, and `run` takes operations without device tensors, too.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from ...errors import ConfigError, OperationTimeoutError
from ...transport.base import Times
from ...transport.call import hold_callers
from ..work.work import CommWork, ReceiveWork
from .accelerator import Accelerator, current, waits_for_words, write_word
from .transfer import Transfer, pinned_bytes

log = logging.getLogger("commlayer")

Call = Callable[[Sequence[Tensor], Sequence[Tensor]], Work]
"""Starts an operation on host tensors (inputs, outputs). An in-place tensor is the same object in both."""


class PinnedHandle:
    """A `base.ReceiveHandle`: an operation on device tensors, which may not have started yet.

    It is done once its results are on the device, or it has failed. `by_stream`: streams can wait for it. Without a
    transfer it is an operation on host tensors. `failed_late` is called if it becomes `unseen`, before the stream goes
    on: a thread that waits for the stream finds the failure with its next call.
    """

    def __init__(
        self,
        transfer: Transfer | None = None,
        *,
        by_stream: bool = False,
        failed_late: Callable[[PinnedHandle], None] | None = None,
    ) -> None:
        self._transfer = transfer
        self._by_stream = by_stream
        self._failed_late = failed_late
        self._lock = threading.Lock()
        """Held for moments only, never while work is enqueued: that may block until a word is written."""
        self._word: Tensor | None = None
        self._is_taken = False
        """Whether a thread has undertaken to enqueue the copies back."""
        self._is_placed = threading.Event()
        """The copies back are enqueued."""
        self._is_over = threading.Event()
        """The operation on host memory is over."""
        self._is_told = False
        """Whether the callbacks have been called."""
        self._callbacks: list[Callable[[BaseException | None], None]] = []
        self._error: BaseException | None = None
        self._is_disowned = False
        self.unseen = False
        """Whether the operation failed after a stream was told to wait for it, and nobody knows of the failure."""
        self.work: Work | None = None
        """The operation on host memory, once it has started."""

    def done(self) -> bool:
        if not self._is_over.is_set():
            return False
        if self._error is not None or self._transfer is None:
            return True
        return self._is_placed.is_set() and self._transfer.is_back()

    def failed(self) -> bool:
        return self._is_over.is_set() and self._error is not None

    def wait(self, timeout_s: float | None = None) -> None:
        """Lets the current stream wait for the results. Raises as `base.Handle.wait`.

        With a timeout, and where streams cannot wait, it also blocks the calling thread until the operation is over.
        Otherwise it raises only failures that are known already.
        """
        if timeout_s is None and self._by_stream:
            self._order()
            return
        self.join(timeout_s)
        if self._transfer is not None:
            self._is_placed.wait()
            self._transfer.follow()
            self._transfer.leave()

    def join(self, timeout_s: float | None = None) -> None:
        """Blocks the calling thread until the operation on host memory is over. Raises as `base.Handle.wait`."""
        if not self._is_over.wait(timeout_s):
            raise OperationTimeoutError(f"the operation did not end within {timeout_s} s; it still goes on")
        self._raise()

    def outcome(self) -> BaseException | None:
        """Blocks the calling thread until the operation on host memory is over, and returns its error."""
        self._is_over.wait()
        self.unseen = False
        return self._error

    def disown(self) -> None:
        """Nobody asks for this operation any more: its failure may stay unknown."""
        self._is_disowned = True

    def missing(self) -> list[tuple[int, int]]:
        self.join()
        return self.work.missing() if isinstance(self.work, CommWork) else []  # gloo loses nothing

    def times(self) -> Times | None:
        return self.work.times() if isinstance(self.work, CommWork) else None

    @property
    def source(self) -> int:
        self.join()
        return self.work._source_rank()  # type: ignore[union-attr]

    def on_done(self, callback: Callable[[BaseException | None], None]) -> None:
        """See `base.Handle.on_done`; it runs with a stream current that has the copies back, which may not be over.

        In a backward pass, as DDP calls it, that is at the end of the pass at the latest: no thread waits then.
        """
        with self._lock:
            is_told = self._is_told
            if not is_told:
                self._callbacks.append(callback)
        if is_told:
            self._call(callback, self._error)
        elif self._by_stream and torch._C._current_graph_task_id() != -1:
            torch.autograd.Variable._execution_engine.queue_callback(self._order_by_now)

    def end(self, error: BaseException | None) -> None:
        """The operation on host memory is over: `PinnedCopies` calls this once."""
        with self._lock:
            is_mine, self._is_taken = not self._is_taken, True
            self._error = error = self._error or error
        if self._transfer is not None and is_mine and error is None:
            try:
                self._transfer.bring_back()
            except Exception as failure:
                self._error = error = failure
        elif self._transfer is not None and error is not None:
            with contextlib.suppress(Exception):  # whatever happens, the word must be written
                self._transfer.spoil()
        self.unseen = error is not None and not is_mine and not self._is_disowned
        if self.unseen:
            log.error("an operation failed whose results a stream waits for; they are NaN there: %s", error)
            if self._failed_late is not None:
                self._failed_late(self)
        if self._word is not None:
            write_word(self._word)
        if is_mine:
            self._is_placed.set()
        self._is_over.set()
        if is_mine or error is not None:
            self._tell(error)

    def settle(self) -> None:
        """Blocks the calling thread until the operation is over, if a stream waits for it."""
        if self._word is not None:
            self._is_over.wait()

    def unblock(self) -> None:
        """Lets the stream go on that waits for the operation, though it is not over: the process ends."""
        if self._word is not None:
            write_word(self._word)

    def finish(self) -> None:
        """Blocks the calling thread until the operation is over, and its copies back are."""
        self._is_over.wait()
        self._is_placed.wait()
        if self._transfer is not None:
            self._transfer.wait_until_back()

    def let_go(self) -> bool:
        """Frees all memory if the device does not need it any more; False if it does."""
        transfer = self._transfer
        if not self._is_over.is_set() or not self._is_placed.is_set() or transfer is None or not transfer.is_back():
            return False
        transfer.release()
        return True

    def _order(self) -> None:
        """Lets the current stream wait for the results, now or later."""
        transfer = self._transfer
        assert transfer is not None  # noqa: S101  # by_stream
        self._raise()
        word = None if self._is_taken else transfer.word()
        with self._lock:
            is_mine, self._is_taken = not self._is_taken, True
            if is_mine:
                self._word = word
        if is_mine:
            try:
                transfer.bring_back(word)
                transfer.leave()
            except Exception as failure:
                self._error = failure
                raise
            finally:
                self._is_placed.set()
                self._tell(self._error)
        else:
            self._is_placed.wait()
            transfer.follow()
            transfer.leave()
        self._raise()

    def _order_by_now(self) -> None:
        """Autograd calls this at the end of a backward pass. A failure is for the callbacks."""
        if not self._is_placed.is_set():
            with contextlib.suppress(Exception):
                self._order()

    def _raise(self) -> None:
        if self._error is not None:
            self.unseen = False
            raise self._error

    def _tell(self, error: BaseException | None) -> None:
        with self._lock:
            callbacks, self._callbacks, self._is_told = self._callbacks, [], True
        if callbacks and error is not None:
            self.unseen = False
        for callback in callbacks:
            self._call(callback, error)

    def _call(self, callback: Callable[[BaseException | None], None], error: BaseException | None) -> None:
        transfer = self._transfer if error is None else None
        with contextlib.nullcontext() if transfer is None else transfer.on_results():
            callback(error)


class PinnedCopies:
    """Starts operations on device tensors, in the order of the calls, from a thread that waits for the copies out.

    `stream_wait` False: `wait()` blocks the calling thread, whatever the device can. A collective whose pinned memory,
    with that of the collectives in flight, is more than `limit_bytes` blocks in the call until enough of them are over.
    A message never does: another rank may wait for it before it calls the collective.
    """

    def __init__(
        self, accelerator: Accelerator | None = None, *, stream_wait: bool = False, limit_bytes: int | None = None
    ) -> None:
        self._accelerator = accelerator or current()
        self._stream_wait = stream_wait
        self._limit_bytes = limit_bytes
        self._collectives: deque[tuple[PinnedHandle, int]] = deque()
        """Those whose pinned memory counts, with its bytes."""
        self._streams: dict[torch.device, tuple[Any, Any]] = {}
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._server: threading.Thread | None = None  # the same one, also while it ends
        self._waiting = 0
        self._in_flight: deque[PinnedHandle] = deque()
        self._unseen: deque[PinnedHandle] = deque()
        self._lock = threading.Lock()
        self._at_exit = Finalize(self, _unblock, (self._in_flight,), exitpriority=0)

    @property
    def busy(self) -> bool:
        """Whether an operation that was called has not started: one that this thread starts now must wait for it."""
        return self._waiting > 0 and threading.current_thread() is not self._server

    def takes(self, tensor: Tensor) -> bool:
        """Whether operations on this tensor need pinned copies."""
        return self._accelerator.has(tensor)

    def run(
        self,
        call: Call,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        *,
        at_once: bool = False,
        is_message: bool = False,
        results: Sequence[Tensor] | None = None,
    ) -> ReceiveWork:
        """Starts `call` on pinned copies of the tensors when its turn comes, and copies the results to `outputs`.

        Host tensors are passed on as they are, and so is the caller's context (`priority.py`). `at_once` is for calls
        without inputs that need no order among the others: they start here and now. `results` are those of the work,
        if they are not `outputs`.

        Raises ValueError if the tensors are on more than one device, ConfigError while the stream records a graph, and
        the failure of an earlier operation that nobody was told of, as its stream was waiting already.
        """
        self._raise_unseen()
        self._let_go()
        device = self._device_of(inputs, outputs)
        nbytes = 0 if device is None or is_message else pinned_bytes(filter(self.takes, (*inputs, *outputs)))
        self._make_room(nbytes)
        transfer = None if device is None else self._take_out(device, inputs, outputs)
        by_stream = transfer is not None and self._stream_wait and waits_for_words(self._accelerator, transfer.device)
        handle = PinnedHandle(transfer, by_stream=by_stream, failed_late=self._unseen.append)
        host_inputs, host_outputs = list(inputs), list(outputs)
        if transfer is not None:
            host_inputs, host_outputs = transfer.host(inputs), transfer.host(outputs)
        context = contextvars.copy_context()
        context.run(hold_callers)
        if at_once:
            self._begin(handle, context.run(call, host_inputs, host_outputs))
        else:

            def start() -> None:
                try:
                    if transfer is not None:
                        transfer.wait_until_out()
                    started = context.run(call, host_inputs, host_outputs)
                except Exception as error:
                    self._has_started()
                    handle.end(error)
                    return
                self._has_started()
                self._begin(handle, started)

            self._enqueue(start)
        if transfer is not None:
            self._in_flight.append(handle)
        if nbytes > 0:
            self._collectives.append((handle, nbytes))
        return ReceiveWork(handle, list(outputs if results is None else results), device=device)

    def settle(self) -> None:
        """Blocks the calling thread until all operations are over that a stream waits for."""
        for handle in list(self._in_flight):
            handle.settle()

    def close(self) -> None:
        """Ends the thread once every operation that was called has started."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()

    def _device_of(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> torch.device | None:
        """The device of these tensors; None if all are on the host."""
        devices = {tensor.device for tensor in (*inputs, *outputs) if self._accelerator.has(tensor)}
        if not devices:
            return None
        names = ", ".join(sorted(map(str, devices)))
        if len(devices) > 1:
            raise ValueError(f"tensors on {names} in one operation: move them to one device")
        if self._accelerator.is_capturing():
            raise ConfigError(
                f"an operation on {names} while a CUDA graph is recorded: a graph cannot hold operations of the host; "
                f"call it outside of the graph"
            )
        return devices.pop()

    def _take_out(self, device: torch.device, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Transfer:
        """Starts the copies of the inputs."""
        out, back = self._side_streams(device)
        transfer = Transfer(self._accelerator, device, back, inputs, outputs)
        transfer.take_out(out)
        return transfer

    def _enqueue(self, start: Callable[[], None]) -> None:
        with self._lock:
            self._waiting += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="commlayer-pinned", daemon=True)
                self._server = self._thread
                self._thread.start()
            self._queue.put(start)

    def _serve(self) -> None:
        while (start := self._queue.get()) is not None:
            start()
            del start  # it has the tensors of the call

    def _has_started(self) -> None:
        with self._lock:
            self._waiting -= 1

    def _begin(self, handle: PinnedHandle, started: Work) -> None:
        handle.work = started

        def finish(_: Any) -> None:
            try:
                started.wait()  # it is over; this raises its error
            except Exception as error:
                handle.end(error)
            else:
                handle.end(None)

        try:
            started.get_future().add_done_callback(finish)
        except Exception as error:
            handle.end(error)

    def _raise_unseen(self) -> None:
        while self._unseen:
            handle = self._unseen.popleft()
            if handle.unseen:
                handle.join()

    def _let_go(self) -> None:
        """Frees the memory of operations that are done, up to the first that is not; that one moves to the end."""
        with self._lock:
            while self._in_flight:
                if not self._in_flight[0].let_go():
                    self._in_flight.rotate(-1)
                    return
                self._in_flight.popleft()

    def _make_room(self, nbytes: int) -> None:
        """Blocks the calling thread while collectives in flight leave no room for so many bytes of pinned memory.

        They are over without any later call of this group, on all ranks. One that is larger than the limit goes alone.
        """
        with self._lock:
            while self._collectives and self._collectives[0][0].done():
                self._collectives.popleft()
        while nbytes > 0 and self._limit_bytes is not None:
            with self._lock:
                if not self._collectives or sum(each for _, each in self._collectives) + nbytes <= self._limit_bytes:
                    return
                oldest, _ = self._collectives.popleft()
            oldest.finish()

    def _side_streams(self, device: torch.device) -> tuple[Any, Any]:
        with self._lock:
            if device not in self._streams:
                self._streams[device] = (self._accelerator.side_stream(device), self._accelerator.side_stream(device))
            return self._streams[device]


def pinned_share() -> int:
    """The limit of pinned bytes for a group, if none is set: an eighth of the host's memory, shared by its ranks.

    The data loaders and the page cache have the rest. With 512 GiB and 8 ranks it is 8 GiB, as much as the gradients of
    2 * 10**9 parameters in float32.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return memory // 8 // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _unblock(handles: Iterable[PinnedHandle]) -> None:
    for handle in list(handles):
        handle.unblock()
