"""One way to run a job: stages, chunks, order, reductions and recomputation, with the predicted step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise

from ..scheduler.actions import Order, Reduction, peak_activations
from ..scheduler.link import Discipline, Network
from ..scheduler.pipelines import breadth_first, interleaved, one_f_one_b
from ..scheduler.simulate import Simulation, StageCosts, simulate
from .costs import Costs, Link
from .layout import Outer
from .place import Place


@dataclass(frozen=True)
class Choice:
    """What the planner decides."""

    ranks: int
    """Ranks of one pipeline, p."""
    replicas: int
    """Pipelines whose gradients are averaged, d."""
    microbatches: int
    """Micro-batches of one pipeline in a step, M."""
    chunks: int
    """Stages of one rank, v."""
    group: int | None
    """Group size of the interleaved order; None: AIAO (breadth first), or 1F1B for one chunk."""
    reduction: Reduction
    recompute: tuple[int, ...]
    """The ranks of a pipeline whose backward repeats the forward of each of their layers."""
    cuts: tuple[int, ...]
    """Stage s has the layers from `cuts[s]` up to `cuts[s + 1]`."""
    outer: Outer = "stages"
    """On a cluster: the division whose parts are farthest from each other; see `layout.Layout`."""
    places: tuple[Place, ...] | None = None
    """On a cluster: the ranks of a pipeline. None: all are as the costs say."""

    def order(self) -> Order:
        """The actions of each rank, for `commlayer.scheduler.simulate`."""
        if self.chunks == 1:
            return one_f_one_b(self.ranks, self.microbatches)
        if self.group is None:
            return breadth_first(self.ranks, self.microbatches, self.chunks)
        return interleaved(self.ranks, self.microbatches, self.chunks, self.group)

    def stages(self, costs: Costs) -> list[StageCosts]:
        """The costs of each stage."""
        found = []
        for stage, (first, end) in enumerate(pairwise(self.cuts)):
            rank = stage % self.ranks
            made = partial(costs.stage, first, end, replicas=self.replicas, recompute=rank in self.recompute)
            if self.places:
                place = self.places[rank]
                made = partial(made, speed=place.speed, send=place.send, reduce=place.reduce)
            found.append(made())
        return found

    def room_bytes(self, memory_bytes: float) -> list[float]:
        """The memory of each rank: on a cluster its own, else `memory_bytes`."""
        return [place.memory_bytes for place in self.places] if self.places else [memory_bytes] * self.ranks

    def latency_s(self, costs: Costs) -> float:
        """The largest latency of the links between stages and replicas."""
        if self.places is None:
            return costs.link.latency_s
        used = [place.send for place in self.places[: len(self.cuts) - 2]]
        used += [place.reduce for place in self.places] if self.replicas > 1 else []
        return max((link.latency_s for link in used), default=0.0)

    def memory_bytes(self, costs: Costs) -> float:
        """Bytes of the rank that needs most."""
        return max(self.rank_bytes(costs))

    def rank_bytes(self, costs: Costs) -> list[float]:
        """Bytes of each rank: parameters and their state, activations, a second gradient if stale."""
        sizes = {stage: cost.activation_bytes for stage, cost in enumerate(self.stages(costs))}
        factor = costs.state_factor + (self.reduction.mode == "stale")
        found = []
        for rank, actions in enumerate(self.order()):
            ranges = [self.cuts[stage : stage + 2] for stage in range(rank, len(self.cuts) - 1, self.ranks)]
            layers = [layer for first, end in ranges for layer in costs.layers[first:end]]
            working = max(layer.activation_bytes for layer in layers) if rank in self.recompute else 0.0
            parameters = sum(layer.parameter_bytes for layer in layers)
            found.append(factor * parameters + peak_activations(actions, sizes) + working)
        return found

    def simulate(self, costs: Costs, discipline: Discipline = "class", *, steps: int = 12) -> Simulation:
        """The predicted steps of this choice."""
        places = self.places or ()
        hosts, leaves_host = tuple(place.host for place in places), tuple(place.leaves_host for place in places)
        network = Network(discipline, self.latency_s(costs), hosts=hosts, leaves_host=leaves_host)
        return simulate(self.order(), self.stages(costs), self.reduction, network, action_s=costs.action_s, steps=steps)

    def __str__(self) -> str:
        order = "1F1B" if self.chunks == 1 else "AIAO" if self.group is None else f"interleaved g={self.group}"
        layers = [end - first for first, end in zip(self.cuts, self.cuts[1:], strict=False)]
        return (
            f"{_count(self.ranks, 'rank')} x {_count(self.replicas, 'replica')},"
            f" {_count(self.microbatches, 'micro-batch', 'es')}, {order},"
            f" {_count(self.chunks, 'chunk')}, {self.reduction.mode}, {_count(self.reduction.buckets, 'bucket')}"
            f"{self._recomputed()}, layers {_runs(layers)}{self._placed()}"
        )

    def _placed(self) -> str:
        if self.places is None or 1 in (self.ranks, self.replicas):
            return ""
        return f", neighbours are {'replicas' if self.outer == 'stages' else 'stages'}"

    def _recomputed(self) -> str:
        if len(self.recompute) in (0, self.ranks):
            return ", recompute" if self.recompute else ""
        return f", recompute on ranks {' '.join(map(str, self.recompute))}"


@dataclass(frozen=True)
class Plan:
    """A choice with its prediction; `str` is one line."""

    choice: Choice
    costs: Costs = field(repr=False)
    step_s: float
    """Seconds of a step."""
    compute_s: float
    """Seconds of computation on the busiest rank."""
    exposed_s: float
    """Seconds of a step that the rank that waits longest for reductions spends so."""
    bubble_s: float
    """Seconds of a step that the rank that waits longest for other stages spends so."""
    memory_bytes: float
    """Bytes of the rank that needs most."""
    reason: str = ""
    """Why a plan before this one is better; empty for the best."""

    @cached_property
    def link_bytes(self) -> float:
        """Bytes that the rank that sends most puts on its link in a step."""
        by_byte, like = replace(self.costs, link=Link(8.0)), replace(self.choice, places=None)
        return link_seconds(like, like.stages(by_byte))

    def simulate(self) -> Simulation:
        """The predicted steps, with their trace."""
        return self.choice.simulate(self.costs)

    def __str__(self) -> str:
        line = (
            f"{seconds(self.step_s)}: {self.choice}; {self.memory_bytes / 2**30:.2f} GiB, exposed"
            f" {seconds(self.exposed_s)}, bubble {seconds(self.bubble_s)}"
        )
        return f"{line} ({self.reason})" if self.reason else line


def link_seconds(choice: Choice, stages: Sequence[StageCosts]) -> float:
    """Seconds of a step that the busiest link is in use: reductions, outputs and their gradients.

    On a cluster, those that leave a host take its link, and others those of their rank, as in `simulate`.
    """
    used: defaultdict[tuple[str, int], float] = defaultdict(float)
    places = choice.places

    def use(rank: int, seconds: float, *, leaves_host: bool) -> None:
        used[("host", places[rank].host) if places and leaves_host else ("rank", rank)] += seconds

    for stage, cost in enumerate(stages):
        rank, after = stage % choice.ranks, (stage + 1) % choice.ranks
        use(rank, cost.reduce_s, leaves_host=places is not None and places[rank].leaves_host)
        if choice.ranks > 1 and stage < len(stages) - 1:
            for sender in (rank, after):
                is_outside = places is not None and places[rank].host != places[after].host
                use(sender, choice.microbatches * cost.send_s, leaves_host=is_outside)
    return max(used.values())


def seconds(value: float) -> str:
    """`value` seconds with four digits."""
    return f"{value:.4g} s" if value >= 1 else f"{value * 1e3:.4g} ms"


def _count(number: int, name: str, plural: str = "s") -> str:
    return f"{number} {name}{'' if number == 1 else plural}"


def _runs(layers: Sequence[int]) -> str:
    """Layers per stage: 3 3 2 2 as 3x2 2x2."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][0] == layer:
            runs[-1][1] += 1
        else:
            runs.append([layer, 1])
    return " ".join(f"{size}x{times}" if times > 1 else str(size) for size, times in runs)
