"""`Commit`: the buckets of a step change residuals together, or none of them does.

With AMP, an overflow in one bucket makes every rank skip the whole step. The residuals of all buckets must then stay as
they were, those of finite buckets too. So a bucket that has a residual to change waits: its future completes when all
buckets of the step are done. The new residual waits in the gradient's own memory and takes none beside.

All ranks have the same averages, so all ranks come to the same result.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.futures import Future

from ...compress.values import is_finite
from ...errors import CommError


@dataclasses.dataclass
class Settled:
    """A bucket whose operations have ended well."""

    averages: Sequence[Tensor]
    """All values of the average."""
    change: Callable[[], None] | None
    """Changes the residual, if all averages of the step are finite. None: this bucket has nothing to change."""
    result: Callable[[], Tensor]
    """Makes the future's value."""
    future: Future[Tensor]

    def complete(self, *, commits: bool) -> None:
        """Completes the future, after the change if the step `commits`."""
        try:
            if commits and self.change is not None:
                self.change()
            self.future.set_result(self.result())
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Fails the future."""
        self.future.set_exception(error)  # type: ignore[arg-type]  # declared as the value's type


class Commit:
    """The buckets of the step that is under way. After its last bucket, the next step may begin.

    `alone`: each bucket is a step of its own, where an overflow makes nobody skip the step of other buckets.
    `held`: the buckets wait for `conclude`, because ranks have different averages.
    """

    def __init__(self, *, alone: bool = False, held: bool = False) -> None:
        self._alone, self._held = alone, held
        self._lock = threading.Condition()
        self._reset()

    def _reset(self) -> None:
        self._unsettled = 0
        self._has_last = False
        self._is_finite = True
        self._has_failed = False
        self._waiting: list[Settled] = []
        self._unchecked: list[Tensor] = []
        """Averages of buckets without a change: their values count only if another bucket has one."""

    def enter(self, *, is_last: bool) -> None:
        """Each bucket's hook calls this, in the order of the buckets, before `settle` or `fail`."""
        with self._lock:
            self._unsettled += 1
            self._has_last |= is_last or self._alone

    def settle(self, bucket: Settled) -> None:
        """The operations of a bucket have ended well. It is called on any thread, once per bucket."""
        if bucket.change is None:
            bucket.complete(commits=False)
        self._leave(bucket, finite=bucket.change is None or all(map(is_finite, bucket.averages)))

    def fail(self) -> None:
        """A bucket has failed: the residuals of the step's other buckets stay as they were."""
        self._leave(None, finite=False)

    def conclude(self, agree: Callable[[bool, bool], bool]) -> None:
        """Waits until the operations of all buckets that entered are over, and ends the step of a held commit.

        `agree` is called with whether an operation has failed here, and whether all averages are finite; it returns
        whether the step counts on all ranks. If it raises, the buckets that wait fail with the same error.
        """
        with self._lock:
            self._lock.wait_for(lambda: not self._unsettled)
            done, others, finite, failed = self._waiting, self._unchecked, self._is_finite, self._has_failed
            self._reset()
        try:
            commits = agree(failed, finite and all(map(is_finite, others)))
        except Exception as error:
            for bucket in done:
                bucket.fail(error)
            raise
        for bucket in done:
            bucket.complete(commits=commits)

    def _leave(self, bucket: Settled | None, *, finite: bool) -> None:
        with self._lock:
            self._unsettled -= 1
            self._is_finite &= finite
            self._has_failed |= bucket is None
            if bucket is not None and bucket.change is not None:
                self._waiting.append(bucket)
            elif bucket is not None:
                self._unchecked += bucket.averages
            self._lock.notify_all()
            if self._held or self._unsettled or not self._has_last:
                return
            done, others, commits = self._waiting, self._unchecked, self._is_finite
            self._reset()
        commits = commits and bool(done) and all(map(is_finite, others))
        for bucket in done:
            bucket.complete(commits=commits)

    def abandon(self, who: str) -> None:
        """Fails the futures that still wait, of a step that ended before the hook of its last bucket. `who`: this rank,
        for the error."""
        with self._lock:
            left = self._waiting
            self._reset()
        for bucket in left:
            bucket.fail(CommError(f"{who}: this step ended before the hook of its last bucket"))
