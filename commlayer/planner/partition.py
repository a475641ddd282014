"""Exact balanced partition of a chain of layers into contiguous stages (the problem of BaPipe, arXiv 2012.12544)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal

from ..errors import ConfigError
from .costs import Costs, Link

StageCost = Callable[[int, int, int], float]
"""Cost of stage s with the layers from `first` up to `end`."""


@dataclass(frozen=True)
class Partition:
    """Stage s has the layers from `cuts[s]` up to `cuts[s + 1]`."""

    cuts: tuple[int, ...]
    time_s: float
    """Seconds per micro-batch of the slowest stage, divided by its share."""
    recomputed: tuple[int, ...] = ()
    """The stages that recompute their activations."""

    @property
    def stages(self) -> tuple[tuple[int, int], ...]:
        return tuple(pairwise(self.cuts))


@dataclass(frozen=True)
class Limits:
    """Conditions on a partition."""

    memory_bytes: float | Sequence[float] = math.inf
    """Bytes that a stage may take: of all, or of each."""
    live: Sequence[int] | None = None
    """Micro-batches whose activations stage s keeps at once; under 1F1B min(M, p - s). None: 1 each."""
    shares: Sequence[float] | None = None
    """Relative time of each stage; None: equal. Below 1 for a first segment that shall be small, because its reduction
    ends last and is needed first."""
    speeds: Sequence[float] | None = None
    """Speed of each stage's rank, relative to the one on which the layers were measured (BaPipe's heterogeneous
    clusters). None: 1 each."""
    links: Sequence[Link] | None = None
    """The link on which stages s and s + 1 exchange, for each s but the last: within a host, or between hosts. None:
    that of the costs."""


def partition(
    costs: Costs,
    stages: int,
    limits: Limits | None = None,
    *,
    overlap: bool = False,
    recompute: bool | Literal["as needed"] = False,
) -> Partition:
    """The contiguous partition with the least time of its slowest stage: min max_s t(s) / share(s).

    t(s) is forward, backward and transfer, where the transfer is the output to the next stage and the gradient to the
    one before. `overlap`: the transfer hides behind computation, t(s) = max(computation, transfer) (BaPipe's 1F1B-SO).
    `recompute`: whether the stages recompute; as needed: those that do not fit without (Merak, arXiv 2206.04959).
    Dynamic programming over (stage, layer), O(stages layers^2). Of equally good partitions, one with early cuts.

    Raises:
        ConfigError: more stages than layers, a list of wrong length, a number in it that is not above 0, or no
            partition within the memory; the error names the memory that would do.
    """
    limits = limits or Limits()
    layers = len(costs.layers)
    if not 1 <= stages <= layers:
        raise ConfigError(f"stages={stages} does not fit {layers} layers; use 1 to {layers}")
    live = _per_stage("live", limits.live, stages)
    shares = _per_stage("shares", limits.shares, stages)
    speeds = _per_stage("speeds", limits.speeds, stages)
    given = limits.memory_bytes
    room = [given] * stages if isinstance(given, (int, float)) else _per_stage("memory_bytes", given, stages)
    links = [costs.link] * (stages - 1) if limits.links is None else limits.links
    if len(links) != stages - 1:
        raise ConfigError(f"links has {len(links)} entries, and {stages} stages have {stages - 1} links between them")
    ways = (False, True) if recompute == "as needed" else (recompute,)

    @cache
    def memory(first: int, end: int, micro_batches: int, way: bool) -> float:
        return costs.memory_bytes(first, end, live=micro_batches, recompute=way)

    times = {way: _stage_time(costs, speeds, links, overlap=overlap, recompute=way) for way in ways}

    def way_of(stage: int, first: int, end: int) -> bool | None:
        """Whether the stage recomputes; None: it does not fit either way."""
        return next((way for way in ways if memory(first, end, int(live[stage]), way) <= room[stage]), None)

    def cost(stage: int, first: int, end: int) -> float:
        way = way_of(stage, first, end)
        return math.inf if way is None else times[way](stage, first, end) / shares[stage]

    cuts, time_s = _min_max(layers, stages, cost)
    if time_s == math.inf:
        _, ratio = _min_max(
            layers,
            stages,
            lambda stage, first, end: min(memory(first, end, int(live[stage]), way) for way in ways) / room[stage],
        )
        is_one = isinstance(given, (int, float))
        needed = f"{ratio * room[0]:.0f} bytes" if is_one else f"{ratio:.3g} times as much"
        raise ConfigError(
            f"memory_bytes={f'{room[0]:.0f}' if is_one else list(room)} is too small for {stages} stages: the best"
            f" partition needs {needed}; give more memory or stages, or recompute"
        )
    recomputed = tuple(stage for stage, ends in enumerate(pairwise(cuts)) if way_of(stage, *ends))
    return Partition(cuts, time_s, recomputed)


def _per_stage(name: str, values: Sequence[float] | None, stages: int) -> Sequence[float]:
    values = [1] * stages if values is None else values
    if len(values) != stages or not all(value > 0 for value in values):
        raise ConfigError(f"{name}={list(values)} does not fit {stages} stages; give one number above 0 for each")
    return values


def _stage_time(
    costs: Costs, speeds: Sequence[float], links: Sequence[Link], *, overlap: bool, recompute: bool
) -> StageCost:
    compute, total = [0.0], 0.0
    for layer in costs.layers:
        total += layer.forward_s * (2 if recompute else 1) + layer.backward_s
        compute.append(total)
    sent = [[link.send_s(layer.sent_bytes) for layer in costs.layers] for link in links]

    def time(stage: int, first: int, end: int) -> float:
        transfer = (sent[stage][end - 1] if stage < len(links) else 0.0) + (
            sent[stage - 1][first - 1] if stage else 0.0
        )
        computation = (compute[end] - compute[first]) / speeds[stage]
        return max(computation, transfer) if overlap else computation + transfer

    return time


def _min_max(layers: int, stages: int, cost: StageCost) -> tuple[tuple[int, ...], float]:
    """Cuts with the least maximum of the stages' costs, and that maximum. Every stage has a layer."""
    best = {0: 0.0}  # costs of the first layers, in the stages so far
    before: list[dict[int, int]] = []
    for stage in range(stages):
        ends = [layers] if stage == stages - 1 else range(stage + 1, layers - (stages - stage - 1) + 1)
        following, cuts = dict[int, float](), dict[int, int]()
        for end in ends:
            for first in range(stage, end):
                value = max(best.get(first, math.inf), cost(stage, first, end))
                if end not in following or value < following[end]:
                    following[end], cuts[end] = value, first
        best = following
        before.append(cuts)
    path = [layers]
    for cuts in reversed(before):
        path.append(cuts[path[-1]])
    return tuple(reversed(path)), best[layers]
