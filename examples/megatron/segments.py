"""Megatron's buckets in the order of their next use.

A bucket group of Megatron's DistributedDataParallel is a segment of the model: one reduce-scatter of its gradients in
the backward pass and, with the distributed optimizer, one all-gather of its parameters before the next forward pass.

`ByNextUse` gives both a class: the segment that the next forward pass needs first is the most urgent. It suits every
job. `Deferred` also takes the optimizer's step apart: each segment is reduced, stepped and gathered before its next
use, so nothing waits for all gradients. It suits jobs without gradient clipping, which needs all gradients at once.

Both change only when bytes move. Losses stay as they were, bit by bit.
"""

from __future__ import annotations

import functools
from typing import Any

import commlayer
from commlayer.scheduler.deferred import DeferredStep
from commlayer.scheduler.gradient import PendingReduction

Group = Any
"""megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup"""


def in_order(chunks: list[Any]) -> list[Group]:
    """The bucket groups of this rank's model chunks in the order in which a forward pass uses them."""
    found = []
    for chunk in chunks:
        place = {parameter: number for number, parameter in enumerate(chunk.parameters())}
        groups = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
        found += sorted(groups, key=lambda group: min(place[parameter] for parameter in group.params))
    return found


class ByNextUse:
    """Starts reductions and gathers in classes 1 (used first) to 7. Call its `step` instead of the optimizer's.

    Class 0 stays free for what the computation waits for: run forward and backward passes `with commlayer.priority(0)`.
    The DistributedDataParallelConfig needs overlap_param_gather and, because all gathers start in `step`,
    align_param_gather. Megatron's hooks wait for each gather in front of its first use.
    """

    def __init__(self, chunks: list[Any], optimizer: Any) -> None:
        self._optimizer = optimizer
        self._groups = in_order(chunks)
        for place, group in enumerate(self._groups):
            urgency = commlayer.priority(1 + 6 * place // max(len(self._groups) - 1, 1))
            group.start_grad_sync = urgency(group.start_grad_sync)
            group.start_param_sync = urgency(group.start_param_sync)

    def step(self) -> Any:
        """Steps all parameters and starts all gathers. Megatron starts a gather when the one before it is used.

        Returns the result of Megatron's step: whether it was made, the norm of the gradient, the number of zeros.
        """
        with commlayer.priority(0):  # the norm is a sum over ranks
            result = self._optimizer.step()
        for group in self._groups:
            group.start_param_sync()
        return result

    def finish(self) -> None:
        """Waits for all gathers: before parameters are read, saved or evaluated."""
        for group in self._groups:
            finish_gather(group)


class Deferred(ByNextUse):
    """Makes the step of each segment before its next use. Call its `step` instead of the optimizer's.

    Raises ValueError for configurations in which a step needs more than its own gradients.
    """

    def __init__(self, chunks: list[Any], optimizer: Any) -> None:
        check(chunks, optimizer)
        super().__init__(chunks, optimizer)
        self._optimizers = [
            chained_optimizer
            for chained_optimizer in optimizer.chained_optimizers
            if not chained_optimizer.is_stub_optimizer
        ]
        self._steps = [DeferredStep(part.optimizer, views_are_watched=True) for part in self._optimizers]
        self._begun = len(self._groups)
        """Number of groups whose gathers have started."""
        for place, group in enumerate(self._groups):
            self._step_before_use(place, group)
        for chunk in chunks:
            chunk.config.finalize_model_grads_func = self._finalize
            for buffer in chunk.buffers:
                buffer.reset = lambda: None  # zero_grad_buffer() comes while gradients travel; see _advance

    def step(self) -> Any:
        """Notes the hyperparameters of now. The next forward pass makes the steps. Returns the same as Megatron."""
        for optimizer in self._optimizers:
            optimizer.optimizer.step()
        self._begun = 0
        return True, 0.0, None

    def finish(self) -> None:
        """Makes all steps, and waits for all gathers."""
        self._advance(len(self._groups))
        super().finish()

    def _finalize(self, *_: Any, **__: Any) -> None:
        """Notes the reductions after the last backward pass, instead of finalize_model_grads, and waits for none."""
        for group in reversed(self._groups):
            if group.is_first_batch:
                group.start_grad_sync()  # Megatron learns in its first batch when a group is ready
            for optimizer, step in zip(self._optimizers, self._steps, strict=True):
                gradients = shards(optimizer, group)
                if gradients:
                    step.add(PendingReduction(functools.partial(finish_grad_sync, group), gradients))

    def _step_before_use(self, place: int, group: Group) -> None:
        def finish_param_sync(skip_next_bucket_dispatch: bool = False) -> None:  # noqa: ARG001  # Megatron's name
            self._advance(place + 2)  # the gather of the next group travels while this one computes
            finish_gather(group)

        group.finish_param_sync = finish_param_sync

    def _advance(self, end: int) -> None:
        """Steps the groups before `end` and starts their gathers, in one order: all ranks must start them alike."""
        for group in self._groups[self._begun : end]:
            for optimizer, step in zip(self._optimizers, self._steps, strict=True):
                step.use(shards(optimizer, group))
            finish_grad_sync(group)  # this rank may own no shard of the group
            for bucket in group.buckets:
                bucket.grad_data.zero_()
            group.start_param_sync()
        self._begun = max(self._begun, min(end, len(self._groups)))


def shards(optimizer: Any, group: Group) -> dict[Any, Any]:
    """This rank's shards of the group's parameters, as the distributed optimizer has them, with their gradients."""
    found = {}
    for models, mains in zip(optimizer.model_fp32_groups, optimizer.shard_fp32_groups, strict=True):
        for model, main in zip(models, mains, strict=True):
            if model in group.params:
                span = optimizer._get_model_param_range_map(model)["param"]
                found[main] = model.main_grad.view(-1)[span.start : span.end]
    return found


def finish_grad_sync(group: Group) -> None:
    """Waits for the group's reduction, once."""
    if group.grad_reduce_handle is not None:
        type(group).finish_grad_sync(group)


def finish_gather(group: Group) -> None:
    """Waits for the group's gather, once."""
    if group.param_gather_handle is not None:
        group.param_gather_handle.wait()
        group.param_gather_handle = None


def check(chunks: list[Any], optimizer: Any) -> None:
    """Raises ValueError if a deferred step would change results."""
    config, ddp, model = optimizer.config, chunks[0].ddp_config, chunks[0].config
    faults = {
        "clip_grad": (config.clip_grad > 0, "the norm needs all gradients; set it to 0, or use ByNextUse"),
        "bf16, fp16": (config.bf16 or config.fp16, "its master parameters are not copied back here"),
        "overlap_param_gather": (not ddp.overlap_param_gather, "its forward hooks make the steps; set it"),
        "overlap_grad_reduce": (not ddp.overlap_grad_reduce, "reductions start in the backward pass; set it"),
        "sequence_parallel": (model.sequence_parallel, "gradients of norms are reduced once more"),
        "calculate_per_token_loss": (model.calculate_per_token_loss, "gradients are scaled once more"),
        "num_moe_experts": (bool(model.num_moe_experts), "gradients of routers are reduced once more"),
        "share_embeddings_and_output_weights": (
            any(chunk.module.share_embeddings_and_output_weights for chunk in chunks),
            "gradients of embeddings are reduced once more",
        ),
    }
    for name, (is_so, fault) in faults.items():
        if is_so:
            raise ValueError(f"Deferred with {name}: {fault}")
