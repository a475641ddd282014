"""Gradient averaging for DistributedDataParallel, as the communication hook that PyTorch documents.

    state = commlayer.HookState(commlayer.Policy())
    model.register_comm_hook(state, commlayer.allreduce_hook)

It works whatever the job's own backend is: where that is not commlayer, the state makes a commlayer group of the same
ranks when the first bucket is ready.
"""

# No `from __future__ import annotations` here: DDP checks a hook's annotations, and would find strings.

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions
from torch.futures import Future

from .backend import NAME, CommProcessGroup, Options
from .config import Policy
from .dynamo import untraced
from .errors import ConfigError
from .residual import Residual, largest_blocks


class HookState:
    """What a hook keeps from step to step: its policy and its group.

    `process_group` is that of the model, None meaning WORLD. It is no part of what is saved or pickled: a restored
    state uses WORLD until `process_group` is set.

    With `Policy(loss_bound=...)` and its treatment `feedback`, the state keeps what of this rank's gradients was lost
    until the next step adds it. That is no part of what is saved, either: a restored state has lost nothing yet.
    """

    def __init__(self, policy: Policy | None = None, process_group: dist.ProcessGroup | None = None) -> None:
        self.policy = policy or Policy()
        self.process_group = process_group
        self.residual = Residual()
        """What of the gradients was lost and waits for the next step."""
        self._group: CommProcessGroup | None = None
        self._sources: dict[int, torch.Tensor] = {}

    def source(self, bucket: dist.GradBucket) -> torch.Tensor:
        """Host memory to send a bucket's gradients from. It is the bucket's own until its operation has ended."""
        gradients, source = bucket.buffer(), self._sources.get(bucket.index())
        if source is None or source.shape != gradients.shape or source.dtype != gradients.dtype:
            source = self._sources[bucket.index()] = torch.empty_like(gradients, device="cpu")
        return source

    def group(self) -> CommProcessGroup:
        """The commlayer group to use. The first call may make it: then every rank of the group must call.

        A group that has been destroyed since, with the job's process groups, is replaced.
        """
        if self._group is None or self._group.closed:
            given = self.process_group or dist.distributed_c10d._get_default_group()
            if isinstance(given, CommProcessGroup) and given.policy == self.policy:
                self._group = given
            else:
                made = dist.new_group(
                    dist.get_process_group_ranks(given),
                    backend=NAME,
                    pg_options=Options(self.policy),
                    use_local_synchronization=True,  # the ranks of other groups take no part
                    group_desc="commlayer.HookState",
                )
                assert isinstance(made, CommProcessGroup)  # noqa: S101  # this rank is a member
                self._group = made
        return self._group

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: plain values only."""
        return {"policy": dataclasses.asdict(self.policy)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned. Raises ConfigError if it holds a policy this version cannot keep."""
        self.policy = Policy(**state["policy"])
        self.residual = Residual()
        self._sources = {}
        self._group = None

    def __getstate__(self) -> dict[str, Any]:
        return self.state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.process_group = None
        self.load_state_dict(state)


@untraced
def allreduce_hook(state: HookState, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """Averages a bucket of gradients over the ranks.

    A failure reaches the caller of `backward()` as a RuntimeError with the engine's text.
    """
    gradients = bucket.buffer()
    options = AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
    if state.group().loses and state.policy.treatment == "feedback":
        return _with_feedback(state, bucket, options)
    if gradients.is_cpu:
        return state.group().allreduce([gradients], options).get_future().then(lambda done: done.value()[0])
    return _through_host(state.group(), gradients, options)


def _with_feedback(state: HookState, bucket: dist.GradBucket, options: AllreduceOptions) -> Future[torch.Tensor]:
    """The same, for gradients of which a part may be lost: this rank adds it to its next ones."""
    gradients, group, source = bucket.buffer(), state.group(), state.source(bucket)
    if not gradients.is_floating_point():
        raise ConfigError(f"a bucket of {gradients.dtype}: Policy(loss_bound=...) is for floating-point gradients")
    parameters = bucket.parameters()
    starts = [int(each.storage_offset() - gradients.storage_offset()) for each in bucket.gradients()]
    source.copy_(gradients)
    state.residual.add_to(source, parameters, starts)
    protect = None
    if state.policy.protect_quantile:
        protect = largest_blocks(source, state.policy.protect_quantile, group.packet_bytes)
    target = gradients
    if not gradients.is_cpu:  # where a result is lost, what was there before stays
        target = source.clone() if state.policy.consistency == "relaxed" else torch.empty_like(source)
    work = group.allreduce_from(source, target, options, protect)

    def settle(done: Future[list[torch.Tensor]]) -> torch.Tensor:
        done.value()  # raises what it failed of
        state.residual.keep(source, parameters, starts, work.missing())
        return target if gradients.is_cpu else gradients.copy_(target)

    if gradients.is_cpu:
        return work.get_future().then(settle)
    return _on_device(gradients.device, work.get_future(), settle)


def _through_host(group: CommProcessGroup, gradients: torch.Tensor, options: AllreduceOptions) -> Future[torch.Tensor]:
    """The same for gradients on a device: the engine reaches host memory only.

    Each copy has ended when it returns, so that no stream has to wait for another.
    """
    done = group.allreduce([gradients.cpu()], options).get_future()
    return _on_device(gradients.device, done, lambda done: gradients.copy_(done.value()[0]))


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
