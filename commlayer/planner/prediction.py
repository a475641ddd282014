"""The predicted step of one layout on a cluster (docs/parallelism.md#the-step)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from .cluster import Cluster
from .exchange import Exchange
from .layout import Layout
from .spread import Owner, even, pipeline_s, spread, step_s
from .transformer import Transformer


@dataclass(frozen=True)
class Prediction:
    """One layout with its predicted step."""

    layout: Layout
    layers: tuple[int, ...]
    """Layers of each stage."""
    microbatches: tuple[int, ...]
    """Micro-batches of each replica."""
    step_s: float
    compute_s: float
    """Computation of the slowest stage or replica."""
    activations_s: float
    """Its exchanges of activations, for which its computation waits."""
    fill_s: float
    """The pipeline fills and empties: computations, exchanges and sends of the other stages."""
    link_s: float
    """Waiting at the end for links, on which parameters and gradients travel during the computation."""
    memory_bytes: float
    """The memory of the rank that needs most."""
    received_bytes: int
    """Bytes that a rank receives in a step, in the stage with most."""
    messages: int
    """Messages that such a rank sends."""

    @cached_property
    def parts(self) -> dict[str, float]:
        """The step's parts in seconds, by name; they add up to it."""
        return {
            "computation": self.compute_s,
            "exchanges of activations": self.activations_s,
            "filling the pipeline": self.fill_s,
            "waiting for busy links": self.link_s,
        }


@dataclass(frozen=True)
class TooLarge:
    """A layout that does not fit, divided among the ranks so that it comes as near as possible."""

    layout: Layout
    rank: int
    """A rank whose memory is short by the largest factor."""
    needed_bytes: float
    memory_bytes: float

    @property
    def ratio(self) -> float:
        """The bytes needed, divided by those there: above 1."""
        return self.needed_bytes / self.memory_bytes

    def __str__(self) -> str:
        return (
            f"{self.layout.family} ({self.layout}) needs {self.needed_bytes / 2**30:.2f} of"
            f" {self.memory_bytes / 2**30:.2f} GiB on rank {self.rank}"
        )


@dataclass(frozen=True)
class _Times:
    """Seconds of one stage, or of a replica without stages: of one layer and micro-batch unless said otherwise."""

    compute_s: float
    slice_s: float
    """Computation of the longest slice."""
    activations_s: float
    slice_activations_s: float
    link_s: float
    """Bytes that travel with a micro-batch."""
    reduce_s: float
    """Bytes that travel once a step."""
    boundary_s: float
    """Gathering what has come from other stages; of a micro-batch and the whole stage, as are the next two."""
    received_s: float
    """All bytes from other stages."""
    arrival_s: float
    """The time from the departure of a slice until it has come from a neighbour: the sum of both directions."""


