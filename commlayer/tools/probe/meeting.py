"""The ranks meet in torch's Store: rank 0 plans rounds, one rank per host takes part, and results come back."""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from ...config import Config
from ...transport import interfaces, native
from .facts import host_facts
from .packets import COOKIE_BYTES, Port, own_limit_bps
from .path import CROSSED, measure
from .responder import Responder
from .sample import Sample

JOIN_S = 120.0
"""Seconds in which all ranks must have started."""
_LEAVE_S = 15.0
_POLL_S = 0.02
_LAST_S = 1.0
"""The shortest wait for a result at the end of a round."""

Task = dict[str, Any]
"""`driver` and `responder`, by index of the host, and `paths`; see `plan.py`."""


class Host(NamedTuple):
    """A host as all ranks know it."""

    name: str
    rank: int
    """The rank that measures for it."""
    ranks: int
    nics: list[dict[str, Any]]
    facts: dict[str, Any]
    limit_bps: float


class MeetingError(RuntimeError):
    """The ranks cannot measure together; the text has the remedy."""


def _identity() -> str:
    """Differs between hosts, also emulated ones: the machine's boot and the network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"


class Meeting:
    """This rank among the others. `hosts` is the same on all ranks."""

    rank: int
    size: int

    def __init__(self) -> None:
        try:
            store, self.rank, self.size = next(dist.rendezvous("env://", timeout=timedelta(seconds=JOIN_S)))
        except (ValueError, dist.DistError) as error:
            raise MeetingError(f"the ranks do not meet: {error}") from error
        self._store = dist.PrefixStore("commlayer/probe", store)
        self._rounds = 0
        self._trains = 0
        self._ports: list[Port] = []
        self._numbers: dict[int, int] = {}
        self._cookie = b""
        self._port_range: Sequence[int] = ()
        self._others: dict[tuple[int, int], list[Port]] = {}
        try:
            self.hosts = self._join()  # opens the ports
        except dist.DistError as error:
            raise MeetingError(f"not all of {self.size} ranks came within {JOIN_S:g} s: {error}") from error
        self._responder = Responder(self._ports)

    @property
    def is_leader(self) -> bool:
        """Whether this rank plans and reports."""
        return self.rank == 0

    @property
    def host(self) -> int | None:
        """The host for which this rank measures, by index; None if another rank does."""
        return self._numbers.get(self.rank)

    def close(self) -> None:
        """Closes the sockets."""
        for ports in (self._ports, *self._others.values()):
            for port in ports:
                port.close()

    # ---- joining

    def _join(self) -> list[Host]:
        if self.is_leader:
            self._put("cookie", secrets.token_hex(COOKIE_BYTES))
        self._put(f"rank/{self.rank}", [_identity(), socket.gethostname()])
        said = [self._get(f"rank/{rank}", JOIN_S) for rank in range(self.size)]
        first: dict[str, int] = {}
        for rank, (identity, _) in enumerate(said):
            first.setdefault(identity, rank)
        names = _distinct([said[rank][1] for rank in first.values()], list(first.values()))
        if first[said[self.rank][0]] == self.rank:
            self._put(f"host/{self.rank}", self._open())
        hosts = []
        for (identity, rank), name in zip(first.items(), names, strict=True):
            described = self._get(f"host/{rank}", JOIN_S)
            if error := described.get("error"):
                raise MeetingError(f"{name}: {error}")
            hosts.append(Host(name, rank, [told[0] for told in said].count(identity), **described))
        self._numbers = {host.rank: number for number, host in enumerate(hosts)}
        return hosts

    def _open(self) -> dict[str, Any]:
        """Opens a socket on each interface of this host. Returns the description of the host, or an error."""
        self._cookie = bytes.fromhex(self._get("cookie", JOIN_S))
        try:
            config = Config.from_environment()
            self._port_range = config.port_range
            used = interfaces.choose(config, native.interfaces()).used
            nics = [nic for nic in used if not nic["loopback"]]
            for nic in nics:
                self._ports.append(Port(nic["address"], self._cookie, config.port_range))
                nic["port"] = self._ports[-1].number
        except (ValueError, OSError) as error:
            return {"error": str(error)}
        return {"nics": nics, "facts": host_facts([nic["ifname"] for nic in nics]), "limit_bps": own_limit_bps()}

    # ---- rounds

    def lead(self, tasks: Sequence[Task], seconds: float) -> list[Sample]:
        """Has the hosts do these tasks at the same time; each host may be in one of them. Raises MeetingError if a host
        has not ended after `seconds`."""
        self._put(f"round/{self._rounds}", {"tasks": list(tasks), "seconds": seconds})
        end = time.monotonic() + seconds
        self._take_part(tasks, seconds)
        samples = []
        for task in tasks:
            try:
                tables = self._get(self._result(task), max(end - time.monotonic(), _LAST_S))
            except dist.DistError as error:
                raise self._no_result(task, seconds) from error
            if "error" in tables:
                raise MeetingError(f"{self.hosts[task['driver']].name}: {tables['error']}")
            samples += [Sample.from_table(table) for table in tables["samples"]]
        self._rounds += 1
        return samples

    def follow(self, seconds: float) -> None:
        """Takes part in the rounds of the leader until it ends the meeting."""
        while True:
            try:
                found = self._get(f"round/{self._rounds}", seconds)
            except dist.DistError as error:
                raise MeetingError(f"rank 0 ({self.hosts[0].name}) is gone; see its output") from error
            if found is None:
                self._store.add("left", 1)
                return
            self._take_part(found["tasks"], found["seconds"])
            self._rounds += 1

    def end(self) -> None:
        """Ends the meeting for all ranks. Waits for them, because this process may hold the Store."""
        self._put(f"round/{self._rounds}", None)
        deadline_s = time.monotonic() + _LEAVE_S
        while self._store.add("left", 0) < self.size - 1 and time.monotonic() < deadline_s:
            time.sleep(0.01)

    def _take_part(self, tasks: Sequence[Task], seconds: float) -> None:
        """Raises MeetingError if a host that drives this one has not ended after `seconds`."""
        mine = [task for task in tasks if task["driver"] == self.host]
        served = [task for task in tasks if task["responder"] == self.host]
        if mine and served:
            self._drive_and_serve(mine[0], served, tasks, seconds)
        elif mine:
            self._drive(mine[0], tasks, seconds)
        elif served and not self._responder.serve(functools.partial(self._have_results, served), seconds):
            raise self._no_result(served[0], seconds)

    def _drive_and_serve(self, task: Task, served: Sequence[Task], tasks: Sequence[Task], seconds: float) -> None:
        """Drives from a port of its own, while a thread answers another driver."""
        ended = threading.Event()
        deadline_s = time.monotonic() + seconds
        thread = threading.Thread(target=self._responder.serve, args=(ended.is_set, seconds), daemon=True)
        thread.start()
        try:
            self._drive(task, tasks, seconds)
            while not self._have_results(served):
                if time.monotonic() >= deadline_s:
                    raise self._no_result(served[0], seconds)
                time.sleep(_POLL_S)
        finally:
            ended.set()
            thread.join()

    def _drive(self, task: Task, tasks: Sequence[Task], seconds: float) -> None:
        samples: list[dict[str, Any]] = []
        try:
            for number, about in enumerate(task["paths"]):
                port = self._ports[about["port"]]
                flow_ports: Sequence[Port] = ()
                if CROSSED in about["phases"]:
                    self._wait_for_all(number, [other for other in tasks if len(other["paths"]) > number], seconds)
                    own = self._more_ports(about["port"], 1)
                    if not own:
                        continue
                    port = own[0]
                elif "flows" in about["phases"]:
                    flow_ports = self._more_ports(about["port"], about["effort"]["flows"])
                sample, self._trains = measure(port, tuple(about["to"]), about, self._trains, flow_ports)
                samples.append(sample.table)
        except Exception as error:
            self._put(self._result(task), {"error": f"{type(error).__name__}: {error}"})
            raise
        self._put(self._result(task), {"samples": samples})

    def _more_ports(self, index: int, count: int) -> list[Port]:
        """`count` ports more on the address of a port, the same in each call; fewer if COMMLAYER_PORT_RANGE has no
        more."""
        ports = self._others.setdefault((index, count), [])
        with contextlib.suppress(ValueError):
            while len(ports) < count:
                ports.append(Port(self._ports[index].address, self._cookie, self._port_range, share=count))
        return ports

    def _wait_for_all(self, number: int, tasks: Sequence[Task], seconds: float) -> None:
        """Waits until the drivers of all these tasks have come to their path with this number."""
        key = f"start/{self._rounds}/{number}"
        if self._store.add(f"{key}/count", 1) == len(tasks):
            self._put(key, True)
        self._get(key, seconds)

    def _have_results(self, tasks: Sequence[Task]) -> bool:
        return all(self._has(self._result(task)) for task in tasks)

    def _no_result(self, task: Task, seconds: float) -> MeetingError:
        name = self.hosts[task["driver"]].name
        return MeetingError(f"{name} sent no result within {seconds:.0f} s; see its output")

    def _result(self, task: Task) -> str:
        return f"result/{self._rounds}/{task['driver']}"

    # ---- the Store

    def _put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def _get(self, key: str, seconds: float) -> Any:
        self._store.wait([key], timedelta(seconds=seconds))
        return json.loads(self._store.get(key))

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))


def _distinct(names: Sequence[str], ranks: Sequence[int]) -> list[str]:
    """Host names; those that several hosts have, with a rank."""
    return [
        f"{name} (rank {rank})" if list(names).count(name) > 1 else name
        for name, rank in zip(names, ranks, strict=True)
    ]
