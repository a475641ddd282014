"""`reduce_gradient`: averages one buffer of gradients over the ranks.

Here scheduling (the buffer's class of service), the loss bound (policy, tolerance, protected blocks) and compression
(error feedback) meet. They know nothing of each other. DDP's hook and `commlayer bench gradients` both call it:

    scheduler/order.py      class of service of the buffer
    loss/tolerance.py       its loss bound, and the parameters that may lose nothing
    compress/feedback.py    adds the residual of earlier steps
    loss/protect.py         map of the packets that must arrive
    frontend/backend.py     the all-reduce
    compress/feedback.py    keeps the contributions that were not counted
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, Work
from torch.futures import Future

from ..compress.feedback import Feedback
from ..config import Policy
from ..loss.protect import as_words, blocks_of, largest_blocks
from ..loss.tolerance import Tolerance, bucket_loss_bound
from ..scheduler.order import bucket_class
from .backend import CommProcessGroup
from .work import CommWork

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

    def host(self, index: int, use: str, like: Tensor) -> Tensor:
        """Host memory of the shape and dtype of `like`. Buffer `index` owns it for this use until its next step."""
        memory = self.memory.get((index, use))
        if memory is None or memory.shape != like.shape or memory.dtype != like.dtype:
            memory = self.memory[index, use] = torch.empty_like(like, device="cpu")
        return memory


@dataclasses.dataclass(frozen=True)
class Place:
    """Place of a buffer in its step."""

    index: int = 0
    """Number of the buffer; the last one of a backward pass holds the front layers."""
    count: int = 0
    """Buffers per step; 0: not known yet."""
    step: int = 0


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
    device it is `buffer`, on the CPU it is `buffer` or, with error feedback, memory that is valid until the next step.

    The future fails with the operation's error. Raises ConfigError for a buffer that cannot be reduced as the policy
    demands, and for a loss bound of the tolerance out of range.
    """
    place = place or Place()
    starts = [0, *accumulate(each.numel() for each in parameters)][:-1] if starts is None else starts
    group, feedback, tolerance = reduction.group, reduction.feedback, reduction.tolerance
    policy, reliable = _policy_at(place, policy, parameters, reduction)
    source = buffer if buffer.is_cpu else reduction.host(place.index, "source", buffer).copy_(buffer)
    protected = [(starts[i], starts[i] + parameters[i].numel()) for i in reliable]
    protected += feedback.add_to(source, parameters, starts)  # protected: no gradient is over a step late
    may_lose = group.can_lose and policy.loss_bound > 0
    feeds_back = may_lose and policy.treatment == "feedback"
    target = source
    if feeds_back:  # `source` must still be there when the missing contributions are known
        target = reduction.host(place.index, "target", source)
    options = AllreduceOptions()
    options.reduceOp = dist.ReduceOp(reduction.op)
    if feeds_back or (may_lose and (protected or policy.protect_share)):
        protect = _protect_map(source, protected, policy.protect_share, group.packet_bytes)
        work: Work = group.allreduce_from(source, target, options, protect, policy=policy)
    else:
        work = group.allreduce([source], options, policy=policy)

    def settle(done: Future[list[Tensor]]) -> Tensor:
        done.value()  # raises the operation's error
        missing = work.missing() if isinstance(work, CommWork) else []  # else gloo's
        if feeds_back:
            feedback.keep(source, parameters, starts, missing)
        if reduction.count is not None:
            reduction.count(source.nbytes, missing)
        averaged = target if buffer.is_cpu else buffer.copy_(target)
        if tolerance is not None:
            tolerance.observe(place.step, place.index, averaged)
        return averaged

    future = work.get_future()
    return future.then(settle) if buffer.is_cpu else _on_device(buffer.device, future, settle)


def _policy_at(
    place: Place, policy: Policy, parameters: Sequence[Tensor], reduction: Reduction
) -> tuple[Policy, list[int]]:
    """The policy of one buffer, with its class and loss bound, and the indices of parameters that may lose nothing."""
    policy = dataclasses.replace(policy, priority=bucket_class(policy.priority, place.index, place.count))
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
