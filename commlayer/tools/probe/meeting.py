"""The ranks meet in torch's Store: rank 0 plans rounds, one rank per host takes part, and results come back."""

from __future__ import annotations

import functools
import json
import secrets
import socket
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
from .path import measure
from .responder import Responder
from .sample import Sample

JOIN_S = 120.0
"""Seconds in which all ranks must have started."""
_LEAVE_S = 5.0

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
        for port in self._ports:
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
            hosts.append(Host(name, rank, [each[0] for each in said].count(identity), **described))
        self._numbers = {host.rank: number for number, host in enumerate(hosts)}
        return hosts

    def _open(self) -> dict[str, Any]:
        """Opens a socket on each interface of this host. Returns the description of the host, or an error."""
        cookie = bytes.fromhex(self._get("cookie", JOIN_S))
        try:
            config = Config.from_environment()
            used = interfaces.choose(config, native.interfaces()).used
            nics = [nic for nic in used if not nic["loopback"]]
            for nic in nics:
                self._ports.append(Port(nic["address"], cookie, config.port_range))
                nic["port"] = self._ports[-1].number
        except (ValueError, OSError) as error:
            return {"error": str(error)}
        return {"nics": nics, "facts": host_facts([nic["ifname"] for nic in nics]), "limit_bps": own_limit_bps()}

    # ---- rounds

    def lead(self, tasks: Sequence[Task], seconds: float) -> list[Sample]:
        """Has the hosts do these tasks at the same time; each host may be in one of them. Raises MeetingError if a host
        has not ended after `seconds`."""
        self._put(f"round/{self._rounds}", list(tasks))
        self._take_part(tasks)
        samples = []
        for task in tasks:
            name = self.hosts[task["driver"]].name
            try:
                tables = self._get(self._result(task), seconds)
            except dist.DistError as error:
                raise MeetingError(f"{name} sent no result within {seconds:.0f} s; see its output") from error
            if "error" in tables:
                raise MeetingError(f"{name}: {tables['error']}")
            samples += [Sample.from_table(table) for table in tables["samples"]]
        self._rounds += 1
        return samples

    def follow(self, seconds: float) -> None:
        """Takes part in the rounds of the leader until it ends the meeting."""
        while True:
            try:
                tasks = self._get(f"round/{self._rounds}", seconds)
            except dist.DistError as error:
                raise MeetingError(f"rank 0 ({self.hosts[0].name}) is gone; see its output") from error
            if tasks is None:
                self._store.add("left", 1)
                return
            self._take_part(tasks)
            self._rounds += 1

    def end(self) -> None:
        """Ends the meeting for all ranks. Waits for them, because this process may hold the Store."""
        self._put(f"round/{self._rounds}", None)
        deadline_s = time.monotonic() + _LEAVE_S
        while self._store.add("left", 0) < self.size - 1 and time.monotonic() < deadline_s:
            time.sleep(0.01)

    def _take_part(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            if task["driver"] == self.host:
                self._drive(task)
            elif task["responder"] == self.host:
                self._responder.serve(functools.partial(self._has, self._result(task)))

    def _drive(self, task: Task) -> None:
        samples: list[dict[str, Any]] = []
        try:
            for about in task["paths"]:
                port = self._ports[about["port"]]
                sample, self._trains = measure(port, tuple(about["to"]), about, self._trains)
                samples.append(sample.table)
        except Exception as error:
            self._put(self._result(task), {"error": f"{type(error).__name__}: {error}"})
            raise
        self._put(self._result(task), {"samples": samples})

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
