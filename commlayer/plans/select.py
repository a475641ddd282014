"""`plan_for`: selects the algorithm for a collective, its size and the hosts."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from ..errors import ConfigError
from . import direct, encoded, grid, hierarchical, host, ring
from .cache import PlanCache
from .codec import CODECS
from .hierarchical import Hosts
from .plan import Buffer, Plan, PlanBuilder, sign
from .settings import Settings

__all__ = ["Collective", "Settings", "make_plan", "plan_for"]

Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "barrier"]
"""The collectives of `plan_for`; `delivery.deliver` makes all-to-all, gather, scatter and uneven all-gather."""

RING_WORLD_SIZE = 17
"""Smaller worlds use the direct algorithms: fewer steps, and not yet too many senders at one receiver."""

RING_CHUNK_BYTES = 32 << 10
"""With shorter chunks the 2 (n-1) latencies of a ring cost more than the incast that it avoids."""


def make_plan(
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
    """The plan of `rank` for a collective among the group ranks in `hosts`.

    `numel` counts the elements of the tensor for all_reduce, broadcast and reduce (in place in OUTPUT), of OUTPUT for
    reduce_scatter, and of INPUT for all_gather; barrier ignores it. `itemsize` is bytes per element. `average` divides
    by the number of ranks. `root` is the source of broadcast and the target of reduce. `element` names the type of the
    elements. Ranks with another `element` or `signed` get MismatchError.

    Raises ConfigError if the staging in `settings` is too small for the ranks of a host, or if they have weights for
    another number of hosts.
    """
    if settings.weights and len(settings.weights) != len(hosts):
        raise ConfigError(f"Settings(weights={settings.weights}) for {len(hosts)} hosts: use a weight for each host")
    plan = _plan(collective, rank, hosts, numel, itemsize, average, root, settings)
    sizes = (numel, root) if collective in SIZED else ()
    signature = sign(collective, itemsize, average, sizes, settings, element, signed)
    return dataclasses.replace(plan, weights=settings.weights, signature=signature)


PLANS = PlanCache()
"""The plans of all groups. (A number of them would be no bound of memory: one of 8,000 ranks may take megabytes.)"""

plan_for = PLANS.over(make_plan)
"""The plan that `make_plan` makes of the same arguments. Cached: the same object each time, while there is room."""

SIZED = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "barrier")
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
    n, length = sum(map(len, hosts)), numel * itemsize
    divisor = n if average else 1
    if n == 1:
        return _alone(collective, length)
    flat = len(hosts) == n
    # These modules have the same functions; those of `hierarchical` take the hosts, the others the number of ranks.
    module: Any = host if len(hosts) == 1 else direct if flat else hierarchical
    where = hosts if module is hierarchical else n
    is_encoded = settings.codecs is not None and len(hosts) > 1
    plan: Plan
    match collective:
        case "all_reduce":
            match all_reduce_algorithm(hosts, length, settings):
                case "grid":
                    return grid.all_reduce(rank, n, numel, itemsize, divisor, settings)
                case "exchange":
                    return direct.exchange(rank, n, numel, itemsize, divisor)
                case "ring":
                    return ring.all_reduce(rank, n, numel, itemsize, divisor, settings)
                case "encoded":
                    return encoded.all_reduce(rank, hosts, numel, itemsize, divisor, settings)
            is_partial = settings.partial and (flat or (len(hosts) > 1 and not settings.is_short(len(hosts), length)))
            make = module.partial_all_reduce if is_partial else module.all_reduce
            plan = make(rank, where, numel, itemsize, divisor, settings)
        case "reduce_scatter":
            if is_encoded:
                return encoded.reduce_scatter(rank, hosts, numel, itemsize, divisor, settings)
            if flat and _ring(n, length, settings) and not settings.partial:
                return ring.reduce_scatter(rank, n, numel, itemsize, divisor, settings)
            plan = module.reduce_scatter(rank, where, numel, itemsize, divisor, settings)
        case "all_gather":
            if is_encoded:
                return encoded.all_gather(rank, hosts, numel, itemsize, settings)
            if flat and _ring(n, length, settings):
                return ring.all_gather(rank, n, numel, itemsize, settings)
            plan = module.all_gather(rank, where, numel, itemsize, settings)
        case "broadcast":
            module = grid if flat and grid.serves(n, length) else module
            plan = module.broadcast(rank, where, numel, itemsize, root, settings)
        case "reduce":
            plan = module.reduce(rank, where, numel, itemsize, divisor, root, settings)
        case "barrier":
            module = grid if flat and grid.serves(n, 0) else module
            plan = module.barrier(rank, where)
    return plan


def all_reduce_algorithm(hosts: Hosts, length: int, settings: Settings) -> str:
    """The algorithm of an all-reduce of `length` bytes: none, host, grid, exchange, ring, encoded, direct or
    hierarchical."""
    n = sum(map(len, hosts))
    if n == 1 or len(hosts) == 1:
        return "none" if n == 1 else "host"
    flat = len(hosts) == n
    is_short = settings.is_short(len(hosts), length)
    is_encoded = settings.codecs is not None and not is_short
    if flat and grid.sums(n, length, settings) and (is_short or not (settings.partial or is_encoded)):
        return "grid"
    if flat and settings.algorithm == "auto" and is_short:
        return "exchange"
    if flat and not settings.partial and not is_encoded and _ring(n, length // n, settings):
        return "ring"
    if is_encoded:
        return "encoded"
    return "direct" if flat else "hierarchical"


def segment_count(hosts: Hosts, length: int, settings: Settings) -> int:
    """The segments of an all-reduce of `length` bytes, about, whose shards `Settings.weights` can make unequal. 0:
    the hosts own no shards of it."""
    algorithm = all_reduce_algorithm(hosts, length, settings)
    if algorithm not in ("encoded", "direct", "hierarchical"):
        return 0
    is_short = algorithm == "hierarchical" and settings.is_short(len(hosts), length)
    if is_short or (algorithm == "encoded" and encoded.exchanges(len(hosts), partial=settings.partial)):
        return 0  # its owners exchange all they have
    messages = min(map(len, hosts)) * len(hosts)
    if settings.codecs is not None:
        length = CODECS[settings.codecs[0]].encoded_bytes(length)
    least_bytes = settings.partial_message_bytes * messages if settings.partial else 0
    return max(length // max(settings.segment_for(messages), least_bytes), 1)


def _alone(collective: Collective, length: int) -> Plan:
    b = PlanBuilder(0, 1)
    if collective in ("reduce_scatter", "all_gather") and length:
        b.copy(Buffer.INPUT, 0, Buffer.OUTPUT, 0, length)
    return b.build()


def _ring(world_size: int, chunk_bytes: int, settings: Settings) -> bool:
    if settings.algorithm == "auto":
        return world_size >= RING_WORLD_SIZE and chunk_bytes >= RING_CHUNK_BYTES
    return settings.algorithm == "ring"
