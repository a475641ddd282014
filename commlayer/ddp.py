"""Gradient averaging for DistributedDataParallel, as the communication hook that PyTorch documents.

    state = commlayer.HookState(commlayer.Policy())
    model.register_comm_hook(state, commlayer.allreduce_hook)

It works whatever the job's own backend is: where that is not commlayer, the state makes a commlayer group of the same
ranks when the first bucket is ready.
"""

# No `from __future__ import annotations` here: DDP checks a hook's annotations, and would find strings.

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions
from torch.futures import Future

from .backend import NAME, CommProcessGroup, Options
from .config import Policy
from .dynamo import untraced


class HookState:
    """What a hook keeps from step to step: its policy and its group.

    `process_group` is that of the model, None meaning WORLD. It is no part of what is saved or pickled: a restored
    state uses WORLD until `process_group` is set.
    """

    def __init__(self, policy: Policy | None = None, process_group: dist.ProcessGroup | None = None) -> None:
        self.policy = policy or Policy()
        self.process_group = process_group
        self._group: CommProcessGroup | None = None

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
    if gradients.is_cpu:
        return state.group().allreduce([gradients], options).get_future().then(lambda done: done.value()[0])
    return _through_host(state.group(), gradients, options)


def _through_host(group: CommProcessGroup, gradients: torch.Tensor, options: AllreduceOptions) -> Future[torch.Tensor]:
    """The same for gradients on a device: the engine reaches host memory only.

    Each copy has ended when it returns, so that no stream has to wait for another.
    """
    averaged: Future[torch.Tensor] = Future(devices=[gradients.device])

    def copy_back(done: Future[list[torch.Tensor]]) -> None:
        try:
            averaged.set_result(gradients.copy_(done.value()[0]))
        except Exception as error:
            averaged.set_exception(error)  # type: ignore[arg-type]  # declared as the value's type

    group.allreduce([gradients.cpu()], options).get_future().add_done_callback(copy_back)
    return averaged.then(lambda done: done.value())  # see work.py
