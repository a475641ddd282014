"""Search for the fastest plan: every choice that fits the memory, with the discrete-event model as its cost.

The choices are those of PipeDream-2BW's planner (arXiv 2006.09503: width, depth, recomputation) and BaPipe's (schedule,
partition), and besides the group size, buckets, deferral and an uneven first segment.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..config import whole
from ..errors import ConfigError
from ..scheduler.actions import Mode, Reduction
from ..scheduler.link import Discipline
from .cluster import Cluster
from .costs import Costs
from .layout import Layout, Outer
from .partition import Limits, partition
from .place import Place, places
from .plan import Choice, Plan, link_seconds, seconds

FIRST_SHARES = (1.0, 0.5)
"""Sizes of the first segment that are tried with deferral: the last reduction is that of the first segment."""
MODES: dict[int, tuple[Mode, ...]] = {0: ("step", "deferred"), 1: ("stale",)}
"""Modes by staleness. Over a FIFO link also serial, whose reductions delay no sends; by class, it gains nothing."""
STEPS: dict[Mode, int] = {"serial": 6, "step": 6, "deferred": 6, "stale": 12}
"""Simulated steps by mode. A stale link fills over several steps before ranks wait for it."""

Placement = tuple[Outer, tuple[Place, ...] | None]
"""See the fields of `Choice`."""


@dataclass(frozen=True)
class Rejected:
    """A choice without a simulation, and the reason."""

    choice: str
    reason: str

    def __str__(self) -> str:
        return f"{self.choice}: {self.reason}"


class Plans(list[Plan]):
    """Plans by predicted step time; of equally fast ones, the one with less memory first."""

    def __init__(self, plans: Iterable[Plan], rejected: Sequence[Rejected]) -> None:
        super().__init__(plans)
        self.rejected = tuple(rejected)
        """Choices that do not fit, or that are slower than the plans kept."""

    def frontier(self) -> list[Plan]:
        """The plans that no other plan beats in step time, memory and bytes sent per rank, by step time."""
        return [self[i] for i in unbeaten([(p.step_s, p.memory_bytes, p.link_bytes) for p in self])]


def unbeaten(costs: Sequence[tuple[float, float, float]]) -> list[int]:
    """The places of the costs that no others equal or beat in all three respects, in ascending order of the costs.

    Of equal costs the first stay. O(n log n) comparisons: those so far, as a staircase of the second and third cost.
    """
    found: list[int] = []
    seconds: list[float] = []  # ascending
    thirds: list[float] = []  # the least third cost up to this second one, descending
    for (_, second, third), i in sorted((cost, i) for i, cost in enumerate(costs)):
        place = bisect_right(seconds, second)
        if place and thirds[place - 1] <= third:
            continue
        found.append(i)
        end = place
        while end < len(thirds) and thirds[end] >= third:
            end += 1
        seconds[place:end], thirds[place:end] = [second], [third]
    return found


def search(
    costs: Costs,
    *,
    ranks: int | Cluster,
    microbatches: int,
    memory_bytes: float | None = None,
    staleness: Sequence[int] = (0,),
    buckets: Sequence[int] = (1, 8),
    chunks: Sequence[int] = (1, 2, 4, 8),
    discipline: Discipline = "class",
    keep: int = 10,
) -> Plans:
    """The `keep` fastest plans for `ranks` ranks, in ascending order of the predicted step.

    Args:
        costs: of one micro-batch on one rank; with a cluster, on its first one.
        ranks: their number, if all are alike and have the link of the costs; or a `Cluster` of unequal ranks on two
            classes of links (BaPipe's and PipeDream-2BW's setting). Its ranks keep their order: neighbours are the
            stages of a pipeline, or the replicas of a stage. Faster ranks have more layers; replicas have equal shares
            of the micro-batches, so the slowest one decides.
        microbatches: of a step, over all ranks: each of d replicas takes a d-th.
        memory_bytes: of each rank; a cluster has its own.
        staleness: 0 for exact plans, (0, 1) also for those that update with the gradient before
            (W(t+1) = W(t) - lr g(W(t-1))), which changes the numerics.
        buckets: numbers of buckets per stage that are tried.
        chunks: numbers of stages per rank that are tried.
        discipline: the order of transfers on a link; see `commlayer.scheduler.link.Network`.
        keep: plans returned. The rest is simulated only as far as its lower bound is below theirs.

    Where a choice does not fit, its ranks recompute that need it (Merak, arXiv 2206.04959).

    Raises:
        ConfigError: a number that is not whole or below 1, a staleness other than 0 and 1, ranks or micro-batches that
            cannot be divided, or no plan within the memory; the error names what the smallest plan needs.
    """
    cluster = ranks if isinstance(ranks, Cluster) else None
    count_of_ranks = len(cluster.ranks) if cluster else ranks
    numbers = {"ranks": count_of_ranks, "microbatches": microbatches, "keep": keep}
    numbers |= {f"buckets[{i}]": count for i, count in enumerate(buckets)}
    numbers |= {f"chunks[{i}]": count for i, count in enumerate(chunks)}
    for name, value in numbers.items():
        if whole(value, 0) < 1:
            raise ConfigError(f"{name}={value} is not valid; give a whole number of at least 1")
    if (memory_bytes is None) != (cluster is not None):
        raise ConfigError(
            f"memory_bytes={memory_bytes} with ranks={'a Cluster' if cluster else ranks}; give the bytes of one rank"
            " with a number of ranks, and none with a Cluster, whose ranks have their own"
        )
    if memory_bytes is not None and not memory_bytes > 0:
        raise ConfigError(f"memory_bytes={memory_bytes} is not above 0; give the bytes of one rank")
    if not staleness or not set(staleness) <= set(MODES):
        raise ConfigError(f"staleness={staleness} is unknown; use (0,) for exact plans, or (0, 1)")
    reductions = [
        Reduction(mode, count)
        for age in sorted(set(staleness))
        for mode in MODES[age]
        for count in sorted(set(buckets))
    ]
    if discipline == "fifo" and 0 in staleness:
        reductions.append(Reduction("serial"))
    rejected: list[Rejected] = []
    fitting: list[Choice] = []
    least = math.inf
    for choice in _choices(costs, ranks, microbatches, sorted(set(chunks)), reductions, rejected):
        fitted, share = _fitting(costs, choice, choice.room_bytes(memory_bytes or 0.0))
        least = min(least, share)
        if not fitted:
            needed = f"{share:.3g} times the memory of a rank"
            if memory_bytes is not None:
                needed = f"{_gib(share * memory_bytes)} of {_gib(memory_bytes)}"
            rejected.append(Rejected(str(choice), f"needs {needed}"))
        fitting += fitted
    if not fitting:
        if least == math.inf:
            raise ConfigError(
                f"ranks={count_of_ranks} and microbatches={microbatches} cannot be divided: {rejected[-1]}; give a"
                " multiple of the ranks as micro-batches, or more layers"
            )
        if memory_bytes is None:
            raise ConfigError(
                f"the memory of the cluster's ranks is too small for any plan: the smallest needs {least:.3g} times as"
                " much on some rank; give more memory or ranks, or smaller micro-batches"
            )
        raise ConfigError(
            f"memory_bytes={memory_bytes:.0f} is too small for any plan: the smallest needs {least * memory_bytes:.0f}"
            " bytes per rank; give more memory or ranks, or smaller micro-batches"
        )
    return _fastest(costs, fitting, discipline, keep, rejected)


def _fitting(costs: Costs, choice: Choice, room: Sequence[float]) -> tuple[list[Choice], float]:
    """The forms of `choice` that fit the memory of each rank; and of what was tried, the least share of it.

    Where the balanced partition does not fit, the ranks recompute that need it. For one chunk, the best partition
    within the memory is tried, too, in which stages recompute that need it.
    """
    shares = _shares(costs, choice, room)
    if max(shares) <= 1:
        return [choice], max(shares)
    tried = [replace(choice, recompute=tuple(rank for rank, share in enumerate(shares) if share > 1))]
    if choice.chunks == 1:
        live = [min(choice.microbatches, choice.ranks - stage) for stage in range(choice.ranks)]
        limits = replace(_limits(choice.places, 1), memory_bytes=room, live=live)
        with_gradient = replace(costs, state_factor=costs.state_factor + (choice.reduction.mode == "stale"))
        ways: tuple[Literal[False, "as needed"], ...] = (False, "as needed")
        for way in ways:
            try:
                found = partition(with_gradient, choice.ranks, limits, overlap=True, recompute=way)
            except ConfigError:
                continue
            tried.append(replace(choice, cuts=found.cuts, recompute=found.recomputed))
    sizes = [max(_shares(costs, plan, room)) for plan in tried]
    fitting = [plan for plan, size in zip(tried, sizes, strict=True) if size <= 1]
    return list(dict.fromkeys(fitting)), min(max(shares), *sizes)


def _shares(costs: Costs, choice: Choice, room: Sequence[float]) -> list[float]:
    """The share of its memory that each rank takes."""
    return [size / own for size, own in zip(choice.rank_bytes(costs), room, strict=True)]


def _limits(places: Sequence[Place] | None, chunks: int) -> Limits:
    """The speeds and links of the stages of these places."""
    if places is None:
        return Limits()
    stages = [*places] * chunks
    return Limits(speeds=[place.speed for place in stages], links=[place.send for place in stages[:-1]])


def _placements(cluster: Cluster | None, depth: int, replicas: int, chunks: int) -> Iterator[Placement]:
    """The ways to lay pipelines over the cluster; of those whose places are alike, the first."""
    if cluster is None:
        yield "stages", None
        return
    seen = set()
    outers: tuple[Outer, ...] = ("stages", "replicas")
    for outer in outers:
        layout = Layout(stages=depth, replicas=replicas, outer=outer)
        found = places(cluster, layout, wraps=chunks > 1)
        if found not in seen:
            seen.add(found)
            yield outer, found


def _choices(
    costs: Costs,
    given: int | Cluster,
    microbatches: int,
    chunks: Sequence[int],
    reductions: Sequence[Reduction],
    rejected: list[Rejected],
) -> Iterator[Choice]:
    cluster, ranks = (given, len(given.ranks)) if isinstance(given, Cluster) else (None, given)
    for depth in (divisor for divisor in range(1, ranks + 1) if ranks % divisor == 0):
        replicas = ranks // depth
        if microbatches % replicas:
            rejected.append(
                Rejected(
                    f"{depth} ranks x {replicas} replicas",
                    f"{microbatches} micro-batches are no multiple of {replicas}",
                )
            )
            continue
        for count in chunks:
            if depth * count > len(costs.layers):
                rejected.append(
                    Rejected(
                        f"{depth} ranks, {count} chunks", f"{len(costs.layers)} layers are fewer than {depth * count}"
                    )
                )
                continue
            for placement in _placements(cluster, depth, replicas, count):
                yield from _choices_of(costs, depth, replicas, microbatches // replicas, count, reductions, placement)


def _choices_of(
    costs: Costs,
    depth: int,
    replicas: int,
    microbatches: int,
    chunks: int,
    reductions: Sequence[Reduction],
    placement: Placement,
) -> Iterator[Choice]:
    outer, placed = placement
    groups: list[int | None] = [None]
    if chunks > 1:
        groups += [group for group in _groups(depth, microbatches) if not 0 < microbatches % group < depth]
    cuts: dict[tuple[int, ...], float] = {}
    for share in FIRST_SHARES if chunks > 1 else (1.0,):
        shares = [share] * depth + [1.0] * (depth * (chunks - 1))
        limits = replace(_limits(placed, chunks), shares=shares)
        cuts.setdefault(partition(costs, depth * chunks, limits, overlap=True).cuts, share)
    for cut, share in cuts.items():
        for group in groups:
            for reduction in reductions if replicas > 1 else [Reduction()]:
                if share == 1.0 or reduction.mode == "deferred" or replicas == 1:
                    shape = (depth, replicas, microbatches, chunks, group, reduction)
                    yield Choice(*shape, recompute=(), cuts=cut, outer=outer, places=placed)


def _groups(depth: int, microbatches: int) -> list[int]:
    """Group sizes between depth first (p) and breadth first (M), in powers of two."""
    groups = []
    size = depth
    while size < microbatches:
        groups.append(size)
        size *= 2
    return [*groups, microbatches] if microbatches >= depth else []


def _fastest(
    costs: Costs, choices: Sequence[Choice], discipline: Discipline, keep: int, rejected: list[Rejected]
) -> Plans:
    """Simulates in the order of a lower bound of the step, until `keep` plans are faster than the next bound."""
    bounded = sorted(((bound(costs, choice), index) for index, choice in enumerate(choices)))
    plans: list[Plan] = []
    times: list[float] = []
    for least, index in bounded:
        choice = choices[index]
        if len(times) >= keep and least > times[keep - 1]:
            rejected.append(
                Rejected(str(choice), f"takes at least {seconds(least)} by its least bubble, reduction or link")
            )
            continue
        result = choice.simulate(costs, discipline, steps=STEPS[choice.reduction.mode])
        busy = max(rank.busy_s for rank in result.ranks)
        memory = choice.memory_bytes(costs)
        plans.append(Plan(choice, costs, result.step_s, busy, result.exposed_s, result.bubble_s, memory))
        insort(times, result.step_s)
    plans.sort(key=_rank)
    best = plans[0]
    reasoned = [best, *(replace(plan, reason=_reason(plan, best)) for plan in plans[1:])]
    rejected += [Rejected(str(plan.choice), plan.reason) for plan in reasoned[keep:]]
    return Plans(reasoned[:keep], rejected)


def bound(costs: Costs, choice: Choice) -> float:
    """A lower bound of the step in seconds: the busiest link, or a rank's computation with its least bubble.

    Every order begins and ends with stage 0. So between the last backward and the next forward of rank r, one backward
    and one forward pass through stages 0 to r - 1, and unless stale, stage 0 waits for its last bucket.
    """
    stages = choice.stages(costs)
    latency_s = choice.latency_s(costs)
    waited = 0.0
    if choice.reduction.mode != "stale" and stages[0].reduce_s > 0:
        waited = stages[0].reduce_s / choice.reduction.buckets + 2 * latency_s
    least = link_seconds(choice, stages)
    for rank in range(choice.ranks):
        own = stages[rank :: choice.ranks]
        once = sum(cost.forward_s + cost.backward_s + 2 * costs.action_s for cost in own)
        updated = sum(cost.update_s for cost in own) if rank == 0 else 0.0  # other ranks may update while they wait
        least = max(least, waited + choice.microbatches * once + updated)
        passed = stages[rank]
        waited += passed.forward_s + passed.backward_s + 2 * (costs.action_s + passed.send_s + latency_s)
    return least


def _rank(plan: Plan) -> tuple[float, float, str]:
    """Order of plans; times that differ by rounding are equal."""
    return float(f"{plan.step_s:.9g}"), plan.memory_bytes, str(plan.choice)


def _reason(plan: Plan, best: Plan) -> str:
    """Why `best` comes before `plan`."""
    ratio = plan.step_s / best.step_s if best.step_s else 1.0
    if ratio < 1 + 1e-6:
        if plan.memory_bytes > best.memory_bytes:
            return f"as fast as the best, with {_gib(plan.memory_bytes)} for {_gib(best.memory_bytes)}"
        return "as fast as the best"
    parts = [
        (plan.compute_s - best.compute_s, "computation", plan.compute_s, best.compute_s),
        (plan.exposed_s - best.exposed_s, "exposed reductions", plan.exposed_s, best.exposed_s),
        (plan.bubble_s - best.bubble_s, "bubble", plan.bubble_s, best.bubble_s),
    ]
    _, name, mine, theirs = max(parts)
    return f"{ratio:.2f}x the best: {name} {seconds(mine)} for {seconds(theirs)}"


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