class _Model:
    """The owners of layers (stages) or, where replicas without stages differ, of micro-batches (replicas)."""

    def __init__(self, model: Transformer, cluster: Cluster, layout: Layout) -> None:
        self.model, self.cluster, self.layout = model, cluster, layout
        self.total = model.sequences // layout.batch
        self.count = self.total // layout.replicas
        self.are_stages = layout.stages > 1 or layout.is_sharded or layout.expert_ranks > 1
        self.groups: list[tuple[int, ...]] = [()] * (layout.stages if self.are_stages else layout.replicas)
        for rank in range(len(cluster.ranks)):
            self.groups[layout.stage_of(rank) if self.are_stages else layout.replica_of(rank)] += (rank,)
        self.poorest = [min(group, key=lambda rank: cluster.ranks[rank].memory_bytes) for group in self.groups]
        self.memory = [cluster.ranks[rank].memory_bytes for rank in self.poorest]
        self.working = float(layout.working_bytes(model))
        live = [layout.live(stage, self.count) if self.are_stages else 1 for stage in range(len(self.groups))]
        self.sizes = [float(layout.layer_bytes(model, stage)) for stage in live]
        """Memory of a layer of each owner."""

    def bytes(self, layers: Sequence[int]) -> list[float]:
        """Memory of each owner with its layers."""
        return [self.working + size * n for size, n in zip(self.sizes, layers, strict=True)]

    def rooms(self) -> list[int]:
        """Layers that fit each owner."""
        pairs = zip(self.memory, self.sizes, strict=True)
        return [math.floor((memory - self.working) / size * (1 + 1e-12)) for memory, size in pairs]

    def too_large(self) -> TooLarge | None:
        layers = (self.model.layers,) * len(self.groups)
        if self.layout.stages > 1:
            weights = [(self.working / m, size / m) for m, size in zip(self.memory, self.sizes, strict=True)]
            layers, _ = even(weights, self.model.layers)
        if all(n <= room for n, room in zip(layers, self.rooms(), strict=True)):
            return None
        needed = self.bytes(layers)
        worst = max(range(len(needed)), key=lambda stage: needed[stage] / self.memory[stage])
        return TooLarge(self.layout, self.poorest[worst], needed[worst], self.memory[worst])

    def moved(self, exchanges: Iterable[Exchange], ranks: tuple[int, ...]) -> tuple[float, float]:
        """Seconds of the bytes, and of the latency."""
        bytes_s = latency_s = 0.0
        for exchange in exchanges:
            load = self.cluster.load(exchange, ranks)
            bytes_s += exchange.rounds * load.seconds(self.cluster.links, exchange.size_bytes)
            latency_s += exchange.rounds * load.latency_s
        return bytes_s, latency_s

    def times(self, ranks: tuple[int, ...]) -> _Times:
        model, layout = self.model, self.layout
        speed = min(self.cluster.ranks[rank].speed_flops for rank in ranks) * layout.mesh.ranks
        passes, launches = (4, 3) if layout.recompute else (3, 2)  # a backward pass computes twice a forward pass
        tokens, cuts = layout.batch * model.length, layout.slices
        keys = model.length * (1 - 0.5 / cuts)  # that a token of the last slice sees
        exchanges = list(layout.exchanges(model))
        with_each = [exchange for exchange in exchanges if exchange.when != "step"]
        boundary = list(layout.boundary(model, layout.stage_of(ranks[0])))
        own_s, own_latency_s = self.moved((exchange for exchange in with_each if not exchange.is_parameters), ranks)
        parameters_s, _ = self.moved((exchange for exchange in with_each if exchange.is_parameters), ranks)
        reduce_s, _ = self.moved((exchange for exchange in exchanges if exchange.when == "step"), ranks)
        gather_s, gather_latency_s = self.moved((exchange for exchange in boundary if exchange.kind != "send"), ranks)
        send_s, send_latency_s = self.moved((exchange for exchange in boundary if exchange.kind == "send"), ranks)
        return _Times(
            compute_s=passes * model.forward_flop(tokens) / speed + launches * model.launch_s * cuts,
            slice_s=passes * model.forward_flop(tokens / cuts, keys) / speed + launches * model.launch_s,
            activations_s=own_s + own_latency_s * cuts,
            slice_activations_s=own_s / cuts + own_latency_s,
            link_s=own_s + parameters_s,
            reduce_s=reduce_s,
            boundary_s=gather_s + gather_latency_s * cuts,
            received_s=gather_s + send_s,
            arrival_s=send_s / cuts + send_latency_s,
        )

    def owner(self, times: _Times, room: int) -> Owner:
        if not self.are_stages:
            n = self.model.layers
            return Owner(n * (times.compute_s + times.activations_s), 0, 0, 0, n * times.link_s, n * times.reduce_s)
        return Owner(
            item_s=times.compute_s + times.activations_s,
            fixed_s=times.boundary_s,
            fill_item_s=times.slice_s + times.slice_activations_s,
            fill_fixed_s=times.boundary_s / self.layout.slices,
            link_item_s=self.count * times.link_s + times.reduce_s,
            link_fixed_s=self.count * times.received_s,
            most=room,
        )

    def sums(self, layers: Sequence[int], microbatches: Sequence[int], name: str) -> int:
        """Bytes or messages of a step of a rank, in the stage with most. Slices repeat messages, and no bytes."""
        cuts = self.layout.slices if name == "messages" else 1
        once = each_time = 0
        for exchange in self.layout.exchanges(self.model):
            value = int(getattr(exchange, name))
            once += value * (exchange.when == "step")
            each_time += value * (exchange.when != "step") * (1 if exchange.is_parameters else cuts)
        found = []
        for stage, n in enumerate(layers):
            ends = sum(int(getattr(exchange, name)) for exchange in self.layout.boundary(self.model, stage))
            found.append(n * (once + max(microbatches) * each_time) + max(microbatches) * cuts * ends)
        return max(found)


def predict(model: Transformer, cluster: Cluster, layout: Layout) -> Prediction | TooLarge:
    """The step of `layout`, which must not refuse `model`, with the best division of its layers and micro-batches."""
    own = _Model(model, cluster, layout)
    large = own.too_large()
    if large is not None:
        return large
    times = [own.times(group) for group in own.groups]
    fill_s = sum(time.arrival_s for time in times)
    owners = [own.owner(time, room) for time, room in zip(times, own.rooms(), strict=True)]
    count = own.count if own.are_stages else 1
    items = spread(owners, model.layers if own.are_stages else own.total, count, fill_s)
    if items is None:
        raise AssertionError(f"{layout}: no division fits, though the smallest does")
    layers = items if own.are_stages else (model.layers,)
    microbatches = (own.count,) * layout.replicas if own.are_stages else items
    slowest = max(range(len(owners)), key=lambda owner: owners[owner].item_s * items[owner] + owners[owner].fixed_s)
    n, units = (items[slowest], count) if own.are_stages else (model.layers, items[slowest])
    whole_s, step = pipeline_s(owners, items, count, fill_s), step_s(owners, items, count, fill_s)
    compute_s = units * n * times[slowest].compute_s
    activations_s = units * (n * times[slowest].activations_s + times[slowest].boundary_s)
    return Prediction(
        layout,
        layers,
        microbatches,
        step,
        compute_s,
        activations_s,
        fill_s=max(whole_s - compute_s - activations_s, 0.0),
        link_s=step - whole_s,
        memory_bytes=max(own.bytes(items if own.are_stages else layers * len(owners))),
        received_bytes=own.sums(layers, microbatches, "received_bytes"),
        messages=own.sums(layers, microbatches, "messages"),
    )
