"""`plan_for`: selects the algorithm for a collective, its size and the hosts."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

from . import direct, hierarchical, host, ring
from .hierarchical import Hosts
from .plan import Buffer, Plan, PlanBuilder, sign
from .settings import Settings

__all__ = ["Collective", "Settings", "plan_for"]

Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "barrier"]
"""The collectives of `plan_for`; `delivery.deliver` makes all-to-all, gather, scatter and uneven all-gather."""

RING_WORLD_SIZE = 17
"""Smaller worlds use the direct algorithms: fewer steps, and not yet too many senders at one receiver."""

RING_CHUNK_BYTES = 32 << 10
"""With shorter chunks the 2 (n-1) latencies of a ring cost more than the incast that it avoids."""


@functools.lru_cache(maxsize=256)
def plan_for(
    collective: Collective,
    *,
    rank: int,
    hosts: Hosts,
    numel: int,
    itemsize: int,
    average: bool = False,
    root: int = 0,
    element: str = "",
    signed: tuple[object, ...] = (),
    settings: Settings,
) -> Plan:
    """The plan of `rank` for a collective among the group ranks in `hosts`. Cached: the same object each time.

    `numel` counts the elements of the tensor for all_reduce, broadcast and reduce (in place in OUTPUT), of OUTPUT for
    reduce_scatter, and of INPUT for all_gather; barrier ignores it. `itemsize` is bytes per element. `average` divides
    by the number of ranks. `root` is the source of broadcast and the target of reduce. `element` names the type of the
    elements. Ranks with another `element` or `signed` get MismatchError.

    Raises ConfigError if the staging in `settings` is too small for the ranks of a host.
    """
    plan = _plan(collective, rank, hosts, numel, itemsize, average, root, settings)
    sizes = (numel, root) if collective in SIZED else ()
    return dataclasses.replace(plan, signature=sign(collective, itemsize, average, sizes, settings, element, signed))


SIZED = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier")
"""Collectives to which all ranks pass the same `numel` and `root`."""


def _plan(
    collective: Collective,
    rank: int,
    hosts: Hosts,
    numel: int,
    itemsize: int,
    average: bool,
    root: int,
    settings: Settings,
) -> Plan:
    n = sum(map(len, hosts))
    length = numel * itemsize
    divisor = n if average else 1
    if n == 1:
        return _alone(collective, length)
    one_host, flat = len(hosts) == 1, len(hosts) == n
    match collective:
        case "all_reduce":
            if one_host:
                return host.all_reduce(rank, n, numel, itemsize, divisor, settings)
            if not flat and settings.partial and (len(hosts) - 1) * length > settings.exchange_limit_bytes:
                return hierarchical.partial_all_reduce(rank, hosts, numel, itemsize, divisor, settings)
            if not flat:
                return hierarchical.all_reduce(rank, hosts, numel, itemsize, divisor, settings)
            if settings.algorithm == "auto" and (n - 1) * length <= settings.exchange_limit_bytes:
                return direct.exchange(rank, n, numel, itemsize, divisor)
            if settings.partial:
                return direct.partial_all_reduce(rank, n, numel, itemsize, divisor, settings)
            if _ring(n, length // n, settings):
                return ring.all_reduce(rank, n, numel, itemsize, divisor, settings)
            return direct.all_reduce(rank, n, numel, itemsize, divisor, settings)
        case "reduce_scatter":
            if one_host:
                return host.reduce_scatter(rank, n, numel, itemsize, divisor, settings)
            if not flat:
                return hierarchical.reduce_scatter(rank, hosts, numel, itemsize, divisor, settings)
            if _ring(n, length, settings) and not settings.partial:
                return ring.reduce_scatter(rank, n, numel, itemsize, divisor, settings)
            return direct.reduce_scatter(rank, n, numel, itemsize, divisor, settings)
        case "all_gather":
            if one_host:
                return host.all_gather(rank, n, numel, itemsize, settings)
            if not flat:
                return hierarchical.all_gather(rank, hosts, numel, itemsize, settings)
            if _ring(n, length, settings):
                return ring.all_gather(rank, n, numel, itemsize, settings)
            return direct.all_gather(rank, n, numel, itemsize, settings)
        case "broadcast":
            if one_host:
                return host.broadcast(rank, n, numel, itemsize, root, settings)
            if not flat:
                return hierarchical.broadcast(rank, hosts, numel, itemsize, root, settings)
            return direct.broadcast(rank, n, numel, itemsize, root, settings)
        case "reduce":
            if one_host:
                return host.reduce(rank, n, numel, itemsize, divisor, root, settings)
            if not flat:
                return hierarchical.reduce(rank, hosts, numel, itemsize, divisor, root, settings)
            return direct.reduce(rank, n, numel, itemsize, divisor, root, settings)
        case "barrier":
            if one_host:
                return host.barrier(rank, n)
            if not flat:
                return hierarchical.barrier(rank, hosts)
            return direct.barrier(rank, n)


def _alone(collective: Collective, length: int) -> Plan:
    b = PlanBuilder(0, 1)
    if collective in ("reduce_scatter", "all_gather") and length:
        b.copy(Buffer.INPUT, 0, Buffer.OUTPUT, 0, length)
    return b.build()


def _ring(world_size: int, chunk_bytes: int, settings: Settings) -> bool:
    if settings.algorithm == "auto":
        return world_size >= RING_WORLD_SIZE and chunk_bytes >= RING_CHUNK_BYTES
    return settings.algorithm == "ring"
