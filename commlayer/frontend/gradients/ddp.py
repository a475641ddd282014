"""Gradient averaging for DistributedDataParallel, as the communication hook that PyTorch documents.

    state = commlayer.HookState(commlayer.Policy())
    model.register_comm_hook(state, commlayer.allreduce_hook)

It works with any backend of the job: where that is not commlayer, the state makes a commlayer group of the same ranks
when the first bucket is ready.
"""

# No `from __future__ import annotations` here: DDP checks a hook's annotations, and would find strings.

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.futures import Future

from ...config import Config
from ...dynamo import untraced
from ...errors import ConfigError
from ..device.pinned_handle import PinnedHandle
from ..work.work import CommWork
from .gradient import Place, Reduction, reduce_gradient
from .hook_state import HookState
from .samples import weigh


@untraced
def allreduce_hook(state: HookState, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """Averages a bucket of gradients over the ranks; see `gradient.reduce_gradient`.

    A failure reaches the caller of `backward()` as a RuntimeError with the engine's text. Raises ConfigError for sparse
    gradients, for the buckets of a second model, and for a restored state that belongs to another model. With
    COMMLAYER_DISABLE it is torch's own `allreduce_hook`, after the weights of `samples`.
    Raises ConfigError unless the state is a HookState.
    """
    if not isinstance(state, HookState):
        given = "a process group" if isinstance(state, dist.ProcessGroup) else repr(state)
        group = ", process_group" if isinstance(state, dist.ProcessGroup) else ""
        raise ConfigError(
            f"rank {dist.get_rank()}: commlayer.allreduce_hook got {given} as its state; give it a HookState: "
            f"model.register_comm_hook(commlayer.HookState(commlayer.Policy(){group}), commlayer.allreduce_hook)"
        )
    if Config.is_disabled():
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # loads what nobody else needs

        _weigh_plain(state, bucket)
        return default_hooks.allreduce_hook(state.process_group, bucket)  # type: ignore[arg-type]  # None: WORLD
    check_dense(bucket)
    if state.within is not None:
        return state.shards.reduce(state, bucket)
    return future_of(reduce_bucket(bucket.buffer(), bucket, state, state.reduction))


def _weigh_plain(state: HookState, bucket: dist.GradBucket) -> None:
    """Multiplies the gradients with this rank's weight, without the engine."""
    buffer = bucket.buffer()
    if bucket.index() == 0:
        state.begin_weight(state.process_group or dist.distributed_c10d._get_default_group(), buffer.device)
    weigh(buffer, state.weight)


def future_of(started: Future[torch.Tensor] | CommWork) -> Future[torch.Tensor]:
    """The averaged bucket, for DDP."""
    return started.get_future().then(lambda done: done.value()[0]) if isinstance(started, CommWork) else started


def check_dense(bucket: dist.GradBucket) -> None:
    """Raises ConfigError for sparse gradients."""
    layout = bucket.buffer().layout
    if layout != torch.strided:
        raise ConfigError(
            f"rank {dist.get_rank()}: bucket {bucket.index()} has {layout} gradients of parameters with the shapes "
            f"{[tuple(parameter.shape) for parameter in bucket.parameters()]}: this hook averages dense gradients; use "
            f"sparse=False"
        )


def reduce_bucket(
    buffer: torch.Tensor,
    bucket: dist.GradBucket,
    state: HookState,
    reduction: Callable[[], Reduction],
    priority: int | None = None,
    *,
    running: int = 0,
) -> Future[torch.Tensor] | CommWork:
    """Averages `buffer`, which has the dense gradients of a bucket: its own memory, or a copy.

    `reduction` is called once the state has begun the step. `priority`: see `Place`. A buffer on a device is averaged
    in place, through pinned copies: its work ends in the order of streams. `running` is the number of earlier steps
    whose reductions may still be in flight.
    """
    first = bucket.buffer().storage_offset()
    starts = [int(gradient.storage_offset() - first) for gradient in bucket.gradients()]
    place = Place(bucket.index(), is_last=bucket.is_last(), priority=priority)
    return reduce_buffer(buffer, bucket.parameters(), state, reduction, place, starts=starts, running=running)


def reduce_buffer(
    buffer: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    state: HookState,
    reduction: Callable[[], Reduction],
    place: Place,
    *,
    starts: Sequence[int] | None = None,
    running: int = 0,
) -> Future[torch.Tensor] | CommWork:
    """Reduces like `reduce_bucket`, any flat buffer. The state completes `place`. `starts`: see `reduce_gradient`."""
    devices = state.group().devices
    pinned = devices.pinned if devices is not None and devices.pinned.takes(buffer) else None
    if pinned is not None and place.index == 0:
        state.in_flight.begin(pinned, running)
    entered = state.enter(parameters, place.index, is_last=place.is_last)
    place = dataclasses.replace(entered, priority=place.priority)
    policy, shared = state.policy, reduction()
    if pinned is None:
        return reduce_gradient(buffer, parameters, policy, shared, starts=starts, place=place)

    def on_host(_: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> CommWork:
        begin = functools.partial(reduce_gradient, outputs[0], parameters, policy, starts=starts, place=place)
        return _reduce_on_host(outputs[0], shared, begin)

    work = pinned.run(on_host, [buffer], [buffer], needs_host=True)
    state.in_flight.add(work, is_last=place.is_last)
    return work


def _reduce_on_host(host: torch.Tensor, shared: Reduction, begin: Callable[..., Future[torch.Tensor]]) -> CommWork:
    """Starts the reduction of a pinned copy, as a work whose result is in that copy."""
    handle = PinnedHandle()
    failures: list[BaseException] = []  # a future keeps only the text

    def failed(error: BaseException) -> None:
        failures.append(error)
        if shared.failed is not None:
            shared.failed(error)

    def settle(done: Future[torch.Tensor]) -> None:
        try:
            averaged = done.value()
            if averaged.data_ptr() != host.data_ptr():
                host.copy_(averaged)
        except Exception as error:
            handle.end(failures[0] if failures else error)
        else:
            handle.end(None)

    begin(reduction=dataclasses.replace(shared, failed=failed)).add_done_callback(settle)
    return CommWork(handle, [host])
