"""Gradient averaging for DistributedDataParallel, as the communication hook that PyTorch documents.

    state = commlayer.HookState(commlayer.Policy())
    model.register_comm_hook(state, commlayer.allreduce_hook)

It works with any backend of the job: where that is not commlayer, the state makes a commlayer group of the same ranks
when the first bucket is ready.
"""

# No `from __future__ import annotations` here: DDP checks a hook's annotations, and would find strings.

import dataclasses
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.futures import Future

from ..errors import ConfigError
from .dynamo import untraced
from .gradient import Reduction, reduce_gradient
from .hook_state import HookState


@untraced
def allreduce_hook(state: HookState, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """Averages a bucket of gradients over the ranks; see `gradient.reduce_gradient`.

    A failure reaches the caller of `backward()` as a RuntimeError with the engine's text. Raises ConfigError for sparse
    gradients, for the buckets of a second model, and for a restored state that belongs to another model.
    """
    check_dense(bucket)
    return reduce_bucket(bucket.buffer(), bucket, state, state.reduction)


def check_dense(bucket: dist.GradBucket) -> None:
    """Raises ConfigError for sparse gradients."""
    layout = bucket.buffer().layout
    if layout != torch.strided:
        raise ConfigError(
            f"rank {dist.get_rank()}: bucket {bucket.index()} has {layout} gradients of parameters with the shapes "
            f"{[tuple(each.shape) for each in bucket.parameters()]}: this hook averages dense gradients; use "
            f"sparse=False"
        )


def reduce_bucket(
    buffer: torch.Tensor,
    bucket: dist.GradBucket,
    state: HookState,
    reduction: Callable[[], Reduction],
    priority: int | None = None,
) -> Future[torch.Tensor]:
    """Averages `buffer`, which has the dense gradients of a bucket: its own memory, or a copy.

    `reduction` is called once the state has begun the step. `priority`: see `Place`.
    """
    parameters = bucket.parameters()
    place = state.enter(parameters, bucket.index(), is_last=bucket.is_last())
    place = dataclasses.replace(place, priority=priority)
    first = bucket.buffer().storage_offset()
    starts = [int(each.storage_offset() - first) for each in bucket.gradients()]
    return reduce_gradient(buffer, parameters, state.policy, reduction(), starts=starts, place=place)
