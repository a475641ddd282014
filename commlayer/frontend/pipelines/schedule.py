"""`schedule`: a schedule of torch.distributed.pipelining with any group size between 1F1B and breadth first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...errors import ConfigError
from ...scheduler.actions import Order
from ...scheduler.pipelines import interleaved


def schedule(
    stages: Sequence[Any],
    n_microbatches: int,
    group: int | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    **options: Any,
) -> Any:
    """Interleaved 1F1B in which groups of `group` micro-batches pass through all stages of a rank.

    `group` is Megatron-Core's `microbatch_group_size_per_vp_stage`: the number of ranks (None) is torch's
    Interleaved1F1B, `n_microbatches` is breadth first, as LoopedBFS with 1F1B inside the last stage. Larger groups end
    the backward passes of a stage earlier, so its gradients have more time to travel; more activations are kept.
    `stages` are those of this rank: rank r of p has r, r + p, ... `options` go to torch's schedule.

    Raises ConfigError for a group that does not fit, and for stages of another order.
    """
    ranks, rank = stages[0].group_size, stages[0].group_rank
    numbers = [stage.stage_index for stage in stages]
    expected = list(range(rank, stages[0].num_stages, ranks))
    if numbers != expected:
        raise ConfigError(
            f"pipeline.schedule: rank {rank} of {ranks} has the stages {numbers}; give it the stages {expected}"
        )
    return scheduled(stages, n_microbatches, interleaved(ranks, n_microbatches, len(stages), group), loss_fn, **options)


def scheduled(
    stages: Sequence[Any], n_microbatches: int, order: Order, loss_fn: Callable[..., Any] | None, **options: Any
) -> Any:
    """A schedule that runs the F and B of `order`. Sends and reductions are added by torch."""
    # It takes long to import.
    from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

    kinds = {"F": _ComputationType.FORWARD, "B": _ComputationType.FULL_BACKWARD}
    made = _PipelineScheduleRuntime(list(stages), n_microbatches, loss_fn=loss_fn, **options)
    made.pipeline_order = {
        rank: [_Action(action.stage, kinds[action.kind], action.microbatch) for action in actions]
        for rank, actions in enumerate(order)
    }
    made._prepare_schedule_with_comms(made.pipeline_order)
    return made
