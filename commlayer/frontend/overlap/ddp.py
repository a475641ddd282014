"""`DdpOverlap`: gradients of a DistributedDataParallel model travel during the next forward pass."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...dynamo import untraced
from ...errors import ConfigError
from ...scheduler.gradient import PendingReduction
from ..gradients.ddp import check_dense, future_of, reduce_bucket
from ..gradients.hook_state import HookState
from ..gradients.started import Memories, Started
from .handle import Overlap


@dataclasses.dataclass(eq=False)
class Bucket:
    """A bucket whose reduction a backward pass has started."""

    parameters: list[Tensor]
    first: int
    """Element of the bucket's storage where its buffer begins."""
    started: Started
    """The reduction of the buffer, or of a copy that the next backward pass does not overwrite."""

    def gradients(self) -> dict[Tensor, Tensor]:
        """The gradients that are reduced, after the backward pass. DDP has made them views of its bucket."""
        found, memory = {}, self.started.memory
        for parameter in self.parameters:
            view = parameter.grad
            if view is not None:
                offset = memory.storage_offset() + view.storage_offset() - self.first
                found[parameter] = memory.as_strided(view.size(), view.stride(), int(offset))
        return found


@untraced
class DdpOverlap(Overlap):
    """The overlap of one model: its communication hook, whose buckets are reduced by `state`."""

    def __init__(self, model: DistributedDataParallel, optimizer: Optimizer, state: HookState, staleness: int) -> None:
        state.group()  # a collective: made here, where all ranks are
        super().__init__(model, model.module, optimizer, staleness)
        state.overlaps = True
        self.state = state
        """Counters, checkpoint and `loss_scale` of the reductions."""
        self._started: list[Bucket] = []
        self._memories: Memories | None = ({}, {}) if staleness else None
        self._ddp = model
        model.register_comm_hook(None, lambda _, bucket: self._reduce(bucket))

    def finish(self) -> None:
        super().finish()
        self.state.in_flight.drain()

    def _reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """The communication hook."""
        if self._ddp._join_config.enable:
            raise ConfigError("overlap within model.join(): ranks without inputs make no steps; leave join() out")
        check_dense(bucket)
        buffer, parameters = bucket.buffer(), bucket.parameters()
        if bucket.index() == 0:
            self._started.clear()  # not empty after a backward pass that failed
            self._agree(self.state.group())
        memory = buffer.clone() if self._deferred.staleness and not self.is_removed else buffer
        priority = self._class_of(parameters, self.state.policy)
        started = Started(memory)
        with self._in_order(parameters):
            started.averaged = reduce_bucket(
                memory,
                bucket,
                self.state,
                lambda: started.reduction(self.state, self._memories, alone=not self.is_removed),
                priority,
                running=self._deferred.staleness,
            )
        if self.is_removed:
            return future_of(started.averaged)
        self._started.append(Bucket(parameters, int(buffer.storage_offset()), started))
        if bucket.is_last():
            # DDP queues its own callback after this hook, and demands plain gradients there. Ours is to follow it.
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: engine.queue_callback(self._end_backward))
        done: Future[Tensor] = Future(devices=[] if buffer.is_cpu else [buffer.device])
        done.set_result(buffer)
        return done

    def _end_backward(self) -> None:
        """The backward pass has ended."""
        started, self._started = self._started, []
        for reduction in started:
            self._deferred.add(PendingReduction(reduction.started.wait, reduction.gradients()))


def check_ddp(model: DistributedDataParallel) -> None:
    """Raises ConfigError if results would change."""
    who = f"overlap({type(model).__name__})"
    reason = "DDP would copy gradients before they are reduced; set it to True"
    unused = "only DDP knows which gradients no rank has, and their parameters must not be stepped; set it to False"
    faults = (
        (not model.gradient_as_bucket_view, f"gradient_as_bucket_view=False: {reason}"),
        (model.find_unused_parameters, f"find_unused_parameters=True: {unused}"),
        (model.mixed_precision is not None, "DDP's mixed_precision has hooks of its own; use torch.autocast"),
        (bool(model._comm_hooks), "the model has a communication hook already, and DDP takes one; leave it out"),
    )
    for is_so, fault in faults:
        if is_so:
            raise ConfigError(f"{who}: {fault}")
