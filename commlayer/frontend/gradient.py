"""`reduce_gradient`: averages one buffer of gradients over the ranks.

Here scheduling (the buffer's class of service), the loss bound (policy, tolerance, protected blocks) and compression
(error feedback) meet. They know nothing of each other. DDP's hook and `commlayer bench gradients` both call it:

    scheduler/order.py      class of service of the buffer
    loss/tolerance.py       its loss bound, and the parameters that may lose nothing
    compress/feedback.py    adds the residual of earlier steps
    compress/fine.py        separates parameters that a codec leaves in 16 bits
    frontend/low_rank.py    instead of the rest, if low-rank factors of the gradients travel
    loss/protect.py         map of the packets that must arrive
    frontend/backend.py     the all-reduce
    compress/feedback.py    keeps the contributions that were not counted, and rounding errors
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, Work
from torch.futures import Future

from ..compress.choice import Choice
from ..compress.codec import FINE, CodecPair, codec_at, is_low_rank, pair_of
from ..compress.feedback import Feedback
from ..compress.fine import Cut, Fine, cut
from ..config import Policy
from ..errors import ConfigError
from ..loss.protect import as_words, blocks_of, largest_blocks
from ..loss.tolerance import Tolerance, bucket_loss_bound
from ..scheduler.order import bucket_class
from .backend import CommProcessGroup
from .low_rank import Bucket, LowRank
from .work import CommWork, join

Missing = list[tuple[int, int]]
"""(offset, length) in bytes of contributions that were not counted."""


@dataclasses.dataclass
class Reduction:
    """State that the gradient reductions of one model share from step to step."""

    group: CommProcessGroup
    feedback: Feedback
    tolerance: Tolerance | None = None
    """Gives the loss bounds instead of the policy's `loss_bound`; None: use the policy's."""
    count: Callable[[int, Missing], None] | None = None
    """Called once per buffer, on any thread, with the bytes that were averaged and those that were not counted."""
    memory: dict[tuple[int, str], Tensor] = dataclasses.field(default_factory=dict)
    """Host memory by buffer and use, kept for the next steps."""
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.AVG
    choice: Choice | None = None
    """Chooses the codecs for the policy's `auto`."""
    fine: Fine = dataclasses.field(default_factory=Fine)
    """The parameters that a codec leaves in 16 bits."""
    low_rank: LowRank = dataclasses.field(default_factory=LowRank)
    failed: Callable[[BaseException], None] | None = None
    """Called with the error of an operation, before the future fails: a future keeps only the error's text."""

    def host(self, index: int, use: str, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Host memory of the shape of `like`, and of its dtype if none is given. Buffer `index` owns it for this use
        until its next step."""
        memory, dtype = self.memory.get((index, use)), dtype or like.dtype
        if memory is None or memory.shape != like.shape or memory.dtype != dtype:
            memory = self.memory[index, use] = torch.empty_like(like, device="cpu", dtype=dtype)
        return memory


@dataclasses.dataclass(frozen=True)
class Place:
    """Place of a buffer in its step."""

    index: int = 0
    """Number of the buffer; the last one of a backward pass holds the front layers."""
    count: int = 0
    """Buffers per step; 0: not known yet."""
    step: int = 0
    is_last: bool = True
    priority: int | None = None
    """Its class; None: by its index."""


def reduce_gradient(
    buffer: Tensor,
    parameters: Sequence[Tensor],
    policy: Policy,
    reduction: Reduction,
    *,
    starts: Sequence[int] | None = None,
    place: Place | None = None,
) -> Future[Tensor]:
    """Averages a flat buffer of gradients. All ranks call it with the same buffers in the same order.

    `buffer` is contiguous, on the CPU or on a device. starts[i] is the element where the gradient of parameters[i]
    begins, ascending; None: the gradients lie one after the other. The future's value is the averaged gradient: on a
    device it is `buffer`, on the CPU it is `buffer` or, if losses or rounding errors are fed back, other memory that is
    valid until the next step.

    The future fails with the operation's error. Raises ConfigError for a buffer that cannot be reduced as the policy
    demands, and for a loss bound of the tolerance out of range.
    """
    place = place or Place()
    starts = [0, *accumulate(each.numel() for each in parameters)][:-1] if starts is None else starts
    group, feedback, tolerance = reduction.group, reduction.feedback, reduction.tolerance
    policy, reliable = _policy_at(place, policy, parameters, reduction)
    pair = _pair_of(policy, buffer, group)
    start_s = time.perf_counter()
    source = buffer
    if pair is not None and buffer.dtype != torch.float32:
        source = reduction.host(place.index, "source", buffer, torch.float32).copy_(buffer)
    elif not buffer.is_cpu:
        source = reduction.host(place.index, "source", buffer).copy_(buffer)
    added = feedback.add_to(source, parameters, starts)
    protected = [(starts[i], starts[i] + parameters[i].numel()) for i in reliable] + added.late
    may_lose = group.can_lose and policy.loss_bound > 0
    feeds_back = may_lose and policy.treatment == "feedback"
    keeps_errors = pair is not None and pair.keeps_errors
    target = source
    if feeds_back or keeps_errors:  # `source` must still be there when the missing contributions are known
        target = reduction.host(place.index, "target", source)
    parts: _Parts | Bucket
    if is_low_rank(policy.codec) and pair is not None:
        numbers = feedback.numbers_of(parameters)
        parts = reduction.low_rank.start(group, policy, source, parameters, starts, numbers, reduction.fine)
    else:
        parts = _Parts(source, target, reduction, policy, protected if may_lose else None)
        if pair is None:
            parts.start(0, source.numel(), 0, from_source=feeds_back)
        else:
            parts.start_encoded(cut(parameters, starts, source.numel(), reduction.fine), place)

    def settle(done: Future[list[Tensor]]) -> Tensor:
        try:
            done.value()
        except Exception as error:
            feedback.put_back(added)
            if reduction.failed is not None:
                reduction.failed(parts.failure() or error)
            raise
        missing, kept = parts.finish()
        if keeps_errors and _is_finite(target):
            feedback.keep_errors(source, parameters, starts, kept, missing if feeds_back else (), added)
        elif keeps_errors:
            feedback.put_back(added)  # AMP skips this step on every rank: all have the same result
        elif feeds_back:
            feedback.keep(source, parameters, starts, missing)
        if reduction.choice is not None:
            reduction.choice.note(place.index, source.numel(), start_s, time.perf_counter())
        if reduction.count is not None:
            reduction.count(buffer.nbytes, missing)
        result = target if target.dtype == buffer.dtype and buffer.is_cpu else buffer.copy_(target)
        if tolerance is not None:
            tolerance.observe(place.step, place.index, result)
        return result

    future = parts.future()
    averaged = future.then(settle) if buffer.is_cpu else _on_device(buffer.device, future, settle)
    if place.is_last:
        reduction.low_rank.finish_step()
    return averaged


class _Parts:
    """The operations on the parts of one buffer."""

    def __init__(
        self,
        source: Tensor,
        target: Tensor,
        reduction: Reduction,
        policy: Policy,
        protected: list[tuple[int, int]] | None,
    ) -> None:
        self.source, self.target, self.reduction, self.policy = source, target, reduction, policy
        self.protected = protected
        """(start, end) in elements of what must not be lost; None: nothing may be lost."""
        self.works: list[tuple[int, Work]] = []
        """With the element where each begins; -1: of the fine values."""
        self.fine: list[tuple[int, int]] = []
        self.packed = source[:0]
        """The fine values, one after the other."""

    def start(self, start: int, end: int, key: int, *, from_source: bool) -> None:
        """Starts the all-reduce of the elements from `start` to `end`: in place, or from the source into the target."""
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp(self.reduction.op)
        source, target = self.source[start:end], self.target[start:end]
        group, policy = self.reduction.group, self.policy
        if self.protected is not None and (from_source or self.protected or policy.protect_share):
            inside = [(max(a, start) - start, min(b, end) - start) for a, b in self.protected]
            protect = _protect_map(source, inside, policy.protect_share, group.packet_bytes)
            work: Work = group.allreduce_from(source, target, options, protect, policy=policy, key=key)
        elif from_source:
            work = group.allreduce_from(source, target, options, None, policy=policy, key=key)
        else:
            work = group.allreduce([source], options, policy=policy)
        self.works.append((start, work))

    def start_encoded(self, parts: Cut, place: Place) -> None:
        """Starts the all-reduces of the fine values, packed, and of the stretches for the policy's codec."""
        self.fine = parts.fine
        if parts.fine:
            packed = self.packed = torch.cat([self.source[start:end] for start, end in parts.fine])
            for start, end in parts.fine:
                self.source[start:end] = 0
            options = AllreduceOptions()
            options.reduceOp = dist.ReduceOp(self.reduction.op)
            policy = dataclasses.replace(self.policy, codec=FINE, loss_bound=0.0)
            work = self.reduction.group.allreduce_from(packed, packed, options, None, policy=policy)
            self.works.append((-1, work))
        for number, (start, end) in enumerate(parts.coarse):
            key = place.step << 32 | place.index << 16 | number
            self.start(start, end, key, from_source=True)

    def future(self) -> Future[list[Tensor]]:
        """Completes when all operations have ended."""
        works = [work for _, work in self.works]
        joined = works[0] if len(works) == 1 else join([work for work in works if isinstance(work, CommWork)])
        return joined.get_future()

    def failure(self) -> BaseException | None:
        """The error of the first operation that failed."""
        errors = (work.exception() for _, work in self.works if isinstance(work, CommWork))
        return next((error for error in errors if error is not None), None)

    def finish(self) -> tuple[Missing, Missing]:
        """Puts the fine values into the target. Returns the ranges that were not counted, and those with errors."""
        missing, kept = [], []
        itemsize = self.source.itemsize
        for start, work in self.works:
            if isinstance(work, CommWork) and start >= 0:  # else gloo's, or that of the fine values
                missing += [(offset + start * itemsize, length) for offset, length in work.missing()]
                kept += [(offset + start * itemsize, length) for offset, length in work.kept]
        at = 0
        for start, end in self.fine:
            self.target[start:end] = self.packed[at : at + end - start]
            if self.source is not self.target:
                self.source[start:end] = 0  # the rounding error of zeros sent in place of fine values is no residual
            at += end - start
        return missing, kept


def _pair_of(policy: Policy, buffer: Tensor, group: CommProcessGroup) -> CodecPair | None:
    """The codecs for a buffer; None: it travels as it is. Codecs are for networks."""
    pair = pair_of(policy.codec) if group.can_lose else None
    if pair is not None and not buffer.dtype.is_floating_point:
        raise ConfigError(
            f"rank {group.rank()}: Policy(codec={policy.codec!r}) and gradients of {buffer.dtype}: codecs are for real "
            f"floating-point numbers; use codec='none'"
        )
    return pair


def _is_finite(values: Tensor) -> bool:
    least, largest = values.aminmax() if values.numel() else (values.sum(), values.sum())
    return math.isfinite(least) and math.isfinite(largest)


def _policy_at(
    place: Place, policy: Policy, parameters: Sequence[Tensor], reduction: Reduction
) -> tuple[Policy, list[int]]:
    """The policy of a buffer, with class, codec and loss bound, and the indices of parameters that lose nothing."""
    priority = place.priority
    if priority is None:
        priority = bucket_class(policy.priority, place.index, place.count)
    policy = dataclasses.replace(policy, priority=priority, codec=codec_at(policy, place.step))
    if reduction.choice is not None:
        policy = dataclasses.replace(policy, codec=reduction.choice.codec(place.index))
    if is_low_rank(policy.codec):
        return dataclasses.replace(policy, loss_bound=0.0), []
    if reduction.tolerance is None:
        return policy, []
    who = f"rank {reduction.group.rank()}: "
    loss_bound, reliable = bucket_loss_bound(reduction.tolerance, place.step, parameters, who)
    return dataclasses.replace(policy, loss_bound=loss_bound), reliable


def _protect_map(values: Tensor, protected: list[tuple[int, int]], share: float, packet_bytes: int) -> Tensor:
    """The map for `Qos.protect`: blocks with a part of the `protected` elements, and the `share` of largest ones."""
    blocks = blocks_of(protected, values, packet_bytes)
    if share:
        blocks |= largest_blocks(values, share, packet_bytes)
    return as_words(blocks)


def _on_device(
    device: torch.device, done: Future[list[Tensor]], settle: Callable[[Future[list[Tensor]]], Tensor]
) -> Future[Tensor]:
    """A future of a tensor on `device`: the value of `settle` once the result is in host memory."""
    averaged: Future[Tensor] = Future(devices=[device])

    def set_result(done: Future[list[Tensor]]) -> None:
        try:
            averaged.set_result(settle(done))
        except Exception as error:
            averaged.set_exception(error)  # type: ignore[arg-type]  # declared as the value's type

    done.add_done_callback(set_result)
    return averaged.then(lambda done: done.value())  # see work.py
