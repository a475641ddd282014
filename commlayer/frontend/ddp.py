"""Gradient averaging for DistributedDataParallel, as the communication hook that PyTorch documents.

    state = commlayer.HookState(commlayer.Policy())
    model.register_comm_hook(state, commlayer.allreduce_hook)

It works whatever the job's own backend is: where that is not commlayer, the state makes a commlayer group of the same
ranks when the first bucket is ready.
"""

# No `from __future__ import annotations` here: DDP checks a hook's annotations, and would find strings.

import dataclasses
import logging
import math
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions
from torch.futures import Future

from ..compress.feedback import Feedback
from ..config import LOSS_BOUND_MAX, Policy, check_bound, number
from ..errors import ConfigError
from ..loss.protect import as_words, blocks_of, largest_blocks
from ..loss.tolerance import Tolerance
from ..scheduler.order import bucket_class
from .backend import NAME, CommProcessGroup, Options
from .dynamo import untraced
from .work import CommWork

log = logging.getLogger("commlayer")


class HookState:
    """What a hook keeps from step to step: its policy and its group.

    `process_group` is that of the model, None meaning WORLD. `tolerance` says what may be lost instead of the policy's
    `loss_bound`, by layer and by step (see tolerance.py). Neither is part of what is saved or pickled: a restored state
    uses WORLD until `process_group` is set, and one that had a tolerance must be given an equal one. Each model needs a
    state of its own.

    With the policy's treatment `feedback`, the state keeps what of this rank's gradients was lost until the next step
    adds it. That is part of what is saved, so every rank should save its own state and restore that. A rank that
    restores another one's leaves what it finds there alone, as it would be added several times.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        process_group: dist.ProcessGroup | None = None,
        *,
        tolerance: Tolerance | None = None,
    ) -> None:
        for name, given, kind in (
            ("policy", policy, Policy),
            ("process_group", process_group, dist.ProcessGroup),
            ("tolerance", tolerance, Tolerance),
        ):
            if given is not None and not isinstance(given, kind):
                is_share = 0 < number(given) <= LOSS_BOUND_MAX
                hint = f"; the same bound for all gradients is Policy(loss_bound={given!r})" if is_share else ""
                raise ConfigError(f"HookState({name}={given!r}): give a {kind.__name__}, or None{hint}")
        self.policy = policy or Policy()
        self.process_group = process_group
        self.tolerance = tolerance
        """Instead of the policy's `loss_bound`; None: that."""
        self.steps = 0
        """Backward passes that have begun with this state, also before it was saved."""
        self.averaged_bytes = 0
        """Of this rank's gradients, what the hook has averaged since this state was made or loaded."""
        self.uncounted_bytes = 0
        """Of these, what the sums lack: the other ranks made them without it, whatever became of it then. With several
        ranks per host it is the sum of a host that counts or does not, and the rank that sends that notes it."""
        self.residual = Feedback()
        """What of the gradients was lost and waits for the next step."""
        self._count_lock = threading.Lock()
        self._loss_scale = self._residual_scale = 1.0
        self._rank: int | None = None  # whose residual it is; None: nobody's yet
        self._tolerance_state: dict[str, Any] | None = None  # restored, and not taken over yet
        self._begun = False  # a step, since this was made or loaded
        self._buckets = 0  # how many there were in the last step
        self._group: CommProcessGroup | None = None
        self._host: dict[tuple[int, str], torch.Tensor] = {}
        if tolerance is not None:
            if self.policy.loss_bound:
                raise ConfigError(
                    f"HookState(Policy(loss_bound={self.policy.loss_bound}), tolerance=...): use one of the two"
                )
            dataclasses.replace(self.policy, loss_bound=LOSS_BOUND_MAX)  # raises if the rest of it forbids loss

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied with, as `GradScaler.get_scale()` says: a finite number above 0; to be set before
        backward where that changes. What was lost at another scale is converted.

        Setting it raises ConfigError for anything else: every gradient would come out wrong, steps later.
        """
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        factor = number(scale)
        if not 0 < factor < math.inf:
            whose = f"rank {dist.get_rank()}: " if dist.is_initialized() else ""
            raise ConfigError(
                f"{whose}HookState.loss_scale={scale!r}: use a finite number above 0, as "
                f"state.loss_scale = scaler.get_scale() of a GradScaler; without one, 1.0"
            )
        self._loss_scale = factor

    def enter(self, bucket: dist.GradBucket) -> tuple[Policy, list[int]]:
        """For the hook, once per bucket and in their order: the policy of its operation, and which of its parameters
        (as indices) may lose nothing at all. Raises ConfigError for those of a second model."""
        index, parameters = bucket.index(), bucket.parameters()
        if not self.residual.has_met(parameters):
            if self._buckets or (self._begun and index == 0):
                raise ConfigError(
                    f"rank {self.group().rank()}: bucket {index} has parameters of another model than this HookState's "
                    f"first steps: make a HookState for each model"
                )
            if index == 0:
                self.residual.renumber()
        if index == 0:
            self._begin_step()
        self.residual.meet(parameters)
        priority = bucket_class(self.policy.priority, index, self._buckets)
        if bucket.is_last():
            self._buckets = index + 1
        if self.tolerance is None:
            return dataclasses.replace(self.policy, priority=priority), []
        bounds = [self._bound_of(self.tolerance, parameter) for parameter in parameters]
        positive = [bound for bound in bounds if bound != 0]
        policy = dataclasses.replace(self.policy, priority=priority, loss_bound=min(positive, default=0.0))
        return policy, [i for i, bound in enumerate(bounds) if bound == 0] if positive else []

    def _bound_of(self, tolerance: Tolerance, parameter: torch.Tensor) -> float:
        """What the tolerance says, checked: anybody may write one."""
        step = self.steps - 1
        bound = tolerance.bound(step, parameter)
        what = f"{type(tolerance).__name__}.bound for step {step} and a parameter of shape {tuple(parameter.shape)}"
        return check_bound(bound, f"rank {self.group().rank()}: {what} returned {bound!r}")

    def observe(self, step: int, bucket: int, gradients: torch.Tensor) -> None:
        """For the hook, when a bucket's averages are there."""
        if self.tolerance is not None:
            self.tolerance.observe(step, bucket, gradients)

    def count(self, averaged_bytes: int, missing: list[tuple[int, int]]) -> None:
        """For the hook, when a bucket's averages are there, on any thread. `missing`: (offset, length) in bytes."""
        with self._count_lock:
            self.averaged_bytes += averaged_bytes
            self.uncounted_bytes += sum(length for _, length in missing)

    def _begin_step(self) -> None:
        rank = self.group().rank()
        if self._rank not in (None, rank) and self.residual:
            log.warning(
                "rank %d restored the HookState of rank %s: what that one had lost is left out; let every rank save "
                "and restore its own",
                rank,
                self._rank,
            )
            self.residual.clear()
        self._rank = rank
        if self._buckets:
            self.residual.check_met()
        if self.loss_scale != self._residual_scale:
            self.residual.scale(self.loss_scale / self._residual_scale)
            self._residual_scale = self.loss_scale
        if self._tolerance_state is not None:
            if self.tolerance is None:
                raise ConfigError("this HookState was saved with a tolerance: set HookState.tolerance to an equal one")
            self.tolerance.load_state_dict(self._tolerance_state)
            self._tolerance_state = None
        if self.tolerance is not None and not self._begun:
            self.steps = int(self._largest(self.steps))  # a rank that is new in the job begins where the others are
        self._begun = True
        if self.tolerance is not None:
            self.tolerance.begin(self.steps, self._largest)
        self.steps += 1

    def _largest(self, value: float) -> float:
        """Of all ranks' values."""
        values = torch.tensor([value], dtype=torch.float64)
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self.group().allreduce([values], options).wait()
        return float(values)

    def host(self, bucket: dist.GradBucket, use: str) -> torch.Tensor:
        """Host memory of a bucket's shape and type. It is the bucket's own for this use until the next step."""
        gradients, memory = bucket.buffer(), self._host.get((bucket.index(), use))
        if memory is None or memory.shape != gradients.shape or memory.dtype != gradients.dtype:
            memory = self._host[bucket.index(), use] = torch.empty_like(gradients, device="cpu")
        return memory

    def group(self) -> CommProcessGroup:
        """The commlayer group to use. The first call may make it: then every rank of the group must call.

        A group that has been destroyed since, with the job's process groups, is replaced.
        """
        if self._group is None or self._group.closed:
            self._group = group_of(self.policy, self.process_group, "commlayer.HookState")
        return self._group

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, between steps: plain values, and tensors of what this rank has lost."""
        tolerance = self._tolerance_state if self.tolerance is None else self.tolerance.state_dict()
        return {
            "policy": dataclasses.asdict(self.policy),
            "steps": self.steps,
            "rank": self._rank,
            "residual": self.residual.state_dict(),
            "loss_scale": self._residual_scale,
            "tolerance": tolerance,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned, between steps: also the policy.

        Raises ConfigError if it is not what that returned, or holds a policy this version cannot keep.
        """
        try:
            policy = Policy(**state["policy"])
        except (KeyError, TypeError) as error:
            raise ConfigError(f"not the state of a HookState of this version: {error!r}") from error
        if self.tolerance is not None and policy.loss_bound:
            raise ConfigError(
                f"a state saved with Policy(loss_bound={policy.loss_bound}) for one with a tolerance: use one of both"
            )
        self.policy = policy
        self.steps = state.get("steps", 0)
        self._rank = state.get("rank")
        self.loss_scale = state.get("loss_scale", 1.0)
        self._residual_scale = self.loss_scale
        self.residual.load_state_dict(state.get("residual", {}))
        self._tolerance_state = state.get("tolerance")
        self.averaged_bytes = self.uncounted_bytes = 0
        self._begun = False
        self._buckets = 0
        self._host = {}
        self._group = None

    def __getstate__(self) -> dict[str, Any]:
        return self.state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.process_group = None
        self.tolerance = None
        self.residual = Feedback()
        self._count_lock = threading.Lock()
        self.load_state_dict(state)


