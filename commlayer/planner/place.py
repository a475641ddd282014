"""`Place`: a rank's position in a pipeline on a cluster: its speed, its memory, and its links to other ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
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
    """To the next position, from the last one to the first; gradients take it back."""
    reduce: Link
    """Among the replicas."""


def places(cluster: Cluster, layout: Layout, *, wraps: bool) -> tuple[Place, ...]:
    """The places of the pipelines of `layout`, which has the cluster's ranks in their order.

    The pairs of neighbours that cross the link of a host share it: with as many others as leave the one host, or come
    to the other, in the same direction. `wraps`: the last position also sends to the first, as with several chunks. All
    replicas wait for each other in every step, so the slowest rank of a position and its slowest links stand for all of
    them: exact if the replicas are alike, else an upper bound.
    """
    pipelines = [layout.stage_axis.group(rank) for rank in range(layout.ranks) if layout.stage_of(rank) == 0]
    depth, replicas, host_of = layout.stages, layout.replicas, cluster.host_of
    pairs = [(ranks[at], ranks[(at + 1) % depth]) for ranks in pipelines for at in range(depth - (not wraps))]
    crossing = [(host_of[sender], host_of[receiver]) for sender, receiver in pairs]
    leaving = Counter(one for one, other in crossing if one != other)
    coming = Counter(other for one, other in crossing if one != other)

    def link(sender: int, receiver: int) -> Link:
        one, other = host_of[sender], host_of[receiver]
        if one == other:
            return cluster.links.within
        between = cluster.links.between
        return Link(between.rate_bps / max(leaving[one], coming[other], 1), between.latency_s)

    found = []
    for at in range(depth):
        members = tuple(ranks[at] for ranks in pipelines)
        load = cluster.load(Exchange("all_gather", layout.replica_axis, 1, "step", True), members)
        byte_s = load.seconds(cluster.links, 1)
        rate_bps = 8 * (replicas - 1) / replicas / byte_s if byte_s else math.inf
        found.append(
            Place(
                min(cluster.ranks[rank].speed_flops for rank in members) / cluster.ranks[0].speed_flops,
                min(cluster.ranks[rank].memory_bytes for rank in members),
                _slowest(link(ranks[at], ranks[(at + 1) % depth]) for ranks in pipelines),
                Link(rate_bps, load.latency_s),
            )
        )
    return tuple(found)


def _slowest(links: Iterable[Link]) -> Link:
    every = list(links)
    return Link(min(link.rate_bps for link in every), max(link.latency_s for link in every))
