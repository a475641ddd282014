"""`PinnedHandle`: an operation on pinned copies of device tensors, whose results a stream or a thread waits for."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from ...errors import OperationTimeoutError
from ...transport.base import Times
from ..work.context import Words
from ..work.work import CommWork
from .accelerator import read_word, write_word
from .transfer import Transfer

CATCH_UP_S = 10.0
"""Time that a call waits for the end of an operation to be told, which the engine has written. After a failure the
ranks agree on the culprit first, which takes some seconds (`transport.inquiry`). The limit is for a thread that tells
the ends and is held up by a callback of the user's."""

log = logging.getLogger("commlayer")


class PinnedHandle:
    """A `base.ReceiveHandle`: an operation on device tensors, which may not have started yet.

    It is done once its results are on the device, or it has failed. `words`, two int32 in pinned memory: streams can
    wait for it. A stream opens the gate, the first word, behind the copies out, and the engine writes the second one at
    the end, so no thread of the host has a part in between. Without a transfer it is an operation on host tensors.
    `failed_late` is called if it becomes `unseen`.
    """

    def __init__(
        self,
        transfer: Transfer | None = None,
        *,
        words: Tensor | None = None,
        failed_late: Callable[[PinnedHandle], None] | None = None,
    ) -> None:
        self._transfer = transfer
        self._words = words
        self._dropped: Tensor | None = None
        self._failed_late = failed_late
        self._lock = threading.Lock()
        """Held for moments only, never while work is enqueued: that may block until a word is written."""
        self._has_waiter = False
        """Whether a stream waits for the second word."""
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

    def words(self) -> Words | None:
        """The words, for the engine; None: it has none."""
        if self._words is None or self._transfer is None:
            return None
        gate = self._words.data_ptr()
        return Words(gate, gate + self._words.itemsize, self._transfer.addresses())

    def drop_words(self) -> None:
        """The host has to start the operation, and to wait for it. The device still writes the gate."""
        self._dropped, self._words = self._words, None

    def wait_until_out(self) -> None:
        """Blocks the calling thread until the inputs are in host memory."""
        if self._transfer is not None:
            self._transfer.wait_until_out()

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
        if timeout_s is None and self._words is not None:
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
        elif self._words is not None and torch._C._current_graph_task_id() != -1:
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
        self.unseen = error is not None and not is_mine and not self._is_disowned
        if self.unseen:
            log.error("an operation failed whose results a stream waits for; they are NaN there: %s", error)
            if self._failed_late is not None:
                self._failed_late(self)
        self.unblock()  # the engine has done so, unless it never had the operation
        if is_mine:
            self._is_placed.set()
        self._is_over.set()
        if is_mine or error is not None:
            self._tell(error)

    def settle(self) -> None:
        """Blocks the calling thread until the operation is over, if a stream waits for it."""
        if self._has_waiter:
            self._is_over.wait()

    def catch_up(self) -> None:
        """Waits a moment for the end that a stream may have seen before this process: so a thread that has waited for
        the stream finds a failure with its next call."""
        if self._has_waiter and self._words is not None and not self._is_over.is_set() and read_word(self._words[1:]):
            self._is_over.wait(CATCH_UP_S)

    def unblock(self) -> None:
        """Lets the stream go on that waits for the operation, though the engine has not written the word."""
        if self._words is not None:
            write_word(self._words[1:])

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
        self._dropped = None
        return True

    def _order(self) -> None:
        """Lets the current stream wait for the results, now or later."""
        transfer, words = self._transfer, self._words
        assert transfer is not None  # noqa: S101  # it has words
        assert words is not None  # noqa: S101
        self._raise()
        with self._lock:
            is_mine, self._is_taken = not self._is_taken, True
            self._has_waiter |= is_mine
        if is_mine:
            try:
                transfer.bring_back(words[1:])
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
