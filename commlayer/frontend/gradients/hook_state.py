"""`HookState`: the policy, the checkpoint and the counters of a communication hook."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...compress.choice import Choice
from ...compress.codec import codec_of
from ...compress.feedback import Feedback
from ...compress.fine import Fine
from ...compress.loss_scale import LossScale
from ...compress.optimizer import check_optimizer
from ...config import LOSS_BOUND_MAX, Policy, number, policy_of_job
from ...errors import ConfigError
from ...loss.tolerance import Tolerance
from ...telemetry.meter import meter
from ..device.in_flight import InFlight
from ..group.backend import CommProcessGroup
from .candidates import choice_for
from .changes import Changes
from .commit import Commit
from .gradient import Place, Reduction
from .hook_group import check_alike, check_ranks, is_no_member, is_usable, largest_of, met_group
from .low_rank import LowRank
from .reducer import Missing
from .restored import Restored
from .samples import weight_of
from .shards import Shards, check_within

RESIDUALS = {"f32": torch.float32, "bf16": torch.bfloat16}
"""The type of residuals, one per `Policy.residual`."""


class HookState:
    """State of a communication hook from step to step. Each model needs a state of its own.

    `policy` None: that of COMMLAYER_POLICY_ variables, or of the job's file of settings, or the default one; it is
    deterministic if the group of the gradients is, and nothing may be lost.
    `process_group` is that of the model; None: WORLD, or the group that `overlap` or `pipeline.attach` is given.
    `tolerance` gives loss bounds by layer and by step instead of the policy's `loss_bound` (see `Tolerance`). `fine`
    selects the parameters that a codec leaves in 16 bits; None: those with fewer than two dimensions, as biases and
    norms. `optimizer` is the one that will use the averaged gradients; the codecs `sign` and `topk` demand it.
    `samples` returns the number of this rank's samples, or tokens, in a step: the average is then that over all
    samples, and not over ranks. It is called once per step, before the first bucket; give it on all ranks or on none.
    `within` is a group of the ranks of this host, of any backend, as NCCL: DDP's hook then sums gradients in it, and a
    rank averages its shard of them with its peers on the other hosts. All hosts have as many ranks. It excludes
    `overlap`, pipelines and the codecs `auto` and `powersgd`.
    None of these is saved or pickled: a restored state has no `process_group` until one is set, a state that had a
    tolerance must be given an equal one, one with `samples` such a function, and `fine` and `optimizer` must be set
    again.

    With the policy's treatment `feedback`, the state keeps lost contributions of this rank's gradients until the next
    step adds them; with a codec that keeps errors, also rounding errors. They are saved, so every rank should save its
    own state and restore that. A rank that restores the state of another rank drops its residual, which would otherwise
    be added several times. With `Policy(deterministic=True)` a resumed training has the bits of one that went on; with
    a codec only if DDP has the same buckets: it regroups them after the first backward pass of a process, so restore
    after such a pass.

    Raises ConfigError for arguments of another type, for a policy with a `loss_bound` beside a tolerance, and for the
    codecs `sign` and `topk` with an optimizer that cannot use them.
    """

    overlaps = False
    """Whether gradients travel during the next forward pass: for `telemetry.meter`."""
    check_policy: Callable[[Policy], None] = staticmethod(lambda policy: None)  # noqa: ARG005
    """Raises ConfigError for a policy that the owner of this state cannot have."""

    def __init__(
        self,
        policy: Policy | None = None,
        process_group: dist.ProcessGroup | None = None,
        *,
        tolerance: Tolerance | None = None,
        fine: Fine | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        samples: Callable[[], float] | None = None,
        within: dist.ProcessGroup | None = None,
    ) -> None:
        for name, given, kind in (
            ("policy", policy, Policy),
            ("process_group", process_group, dist.ProcessGroup),
            ("tolerance", tolerance, Tolerance),
            ("fine", fine, Fine),
            ("optimizer", optimizer, torch.optim.Optimizer),
            # A rank that is in none of the groups tells that to the others, see `between`.
            ("within", None if is_no_member(within) else within, dist.ProcessGroup),
        ):
            if given is not None and not isinstance(given, kind):
                is_share = 0 < number(given) <= LOSS_BOUND_MAX
                hint = f"; the same bound for all gradients is Policy(loss_bound={given!r})" if is_share else ""
                raise ConfigError(f"HookState({name}={given!r}): give a {kind.__name__}, or None{hint}")
        if samples is not None and not callable(samples):
            raise ConfigError(
                f"HookState(samples={samples!r}): give a function that returns this rank's samples of a step, as "
                f"lambda: len(batch), or None"
            )
        self.policy = policy or _default_policy(tolerance)
        self._follows_group = policy is None
        self.process_group = process_group
        self.tolerance = tolerance
        """Gives the loss bounds instead of the policy's `loss_bound`; None: the policy does."""
        self.fine = fine or Fine()
        """The parameters that a codec leaves in 16 bits."""
        self.optimizer = optimizer
        """It is checked at the first step, as a restored state gets it late."""
        self.samples = samples
        """Returns this rank's samples of a step, which weight its gradients; None: all ranks have the same weight."""
        self.within = within
        """The group of this host's ranks, if buckets are averaged in two levels; it may be set between steps."""
        if within is not None:
            check_within(self.policy)
        check_optimizer(self.policy, optimizer)
        self.feedback = Feedback(RESIDUALS[self.policy.residual])
        """Lost contributions and rounding errors that wait for the next step."""
        self.low_rank = LowRank()
        """State of the codec `powersgd:RANK`."""
        self.steps = 0
        """Backward passes that have begun with this state, including those before it was saved."""
        self._reset()
        if tolerance is not None:
            if self.policy.loss_bound:
                raise ConfigError(
                    f"HookState(Policy(loss_bound={self.policy.loss_bound}), tolerance=...): use one of both"
                )
            dataclasses.replace(self.policy, loss_bound=LOSS_BOUND_MAX)  # raises if the rest of it forbids loss

    def _reset(self) -> None:
        """Everything that a checkpoint does not hold, as of a new state."""
        self.averaged_bytes = 0
        """Bytes of local gradient averaged since this state was made or loaded."""
        self.uncounted_bytes = 0
        """Bytes of local gradient missing from the reduced result. With several ranks per host, counted on the sending
        rank."""
        self._count_lock = threading.Lock()
        self._loss_scale = LossScale()
        self._scaler_searches = 2  # some jobs make their scaler after a first step
        self._restored = Restored()
        self._begun = False  # a step, since this state was made or loaded
        self._choice: Choice | None = None
        self._buckets = 0  # those of the last step; 0: not known
        self._group: CommProcessGroup | None = None
        self._memory: dict[tuple[int, str], Tensor] = {}
        self._commit = Commit()
        self.shards = Shards()
        """The buckets of a state with `within`."""
        self.in_flight = InFlight()
        """Reductions of buckets on a device."""
        self._changes = Changes()
        self.weight = 1.0
        """Factor of this rank's gradients in this step, by its samples."""

    @property
    def loss_scale(self) -> float:
        """Factor that the loss is multiplied with. Unless it is set, it is that of the job's `torch.amp.GradScaler`,
        and 1 without one. Another scaler's must be set before `backward()` whenever it changes: the residual of
        another scale is converted.

        Setting it raises ConfigError unless the value is a finite number above 0. Reading it raises ConfigError if
        several GradScalers have different scales.
        """
        return self._loss_scale.value

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self._loss_scale.set(scale, f"rank {dist.get_rank()}: " if dist.is_initialized() else "")

    def enter(self, parameters: Sequence[Tensor], index: int, *, is_last: bool) -> Place:
        """The place of bucket `index` with these parameters; the hook calls this once per bucket, in order.

        Raises ConfigError for the buckets of a second model.
        """
        if not self.feedback.has_met(parameters):
            if self._buckets or (self._begun and index == 0):
                raise ConfigError(
                    f"{self.group().who}: bucket {index} has parameters of another model than the first "
                    f"steps of this HookState; make a HookState for each model. With static_graph=True, DDP also "
                    f"numbers all buckets 0 in its first step: it has several where parameters have several types; "
                    f"leave static_graph out then"
                )
            if index == 0:
                self.feedback.renumber()
                self.low_rank.renumber()
        if index == 0:
            self._begin_step()
            if meter.is_on:
                meter.hook_steps(self, overlaps=self.overlaps)
        self.feedback.meet(parameters)
        place = Place(index, self._buckets, self.steps - 1, is_last)
        if is_last:
            self._buckets = index + 1
        return place

    def reduction(self) -> Reduction:
        """The state that the reductions of this model share, for the hook."""
        shared = self.feedback, self.tolerance, self._count, self._memory
        return Reduction(
            self.group(),
            *shared,
            choice=self._choice,
            fine=self.fine,
            low_rank=self.low_rank,
            commit=self._commit,
            weight=self.weight,
        )

    def explain(self) -> str:
        """The codecs that `auto` has chosen, as a table: measured and predicted times, bytes, and the reason."""
        if self._choice is not None:
            return self._choice.explain()
        if self.policy.codec != "auto":
            return f"Policy(codec={self.policy.codec!r}) leaves nothing to choose; auto chooses"
        reason = "all ranks share a host, where nothing is encoded" if self._begun else "no step has been made"
        return f"Policy(codec='auto') has chosen nothing: {reason}"

    def _count(self, averaged_bytes: int, missing: Missing) -> None:
        with self._count_lock:
            self.averaged_bytes += averaged_bytes
            self.uncounted_bytes += sum(length for _, length in missing)

    def _begin_step(self) -> None:
        if not self._begun:
            check_optimizer(self.policy, self.optimizer)
            has_residuals = bool(self.feedback) or codec_of(self.policy.codec).keeps_errors
            self._restored.meet_ranks(self.group().size(), self.group().who, warns=has_residuals)
        self.begin_weight(self.group())
        if self._scaler_searches and (self.policy.loss_bound or self.tolerance or self.policy.codec != "none"):
            self._scaler_searches -= 1
            self._loss_scale.find_scalers()
        for memory in (self.feedback, self.low_rank):
            memory.begin_step(self.group().rank(), self.loss_scale / self.shards.per_host, self.group().who)
        self._commit.abandon(self.group().who)
        self._commit = Commit()
        if self._buckets:
            self.feedback.check_met()
            self._restored.meet_fine(self._fine_numbers(), self.group().who, warns=self.policy.codec != "none")
        self._restored.give_to(self.tolerance)
        watched = meter.is_on  # all ranks watch, or none: they compare COMMLAYER_TOP
        if not self._begun and (self.tolerance is not None or self.policy.codec != "none" or watched):
            self.steps = int(self._largest(self.steps))  # a rank that is new in the job begins where the others are
        if watched:
            self._changes.begin_step(self)
        if self.tolerance is not None:
            self.tolerance.begin(self.steps, self._largest)
        if self.policy.codec == "auto" and self.group().can_lose:
            if self._choice is None:
                partial = self.tolerance is not None or self.policy.loss_bound > 0
                self._choice = choice_for(self.group(), self.policy, self.optimizer, self.largest_of, partial=partial)
                self._choice.load_state_dict(self._restored.choice)
            self._choice.begin_step(self.steps, time.perf_counter(), self.largest_of)
        self._begun = True
        self.steps += 1

    def begin_weight(self, group: dist.ProcessGroup, device: torch.device | str = "cpu") -> None:
        """Sets `weight` for a step. All ranks of the group call. Raises ConfigError if a saved state had `samples` and
        this one has none, and for wrong counts: see `samples.weight_of`."""
        self.weight = 1.0 if self.samples is None else weight_of(self.samples, group, device)
        if self.samples is None:
            self._restored.check_weighted()

    def changed_policy(self, fields: Mapping[str, Any]) -> Policy:
        """The policy with these fields, for `commlayer ctl`. Raises ConfigError if this hook cannot have it."""
        policy = dataclasses.replace(self.policy, **fields)
        if self.tolerance is not None and "loss_bound" in fields:
            raise ConfigError("loss-bound: this HookState has a tolerance, which gives the loss bounds")
        check_optimizer(policy, self.optimizer)
        if self.within is not None:
            check_within(policy)
        self.check_policy(policy)
        return policy

    def change_policy(self, fields: Mapping[str, Any]) -> None:
        """Sets these fields of the policy; `Changes` calls this between steps, on all ranks of the group."""
        self.policy = self.changed_policy(fields)
        if "codec" in fields:
            self._choice = None

    @property
    def changed(self) -> int:
        """The number of the latest change by `commlayer ctl`."""
        return self._changes.number

    def _fine_numbers(self) -> list[int]:
        """The parameters that a codec leaves in 16 bits, by number."""
        return self.feedback.numbers_where(self.fine.__contains__)

    def _largest(self, value: float) -> float:
        """The largest of all ranks' values."""
        return self.largest_of([value])[0]

    def largest_of(self, own: Sequence[float]) -> list[float]:
        """The largest of all ranks' values, one by one."""
        return largest_of(self.group(), own)

    def use_group(self, given: dist.ProcessGroup, who: str) -> None:
        """Makes `given` the `process_group`, unless there is one. Raises ConfigError for one with other ranks, and for
        a state with `within`, which is for DDP's hook alone."""
        if self.within is not None:
            raise ConfigError(
                f"{who}(state=...): a HookState with within=... is for register_comm_hook alone; leave within out"
            )
        check_ranks(self._usable() or self.process_group, given, who)
        self.process_group = self.process_group or given

    def group(self) -> CommProcessGroup:
        """The commlayer group to use. The first call may make it: then every rank of the group must call.

        A group that has been destroyed since, with the job's process groups, is replaced. Raises MismatchError on all
        ranks if their states have different policies.
        """
        group = self._usable()
        if group is None:
            self._follow_group()
            group = met_group(self.policy, self.process_group, self.compare)
        self._group = group
        return group

    def compare(self, group: CommProcessGroup) -> None:
        """The ranks of a group compare their states. All of them call. Raises MismatchError on all if they differ."""
        tolerance = None if self.tolerance is None else type(self.tolerance).__name__
        check_alike(group, {**dataclasses.asdict(self.policy), "tolerance": tolerance})

    def _follow_group(self) -> None:
        """Makes a policy that the caller did not give deterministic, if the group of the gradients is."""
        given = getattr(self.process_group or dist.distributed_c10d._get_default_group(), "policy", None)
        is_exact = self.tolerance is None and not self.policy.loss_bound
        if self._follows_group and is_exact and isinstance(given, Policy) and given.deterministic:
            self.policy = dataclasses.replace(self.policy, deterministic=True)

    def _usable(self) -> CommProcessGroup | None:
        """The group, unless torch has let go of it. An aborted group stays until then: its errors tell why."""
        return self._group if is_usable(self._group) else None

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, between steps: plain values, and tensors of lost contributions.

        Waits for reductions of buckets on a device, and raises their error.
        """
        self.in_flight.drain()
        restored = self._restored
        tolerance = restored.tolerance  # which the tolerance takes over in the first step
        if tolerance is None and self.tolerance is not None:
            tolerance = self.tolerance.state_dict()
        return {
            "policy": dataclasses.asdict(self.policy),
            "steps": self.steps,
            "world_size": restored.world_size,
            "fine": restored.fine or self._fine_numbers(),
            "feedback": self.feedback.state_dict(),
            "low_rank": self.low_rank.state_dict(),
            **({} if self._loss_scale.given is None else {"loss_scale": self._loss_scale.given, "scale_is_set": True}),
            "choice": restored.choice if self._choice is None else self._choice.state_dict(),
            "tolerance": tolerance,
            "weighted": restored.weighted or self.samples is not None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the value of `state_dict`, including the policy; to be called between steps.

        Raises ConfigError unless `state` came from `state_dict` of this version, and if it holds a loss bound while
        this state has a tolerance.
        """
        try:
            policy = Policy(**state["policy"])
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"not the state of a HookState of this version ({error!r}): train on with a new HookState"
            ) from error
        if self.tolerance is not None and policy.loss_bound:
            raise ConfigError(
                f"the saved state has Policy(loss_bound={policy.loss_bound}), and this HookState has a tolerance: "
                f"use one of both"
            )
        self._reset()
        self.policy, self._follows_group = policy, False
        self.steps = state.get("steps", 0)
        scale = state.get("loss_scale", 1.0)
        # Former versions had no `scale_is_set`, and saved 1 where none was set.
        if state.get("scale_is_set") or isinstance(scale, bool) or scale != 1.0:
            self.loss_scale = scale
        self.feedback.dtype = RESIDUALS[policy.residual]
        self.feedback.load_state_dict(state.get("feedback", {}))
        self.low_rank = LowRank()
        self.low_rank.load_state_dict(state.get("low_rank", {}))
        self._restored = Restored.of(state)

    def __getstate__(self) -> dict[str, Any]:
        return self.state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.process_group = None
        self.tolerance = None
        self.fine = Fine()
        self.optimizer = None
        self.samples = None
        self.within = None
        self.feedback = Feedback()
        self.load_state_dict(state)


def _default_policy(tolerance: Tolerance | None) -> Policy:
    """The policy that the settings of the job give; loss bounds are those of a tolerance, if there is one."""
    policy = policy_of_job()
    return policy if tolerance is None else dataclasses.replace(policy, loss_bound=0.0)
