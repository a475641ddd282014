"""`Report`: the log of a process at the start of each group, and at the end of the job."""

from __future__ import annotations

import atexit
import importlib.metadata
import math
import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ...config import Config, Policy, changed, path_of_file
from ...errors import CommError
from ...plans.select import all_reduce_algorithm
from ...plans.settings import Settings
from ...transport.call import Call, Calls
from ...transport.fork import disowned_in_children
from ...transport.kernels import kernels_level
from ...transport.log import OFF, begin, log
from ...transport.native import Engine
from ...transport.path_watch import Uplink, Watch, names_of_paths
from ...transport.sockets import sockets

SIZES = (4 << 10, 64 << 10, 1 << 20, 64 << 20)
"""Bytes of the all-reduces whose plans the log names."""

SHOWN = 8
"""Hosts, and peers, that the log names one by one."""


BUSY = 0.5
"""The share of a job's time in communication from which on the log gives advice."""
WAITED = 0.25
"""The largest share of that time which counts as little."""
FILLED = 0.5
"""The share of that time from which on a link that was full is the reason."""


class Tally:
    """Sums of the calls of a process, of all its groups."""

    def __init__(self) -> None:
        self.count = 0
        self.nbytes = 0
        self.busy_s = 0.0
        """Time with at least one operation in flight."""
        self._until_s = 0.0
        self._lock = threading.Lock()

    def add(self, call: Call) -> None:
        """Counts a call that has ended, or is forgotten while it runs."""
        times = call.times()
        end_s = time.monotonic() if times is None else times.ended_s
        with self._lock:
            self.count += 1
            self.nbytes += call.nbytes
            self.busy_s += max(0.0, end_s - max(call.submitted_s, self._until_s))
            self._until_s = max(self._until_s, end_s)


class Report:
    """The log of this process, of all its groups: see `Report.open`."""

    _guard: ClassVar[threading.Lock] = threading.Lock()
    _current: ClassVar[Report | None] = None

    def __init__(self) -> None:
        self._tally = Tally()
        self._open: list[Calls] = []
        self._watch = Watch()
        self._hosts: dict[int, str] = {}
        """Names of the ranks' hosts, by rank of the job."""
        self._begin_s = time.monotonic()
        atexit.register(self._end)
        disowned_in_children(self)

    def disown(self) -> None:
        """See `fork.Owned`: the sums are of the parent, which tells them at its end."""
        cls = type(self)
        cls._guard, cls._current = threading.Lock(), None

    @classmethod
    def open(cls, native: Any, config: Config, policy: Policy, settings: Settings, calls: Calls) -> Report | None:
        """Begins the log of a group, if COMMLAYER_LOG asks for one. `native`: a `NativeGroup`."""
        if config.log == OFF:
            return None
        own = native.diagnosis.descriptions[native.rank]
        begin(config.log, own["peer"])
        with cls._guard:
            report = cls._current
            if report is None:
                report = cls._current = Report()
                for line in lines_of_process(native.engine, config):
                    log.info("%s", line)
                for socket in sockets(native.engine):
                    log.info("%s", socket.text)
                    if socket.advice:
                        log.warning("%s: %s", socket.port["ifname"], socket.advice)
            report._open.append(calls)
            calls.tally = report._tally.add
            for line in lines_of_group(native, policy, settings):
                log.info("%s", line)
            report._watch.add(own, native.diagnosis.descriptions)
            report._hosts |= {
                description["peer"]: description.get("hostname", "") for description in native.diagnosis.descriptions
            }
        return report

    def close(self, calls: Calls) -> None:
        """Ends the log of a group; that of the last one tells the sums of the process."""
        with self._guard:
            if calls in self._open:
                self._count(calls)
                self._open.remove(calls)
            if not self._open:
                self._end()

    def _count(self, calls: Calls) -> None:
        for call in calls.latest:
            self._tally.add(call)
        calls.tally = None

    def _end(self) -> None:
        cls = type(self)
        if cls._current is not self:
            return
        cls._current = None
        for calls in self._open:
            self._count(calls)
        self._watch.close()
        self._watch.look()
        atexit.unregister(self._end)
        log.info("%s", self._summary())

    def _summary(self) -> str:
        tally, passed_s = self._tally, time.monotonic() - self._begin_s
        text = (
            f"end: {tally.count} operation{'s' * (tally.count != 1)} of {amount(tally.nbytes)}; "
            f"{tally.busy_s:.3g} s of {passed_s:.3g} s in communication ({tally.busy_s / max(passed_s, 1e-9):.0%})"
        )
        try:
            found = Engine.shared_report()
        except CommError:
            return text
        sent, lost = found.stats["packets_sent"], found.stats["packets_lost"] - found.stats["packets_spurious"]
        text += f"; network: {amount(found.stats['payload_bytes_sent'])} sent in {sent} packets, {lost} lost"
        if sent:
            text += f" ({lost / sent:.3%})"
        text += f"; {found.stats['waited_us'] / 1e6:.3g} s waiting for late ranks"
        link = self._watch.uplinks.fullest()
        text += advice(tally.busy_s, passed_s, found.stats["waited_us"] / 1e6, link) if sent else ""
        slowest = max(found.lags, key=lambda rank: found.lags[rank].waited_us, default=None)
        if slowest is None or not found.lags[slowest].waited_us:
            return text
        waited_s = found.lags[slowest].waited_us / 1e6
        place = f" on {self._hosts[slowest]}" if self._hosts.get(slowest) else ""
        share = f"{waited_s / max(passed_s, 1e-9):.0%}"
        return f"{text}; slowest peer: rank {slowest}{place}, waited for {waited_s:.3g} s ({share})"


