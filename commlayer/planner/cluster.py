"""Hosts of several ranks, unequal in speed and memory, on two classes of links: within a host and between hosts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..errors import ConfigError
from .costs import Link
from .exchange import Axis, Exchange


@dataclass(frozen=True)
class Rank:
    """One processor.

    Raises:
        ConfigError: a value that is not finite and above 0.
    """

    speed_flops: float
    """Operations per second that it reaches in matrix products of the model, not those of its data sheet."""
    memory_bytes: float

    def __post_init__(self) -> None:
        for name in ("speed_flops", "memory_bytes"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"Rank.{name}={getattr(self, name)} is not valid; give a finite number above 0")


@dataclass(frozen=True)
class Links:
    """The two classes of links. Rates are those of one direction."""

    within: Link
    """Each rank's link to the others of its host."""
    between: Link
    """Each host's link to the other hosts, which its ranks share."""


@dataclass(frozen=True)
class Load:
    """What a collective of one byte puts on the links of some ranks and hosts: those that receive most."""

    within_bytes: float
    between_bytes: float
    """The bytes of all groups that have ranks on the host: they exchange at the same time."""
    latency_s: float
    """The latency of one round."""

    def seconds(self, links: Links, size: float) -> float:
        """Seconds that `size` bytes take. A collective first crosses hosts, then goes around within each, or the other
        way round: so the two times add up."""
        return links.between.send_s(self.between_bytes * size) + links.within.send_s(self.within_bytes * size)


class Cluster:
    """Ranks with numbers in the order of their hosts.

    Raises:
        ConfigError: no hosts, or a host without ranks.
    """

    def __init__(self, hosts: Sequence[Sequence[Rank]], links: Links) -> None:
        for number, host in enumerate(hosts):
            if not host:
                raise ConfigError(f"hosts[{number}] has no ranks; give at least one Rank, or leave the host out")
        if not hosts:
            raise ConfigError("hosts is empty; give a list of ranks for each host")
        self.links = links
        self.ranks = [rank for host in hosts for rank in host]
        self.host_of = [number for number, host in enumerate(hosts) for _ in host]
        self._loads: dict[object, Load] = {}

    @cached_property
    def memory_bytes(self) -> float:
        """Memory of the rank that has least."""
        return min(rank.memory_bytes for rank in self.ranks)

    def load(self, exchange: Exchange, ranks: tuple[int, ...], *, alone: bool = False) -> Load:
        """The load on the links of `ranks`. `alone`: without that of other groups of the axis, at the same time.

        Between hosts, every byte goes to a host once, for all its ranks in the group, as in `hierarchical` plans: a
        host with l of g ranks receives 1 - l / g of the tensor, and an all-to-all l (g - l) / g of each rank's.
        """
        kind = exchange.kind if exchange.kind in ("send", "all_to_all") else "all_gather"
        key = (kind, exchange.axis, ranks, exchange.when if kind == "send" else "", alone)
        if key not in self._loads:
            is_send = kind == "send"
            found = self._sent(exchange, ranks) if is_send else self._gathered(kind, exchange.axis, ranks, alone)
            self._loads[key] = found
        return self._loads[key]

    def _gathered(self, kind: str, axis: Axis, ranks: tuple[int, ...], alone: bool) -> Load:
        own_hosts = {self.host_of[rank] for rank in ranks}
        arriving = dict.fromkeys(own_hosts, 0.0)
        within, crosses, stays, size = 0.0, False, False, axis.size
        for rank in range(len(self.ranks)):
            group = axis.group(rank)
            if group[0] != rank:
                continue
            counts: dict[int, int] = {}
            for member in group:
                counts[self.host_of[member]] = counts.get(self.host_of[member], 0) + 1
            is_own = any(own in group for own in ranks)
            if alone and not is_own:
                continue
            for host, count in counts.items():
                if host in own_hosts:
                    messages = 1 if kind == "all_gather" else count  # an all-to-all has other bytes for each rank
                    arriving[host] += messages * (size - count) / size
                if is_own and count > 1:
                    stays = True
                    others = (size - count) / (size * count) if kind == "all_gather" else (size - count) / size
                    within = max(within, (size - 1) / size - others)
            crosses |= is_own and len(counts) > 1
        latency_s = self.links.between.latency_s * crosses + self.links.within.latency_s * stays
        return Load(within, max(arriving.values()), latency_s)

    def _sent(self, exchange: Exchange, ranks: tuple[int, ...]) -> Load:
        """Each of `ranks` receives from its neighbour along the axis, if there is one: the one before if forward."""
        arriving: dict[int, int] = {}
        within = 0
        for rank in ranks:
            group = exchange.axis.group(rank)
            place = group.index(rank) + (-1 if exchange.when == "forward" else 1)
            if not 0 <= place < len(group):
                continue
            if self.host_of[group[place]] == self.host_of[rank]:
                within = 1
            else:
                arriving[self.host_of[rank]] = arriving.get(self.host_of[rank], 0) + 1
        between = max(arriving.values(), default=0)
        latency_s = self.links.between.latency_s if between else self.links.within.latency_s * within
        return Load(within, between, latency_s)
