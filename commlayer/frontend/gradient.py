"""`reduce_gradient`: averages one buffer of gradients over the ranks.

Here scheduling (the buffer's class of service), the loss bound (policy, tolerance, protected blocks) and compression
(error feedback) meet. They know nothing of each other. DDP's hook and `commlayer bench gradients` both call it:

    scheduler/order.py      class of service of the buffer
    loss/tolerance.py       its loss bound, and the parameters that may lose nothing
    compress/feedback.py    adds the residual of earlier steps
    compress/fine.py        separates parameters that a codec leaves in 16 bits
    frontend/low_rank.py    instead of the rest, if low-rank factors of the gradients travel
    frontend/top_k.py       instead of the all-reduce, if only the largest values travel
    loss/protect.py         map of the packets that must arrive
    frontend/backend.py     the all-reduce
    frontend/commit.py      waits for the step's other buckets: an overflow in one of them changes no residual
    compress/feedback.py    keeps the contributions that were not counted, and rounding errors
"""

from __future__ import annotations

import dataclasses
import functools
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
from ..compress.codec import (
    FINE,
    CodecPair,
    codec_at,
    has_own_messages,
    is_low_rank,
    is_top_k,
    low_rank_of,
    pair_of,
)
from ..compress.content import content_of
from ..compress.feedback import Feedback
from ..compress.fine import Cut, Fine, cut
from ..config import Policy
from ..errors import ConfigError
from ..loss.protect import as_words, blocks_of, largest_blocks
from ..loss.tolerance import Tolerance, bucket_loss_bound
from ..scheduler.order import bucket_class
from .backend import CommProcessGroup
from .candidates import LOW_RANK
from .commit import Commit, Settled, is_finite
from .label import labelled
from .low_rank import Bucket, LowRank
from .top_k import TopK
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
    commit: Commit = dataclasses.field(default_factory=Commit)
    """The buffers that change residuals together."""
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

    `buffer` is contiguous, on the CPU or on a device, from where it is copied here and now; DDP's hook takes a pinned
    copy instead (`ddp.py`). starts[i] is the element where the gradient of parameters[i]
    begins, ascending; None: the gradients lie one after the other. The future's value is the averaged gradient: on a
    device it is `buffer`, on the CPU it is `buffer` or, if losses or rounding errors are fed back, other memory that is
    valid until the next step. The future of a bucket with a residual to change completes when all buckets of the step
    are done: do not wait for it in the hook.

    The future fails with the operation's error. Raises ConfigError for a buffer that cannot be reduced as the policy
    demands, and for a loss bound of the tolerance out of range.
    """
    place = place or Place()
    starts = [0, *accumulate(each.numel() for each in parameters)][:-1] if starts is None else starts
    group, tolerance = reduction.group, reduction.tolerance
    policy, reliable = _policy_at(place, policy, parameters, reduction)
    pair = _pair_of(policy, buffer, group)
    source = buffer
    if pair is not None and buffer.dtype != torch.float32:
        source = reduction.host(place.index, "source", buffer, torch.float32).copy_(buffer)
    elif not buffer.is_cpu:
        source = reduction.host(place.index, "source", buffer).copy_(buffer)
    residual = _Residual(reduction, policy, pair, source, parameters, starts)
    target = source
    if residual.feeds_back or residual.keeps_errors:  # `source` must still be there when the missing parts are known
        target = reduction.host(place.index, "target", source)
    parts: _Parts | Bucket
    with labelled(f"bucket {place.index}"):
        if residual.has_factors:
            whose = parameters, starts, residual.numbers
            parts = reduction.low_rank.start(group, policy, source, *whose, reduction.fine)
        else:
            protected = [(starts[i], starts[i] + parameters[i].numel()) for i in reliable] + residual.added.late
            parts = _Parts(source, target, reduction, policy, protected if residual.may_lose else None)
            if pair is None:
                parts.start(0, source.numel(), 0, from_source=residual.feeds_back)
            elif residual.selects:
                parts.start_selected(cut(parameters, starts, source.numel(), reduction.fine.without_defaults()))
            else:
                parts.start_encoded(cut(parameters, starts, source.numel(), reduction.fine), place)
    averaged: Future[Tensor] = Future(devices=[] if buffer.is_cpu else [buffer.device])

    def result() -> Tensor:
        found = target if target.dtype == buffer.dtype and buffer.is_cpu else buffer.copy_(target)
        if tolerance is not None:
            tolerance.observe(place.step, place.index, found)
        return found

    def settle(done: Future[list[Tensor]]) -> None:
        try:
            done.value()
            missing, kept = parts.finish()
            if reduction.choice is not None:
                content = content_of(parameters, starts, source.numel(), reduction.fine, low_rank_of(LOW_RANK))
                reduction.choice.note(place.index, content, parts.spans())
            if reduction.count is not None:
                reduction.count(buffer.nbytes, missing)
        except Exception as error:
            reduction.commit.fail()
            if reduction.failed is not None:
                reduction.failed(parts.failure() or error)
            averaged.set_exception(error)  # type: ignore[arg-type]  # declared as the value's type
            return
        change = functools.partial(residual.change, parts, missing, kept) if residual.has_change else None
        reduction.commit.settle(Settled(target, change, result, averaged))

    reduction.commit.enter(is_last=place.is_last)
    parts.future().add_done_callback(settle)
    if place.is_last:
        reduction.low_rank.finish_step()
    return averaged.then(lambda done: done.value())  # see work.py


class _Residual:
    """The residual of one buffer: adds to `source` what earlier steps have left, and keeps what this one leaves."""

    def __init__(
        self,
        reduction: Reduction,
        policy: Policy,
        pair: CodecPair | None,
        source: Tensor,
        parameters: Sequence[Tensor],
        starts: Sequence[int],
    ) -> None:
        self.may_lose = reduction.group.can_lose and policy.loss_bound > 0
        self.feeds_back = self.may_lose and policy.treatment == "feedback"
        self.selects = pair is not None and is_top_k(policy.codec)
        self.keeps_errors = self.selects or (pair is not None and pair.keeps_errors)
        self.has_factors = pair is not None and is_low_rank(policy.codec)
        self._feedback, self._low_rank = reduction.feedback, reduction.low_rank
        self._values = source, parameters, starts
        self.added = self._feedback.add_to(*self._values)
        self.numbers = self._feedback.numbers_of(parameters)
        self._errors: list[int] = []  # parameters whose errors of low-rank factors were added
        if not self.has_factors:
            self._errors = self._low_rank.add_errors(*self._values, self.numbers)

    @property
    def has_change(self) -> bool:
        """Whether `change` changes anything."""
        keeps = self.feeds_back or self.keeps_errors or self.has_factors
        return keeps or bool(self.added.stretches or self._errors)

    def change(self, parts: _Parts | Bucket, missing: Missing, kept: Missing) -> None:
        """Forgets what was added, and keeps what the step leaves: once the step is known to count."""
        self._feedback.spend(self.added)
        self._low_rank.forget_errors(self._errors)
        if self.keeps_errors:
            self._feedback.keep_errors(*self._values, kept, missing if self.feeds_back else (), self.added)
        elif self.feeds_back:
            self._feedback.keep(*self._values, missing)
        if isinstance(parts, Bucket):
            parts.keep()


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
        self._start_s = time.perf_counter()
        self.protected = protected
        """(start, end) in elements of what must not be lost; None: nothing may be lost."""
        self.works: list[tuple[int, Work]] = []
        """With the element where each begins; -1: of the fine values, or of the selected ones."""
        self.fine: list[tuple[int, int]] = []
        self.packed = source[:0]
        """The fine values, one after the other."""
        self.selected: TopK | None = None
        """The other values, if only the largest of them travel."""

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
        self.start_fine(parts)
        for number, (start, end) in enumerate(parts.coarse):
            key = place.step << 32 | place.index << 16 | number
            self.start(start, end, key, from_source=True)

    def start_selected(self, parts: Cut) -> None:
        """Starts the all-reduce of the fine values, and the all-gather of the largest others."""
        self.start_fine(parts)
        count = self.source.numel() - sum(end - start for start, end in parts.fine)
        if count:
            self.selected = TopK(self.reduction.group, self.policy, self.source, count)
            self.works.append((-1, self.selected.work))

    def start_fine(self, parts: Cut) -> None:
        """Starts the all-reduce of the fine values, packed, and leaves zeros in the source."""
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

    def spans(self) -> list[tuple[float, float]]:
        """(start, end) of the operations, which have ended."""
        return [(self._start_s, time.perf_counter())]

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
            if isinstance(work, CommWork) and start >= 0:  # else gloo's, or of fine or selected values
                missing += [(offset + start * itemsize, length) for offset, length in work.missing()]
                kept += [(offset + start * itemsize, length) for offset, length in work.kept]
        if self.selected is not None:
            self.selected.sum_into(self.target)
            if self.reduction.op == dist.ReduceOp.AVG:
                self.target.div_(self.reduction.group.size())
            kept = [(0, self.source.nbytes)]
        at = 0
        for start, end in self.fine:
            self.target[start:end] = self.packed[at : at + end - start]
            if self.source is not self.target:
                self.source[start:end] = 0  # the rounding error of zeros sent in place of fine values is no residual
            at += end - start
        if self.selected is not None and not is_finite(self.target):
            self.target.fill_(math.nan)  # values that were not sent may be infinite, too
        return missing, kept


def _pair_of(policy: Policy, buffer: Tensor, group: CommProcessGroup) -> CodecPair | None:
    """The codecs for a buffer; None: it travels as it is. Codecs are for networks."""
    pair = pair_of(policy.codec) if group.can_lose else None
    if pair is not None and not buffer.dtype.is_floating_point:
        raise ConfigError(
            f"{group.who}: Policy(codec={policy.codec!r}) and gradients of {buffer.dtype}: codecs are for real "
            f"floating-point numbers; use codec='none'"
        )
    return pair


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
    if has_own_messages(policy.codec):
        return dataclasses.replace(policy, loss_bound=0.0), []
    if reduction.tolerance is None:
        return policy, []
    who = f"{reduction.group.who}: "
    loss_bound, reliable = bucket_loss_bound(reduction.tolerance, place.step, parameters, who)
    return dataclasses.replace(policy, loss_bound=loss_bound), reliable


def _protect_map(values: Tensor, protected: list[tuple[int, int]], share: float, packet_bytes: int) -> Tensor:
    """The map for `Qos.protect`: blocks with a part of the `protected` elements, and the `share` of largest ones."""
    blocks = blocks_of(protected, values, packet_bytes)
    if share:
        blocks |= largest_blocks(values, share, packet_bytes)
    return as_words(blocks)
