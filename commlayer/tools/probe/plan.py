"""What is measured in a round: the tasks of the first pass, and those of the second, which looks again at suspects."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

from .meeting import Host, Task
from .path import CROSSED, PHASES, Effort
from .sample import Sample, Way
from .schedule import pairs, paths, rounds

_AGAIN = {
    "unreachable": PHASES,
    "rate": ("rate",),
    "loss": ("loss",),
    "reordering": ("loss",),
    "rtt": ("rtt",),
    "links": ("flows",),
}
"""The phases that measure a kind of defect. The others have been tried several times already."""
_MORE_OF_FLOWS = 4
_ALONE_MAX = 24  # tasks that are done when nothing else goes on


@dataclasses.dataclass(frozen=True)
class Plan:
    """Pairs of hosts and their paths."""

    hosts: Sequence[Host]
    effort: Effort
    partners: int

    @functools.cached_property
    def shared(self) -> dict[str, list[tuple[str, str]]]:
        """The addresses that several hosts have, with host and interface of each: packets to them do not leave a host,
        so no path has one."""
        ends: dict[str, list[tuple[str, str]]] = {}
        for host in self.hosts:
            for nic in host.nics:
                ends.setdefault(nic["address"], []).append((host.name, nic["ifname"]))
        return {address: places for address, places in ends.items() if len({host for host, _ in places}) > 1}

    def first_pass(self) -> list[list[Task]]:
        """Rounds of tasks: every pair in one direction, and then in the other."""
        found = []
        for meetings in rounds(pairs(len(self.hosts), self.partners), len(self.hosts)):
            for ends in (meetings, [(other, one) for one, other in meetings]):
                tasks = [self._task(one, other) for one, other in ends]
                found.append([task for task in tasks if task["paths"]])
        return [tasks for tasks in found if tasks]

    def second_pass(self, suspects: Mapping[str, set[Way]], samples: Sequence[Sample]) -> list[list[Task]]:
        """Rounds that look at the suspects again: rates and round trips one at a time, where they are few."""
        phases: dict[Way, set[str]] = {}
        for kind, ways in ((kind, ways) for kind, ways in suspects.items() if kind in _AGAIN):
            for way in ways | set(_beside(ways, samples)) if kind == "loss" else ways:
                phases.setdefault(way, set()).update(_AGAIN[kind])
        known = {sample.way: sample for sample in samples}
        tasks: dict[tuple[int, int], Task] = {}
        for one, other in sorted({(way.source, way.target) for way in phases}):
            task = self._task(one, other)
            task["paths"] = [about for about in task["paths"] if Way(*about["way"]) in phases]
            for about in task["paths"]:
                way = Way(*about["way"])
                about |= {"phases": sorted(phases[way]), **_known(known[way])}
                if "flows" in phases[way]:  # few packets of each flow have told little
                    about["effort"]["train_packets"] *= _MORE_OF_FLOWS
            tasks[one, other] = task
        alone = [ends for ends, task in tasks.items() if _needs_quiet(task)]
        if len(alone) > _ALONE_MAX:
            alone = []
        found = [[tasks.pop(ends)] for ends in alone]
        return found + [[tasks[ends] for ends in meetings] for meetings in rounds(tasks, len(self.hosts))]

    def crossed(self, samples: Sequence[Sample] | None = None) -> list[list[Task]]:
        """Rounds in which every host sends at once: to its neighbour, and to the host half of all hosts away.

        Only paths of `samples` that answered take part; None: all of the first pass.
        """
        reached = None if samples is None else {sample.way: sample for sample in samples if sample.is_reached}
        measured = pairs(len(self.hosts), self.partners)
        found = []
        for distance in dict.fromkeys((1, len(self.hosts) // 2)):
            tasks = []
            for host in range(len(self.hosts)):
                other = (host + distance) % len(self.hosts)
                if (min(host, other), max(host, other)) not in measured:
                    continue
                task = self._task(host, other)
                if reached is not None:
                    task["paths"] = [about for about in task["paths"] if Way(*about["way"]) in reached]
                for about in task["paths"]:
                    about |= {"phases": [CROSSED], **(_known(reached[Way(*about["way"])]) if reached else {})}
                tasks += [task] * bool(task["paths"])
            found.append(tasks)
        return [tasks for tasks in found if tasks]

    def seconds(self, tasks: Sequence[Task]) -> float:
        """The rough time of a round."""
        each_s = self.effort.crossed_seconds if is_crossed(tasks[0]) else self.effort.seconds
        return max(len(task["paths"]) for task in tasks) * each_s + 0.1

    def bytes(self, passes: Sequence[Sequence[Task]]) -> tuple[int, int]:
        """The most bytes that all hosts send, and that one sends, in these rounds."""
        by_host: dict[int, int] = {}
        for tasks in passes:
            for task in tasks:
                efforts = [Effort(**about["effort"]) for about in task["paths"]]
                size = sum(effort.crossed_bytes if is_crossed(task) else effort.bytes for effort in efforts)
                by_host[task["driver"]] = by_host.get(task["driver"], 0) + size
        return sum(by_host.values()), max(by_host.values(), default=0)

    def _task(self, driver: int, responder: int) -> Task:
        ones, others = self.hosts[driver].nics, self.hosts[responder].nics
        own, far = ([nic for nic in nics if nic["address"] not in self.shared] for nics in (ones, others))
        abouts = []
        for mine, theirs, network in paths(own, far):
            abouts.append(
                {
                    "way": Way(driver, mine["ifname"], responder, theirs["ifname"]),
                    "network": network,
                    "to": [theirs["address"], theirs["port"]],
                    "port": [nic["address"] for nic in ones].index(mine["address"]),
                    "interface_mtu": min(mine["mtu"], theirs["mtu"]),
                    "mtu": 0,
                    "rate_bps": 0.0,
                    "rtt_us": [],
                    "phases": list(PHASES),
                    "effort": dataclasses.asdict(self._effort(driver, mine["ifname"])),
                }
            )
        return {"driver": driver, "responder": responder, "paths": abouts}

    def _effort(self, host: int, nic: str) -> Effort:
        """A slow interface sends less in the time of a burst."""
        speed = self.hosts[host].facts["nics"].get(nic, {}).get("speed_mbit_s")
        if speed is None:
            return self.effort
        most = int(speed * 1e6 / 8 * self.effort.burst_s * 1.25)
        return dataclasses.replace(self.effort, burst_bytes=min(self.effort.burst_bytes, max(most, 100_000)))


def is_crossed(task: Task) -> bool:
    """Whether the task belongs to a round in which all hosts send at once."""
    return any(CROSSED in about["phases"] for about in task["paths"])


def _known(sample: Sample) -> dict[str, object]:
    """The figures of a path that later phases build upon."""
    return {"rate_bps": sample.rate_bps, "mtu": sample.mtu, "rtt_us": sample.rtt_us}


def _needs_quiet(task: Task) -> bool:
    return any({"rate", "rtt"} & set(about["phases"]) for about in task["paths"])


def _beside(ways: set[Way], samples: Sequence[Sample]) -> Iterator[Way]:
    """The other paths of an interface of which several paths, in the same direction, are suspects."""
    ends = [
        *((True, way.source, way.source_nic) for way in ways),
        *((False, way.target, way.target_nic) for way in ways),
    ]
    several = {end for end, count in collections.Counter(ends).items() if count > 1}
    for sample in samples:
        way = sample.way
        if {(True, way.source, way.source_nic), (False, way.target, way.target_nic)} & several and sample.is_reached:
            yield way
