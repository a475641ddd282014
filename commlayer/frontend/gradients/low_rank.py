"""`LowRank`: averages the buckets of a model as low-rank factors (codec `powersgd:RANK`).

A bucket takes two all-reduces for its left and right factors (compress/powersgd.py), and one for its other gradients.
All travel in bf16. Every rank must submit operations in the same order, so the hook's thread submits all of them:

    hook of each bucket        submits the left factors and the other gradients
    hook of the last bucket    for each bucket: waits for the left factors, submits the right ones;
                               for each bucket: waits for the right factors, completes the bucket's future

Only communication is left to do while the last hook waits. The arithmetic stays in that thread, too: in a callback of
the engine it could run with another number of threads than on other ranks, and differ in the last bit.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions
from torch.futures import Future

from ...compress.codec import FINE
from ...compress.feedback import Added, Feedback
from ...compress.powersgd import Compression, PowerSgd
from ...errors import CommError
from ...scheduler.gradient import gradient_view
from ..work.work import CommWork
from .reducer import Buffer, Missing, Reducer

log = logging.getLogger("commlayer")


class LowRank:
    """Low-rank reductions of one model's buckets: their state from step to step, and the buckets of this step."""

    def __init__(self) -> None:
        self._powersgd: PowerSgd | None = None
        self._restored: dict[str, Any] | None = None
        """A saved state of `_powersgd`, until that is made."""
        self._owner: int | None = None
        """The rank whose errors these are; None: not known yet."""
        self._loss_scale = 1.0
        self._open: list[Factors] = []
        """Buckets whose futures are not complete, in the order of their hooks."""

    def begin_step(self, rank: int, loss_scale: float, who: str) -> None:
        """Prepares for the gradients of a step on `rank` of the group, whose loss is multiplied with `loss_scale`.
        `who`: the rank in texts.

        The errors of another rank are dropped: that rank adds them, too. Right factors are the same on all ranks. The
        futures of a step that ended before its last bucket fail.
        """
        state = self.state_dict()["powersgd"]
        if state is not None and self._owner not in (None, rank):
            log.warning(
                "%s drops the PowerSGD errors of rank %s of the group; let every rank restore its own", who, self._owner
            )
            self._powersgd, self._restored = None, {**state, "errors": {}}
        self._owner, self._loss_scale = rank, loss_scale
        for bucket in self._take_open():
            bucket.fail(CommError(f"{who}: this step ended before the hook of its last bucket"))

    def enter(self, bucket: Factors) -> Compression:
        """Enters a bucket of this step, and computes its left factors.

        Raises ConfigError if a restored state is of another rank of the approximation, or of another model.
        """
        buffer = bucket.buffer
        views = _views(buffer.source, buffer.parameters, buffer.starts)
        excluded = {i for i, parameter in enumerate(buffer.parameters) if buffer.fine.is_given(parameter)}
        powersgd = self._powersgd_of(buffer.codec.rank)
        compression = powersgd.compress(buffer.numbers, views, excluded=excluded, loss_scale=self._loss_scale)
        self._open.append(bucket)
        return compression

    def _powersgd_of(self, rank: int) -> PowerSgd:
        """The state for this rank of the approximation; a new one with the same errors if the rank has changed."""
        if self._powersgd is None or self._powersgd.rank != rank:
            made = PowerSgd(rank)
            if self._restored is not None:
                made.load_state_dict(self._restored)
            elif self._powersgd is not None:
                made.load_state_dict({**self._powersgd.state_dict(), "rank": rank, "right": {}})
            self._powersgd, self._restored = made, None
        return self._powersgd

    def add_errors(
        self, source: Tensor, parameters: Sequence[Tensor], starts: Sequence[int], numbers: Sequence[int]
    ) -> list[int]:
        """Adds the errors that steps with factors have left to `source`, for a bucket of another codec.

        Returns the numbers of the parameters that had errors, for `forget_errors`. Raises ConfigError if a restored
        state is of another model.
        """
        if self._restored is not None:
            self._powersgd_of(int(self._restored["rank"]))
        if self._powersgd is None:
            return []
        return self._powersgd.add_errors(numbers, _views(source, parameters, starts), self._loss_scale)

    def forget_errors(self, numbers: Sequence[int]) -> None:
        """Forgets errors that `add_errors` has added, once the step is known to count."""
        if self._powersgd is not None:
            self._powersgd.forget_errors(numbers)

    def finish_step(self) -> None:
        """Completes the futures of all buckets, in the hook of the step's last bucket, whatever its codec.

        After a failure, all other futures fail with the same error, and nothing more is submitted.
        """
        buckets = self._take_open()
        try:
            if buckets and self._powersgd is not None:
                self._powersgd.check_met()
            for bucket in buckets:
                bucket.project()
            for bucket in buckets:
                bucket.complete()
        except Exception as error:
            for bucket in buckets:
                bucket.fail(error)

    def _take_open(self) -> list[Factors]:
        buckets, self._open = self._open, []
        return buckets

    def renumber(self) -> None:
        """Forgets errors and right factors, before the parameters of another model; not those restored for it."""
        self._powersgd = None

    def state_dict(self) -> dict[str, Any]:
        """The errors and right factors; to be called between steps."""
        state = self._restored if self._powersgd is None else self._powersgd.state_dict()
        return {"powersgd": state, "owner": self._owner}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the value of `state_dict`."""
        self._powersgd, self._restored, self._owner = None, state.get("powersgd"), state.get("owner")


class Span:
    """The times at which an operation began and ended."""

    def __init__(self, start_s: float) -> None:
        self.start_s, self.end_s = start_s, 0.0

    def end(self) -> None:
        """Notes the present time; on any thread."""
        self.end_s = time.perf_counter()


class Factors(Reducer):
    """The reducer of `Form.LOW_RANK`. Gradients that are not compressed, and left factors, are on their way."""

    adds_factor_errors = False  # PowerSgd does
    keeps = True

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self._policy = dataclasses.replace(buffer.policy, codec=FINE, loss_bound=0.0)
        self._spans: list[Span] = []
        self._compression = buffer.low_rank.enter(self)
        self._left, self._exact = self._compression.left, self._compression.exact
        self._right = self._left[:0]
        self._works = [self._average(values) for values in (self._left, self._exact)]
        self._done: Future[list[Tensor]] = Future()
        self._error: Exception | None = None

    def _average(self, values: Tensor) -> CommWork | None:
        """Starts the all-reduce of `values`, in place; None if there are none."""
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
        if not len(values):
            return None
        span = Span(time.perf_counter())
        self._spans.append(span)
        work = self.buffer.group.allreduce_from(values, values, options, policy=self._policy)
        work.get_future().add_done_callback(lambda _: span.end())
        return work

    def project(self) -> None:
        """Waits for the left factors, and submits the right ones. Raises the operation's error."""
        left = self._works[0]
        if left is not None:
            left.wait()
            self._right = self._compression.project(self._left)
            self._works.append(self._average(self._right))

    def complete(self) -> None:
        """Waits for all operations, writes the averages into the gradients, and completes the future. Raises the
        operation's error."""
        for work in self._works:
            if work is not None:
                work.wait()
        self._compression.finish(self._exact, self._right)
        self._done.set_result([self.buffer.source])

    def fail(self, error: Exception) -> None:
        """Fails the future, unless it is complete."""
        if not self._done.done():
            self._error = error
            self._done.set_exception(error)  # type: ignore[arg-type]  # declared as the value's type

    def failure(self) -> BaseException | None:
        return self._error

    def future(self) -> Future[list[Tensor]]:
        return self._done

    def spans(self) -> list[tuple[float, float]]:
        now_s = time.perf_counter()
        return [(span.start_s, span.end_s or now_s) for span in self._spans]

    def finish(self) -> Missing:
        return []  # `complete` has written the average

    def averages(self) -> Sequence[Tensor]:
        return [self.buffer.source]

    def result(self) -> Tensor:
        return self.buffer.source

    def keep(self, feedback: Feedback, added: Added) -> None:  # noqa: ARG002  # PowerSgd keeps the errors
        self._compression.keep()


def _views(source: Tensor, parameters: Sequence[Tensor], starts: Sequence[int]) -> list[Tensor]:
    """The gradients of the parameters in `source`."""
    return [
        gradient_view(source[start : start + parameter.numel()], parameter)
        for start, parameter in zip(starts, parameters, strict=True)
    ]
