"""What the discrete-event model predicts for the systems of `bench/jobs/pipelines.py`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from torch.distributed.pipelining.schedules import _Action, _add_unshard_reshard, _ComputationType

from bench.jobs.pipelines import SERIAL, SYSTEMS, Case, System
from commlayer.planner.costs import Costs, Layer, Link
from commlayer.scheduler.actions import Action, Order, Reduction
from commlayer.scheduler.link import Network
from commlayer.scheduler.pipelines import breadth_first, interleaved, one_f_one_b
from commlayer.scheduler.simulate import Simulation, StageCosts, simulate


def ideal(case: Case) -> Costs:
    """The case without overhead, on links without latency: the costs behind the limits."""
    size = case.reduction_s / case.chunks * case.replicas / (2 * (case.replicas - 1))
    chunk = Layer(case.forward_s, 2 * case.forward_s, size, 1.0, output_bytes=0.0)
    return Costs((chunk,) * (case.ranks * case.chunks), Link(rate_bps=8.0))


def order_of(case: Case, system: System) -> Order:
    """The actions of each rank; for FSDP2, with its all-gathers and reduce-scatters."""
    if system.order == "1F1B":
        return one_f_one_b(case.ranks, case.microbatches)
    if system.order == "AIAO":
        order = breadth_first(case.ranks, case.microbatches, case.chunks)
    else:
        order = interleaved(case.ranks, case.microbatches, case.chunks)
    return [_sharded(actions) for actions in order] if system.is_fsdp else order


def _sharded(actions: Sequence[Action]) -> list[Action]:
    """A rank's list with FSDP2's transfers, each as half of an all-reduce.

    Torch gathers the parameters of a stage before its use, and keeps those of three stages. An all-gather is waited for
    at the stage's next computation; the reduce-scatter at once.
    """
    lowered = _add_unshard_reshard([_Action(a.stage, _ComputationType.from_str(a.kind), a.microbatch) for a in actions])
    gathers: dict[int, int] = {}  # so far, by stage
    coming: set[int] = set()
    left = {stage: sum(a.stage == stage and a.kind == "B" for a in actions) for stage in {a.stage for a in actions}}
    found: list[Action] = []
    for action in lowered:
        stage, kind = action.stage_index, action.computation_type
        if kind is _ComputationType.UNSHARD:
            gathers[stage] = gathers.get(stage, 0) + 1
            coming.add(stage)
            found.append(Action("REDUCE", stage, part=gathers[stage], parts=2))
        elif kind is not _ComputationType.RESHARD:
            if stage in coming:
                coming.remove(stage)
                found.append(Action("WAIT", stage, part=gathers[stage], parts=2))
            found.append(Action("F" if kind is _ComputationType.FORWARD else "B", stage, action.microbatch_index or 0))
            left[stage] -= kind is not _ComputationType.FORWARD
            if kind is not _ComputationType.FORWARD and left[stage] == 0:
                found += [Action("REDUCE", stage, part=0, parts=2), Action("WAIT", stage, part=0, parts=2)]
    return found + [Action("UPDATE", stage) for stage in left]


def stages_of(case: Case, system: System, costs: Costs) -> list[StageCosts]:
    """The costs of each stage of this system."""
    chunks = [costs.stage(i, i + 1, replicas=case.replicas) for i in range(case.ranks * case.chunks)]
    if system.mode is None:
        chunks = [dataclasses.replace(chunk, reduce_s=0.0) for chunk in chunks]
    if system.order != "1F1B":
        return chunks
    return [_joined(chunks[rank :: case.ranks]) for rank in range(case.ranks)]


def _joined(chunks: Sequence[StageCosts]) -> StageCosts:
    """Chunks that are one stage. It sends one output."""
    return StageCosts(
        forward_s=sum(chunk.forward_s for chunk in chunks),
        backward_s=sum(chunk.backward_s for chunk in chunks),
        send_s=chunks[-1].send_s,
        reduce_s=sum(chunk.reduce_s for chunk in chunks),
        update_s=sum(chunk.update_s for chunk in chunks),
        activation_bytes=sum(chunk.activation_bytes for chunk in chunks),
    )


@functools.cache
def predict(case: Case, name: str, costs: Costs) -> Simulation:
    """The steps of a system. The layers of `costs` are a tuple.

    On links without classes, sends between stages have a link of their own: connections to several peers share a link
    in turns, so a small message does not wait for all others.
    """
    system = SYSTEMS[name]
    reduction = Reduction(system.mode or "step", case.chunks if system.order == "1F1B" and system.mode == "step" else 1)
    network = Network(system.discipline, costs.link.latency_s, shared=system.discipline == "class")
    stages = stages_of(case, system, costs)
    return simulate(order_of(case, system), stages, reduction, network, action_s=costs.action_s)


@functools.cache
def limit(case: Case, name: str) -> Simulation:
    """The steps of a system on an ideal network, without overhead."""
    return predict(case, name, ideal(case))


def reduction_s(case: Case, costs: Costs) -> float:
    """Seconds that the reductions of a step occupy the busiest link."""
    stages = stages_of(case, SYSTEMS[SERIAL], costs)
    return max(stage.reduce_s for stage in stages)


def exposed(case: Case, step_s: float, unreduced_s: float, costs: Costs) -> float:
    """Share of the reductions that makes a step longer than one without."""
    return (step_s - unreduced_s) / reduction_s(case, costs)
