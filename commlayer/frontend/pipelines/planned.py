"""`of_plan`: the schedule of torch.distributed.pipelining that a plan of the planner describes.

    plan = commlayer.planner.search(costs, ranks=8, microbatches=16, memory_bytes=24 << 30, buckets=(1,))[0]
    schedule = commlayer.pipeline.of_plan(plan, stages, loss_fn)
    commlayer.pipeline.attach(schedule, optimizer, dp_group, **commlayer.pipeline.attach_options(plan))

The planner knows no torch, so this is here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...errors import ConfigError
from ...planner.plan import Plan
from .schedule import scheduled


def of_plan(
    plan: Plan,
    stages: Sequence[Any],
    loss_fn: Callable[..., Any] | None = None,
    *,
    recomputed: bool = False,
    **options: Any,
) -> Any:
    """A schedule with the plan's order and micro-batches: Schedule1F1B for one stage per rank, else any group size.

    `stages` are those of this rank, with the layers that `plan.choice.cuts` gives them: rank r of p has stages r,
    r + p, ... `recomputed`: their activations are recomputed, as by torch.utils.checkpoint. `options` go to torch's
    schedule.

    Raises ConfigError for stages that are not the plan's.
    """
    choice, first = plan.choice, stages[0]
    ranks, rank = first.group_size, first.group_rank
    if (rank in choice.recompute) != recomputed:
        plans, remedy = ("recomputes", "use torch.utils.checkpoint in the stages, and recomputed=True")
        if recomputed:
            plans, remedy = ("keeps", "leave recomputed=True and checkpoints out")
        raise ConfigError(
            f"pipeline.of_plan(recomputed={recomputed}): the plan ({choice}) {plans} activations on rank {rank};"
            f" {remedy}"
        )
    numbers = [stage.stage_index for stage in stages]
    expected = list(range(rank, choice.ranks * choice.chunks, choice.ranks))
    if (ranks, first.num_stages) != (choice.ranks, choice.ranks * choice.chunks) or numbers != expected:
        raise ConfigError(
            f"pipeline.of_plan: rank {rank} of {ranks} has the stages {numbers} of {first.num_stages}, and the plan "
            f"({choice}) has the stages {expected} of {choice.ranks * choice.chunks} there; make the plan's stages"
        )
    if choice.chunks > 1:
        return scheduled(stages, choice.microbatches, choice.order(), loss_fn, **options)
    # It takes long to import.
    from torch.distributed.pipelining import Schedule1F1B

    return Schedule1F1B(first, choice.microbatches, loss_fn=loss_fn, **options)


def attach_options(plan: Plan) -> dict[str, Any]:
    """The arguments of `attach` that reduce gradients when the plan does.

    Raises ConfigError for a plan with several buckets per stage: `attach` reduces a stage in one piece.
    """
    mode, buckets = plan.choice.reduction.mode, plan.choice.reduction.buckets
    if buckets > 1:
        raise ConfigError(
            f"pipeline.attach_options: the plan has {buckets} buckets per stage, and attach reduces a stage in one "
            f"piece; search with buckets=(1,)"
        )
    return {"defer": mode in ("deferred", "stale"), "staleness": int(mode == "stale")}
