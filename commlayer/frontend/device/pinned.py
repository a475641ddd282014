"""CUDA tensors on an engine that reaches only host memory: pinned copies, on streams of their own.

    calling thread     starts the copies to pinned memory (`transfer.py`), goes on
    this thread        waits for the copies, starts the operations in the order of the calls
    wait()             blocks the calling thread until the operation is over
    completion thread  once the operation is over: copies the results back

With `stream_wait` and words (`accelerator.waits_for_words`) the caller's stream waits, as with NCCL, and no thread:

    calling thread     starts the copies; behind them the stream opens the operation's gate; submits it to the engine
    engine             starts the operation once its gate is open, in the order of the calls; writes a word at its end
    wait()             lets the current stream wait for that word, then copies the results back
    completion thread  copies back if no stream waits so far

The driver may hold its lock until the device is idle, for the first use of a kernel, say. So nothing between `wait()`
and the end may call it, or need the interpreter, whose lock another thread may hold meanwhile. Operations that need
Python in between, as hooks with codecs, and those of several tensors that are not one stretch of memory, block.

This cannot deadlock where a `wait()` that blocks its thread does not. A stream is given a word to wait for by `wait()`
alone (or at the end of the backward pass, see `PinnedHandle.on_done`). Even if all streams share one queue of the
device, only work that the program enqueues after `wait()` is behind it. The copies out of all operations called before
it, and their gates, are in front of it. The word is always written: by the engine, whether the operation ends well or
not.

Operations of a process group must start in the order of the calls. So operations on CPU tensors queue behind one on
device tensors that has not started: `PinnedCopies.busy` tells, and `run` takes operations without device tensors, too.
The engine has its own queue behind a gate.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.util import Finalize
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work

from ...errors import CommError, ConfigError
from ...transport.call import hold_callers
from ..work.context import NeedsHostError, hold_words
from ..work.work import ReceiveWork
from .accelerator import Accelerator, current, waits_for_words, write_word
from .pinned_handle import PinnedHandle
from .transfer import Transfer, pinned_bytes

WORDS_BYTES = 8
"""Those of the two words of an operation."""

Call = Callable[[Sequence[Tensor], Sequence[Tensor]], Work]
"""Starts an operation on host tensors (inputs, outputs). An in-place tensor is the same object in both."""


class PinnedCopies:
    """Starts operations on device tensors, in the order of the calls, from a thread that waits for the copies out.

    `stream_wait` False: `wait()` blocks the calling thread, whatever the device can. A collective whose pinned memory,
    with that of the collectives in flight, is more than `limit_bytes` blocks in the call until enough of them are over.
    A message never does: another rank may wait for it before it calls the collective.
    """

    def __init__(
        self, accelerator: Accelerator | None = None, *, stream_wait: bool = True, limit_bytes: int | None = None
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
        needs_host: bool = False,
        results: Sequence[Tensor] | None = None,
    ) -> ReceiveWork:
        """Starts `call` on pinned copies of the tensors when its turn comes, and copies the results to `outputs`.

        Host tensors are passed on as they are, and so is the caller's context (`priority.py`). `at_once` is for calls
        without inputs that need no order among the others: they start here and now. `needs_host`: `call` reads or
        writes the copies itself. `results` are those of the work, if they are not `outputs`.

        Raises ConfigError if the tensors are on more than one device, if they are sparse, or results overlap themselves
        (stride 0), and while the stream records a graph; CommError if there is no pinned memory for the copies; and the
        failure of an earlier operation that nobody was told of, as its stream was waiting already.
        """
        self._raise_unseen()
        self._let_go()
        device = self._device_of(inputs, outputs)
        nbytes = 0 if device is None or is_message else pinned_bytes(filter(self.takes, (*inputs, *outputs)))
        self._make_room(nbytes)
        words = None
        if device is not None and self._stream_wait and not needs_host and (at_once or not self.busy):
            with _memory_for(WORDS_BYTES, device):
                words = self._make_words() if waits_for_words(self._accelerator, device) else None
        transfer = None if device is None else self._take_out(device, inputs, outputs, words)
        handle = PinnedHandle(transfer, words=words, failed_late=self._unseen.append)
        returned = list(outputs if results is None else results)
        if transfer is not None:
            inputs, outputs = transfer.host(inputs), transfer.host(outputs)
            self._in_flight.append(handle)
        if nbytes > 0:
            self._collectives.append((handle, nbytes))
        context = contextvars.copy_context()
        context.run(hold_callers)
        begin = functools.partial(context.run, call, inputs, outputs)
        if not self._submit(handle, context.copy(), functools.partial(call, inputs, outputs)):
            if at_once:
                self._begin(handle, begin())
            else:
                self._enqueue(functools.partial(self._start, handle, begin))
        return ReceiveWork(handle, returned, device=device)

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
        fault = ""
        if len(devices) > 1:
            fault = f"tensors on {names} in one operation: move them to one device"
        elif self._accelerator.is_capturing():
            fault = (
                f"an operation on {names} while a CUDA graph is recorded: a graph cannot hold operations of the host; "
                f"call it outside of the graph"
            )
        layouts = {tensor.layout for tensor in (*inputs, *outputs) if self._accelerator.has(tensor)} - {torch.strided}
        if layouts:
            fault = f"{layouts.pop()} tensors on {names}: use to_dense(), or move them to the CPU"
        elif any(self._accelerator.has(output) and _overlaps(output) for output in outputs):
            fault = f"a result on {names} whose elements share memory, as of expand(): use contiguous()"
        if fault:
            raise ConfigError(f"{_who()}{fault}")
        return devices.pop()

    def _take_out(
        self, device: torch.device, inputs: Sequence[Tensor], outputs: Sequence[Tensor], words: Tensor | None
    ) -> Transfer:
        """Starts the copies of the inputs, behind which the stream opens the gate of the words."""
        out, back = self._side_streams(device)
        with _memory_for(pinned_bytes(filter(self.takes, (*inputs, *outputs))), device):
            transfer = Transfer(self._accelerator, device, back, inputs, outputs)
        transfer.take_out(out, words)
        return transfer

    def _make_words(self) -> Tensor:
        """Two words that are 0: see `PinnedHandle`."""
        made = self._accelerator.pinned((2,), torch.int32)
        for word in made:
            write_word(word, 0)
        return made

    def _submit(self, handle: PinnedHandle, context: contextvars.Context, begin: Callable[[], Work]) -> bool:
        """Submits an operation that has words, at once; False: it has none, or cannot have any."""
        words = handle.words()
        if words is None:
            return False
        context.run(hold_words, words)
        try:
            started = context.run(begin)
        except NeedsHostError:
            handle.drop_words()
            return False
        except BaseException as error:
            handle.disown()
            handle.end(error)  # its words live on until the device has written the gate
            raise
        self._begin(handle, started)
        return True

    def _start(self, handle: PinnedHandle, begin: Callable[[], Work]) -> None:
        """Starts an operation once its inputs are in pinned memory, in its turn."""
        try:
            handle.wait_until_out()
            started = begin()
        except Exception as error:
            self._has_started()
            handle.end(error)
            return
        self._has_started()
        self._begin(handle, started)

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
        for handle in list(self._in_flight):
            handle.catch_up()
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
                if (
                    not self._collectives
                    or sum(held_bytes for _, held_bytes in self._collectives) + nbytes <= self._limit_bytes
                ):
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


def _overlaps(tensor: Tensor) -> bool:
    """Whether a tensor has one element in several places."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


@contextlib.contextmanager
def _memory_for(nbytes: int, device: torch.device) -> Iterator[None]:
    """Raises CommError where the driver has no pinned memory: torch says only that CUDA is out of memory."""
    try:
        yield
    except CommError:
        raise
    except (RuntimeError, MemoryError) as error:
        raise CommError(
            f"{_who()}no pinned memory for {nbytes} bytes of an operation on {device} ({error}): lower "
            f"COMMLAYER_PINNED_BYTES, or let the host lock more memory (ulimit -l, and the memory of its container)"
        ) from error


def _who() -> str:
    """This rank of the job: the beginning of errors."""
    return f"rank {dist.get_rank()}: " if dist.is_initialized() else ""


def _unblock(handles: Iterable[PinnedHandle]) -> None:
    for handle in list(handles):
        handle.unblock()
