"""What the discrete-event model predicts for the systems of `bench/overlap.py`, from costs that are measured apart.

The costs are those of parts, and not of a step with communication:

- forward and backward pass and the optimizer's step, of the same hooks where nothing is reduced. They have the launch
  of each bucket, the deferred steps and the interpreter in them.
- an all-reduce of a bucket that runs alone, and a larger one: rate and latency of the link, with headers,
  acknowledgements and wake-ups. An operation's latency occupies no link, so that of the next one overlaps it.
- the same with classes: an urgent all-reduce of a bucket that starts beside others. It waits for the packets that stand
  in front of the link already, and where classes share a link, its queue is kept shorter, which costs rate.

The layers are alike, so a layer has an eighth of each.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from commlayer.scheduler.actions import Action, Reduction
from commlayer.scheduler.link import Network
from commlayer.scheduler.simulate import Simulation, StageCosts, simulate

ERROR_MAX = 0.05
"""Target for the model, of the measured step."""


@dataclasses.dataclass(frozen=True)
class Compute:
    """Seconds of a step in which nothing is reduced."""

    forward_s: float
    backward_s: float
    update_s: float = 0.0
    """0 where the step of a layer is made in the forward pass."""


@dataclasses.dataclass(frozen=True)
class Costs:
    """The costs of one backend."""

    plain: Compute
    """The computing with a hook of DDP that reduces nothing."""
    deferred: Compute
    """The computing with the hooks of `overlap`, where nothing is reduced."""
    reduce_s: float
    """The time of all gradients on the link."""
    latency_s: float
    """The latency of a reduction, beside its time on the link."""
    class_reduce_s: float
    """The time of all gradients on a link that several classes share."""
    class_latency_s: float
    """The latency of an urgent reduction on such a link."""

    @staticmethod
    def from_table(table: dict[str, Any]) -> Costs:
        """Inverse of `dataclasses.asdict`."""
        computed = {name: Compute(**table[name]) for name in ("plain", "deferred")}
        return Costs(**{**table, **computed})


def ideal(layers: int, forward_s: float) -> Costs:
    """Costs without overhead, on a link without latency, whose communication takes as long as forward and backward."""
    compute = Compute(layers * forward_s, 2 * layers * forward_s)
    communication_s = 3 * layers * forward_s
    return Costs(compute, compute, communication_s, 0.0, communication_s, 0.0)


def predict(kind: str, layers: int, layers_per_bucket: int, costs: Costs) -> Simulation:
    """The steps of a system: `step` (DDP), `fifo` and `class` (the hooks of `overlap`), `dear`."""
    if kind == "dear":
        return _dear(layers, costs)
    compute = costs.plain if kind == "step" else costs.deferred
    network, reduce_s = Network("fifo", costs.latency_s / 2), costs.reduce_s
    if kind == "class":
        network, reduce_s = Network("class", costs.class_latency_s / 2), costs.class_reduce_s
    stage = StageCosts(compute.forward_s, compute.backward_s, reduce_s=reduce_s, update_s=compute.update_s)
    buckets = math.ceil(layers / layers_per_bucket)
    return simulate(_one_rank(), [stage], Reduction("step" if kind == "step" else "deferred", buckets), network)


def _one_rank() -> list[list[Action]]:
    """DDP is a pipeline of one rank, whose only stage has all layers."""
    return [[Action("F", 0), Action("B", 0)]]


def _dear(layers: int, costs: Costs) -> Simulation:
    """A stage per layer. Part 0 of a reduction is its reduce-scatter, part 1 its all-gather."""

    def half(kind: str, layer: int, part: int) -> Action:
        return Action(kind, layer, part=part, parts=2)  # type: ignore[arg-type]

    actions = [half("REDUCE", layer, 1) for layer in range(layers)]
    for layer in range(layers):
        actions += [half("WAIT", layer, 1), Action("F", layer)]
    for layer in reversed(range(layers)):
        actions += [Action("B", layer), half("REDUCE", layer, 0)]
    actions.append(half("WAIT", 0, 0))  # on a link in order, the others are over
    compute = costs.deferred
    stage = StageCosts(compute.forward_s / layers, compute.backward_s / layers, reduce_s=costs.reduce_s / layers)
    # A half is one exchange, and so has half of an all-reduce's latency.
    return simulate([actions], [stage] * layers, network=Network("fifo", costs.latency_s / 4))