def advice(busy_s: float, passed_s: float, waited_s: float, link: Uplink | None) -> str:
    """What to do where most of the time goes into communication, and late ranks are not the reason. `link`: the one of
    this process that was full for longest."""
    if busy_s < BUSY * passed_s or waited_s > WAITED * busy_s:
        return ""
    if link is not None and link.full_s >= FILLED * busy_s:
        share = min(link.full_s / busy_s, 1.0)
        return (
            f"; the network limits it: what this rank sends through {link.interface} filled the link for {share:.0%} "
            f"of that time, at {link.rate_bytes * 8e-6:.3g} Mbit/s"
        )
    return (
        "; neither late ranks nor the links of this rank explain that: the `end:` lines of other ranks name the slow "
        "link; `torchrun ... -m commlayer probe` measures all"
    )


def amount(count: float) -> str:
    """A number of bytes for readers: 1.5 MiB."""
    units = ["bytes", "KiB", "MiB", "GiB", "TiB"]
    power = min(int(math.log2(count)) // 10, len(units) - 1) if count >= 1 else 0
    return f"{count / (1 << 10 * power):.3g} {units[power]}"


def lines_of_process(engine: Engine, config: Config) -> list[str]:
    """Versions and settings of this process."""
    given = ", ".join(f"{name}={value}" for name, value in changed(config, Config).items())
    version = importlib.metadata.version("commlayer")
    return [
        f"commlayer {version}, torch {torch.__version__}, kernels {kernels_level()}",
        f"packets of {engine.packet_bytes} bytes; settings: {given or 'defaults'}",
        *([f"settings come from the file {path_of_file()}, too"] if path_of_file() else []),
    ]


def lines_of_group(native: Any, policy: Policy, settings: Settings) -> list[str]:
    """Peers, paths, plans and policy of a group."""
    diagnosis = native.diagnosis
    descriptions: Sequence[dict[str, Any]] = diagnosis.descriptions
    own = descriptions[native.rank]
    name = f"group {diagnosis.name!r}"
    hosts = []
    for ranks in native.hosts[:SHOWN]:
        way = "shared memory" if native.rank in ranks else "UDP" if own["ports"] else "no network"
        numbers = ", ".join(str(diagnosis.number(rank)) for rank in ranks)
        hosts.append(f"{descriptions[ranks[0]].get('hostname')} has rank {numbers} ({way})")
    more = f"; and {len(native.hosts) - SHOWN} more" if len(native.hosts) > SHOWN else ""
    lines = [f"{name}: {native.size} ranks on {len(native.hosts)} hosts: {'; '.join(hosts)}{more}"]
    away = [ranks[0] for ranks in native.hosts if native.rank not in ranks]
    for rank in away[:SHOWN]:
        lines += [f"{name}: path {path}" for path in names_of_paths(own, descriptions[rank])]
    plans = ", ".join(f"{all_reduce_algorithm(native.hosts, size, settings)} at {amount(size)}" for size in SIZES)
    lines.append(f"{name}: all_reduce by {plans}")
    given = ", ".join(f"{field}={value!r}" for field, value in changed(policy, Policy).items())
    lines.append(f"{name}: policy {given or 'defaults'}")
    return lines
