"""`Routes`: the paths of an engine to its peers, their counters, and which interfaces are paused."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import CommError
from .paths import PATHS_MAX, Path
from .ports import Ports
from .status import ffi, lib

if TYPE_CHECKING:
    from .native import Engine

SUMMED = (
    "packets_sent",
    "packets_lost",
    "packets_received",
    "deaths",
    "window_bytes",
    "rate_bytes",
    "capacity_bytes",
    "carried_bytes",
    "delivered_bytes",
    "arrived_bytes",
)
"""The figures of a path that are sums of the two engines' own."""

WORST = ("is_dead", "queue_us")
"""Those that are the larger of the two; all others are of the first engine."""


def merge(path: Any, other: Any) -> None:
    """Adds the figures of a path of the second engine to those of the same path of the first one. Both are a
    `struct cl_path_stats`."""
    for name in SUMMED:
        setattr(path, name, getattr(path, name) + getattr(other, name))
    for name in WORST:
        setattr(path, name, max(getattr(path, name), getattr(other, name)))


class Routes:
    """The paths of an engine to its peers. Their counters have those of the second engine in them."""

    def __init__(self, engine: Engine, ports: Ports) -> None:
        # The engine has this object: with a circle, both would live until Python looks for cycles.
        self._engine: Engine = weakref.proxy(engine)
        self._ports = ports
        self.paused: set[str] = set()
        """The paused interfaces, by `Ports.names`."""
        self._remotes: dict[int, Sequence[Path]] = {}
        self._lock = threading.Lock()  # guards _remotes

    def note(self, peer: int, paths: Sequence[Path]) -> None:
        """Notes the addresses of the paths to another process, which is added. Those of a known one may be new."""
        with self._lock:
            known = self._remotes.setdefault(peer, paths)
            self._remotes[peer] = [
                paths[number] if number < len(paths) and paths[number].local == path.local else path
                for number, path in enumerate(known)
            ]
        for name in list(self.paused):
            self._pause(peer, name, is_paused=True)

    def peers(self) -> list[int]:
        """The processes that this one has met, by rank of the job."""
        with self._lock:
            return sorted(self._remotes)

    def pause(self, interface: str, *, is_paused: bool) -> None:
        """Lets data avoid the paths of an interface (see `Ports.names`), or ends that. Peers that have no other path
        that lives get it there all the same. Raises ClosedError on a closed engine."""
        (self.paused.add if is_paused else self.paused.discard)(interface)
        for peer in self.peers():
            self._pause(peer, interface, is_paused=is_paused)
        if self._engine.second is not None:
            self._engine.second.routes.pause(interface, is_paused=is_paused)

    def _pause(self, peer: int, interface: str, *, is_paused: bool) -> None:
        names = self._ports.names()
        for number, path in enumerate(self._remotes.get(peer, ())):
            if names[path.local] == interface:
                lib.cl_engine_pause(self._engine.raw, peer, number, is_paused)

    def paths(self, peer: int) -> list[dict[str, Any]]:
        """The paths to another process of the job, in their order: their addresses, counters since the peer was added,
        and estimates, by their names in `struct cl_path_stats`.

        Raises CommError if no group of this process has the peer.
        """
        room = ffi.new("struct cl_path_stats[]", PATHS_MAX)
        count = self._read(peer, room)
        if count < 0:
            raise CommError(f"no group of this process has rank {peer}; create one with it first")
        names = [name for name, _ in ffi.typeof("struct cl_path_stats").fields]
        remotes = self._remotes.get(peer, ())
        return [
            {"rank": peer, **{name: int(getattr(path, name)) for name in names}, **self._addresses(remotes[i : i + 1])}
            for i, path in enumerate(room[0:count])
        ]

    def counters(self, peers: Sequence[int]) -> Iterator[tuple[int, int, Any]]:
        """The `struct cl_path_stats` of all paths to these peers, with the peer and the number of the path: as `paths`,
        for frequent readers. Each is valid until the next peer's; lost peers are left out."""
        room = ffi.new("struct cl_path_stats[]", PATHS_MAX)
        for peer in peers:
            count = self._read(peer, room)
            for number in range(count):
                yield peer, number, room[number]

    def _read(self, peer: int, room: Any) -> int:
        """Fills in the paths to a peer; returns their number, below 0 for an unknown one."""
        count = int(lib.cl_engine_read_paths(self._engine.raw, peer, room, PATHS_MAX))
        if self._engine.second is not None and count > 0:
            beside = ffi.new("struct cl_path_stats[]", PATHS_MAX)
            found = max(self._engine.second.routes._read(peer, beside), 0)
            for path, other in zip(room[0:count], beside[0:found], strict=False):  # the same addresses, in one order
                merge(path, other)
        return count

    def remote(self, peer: int, path: int) -> str:
        """The other end of a path, for people."""
        return str(self._addresses(self._remotes.get(peer, ())[path : path + 1])["remote"])

    def _addresses(self, path: Sequence[Path]) -> dict[str, str | int]:
        """This end and the other end of a path; none: it is not known."""
        if not path:
            return {"interface": "", "address": "", "port": 0, "remote": ""}
        local, remote = self._ports.entries[path[0].local], path[0]
        host = f"[{remote.address}]" if ":" in remote.address else remote.address
        ends = {"address": local["address"], "port": local["port"], "remote": f"{host}:{remote.port}"}
        return {"interface": local["ifname"], **ends}

    def disown(self) -> None:
        """See `fork.Owned`; the engine's own `disown` calls it."""
        self._lock = threading.Lock()