def group_of(policy: Policy, process_group: dist.ProcessGroup | None, what: str) -> CommProcessGroup:
    """A commlayer group with this policy and the ranks of `process_group` (None: WORLD): that, or one made for `what`.

    Every rank of the group must call.
    """
    given = process_group or dist.distributed_c10d._get_default_group()
    if isinstance(given, CommProcessGroup) and given.policy == policy:
        return given
    made = dist.new_group(
        dist.get_process_group_ranks(given),
        backend=NAME,
        pg_options=Options(policy),
        use_local_synchronization=True,  # the ranks of other groups take no part
        group_desc=what,
    )
    assert isinstance(made, CommProcessGroup)  # noqa: S101  # this rank is a member
    return made


@untraced
def allreduce_hook(state: HookState, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """Averages a bucket of gradients over the ranks.

    A failure reaches the caller of `backward()` as a RuntimeError with the engine's text.
    """
    gradients = bucket.buffer()
    if gradients.layout != torch.strided:
        raise ConfigError(
            f"bucket {bucket.index()} has {gradients.layout} gradients of parameters of the shapes "
            f"{[tuple(each.shape) for each in bucket.parameters()]}: this hook averages dense ones; use sparse=False"
        )
    policy, reliable = state.enter(bucket)
    step, index = state.steps - 1, bucket.index()
    may_lose = state.group().can_lose and (state.tolerance is not None or policy.loss_bound > 0)
    if may_lose and (policy.treatment == "feedback" or policy.protect_share > 0 or reliable):
        averaged = _from_source(state, bucket, policy, reliable)
    else:
        if state.residual:  # of steps that could lose something
            state.residual.add_to(gradients, bucket.parameters(), _starts(bucket))
        averaged = _in_place(state, gradients, policy)
    if state.tolerance is None:
        return averaged

    def observe(done: Future[torch.Tensor]) -> torch.Tensor:
        state.observe(step, index, done.value())
        return done.value()

    return averaged.then(observe)


def _average() -> AllreduceOptions:
    options = AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
    return options


def _starts(bucket: dist.GradBucket) -> list[int]:
    """The element of the bucket where each of its gradients begins."""
    first = bucket.buffer().storage_offset()
    return [int(each.storage_offset() - first) for each in bucket.gradients()]


def _from_source(
    state: HookState, bucket: dist.GradBucket, policy: Policy, reliable: list[int]
) -> Future[torch.Tensor]:
    """The same, for gradients of which a part may be lost: with `feedback` this rank adds it to its next ones."""
    gradients, group = bucket.buffer(), state.group()
    starts, parts = _starts(bucket), bucket.gradients()
    if not gradients.is_floating_point():
        raise ConfigError(f"a bucket of {gradients.dtype}: bounded loss is for floating-point gradients")
    parameters = bucket.parameters()
    source = gradients if gradients.is_cpu else state.host(bucket, "source").copy_(gradients)
    feedback = policy.treatment == "feedback"
    certain = [(starts[i], starts[i] + parts[i].numel()) for i in reliable]
    if feedback:
        certain += state.residual.add_to(source, parameters, starts)  # so that no gradient is more than a step late
    protect = None
    if policy.loss_bound and (feedback or policy.protect_share or reliable):
        marks = blocks_of(certain, source, group.packet_bytes)
        if policy.protect_share:
            marks |= largest_blocks(source, policy.protect_share, group.packet_bytes)
        protect = as_words(marks)
    target = source
    if feedback:  # what was sent has to be there when it is known what of it was lost
        target = state.host(bucket, "target")
    work = group.allreduce_from(source, target, _average(), protect, policy=policy)

    def settle(done: Future[list[torch.Tensor]]) -> torch.Tensor:
        done.value()  # raises what it failed of
        missing = work.missing()
        state.count(source.nbytes, missing)
        if feedback:
            state.residual.keep(source, parameters, starts, missing)
        return target if gradients.is_cpu else gradients.copy_(target)

    if gradients.is_cpu:
        return work.get_future().then(settle)
    return _on_device(gradients.device, work.get_future(), settle)


def _in_place(state: HookState, gradients: torch.Tensor, policy: Policy) -> Future[torch.Tensor]:
    """The same for gradients that need nothing of this rank afterwards.

    Those on a device go through host memory, as the engine reaches nothing else. Each copy has ended when it returns,
    so that no stream has to wait for another.
    """
    memory = gradients.cpu()
    work = state.group().allreduce([memory], _average(), policy=policy)

    def settle(done: Future[list[torch.Tensor]]) -> torch.Tensor:
        done.value()  # raises what it failed of
        state.count(gradients.nbytes, work.missing() if isinstance(work, CommWork) else [])  # else gloo's
        return gradients if memory is gradients else gradients.copy_(memory)

    if gradients.is_cpu:
        return work.get_future().then(settle)
    return _on_device(gradients.device, work.get_future(), settle)


def _on_device(
    device: torch.device,
    done: Future[list[torch.Tensor]],
    finish: Callable[[Future[list[torch.Tensor]]], torch.Tensor],
) -> Future[torch.Tensor]:
    """What `finish` makes of a result in host memory, as a future of a tensor on a device."""
    averaged: Future[torch.Tensor] = Future(devices=[device])

    def set_result(done: Future[list[torch.Tensor]]) -> None:
        try:
            averaged.set_result(finish(done))
        except Exception as error:
            averaged.set_exception(error)  # type: ignore[arg-type]  # declared as the value's type

    done.add_done_callback(set_result)
    return averaged.then(lambda done: done.value())  # see work.py
