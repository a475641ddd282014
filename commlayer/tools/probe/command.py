"""`commlayer probe` on every rank: the leader plans, announces, reports; the others follow."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ... import errors
from ..json_output import check, deliver
from . import links
from .facts import notes as fact_notes
from .findings import Finding, find, of_addresses
from .meeting import Host, Meeting, MeetingError, Task
from .path import Effort
from .plan import Plan
from .sample import Sample, Way
from .schedule import PARTNERS
from .units import rate_text, time_text
from .view import SLOW_RATIO, View, starving, suspects

EXIT_CLEAN, EXIT_FINDINGS = 0, 3
VERSION = 3
"""The version of the JSON's form."""
_FOLLOW_S = 900.0
_ROUND_EXTRA_S = 60.0

Note = Callable[[str], None]


@dataclass(frozen=True)
class Spec:
    """The options of the command."""

    partners: int = PARTNERS
    effort: Effort = field(default_factory=Effort)
    json_path: Path | None = None
    png_path: Path | None = None
    command: Sequence[str] = ()


@dataclass(frozen=True)
class Report:
    """All that the command found."""

    hosts: list[Host]
    samples: list[Sample]
    findings: list[Finding]
    notes: list[str]
    seconds: float
    command: Sequence[str]

    @property
    def table(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        hosts = [
            {
                "name": host.name,
                "rank": host.rank,
                "ranks": host.ranks,
                "probe_limit_bps": host.limit_bps,
                "interfaces": host.nics,
                **host.facts,
            }
            for host in self.hosts
        ]
        return {
            "version": VERSION,
            "command": list(self.command),
            "seconds": self.seconds,
            "findings": [finding.table for finding in self.findings],
            "notes": self.notes,
            "hosts": hosts,
            "paths": [sample.table for sample in self.samples],
        }

    @classmethod
    def from_table(cls, table: dict[str, Any]) -> Report:
        """Inverse of `table`. Raises KeyError or TypeError if it is of another version."""
        if table["version"] != VERSION:
            raise KeyError("version")
        own = ("name", "rank", "ranks", "probe_limit_bps", "interfaces")
        hosts = []
        for host in table["hosts"]:
            facts = {name: value for name, value in host.items() if name not in own}
            name, rank, ranks, limit_bps, nics = (host[key] for key in own)
            hosts.append(Host(name, rank, ranks, nics, facts, limit_bps))
        findings = [
            Finding(**{**finding, "ways": [Way(**way) for way in finding["ways"]]}) for finding in table["findings"]
        ]
        samples = [Sample.from_table(row) for row in table["paths"]]
        return cls(hosts, samples, findings, table["notes"], table["seconds"], table["command"])


def write(report: Report, spec: Spec, show: Callable[[Report], None]) -> int:
    """Writes the files and shows the report, or writes JSON alone to standard output. Returns the exit status."""
    if spec.png_path is not None:
        from . import heat

        heat.draw(report.hosts, report.samples, spec.png_path)
    deliver(report.table, spec.json_path, lambda: show(report))
    return EXIT_FINDINGS if report.findings else EXIT_CLEAN


def check_files(spec: Spec) -> None:
    """Raises ValueError if a file cannot be written."""
    for option, path in (("--json", spec.json_path), ("--png", spec.png_path)):
        check(path, option)


def under_torchrun() -> bool:
    """Whether torchrun started this process: it takes every exit status but 0 for a crash."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def run(spec: Spec, show: Callable[[Report], None], note: Note) -> int:
    """Measures with all ranks; rank 0 shows the report. Returns the exit status.

    Raises MeetingError, ValueError for a file that cannot be written, or ConfigError for a setting.
    """
    if "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        raise errors.ConfigError(
            "start it on every host: torchrun --nnodes 2 --nproc-per-node 1 ... -m commlayer probe; or here, by ssh: "
            "commlayer probe --hosts hosta,hostb; "
            "to try it on this machine: commlayer emulate clean200 -- commlayer probe"
        )
    if os.environ["RANK"] == "0":
        note(f"waits for all of {os.environ.get('WORLD_SIZE')} ranks")
    meeting = Meeting()
    try:
        if not meeting.is_leader:
            meeting.follow(_FOLLOW_S)
            return EXIT_CLEAN
        try:
            check_files(spec)  # this rank writes; after the meeting, so that the others end with it
            report = _lead(meeting, spec, note)
        finally:
            meeting.end()
    finally:
        meeting.close()
    return write(report, spec, show)


def _lead(meeting: Meeting, spec: Spec, note: Note) -> Report:
    hosts = meeting.hosts
    if len(hosts) < 2:
        raise MeetingError(
            f"all {meeting.size} rank(s) are on one host ({hosts[0].name}): start it with torchrun on every host"
        )
    start = time.monotonic()
    plan = Plan(hosts, spec.effort, spec.partners)
    passes = plan.first_pass()
    addresses = of_addresses(plan.shared)
    if not passes:
        if addresses:
            raise MeetingError(f"{addresses[0].text}; {addresses[0].remedy}")
        raise MeetingError("no two hosts have addresses of the same family; choose interfaces with COMMLAYER_IFNAME")
    _announce(plan, [*passes, *plan.crossed()], note)
    samples = _measure(meeting, plan, passes, note)
    by_way = {sample.way: sample for sample in samples}
    for sample in _measure(meeting, plan, plan.crossed(samples), note):
        by_way[sample.way].add(sample)
    names = [host.name for host in hosts]
    doubtful = suspects(View(names, samples), is_loose=True)
    again = plan.second_pass(doubtful, samples)
    if doubtful["crossed"]:
        again += plan.crossed(samples)
    if again:
        count = sum(len(task["paths"]) for tasks in again for task in tasks)
        more = plan.bytes(again)[0] / 1e6
        note(f"looks again at {count} of {len(samples)} directions, which seem bad: sends at most {more:.0f} MB more")
    for sample in _measure(meeting, plan, again, note):
        by_way[sample.way].add(sample)
    view = View(names, samples)
    return Report(
        hosts, samples, [*addresses, *find(view)], _notes(hosts, samples), time.monotonic() - start, spec.command
    )


def _measure(meeting: Meeting, plan: Plan, passes: Sequence[Sequence[Task]], note: Note) -> list[Sample]:
    progress = _Progress(note, sum(plan.seconds(tasks) for tasks in passes))
    samples: list[Sample] = []
    for tasks in passes:
        samples += meeting.lead(tasks, 3 * plan.seconds(tasks) + _ROUND_EXTRA_S)
        progress.advance(plan.seconds(tasks))
    return samples


def _announce(plan: Plan, passes: Sequence[Sequence[Task]], note: Note) -> None:
    total, most = plan.bytes(passes)
    count = len({tuple(about["way"]) for tasks in passes for task in tasks for about in task["paths"]})
    hosts = len(plan.hosts)
    sparse = f", each with {plan.partners} others at most" if hosts - 1 > plan.partners else ""
    seconds = sum(plan.seconds(tasks) for tasks in passes)
    note(
        f"{hosts} hosts{sparse}; {count} directions of paths; sends at most {total / 1e6:.0f} MB of UDP in all and "
        f"{most / 1e6:.0f} MB per host, for about {math.ceil(seconds)} s"
    )


class _Progress:
    """A line every few seconds."""

    _EVERY_S = 3.0

    def __init__(self, note: Note, seconds: float) -> None:
        self._note, self._left_s, self._all_s = note, seconds, seconds
        self._told = time.monotonic()

    def advance(self, seconds: float) -> None:
        """Some of the expected time is over."""
        self._left_s -= seconds
        if time.monotonic() - self._told >= self._EVERY_S and self._left_s > 0:
            self._told = time.monotonic()
            done = math.floor(100 * (1 - self._left_s / self._all_s))
            self._note(f"{done} % measured, about {math.ceil(self._left_s)} s left")


def _notes(hosts: Sequence[Host], samples: Sequence[Sample]) -> list[str]:
    best: dict[str, float] = {host.name: 0.0 for host in hosts}
    networks: dict[str, list[Sample]] = {}
    for sample in samples:
        for host in (sample.way.source, sample.way.target):
            best[hosts[host].name] = max(best[hosts[host].name], sample.rate_bps)
        if sample.is_reached:
            networks.setdefault(sample.network, []).append(sample)
    found = fact_notes({host.name: host.facts for host in hosts}, best)
    fastest = {name: max(sample.rate_bps for sample in group) for name, group in networks.items()}
    for name, rate in fastest.items():
        most = max(fastest.values())
        if rate * SLOW_RATIO < most:
            nics = ", ".join(sorted({sample.way.source_nic for sample in networks[name]}))
            slower = f"network {name} ({nics}) carries {rate_text(rate)}, the fastest {rate_text(most)}"
            found.append(f"{slower}: commlayer gives each path its share")
    found += links.notes([sample for sample in samples if not starving(sample, "links")])
    found += _crossed_notes(samples)
    if any(sample.is_own_limit and sample.is_reached for sample in samples):
        limit = rate_text(min(host.limit_bps for host in hosts))
        found.append(f"rates with + are lower bounds: the probe was the bottleneck (on loopback it reaches {limit})")
    return found


def _crossed_notes(samples: Sequence[Sample]) -> list[str]:
    """What remains of the rates while all hosts send at once; paths that the probe limits say nothing."""
    known = [
        sample
        for sample in samples
        if sample.crossed and sample.rate_bps and not sample.crossed.is_own_limit and not starving(sample, "crossed")
    ]
    if not known:
        return []
    shares = [sample.crossed.rate_bps / sample.rate_bps for sample in known if sample.crossed]
    if min(shares) * SLOW_RATIO < 1:
        return []  # a finding
    full = statistics.median(sample.crossed.rtt_us[1] for sample in known if sample.crossed)
    share = min(1.0, statistics.median(shares))
    return [f"while all hosts send at once, paths keep {share:.0%} of their rates; round trips take {time_text(full)}"]
