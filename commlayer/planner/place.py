"""`Place`: a rank's position in a pipeline on a cluster: its speed, its memory, and its links to other ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .cluster import Cluster
from .costs import Link
from .exchange import Exchange
from .layout import Layout


@dataclass(frozen=True)
class Place:
    """The ranks with one position in all replicas of a pipeline: what the slowest of them has."""

    speed: float
    """Relative to the cluster's first rank."""
    memory_bytes: float
    send: Link
    """The link to the next position, from the last one to the first; gradients take it back."""
    reduce: Link
    """Among the replicas."""
    host: int
    """That of the first replica's rank, in the order of the positions. Positions of one host share its link."""
    leaves_host: bool
    """Whether the reductions of some replica leave its host."""


def places(cluster: Cluster, layout: Layout, *, wraps: bool) -> tuple[Place, ...]:
    """The places of the pipelines of `layout`, which has the cluster's ranks in their order.

    Replicas do the same at the same time, so those whose sends cross the link of a host divide its rate. Positions of
    one pipeline take turns on the link of their host, in the model (`scheduler.link.Network.hosts`). `wraps`: the last
    position also sends to the first, as with several chunks. All replicas wait for each other in every step, so the
    slowest rank of a position and its slowest links stand for all of them, and the hosts of the first replica for
    those of all: exact if the replicas are alike.
    """
    pipelines = [layout.stage_axis.group(rank) for rank in range(layout.ranks) if layout.stage_of(rank) == 0]
    depth, replicas, host_of = layout.stages, layout.replicas, cluster.host_of
    seen = list(dict.fromkeys(host_of[rank] for rank in pipelines[0]))
    found = []
    for at in range(depth):
        members = tuple(ranks[at] for ranks in pipelines)
        hops = [(host_of[ranks[at]], host_of[ranks[(at + 1) % depth]]) for ranks in pipelines]
        if at == depth - 1 and not wraps:
            hops = []
        load = cluster.load(Exchange("all_gather", layout.replica_axis, 1, "step", True), members, alone=True)
        byte_s = load.seconds(cluster.links, 1)
        rate_bps = 8 * (replicas - 1) / replicas / byte_s if byte_s else math.inf
        found.append(
            Place(
                min(cluster.ranks[rank].speed_flops for rank in members) / cluster.ranks[0].speed_flops,
                min(cluster.ranks[rank].memory_bytes for rank in members),
                _slowest(cluster, hops),
                Link(rate_bps, load.latency_s),
                seen.index(host_of[members[0]]),
                load.between_bytes > 0,
            )
        )
    return tuple(found)


def _slowest(cluster: Cluster, hops: Sequence[tuple[int, int]]) -> Link:
    """The slowest link of the hops at the same time, each from a host to a host."""
    crossing = [(one, other) for one, other in hops if one != other]
    leaving, coming = Counter(one for one, _ in crossing), Counter(other for _, other in crossing)
    between = cluster.links.between
    links = [] if len(crossing) == len(hops) and crossing else [cluster.links.within]
    links += [Link(between.rate_bps / max(leaving[one], coming[other]), between.latency_s) for one, other in crossing]
    return Link(min(link.rate_bps for link in links), max(link.latency_s for link in links))
