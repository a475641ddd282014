"""`reduce_gradient`: averages one buffer of gradients over the ranks.

Here scheduling (the buffer's class of service), the loss bound (policy, tolerance, protected blocks) and compression
(error feedback) meet. They know nothing of each other. DDP's hook and `commlayer bench gradients` both call it:

    scheduler/order.py      class of service of the buffer
    loss/tolerance.py       its loss bound, and the parameters that may lose nothing
    gradients/samples.py    the weight of this rank
    compress/feedback.py    adds the residual of earlier steps
    gradients/reducer.py    the operations, by the form in which the codec lets gradients travel:
                            exact.py, encoded.py, low_rank.py, selected.py
    gradients/commit.py     waits for the step's other buckets: an overflow in one of them changes no residual
    compress/feedback.py    keeps the contributions that were not counted, and rounding errors
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ...compress.choice import Choice
from ...compress.codec import Codec, Form, codec_at, codec_of
from ...compress.content import content_of
from ...compress.extent import extents
from ...compress.feedback import Added, Feedback
from ...compress.fine import Fine
from ...config import Policy
from ...errors import ConfigError
from ...loss.tolerance import Tolerance, bucket_loss_bound
from ...scheduler.order import bucket_class
from ..group.backend import CommProcessGroup
from ..work.context import labelled
from .candidates import LOW_RANK
from .commit import Commit, Settled
from .encoded import Encoded
from .exact import Exact
from .low_rank import Factors, LowRank
from .reducer import Buffer, Missing, Reducer
from .samples import weigh
from .selected import Selected

_REDUCERS: dict[Form, type[Reducer]] = {
    Form.EXACT: Exact,
    Form.ENCODED: Encoded,
    Form.LOW_RANK: Factors,
    Form.SELECTED: Selected,
}


@dataclasses.dataclass
class Reduction:
    """State that the gradient reductions of one model share from step to step."""

    group: CommProcessGroup
    feedback: Feedback
    tolerance: Tolerance | None = None
    """Gives the loss bounds instead of the policy's `loss_bound`; None: use the policy's."""
    count: Callable[[int, Missing], None] | None = None
    """It is called once per buffer, on any thread, with the bytes averaged and those that were not counted."""
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
    weight: float = 1.0
    """Factor of this rank's gradients, by its samples."""
    is_whole: bool = True
    """Whether buffers are whole buckets: the tolerance observes their averages."""
    failed: Callable[[BaseException], None] | None = None
    """It is called with the error of an operation, before the future fails: a future keeps only the error's text."""

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
    strays: Added | None = None,
) -> Future[Tensor]:
    """Averages a flat buffer of gradients. All ranks call it with the same buffers in the same order.

    `buffer` is contiguous, on the CPU or on a device, from where it is copied here and now; DDP's hook takes a pinned
    copy instead (`ddp.py`). starts[i] is the element where the gradient of parameters[i] begins: see `extents`; None:
    the gradients lie one after the other. `strays` is residual that has been added already, to be spent with it. The
    future's value is the averaged gradient: on a device it is `buffer`, on the CPU it is `buffer` or, if losses are fed
    back without a codec, other memory that is valid until the next step. The future of a bucket with a residual to
    change completes when all buckets of the step are done: do not wait for it in the hook.

    The future fails with the operation's error. Raises ConfigError for a buffer that cannot be reduced as the policy
    demands, and for a loss bound of the tolerance out of range.
    """
    place = place or Place()
    starts = [0, *accumulate(parameter.numel() for parameter in parameters)][:-1] if starts is None else starts
    group, tolerance = reduction.group, reduction.tolerance
    policy, reliable = _policy_at(place, policy, parameters, reduction)
    codec = _codec_of(policy, buffer, group)
    source = buffer
    if codec.pair is not None and buffer.dtype != torch.float32:
        source = reduction.host(place.index, "source", buffer, torch.float32).copy_(buffer)
    elif not buffer.is_cpu:
        source = reduction.host(place.index, "source", buffer).copy_(buffer)
    weigh(source, reduction.weight)  # residuals have the weights of their own steps
    feedback, low_rank = reduction.feedback, reduction.low_rank
    strays = strays or Added([], {})
    added = feedback.add_to(source, parameters, starts)
    numbers = feedback.numbers_of(parameters)
    kind = _REDUCERS[codec.form]
    errors: list[int] = []
    if kind.adds_factor_errors:
        errors = low_rank.add_errors(source, parameters, starts, numbers)
    values = Buffer(
        group,
        source,
        parameters,
        starts,
        numbers,
        codec,
        policy,
        [extents(parameters, starts, len(source))[i] for i in reliable] + added.late,
        place.step << 32 | place.index << 16,
        reduction.fine,
        low_rank,
        reduction.op,
        lambda count: reduction.host(place.index, "target", source[:count]),
    )
    with labelled(f"bucket {place.index}"):
        reducer = kind(values)
    averaged: Future[Tensor] = Future(devices=[] if buffer.is_cpu else [buffer.device])

    def result() -> Tensor:
        target = reducer.result()
        found = target if target.dtype == buffer.dtype and buffer.is_cpu else buffer.copy_(target)
        if tolerance is not None and reduction.is_whole:
            tolerance.observe(place.step, place.index, found)
        return found

    def change() -> None:
        feedback.spend(added)
        feedback.spend(strays)
        low_rank.forget_errors(errors)
        reducer.keep(feedback, added)

    def settle(done: Future[list[Tensor]]) -> None:
        try:
            done.value()
            missing = reducer.finish()
            if reduction.choice is not None:
                rank = codec_of(LOW_RANK).rank
                content = content_of(parameters, starts, source.numel(), reduction.fine, rank)
                reduction.choice.note(place.index, content, reducer.spans())
            if reduction.count is not None:
                reduction.count(buffer.nbytes, missing)
        except Exception as error:
            if reduction.failed is not None:
                reduction.failed(reducer.failure() or error)
            reduction.commit.fail()
            averaged.set_exception(error)  # type: ignore[arg-type]  # declared as the value's type
            return
        changes = reducer.keeps or bool(added.stretches or strays.stretches or errors)
        reduction.commit.settle(Settled(reducer.averages(), change if changes else None, result, averaged))

    reduction.commit.enter(is_last=place.is_last)
    reducer.future().add_done_callback(settle)
    if place.is_last:
        low_rank.finish_step()
    return averaged.then(lambda done: done.value())  # see work.py


def _codec_of(policy: Policy, buffer: Tensor, group: CommProcessGroup) -> Codec:
    """The codec of a buffer. Codecs are for networks: on one host it is `none`."""
    codec = codec_of(policy.codec if group.can_lose else "none")
    if codec.pair is not None and not buffer.dtype.is_floating_point:
        raise ConfigError(
            f"{group.who}: Policy(codec={policy.codec!r}) and gradients of {buffer.dtype}: codecs are for real "
            f"floating-point numbers; use codec='none'"
        )
    return codec


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
    if not codec_of(policy.codec).may_lose:
        return dataclasses.replace(policy, loss_bound=0.0), []
    if reduction.tolerance is None:
        return policy, []
    who = f"{reduction.group.who}: "
    loss_bound, reliable = bucket_loss_bound(reduction.tolerance, place.step, parameters, who)
    return dataclasses.replace(policy, loss_bound=loss_bound), reliable
