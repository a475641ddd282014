"""`Sampler`: the sample of one rank, once per second, from counters that the engine and the training keep anyway.

A sample has rates and counts of the time since the one before, so that whoever collects samples need not compute. Of
many paths it has the sums of each interface, and one by one those that stand out.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..transport.flight import recorder
from ..transport.lags import Lag
from ..transport.native import Engine
from .meter import Exposure, meter

PATHS_TOLD = 8
"""Paths that a sample has one by one."""

LAGS_TOLD = 4
"""Peers that a sample names as late."""

PEERS_READ = 512
"""Peers whose paths one sample reads; those of larger jobs take turns."""


class PathReading(NamedTuple):
    """The counters of one path, and its estimates."""

    port: int
    """Number of its local address."""
    sent: int
    lost: int
    received: int
    queue_us: int
    round_trip_us: int
    is_dead: bool


PathKey = tuple[int, int]
"""The peer, by its rank in the job, and the number of the path."""


@dataclasses.dataclass
class Reading:
    """The counters of this process at one time."""

    at_s: float
    """The time on the clock of `time.monotonic()`."""
    stats: Mapping[str, int]
    lags: Mapping[int, Lag]
    paths: Mapping[PathKey, PathReading]
    packet_bytes: int = 0
    """Payload of a full packet."""
    steps: int = 0
    exposed_s: float = 0.0
    late_s: float = 0.0
    stepped_s: float = 0.0
    """Duration of the steps: one may be longer than the time between two samples."""
    exposed_in_steps_s: float = 0.0
    late_in_steps_s: float = 0.0


def between(before: Reading, now: Reading) -> dict[str, Any]:
    """The part of a sample that two readings give: rates per second, and counts of the time between them."""
    passed_s = max(now.at_s - before.at_s, 1e-9)

    def count(name: str) -> int:
        return now.stats.get(name, 0) - before.stats.get(name, 0)

    sent, lost = count("packets_sent"), max(0, count("packets_lost") - count("packets_spurious"))
    queues = [path.queue_us for path in now.paths.values()]
    return {
        "interval_s": round(passed_s, 3),
        "steps": now.steps - before.steps,
        "exposed_s": round(now.exposed_s - before.exposed_s, 6),
        "late_s": round(now.late_s - before.late_s, 6),
        "sent_bytes_s": round(count("payload_bytes_sent") / passed_s),
        "received_bytes_s": round(count("payload_bytes_received") / passed_s),
        "shared_bytes_s": round(count("shared_bytes_received") / passed_s),
        "packets": sent,
        "lost": lost,
        "retransmitted": count("packets_retransmitted"),
        "forgiven_bytes": count("packets_given_up") * now.packet_bytes,
        "queue_us": max(queues, default=0),
        "failed": now.stats.get("operations_failed", 0),
    }


def in_steps(before: Reading, now: Reading) -> dict[str, Any]:
    """The part of a sample that is of whole steps: means of one step, and the waits for the ranks that were late. None
    instead of the means if no step has ended."""
    steps = now.steps - before.steps

    def mean(total_s: float) -> float | None:
        return round(total_s / steps, 6) if steps else None

    return {
        "step_s": mean(now.stepped_s - before.stepped_s),
        "exposed_step_s": mean(now.exposed_in_steps_s - before.exposed_in_steps_s),
        "late_step_s": mean(now.late_in_steps_s - before.late_in_steps_s),
        "lags": _lags(before.lags, now.lags),
        "lags_s": round(max(now.at_s - before.at_s, 1e-9), 3),
    }


def _lags(before: Mapping[int, Lag], now: Mapping[int, Lag]) -> list[list[int]]:
    """The peers that this rank has waited for longest: rank, and microseconds."""
    waits = [[rank, lag.waited_us - before.get(rank, Lag(0, 0)).waited_us] for rank, lag in now.items()]
    return sorted((wait for wait in waits if wait[1] > 0), key=lambda wait: -wait[1])[:LAGS_TOLD]


@dataclasses.dataclass
class Flow:
    """The traffic of one path, or of all paths of one interface, since the reading before."""

    sent: int = 0
    lost: int = 0
    received: int = 0
    queue_us: int = 0
    round_trip_us: int = 0
    dead: int = 0

    def add(self, before: PathReading | None, now: PathReading) -> Flow:
        """Adds a path; returns itself."""
        self.sent += now.sent - (before.sent if before else 0)
        self.lost += now.lost - (before.lost if before else 0)
        self.received += now.received - (before.received if before else 0)
        self.queue_us = max(self.queue_us, now.queue_us)
        self.round_trip_us = max(self.round_trip_us, now.round_trip_us)
        self.dead += now.is_dead
        return self

    def entry(self, bytes_s: float) -> dict[str, Any]:
        """The flow as a sample has it. `bytes_s`: bytes per second that one packet of the interval stands for."""
        return {"bytes_s": round(self.sent * bytes_s), **dataclasses.asdict(self)}


def flows(before: Reading, now: Reading) -> tuple[dict[int, Flow], dict[PathKey, Flow]]:
    """The flows by port, and those of the paths that stand out: dead ones, those with most losses, longest queues and
    most packets."""
    ports: dict[int, Flow] = {}
    paths: dict[PathKey, Flow] = {}
    for key, path in now.paths.items():
        former = before.paths.get(key)
        ports.setdefault(path.port, Flow()).add(former, path)
        paths[key] = Flow().add(former, path)
    told = sorted(paths, key=lambda key: (-paths[key].dead, -paths[key].lost, -paths[key].queue_us, -paths[key].sent))
    return ports, {key: paths[key] for key in sorted(told[:PATHS_TOLD])}


class Sampler:
    """Takes the samples of this process. `world`: the number of ranks in the job."""

    def __init__(self, rank: int, world: int) -> None:
        self._fixed = {"rank": rank, "world": world, "host": socket.gethostname(), "pid": os.getpid()}
        self._exposure = Exposure()
        self._number = 0
        self._turn = 0
        self._before = Reading(time.monotonic(), {}, {}, {})
        self._before = self._read()
        self._counted = self._before
        self._in_steps: dict[str, Any] | None = None

    def take(self) -> dict[str, Any]:
        """The sample of now."""
        engine = Engine.current()
        before, now = self._before, self._read()
        self._before = now
        if self._in_steps is None or now.steps > self._counted.steps or now.steps == 0:
            # Steps may be longer than the time between two samples, which then has none, or one that began before it.
            self._in_steps = in_steps(self._counted, now)
            self._counted = now
        self._number += 1
        sample: dict[str, Any] = {
            **self._fixed,
            "number": self._number,
            "time": round(time.time(), 3),
            "step": self._exposure.step,
            **between(before, now),
            **self._in_steps,
            "oldest_s": round(self._exposure.oldest_s, 3),
            "paused": [] if engine is None else sorted(engine.routes.paused),
            "hooks": [_hook(hook) for hook in meter.hooks()],
        }
        packets = now.stats.get("packets_sent", 0) - before.stats.get("packets_sent", 0)
        payload = now.stats.get("payload_bytes_sent", 0) - before.stats.get("payload_bytes_sent", 0)
        bytes_s = payload / max(packets, 1) / max(now.at_s - before.at_s, 1e-9)
        ports, paths = flows(before, now)
        names = [] if engine is None else engine.ports.names()
        sample["interfaces"] = [
            {"interface": _name(names, port), **ports[port].entry(bytes_s)} for port in sorted(ports)
        ]
        sample["paths"] = [
            {
                "peer": peer,
                "path": number,
                "interface": _name(names, now.paths[peer, number].port),
                "remote": "" if engine is None else engine.routes.remote(peer, number),
                **flow.entry(bytes_s),
            }
            for (peer, number), flow in paths.items()
        ]
        return sample

    def _read(self) -> Reading:
        with Engine.held() as engine:
            if engine is None:
                read = Reading(time.monotonic(), {}, {}, {})
            else:
                lags, paths = engine.lags.read(), self._paths(engine)
                read = Reading(time.monotonic(), engine.stats(), lags, paths, engine.packet_bytes)
        found = self._exposure
        lagged_s = sum(lag.waited_us for lag in read.lags.values()) / 1e6
        found.update(meter, [group.calls for group in recorder.groups()], lagged_s)
        noted = ("steps", "exposed_s", "late_s", "stepped_s", "exposed_in_steps_s", "late_in_steps_s")
        return dataclasses.replace(read, **{name: getattr(found, name) for name in noted})

    def _paths(self, engine: Engine) -> dict[PathKey, PathReading]:
        peers = engine.routes.peers()
        found: dict[PathKey, PathReading] = {}
        if len(peers) > PEERS_READ:
            found.update(self._before.paths)
            self._turn = (self._turn + PEERS_READ) % len(peers)
            peers = (peers + peers)[self._turn : self._turn + PEERS_READ]
        for peer, number, path in engine.routes.counters(peers):
            found[peer, number] = PathReading(
                path.port,
                path.packets_sent,
                path.packets_lost,
                path.packets_received,
                path.queue_us,
                path.round_trip_us,
                bool(path.is_dead),
            )
        return found


def _name(names: Sequence[str], port: int) -> str:
    return names[port] if port < len(names) else str(port)


def _hook(hook: Any) -> dict[str, Any]:
    """A communication hook's state: settings that `commlayer ctl` changes, and its counter."""
    policy = hook.policy
    return {
        "steps": hook.steps,
        "loss_bound": policy.loss_bound,
        "codec": policy.codec,
        "priority": policy.priority,
        "uncounted_bytes": hook.uncounted_bytes,
    }
