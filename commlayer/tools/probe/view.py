"""The samples of a job, and those that look bad."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import cpu, links
from .sample import Sample, Way

SLOW_RATIO = 1.5
"""A path this much slower than the median host is a finding."""
LOSS_LEAST = 0.001
"""Share of lost packets that is a finding."""
BURSTS_LEAST = 2
REORDERED_LEAST = 0.005
RTT_RATIO, RTT_EXTRA_US = 2.0, 1000.0
_TIMED = {
    "rtt": ("rtt", "rate"),
    "reordering": ("loss",),
    "links": ("flows",),
    "crossed": ("crossed",),
}
"""The phases whose times decide, by kind of defect. Rates of one path have `is_own_limit` for this; losses of a whole
path, changed and missing packets stay what they are on a busy machine."""


@dataclass(frozen=True)
class View:
    """The samples of a job, with the names of its hosts."""

    hosts: Sequence[str]
    samples: Sequence[Sample]

    @property
    def reached(self) -> list[Sample]:
        """The samples of paths that answered."""
        return [sample for sample in self.samples if sample.is_reached]

    @functools.cached_property
    def has_single_nics(self) -> bool:
        """Whether every host has one interface, which need not be named."""
        ends = {end for way in self.tested for end in ((way.source, way.source_nic), (way.target, way.target_nic))}
        return len(ends) == len({host for host, _ in ends})

    @functools.cached_property
    def tested(self) -> dict[Way, str]:
        """All paths with their networks."""
        return {sample.way: sample.network for sample in self.samples}


def starving(sample: Sample, kind: str = "") -> dict[int, float]:
    """The hosts that waited for a CPU while the figures of a kind of defect were measured, too long for them to mean
    the network, and the share of that time. Without a kind: while this path was measured alone."""
    found: dict[int, float] = {}
    for phase in _TIMED.get(kind, ()) if kind else sample.cpu_waits.keys() - {"crossed"}:
        for host, share in zip(sample.way[::2], sample.cpu_waits.get(phase, ()), strict=False):
            if share >= cpu.STARVED:
                found[host] = max(share, found.get(host, 0.0))
    return found


def busy_hosts(view: View) -> dict[int, float]:
    """The hosts whose CPUs were too busy to judge their paths, and the share of its time for which the probe waited:
    those that waited in half of their paths or more, and those that would be blamed for something else."""
    measured: dict[int, list[float]] = {}
    for sample in view.reached:
        shares = starving(sample)
        for host in (sample.way.source, sample.way.target):
            measured.setdefault(host, []).append(shares.get(host, 0.0))
    found = {host: share for host, shares in measured.items() if (share := statistics.median_high(shares)) > 0}
    by_way = {sample.way: sample for sample in view.reached}
    for kind, ways in _suspects(view, is_loose=False).items():
        for way in ways:
            for host, share in starving(by_way[way], kind).items() if way in by_way else ():
                found[host] = max(share, found.get(host, 0.0))
    return dict(sorted(found.items()))


def suspects(view: View, *, is_loose: bool = False) -> dict[str, set[Way]]:
    """The bad paths by kind of defect; with `is_loose`, all that are worth a second look, otherwise without those whose
    figures are a busy CPU's."""
    found = _suspects(view, is_loose=is_loose)
    by_way = {sample.way: sample for sample in view.samples}
    if is_loose:
        return found
    return {kind: {way for way in ways if not starving(by_way[way], kind)} for kind, ways in found.items()}


def _suspects(view: View, *, is_loose: bool) -> dict[str, set[Way]]:
    reached = view.reached
    ratio = 1 + (SLOW_RATIO - 1) / (2 if is_loose else 1)
    rates, rtts = usual_rates(reached), usual_rtts(reached)

    def is_slow(path: Sample) -> bool:
        usual = rates.get(path.network, 0.0)
        return not path.is_own_limit and path.rate_bps * ratio < usual

    def is_lossy(path: Sample) -> bool:
        return path.lost > 0 if is_loose else path.loss >= LOSS_LEAST and path.bursts >= BURSTS_LEAST

    def is_late(path: Sample) -> bool:
        usual = rtts.get(path.network, math.inf)
        return bool(path.rtt_us) and path.rtt_us[0] > max(RTT_RATIO * usual, usual + RTT_EXTRA_US)

    tests: dict[str, Callable[[Sample], bool]] = {
        "rate": is_slow,
        "loss": is_lossy,
        "rtt": is_late,
        "reordering": lambda path: path.sent > 0 and path.reordered >= REORDERED_LEAST * path.sent,
        "mtu": lambda path: 0 < path.mtu < path.interface_mtu,
        "dscp": lambda path: _is_changed(path.dscp),
        "ecn": lambda path: any(arrived not in (int(sent), 3) for sent, arrived in path.ecn.items()),
        "links": lambda path: bool(links.lossy(path.flows, is_loose=is_loose)),
        "crossed": lambda path: _is_shared(path, ratio),
    }
    found = {kind: {sample.way for sample in reached if test(sample)} for kind, test in tests.items()}
    return {"unreachable": {sample.way for sample in view.samples if not sample.is_reached}, **found}


def _is_shared(sample: Sample, ratio: float) -> bool:
    """Whether the path is much slower while all hosts send at once."""
    crossed = sample.crossed
    return crossed is not None and not crossed.is_own_limit and crossed.rate_bps * ratio < sample.rate_bps


def _is_changed(arrivals: dict[str, int | None]) -> bool:
    return any(arrived != int(sent) for sent, arrived in arrivals.items())


def usual_rates(samples: Sequence[Sample]) -> dict[str, float]:
    """The rate of the median host by network. A host's rate is that of its best path: one slow peer does not count."""
    best: dict[str, dict[int, float]] = {}
    for sample in samples:
        hosts = best.setdefault(sample.network, {})
        for host in (sample.way.source, sample.way.target):
            hosts[host] = max(hosts.get(host, 0.0), sample.rate_bps)
    return {network: statistics.median_high(hosts.values()) for network, hosts in best.items()}


def usual_rtts(samples: Sequence[Sample]) -> dict[str, float]:
    """The round trip of the median host by network, each host with its nearest peer."""
    best: dict[str, dict[int, float]] = {}
    for sample in samples:
        hosts = best.setdefault(sample.network, {})
        for host in (sample.way.source, sample.way.target) if sample.rtt_us else ():
            hosts[host] = min(hosts.get(host, math.inf), sample.rtt_us[0])
    return {network: statistics.median_low(hosts.values()) for network, hosts in best.items()}
