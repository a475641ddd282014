"""Exact division of equal items (layers, micro-batches) among unequal owners (stages, replicas)."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Owner:
    """The costs of one owner with n items: a + b n for each pair of fields."""

    item_s: float
    """b of its time for one micro-batch."""
    fixed_s: float = 0.0
    fill_item_s: float = 0.0
    """b of its time for the unit that fills and empties the pipeline: a micro-batch, or its longest slice."""
    fill_fixed_s: float = 0.0
    link_item_s: float = 0.0
    """b of the time that its link is in use in a step."""
    link_fixed_s: float = 0.0
    most: int = 1 << 62
    """Items that fit its memory."""


def step_s(owners: Sequence[Owner], items: Sequence[int], count: int, fill_s: float = 0.0) -> float:
    """Seconds of a step: the pipeline's, or those of the busiest link: max over s of l_s."""
    return max(pipeline_s(owners, items, count, fill_s), _links_s(owners, items))


def pipeline_s(owners: Sequence[Owner], items: Sequence[int], count: int, fill_s: float = 0.0) -> float:
    """Seconds of `count` micro-batches through the slowest owner b, and one unit through each other:
    count t_b + sum over s != b of t'_s + fill_s (TeraPipe's T, arXiv 2102.07988, for unequal stages)."""
    pairs = list(zip(owners, items, strict=True))
    times = [owner.item_s * n + owner.fixed_s for owner, n in pairs]
    fills = [owner.fill_item_s * n + owner.fill_fixed_s for owner, n in pairs]
    slowest = max(times)
    of_slowest = max(fill for time, fill in zip(times, fills, strict=True) if time >= slowest * (1 - 1e-12))
    return count * slowest + math.fsum(fills) - of_slowest + fill_s


def spread(owners: Sequence[Owner], total: int, count: int, fill_s: float = 0.0) -> tuple[int, ...] | None:
    """The items of each owner, at least one, `total` together, with the least `step_s`; None if they do not fit.

    Without the links, each possible slowest owner and number of its items bounds the others' items, and those of
    least fill are filled first. With the links, the bound on their times is searched: the larger it is, the less the
    pipeline takes.
    """
    best = _within(owners, total, count, [owner.most for owner in owners])
    if best is None:
        return None
    links_s = _links_s(owners, best)
    if links_s <= pipeline_s(owners, best, count, fill_s):
        return best
    bounds = sorted(
        {e.link_item_s * n + e.link_fixed_s for e in owners for n in range(1, min(total, e.most) + 1)} | {links_s}
    )

    def under(bound_s: float) -> tuple[int, ...] | None:
        return _within(owners, total, count, [_most(e.link_item_s, e.link_fixed_s, bound_s, e.most) for e in owners])

    def is_enough(bound_s: float) -> bool:
        """Whether the pipeline under the bound takes no longer than the bound."""
        items = under(bound_s)
        return items is not None and pipeline_s(owners, items, count, fill_s) <= bound_s

    place = bisect_left(bounds, True, key=is_enough)
    tried = (under(bounds[at]) for at in (place - 1, place) if 0 <= at < len(bounds))
    return min((split for split in (*tried, best) if split is not None), key=lambda n: step_s(owners, n, count, fill_s))


def even(weights: Sequence[tuple[float, float]], total: int) -> tuple[tuple[int, ...], float]:
    """The items of each owner, at least one, with the least max of a + b n over its pair (a, b); and that max."""
    items = [1] * len(weights)
    heap = [(fixed + 2 * item, owner) for owner, (fixed, item) in enumerate(weights)]
    heapq.heapify(heap)
    for _ in range(total - len(weights)):
        _, owner = heap[0]
        items[owner] += 1
        fixed, item = weights[owner]
        heapq.heapreplace(heap, (fixed + item * (items[owner] + 1), owner))
    return tuple(items), max(fixed + item * n for (fixed, item), n in zip(weights, items, strict=True))


def _links_s(owners: Sequence[Owner], items: Sequence[int]) -> float:
    return max(owner.link_item_s * n + owner.link_fixed_s for owner, n in zip(owners, items, strict=True))


def _most(item: float, fixed: float, bound: float, most: int) -> int:
    """The largest n with fixed + item n <= bound, but for rounding, at most `most`."""
    left = bound * (1 + 1e-12) - fixed
    if left < 0:
        return 0
    return most if item == 0 or left / item >= most else math.floor(left / item + 1e-12)


def _within(owners: Sequence[Owner], total: int, count: int, most: Sequence[int]) -> tuple[int, ...] | None:
    """The items with the least time of the pipeline, of which no owner has more than its `most`."""
    if len(owners) > total or min(most) < 1 or sum(min(limit, total) for limit in most) < total:
        return None
    order = sorted(range(len(owners)), key=lambda place: owners[place].fill_item_s)
    slowest: dict[tuple[Owner, int], int] = {}
    for place, owner in enumerate(owners):
        slowest.setdefault((owner, most[place]), place)  # of like owners any may be the slowest
    tops = sorted(
        (owner.item_s * n + owner.fixed_s, place, n)
        for (owner, limit), place in slowest.items()
        for n in range(1, min(limit, total - len(owners) + 1) + 1)
    )

    def has_room(top: tuple[float, int, int]) -> bool:
        limits = [_most(owner.item_s, owner.fixed_s, top[0], most[place]) for place, owner in enumerate(owners)]
        return min(limits) >= 1 and sum(min(limit, total) for limit in limits) >= total

    fixed_s = math.fsum(owner.fill_fixed_s for owner in owners)
    best, found = math.inf, None
    for top in tops[bisect_left(tops, True, key=has_room) :]:
        if count * top[0] >= best:
            break
        items = _rest(owners, total, top, most, order)
        if items is None:
            continue
        fills = math.fsum(owner.fill_item_s * n for owner, n in zip(owners, items, strict=True)) + fixed_s
        own = owners[top[1]]
        value = count * top[0] + fills - own.fill_item_s * top[2] - own.fill_fixed_s
        if value < best:
            best, found = value, items
    return found


def _rest(
    owners: Sequence[Owner], total: int, top: tuple[float, int, int], most: Sequence[int], order: Sequence[int]
) -> tuple[int, ...] | None:
    """The items if `top`'s owner has its number and is the slowest: the others' with the least fill."""
    slowest_s, place, own = top
    items = [1] * len(owners)
    items[place] = own
    left = total - sum(items)
    if left < 0:
        return None
    for at in order:
        limit = _most(owners[at].item_s, owners[at].fixed_s, slowest_s, most[at])
        if limit < 1:
            return None
        if at != place:
            more = min(limit - 1, left)
            items[at] += more
            left -= more
    return None if left else tuple(items)
