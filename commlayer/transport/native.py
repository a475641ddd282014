"""`Engine`: the native engine of this process; groups run on it (`group.py`).

Every call into the compiled module releases the GIL.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from ..config import Config
from ..errors import ClosedError, CommError, ConfigError
from . import interfaces as host_interfaces
from .completions import Completions
from .description import printable
from .descriptors import raise_descriptor_limit
from .fork import disowned_in_children
from .lags import Lag, Lags
from .log import log
from .ports import Ports
from .routes import Routes
from .status import check, ffi, lib

UNEXPECTED_LIMIT_BYTES = 16 << 20
"""Limit of memory for unexpected packets, which arrive before this rank has called their operation."""

LIFE_BYTES = 16

TWIN = lib.CL_PEERS_MAX
"""The number by which an engine watches its own process, whose other engine shares its interfaces: no peer has it."""


def interfaces() -> list[dict[str, Any]]:
    """The network interfaces that are up, one entry per address."""
    found = ffi.new("struct cl_interface[64]")
    count = lib.cl_interfaces(found, 64)
    if count < 0:
        check(count, "listing the network interfaces")
    return [
        {
            "ifname": ffi.string(port.name).decode(),
            "address": ffi.string(port.address).decode(),
            "prefix": port.prefix_bits,
            "mtu": port.mtu,
            "loopback": bool(port.is_loopback),
            "running": bool(port.is_running),
            "version": 6 if port.is_ipv6 else 4,
        }
        for port in found[0:count]
    ]


class Report(NamedTuple):
    """The counters of an engine."""

    stats: dict[str, int]
    lags: dict[int, Lag]
    """One lag per rank of the job."""
    paths: dict[int, list[dict[str, Any]]]
    """The counters of the paths, in their order, by rank of the job."""


class Engine:
    """The native engine of this process: its thread, sockets and peers."""

    _shared: ClassVar[Engine | None] = None
    _last_report: ClassVar[Report | None] = None  # the report of the latest shared engine that was closed
    _guard: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def shared(cls, config: Config) -> Engine:
        """The process's engine, opened by its first user; each user calls `release` once."""
        with cls._guard:
            if cls._shared is None:
                raise_descriptor_limit()
                cls._shared = cls._that_lingers(config)
            cls._shared._users += 1
            return cls._shared

    @classmethod
    def current(cls) -> Engine | None:
        """The process's engine; None before its first user, and after its last."""
        return cls._shared

    @classmethod
    @contextlib.contextmanager
    def held(cls) -> Iterator[Engine | None]:
        """The process's engine, or None. Until the end of the context no other thread closes it: the native engine
        would be freed while this one reads its counters."""
        with cls._guard:
            yield cls._shared

    @classmethod
    def private(cls, config: Config) -> Engine:
        """Another engine, for groups in another job than the process's; this is its first use."""
        engine = cls._that_lingers(config)
        engine._is_private, engine._users = True, 1
        return engine

    def use(self) -> Engine:
        """Begins another use, which ends with `release`."""
        with self._guard:
            self._users += 1
        return self

    @classmethod
    def _that_lingers(cls, config: Config) -> Engine:
        used, left_out = host_interfaces.choose(config, interfaces())
        engine = cls(config, used, left_out=left_out)
        # Processes that multiprocessing made do not run atexit.
        engine._at_exit = Finalize(None, engine._linger, exitpriority=0)
        if config.threads > 1:
            try:
                engine._open_second()
            except BaseException:
                engine.close()
                raise
        return engine

    def __init__(
        self,
        config: Config,
        ports: list[dict[str, Any]],
        wire: str = "",
        wire_type: Any = ffi.NULL,
        *,
        left_out: Sequence[str] = (),
    ) -> None:
        """`wire` replaces the wire of `config`, and `wire_type`, a `struct cl_wire_type *`, both. `left_out`: virtual
        interfaces of this host that are not used."""
        self.config = config
        self._wire = wire or config.wire
        self.life = os.urandom(LIFE_BYTES).hex()
        """Identifies this engine among all that this process, and its predecessors in the job, have had."""
        self.job: tuple[int, bytes, bool] | None = None
        """The job that this process has joined, as all its groups have it: see `bootstrap._job`."""
        self.key = b""
        """Its key, with the job's secret in it."""
        self.hosts: dict[int, str] = {}
        """Host names of the processes met so far, by rank of the job."""
        self.lags = Lags()
        self._lives: dict[int, str] = {}
        self.second: Engine | None = None
        """The engine with the second thread, of COMMLAYER_THREADS=2: see `joining.join_both`. It is closed with this
        one, whose counters have its own in them."""
        self._is_private = False
        self._users = 0
        self._at_exit: Finalize | None = None
        self._left_out = [] if any(not port["loopback"] for port in ports) else list(left_out)
        self.ports = Ports(ports, config.ports)
        self.routes = Routes(self, self.ports)
        ports = self.ports.entries
        first, last = config.port_range or (0, 0)
        self._lock = threading.Lock()
        addresses = [ffi.new("char[]", port["address"].encode()) for port in ports]
        array = ffi.new("char *[]", addresses)
        names = [ffi.new("char[]", text.encode()) for text in (self._wire, config.ofi_provider)]
        options = ffi.new(
            "struct cl_engine_options *",
            {
                "wire": names[0],
                "wire_type": wire_type,
                "addresses": ffi.cast("const char *const *", array),
                "address_count": len(ports),
                "datagram_bytes": self.ports.datagram_bytes(config.mtu),
                "unexpected_limit_bytes": UNEXPECTED_LIMIT_BYTES,
                "peer_timeout_us": int(config.peer_timeout_s * 1e6),
                "auth": getattr(lib, f"CL_AUTH_{config.auth.upper()}"),
                "dscp": config.dscp,
                "ofi_provider": names[1],
                "port_first": first,
                "port_last": last,
                "credit_bytes": config.credit_bytes,
            },
        )
        out = ffi.new("cl_engine **")
        where = ", ".join(f"{port['ifname']} {port['address']}" for port in ports) or "no address"
        status = lib.cl_engine_open(options, out)
        if status == lib.CL_ENOPORT:
            raise ConfigError(
                f"COMMLAYER_PORT_RANGE={first}-{last}: no free UDP port on host {socket.gethostname()} ({where}); "
                f"a host needs COMMLAYER_PORTS={config.ports}, times COMMLAYER_THREADS, per process; widen the range, "
                f"or end the processes that hold its ports (`ss -ulpn` lists them)"
            )
        check(status, f"opening the engine on {where}")
        self._engine = out[0]
        self._completions = _completions(self._engine)
        self.ports.read(self._engine)
        disowned_in_children(self)

    def _open_second(self) -> None:
        """Opens the second engine. Each reads the other's meter, by which they share the interfaces."""
        second = Engine.private(dataclasses.replace(self.config, threads=1))
        try:
            statuses = []
            for engine, other in ((self, second), (second, self)):
                statuses.append(lib.cl_engine_watch_process(engine.raw, TWIN, os.getpid()))
                statuses.append(lib.cl_engine_read_meter(engine.raw, TWIN, lib.cl_engine_meter(other.raw)))
            if any(status != lib.CL_OK for status in statuses):
                log.warning(
                    "the engines of process %d cannot read each other's meters; their shares of this host's interfaces "
                    "show by the queues alone",
                    os.getpid(),
                )
        except BaseException:
            second.close()
            raise
        self.second = second

    @property
    def packet_bytes(self) -> int:
        """Payload of a full packet. A packet to a peer whose own packets are smaller has their size."""
        return int(lib.cl_engine_packet_bytes(self.raw))

    @property
    def is_private(self) -> bool:
        """Whether its groups are in another job than the process's."""
        return self._is_private

    @property
    def raw(self) -> Any:
        """The cl_engine pointer, for NativeGroup."""
        if self._engine is None:
            raise ClosedError("the engine of this process is closed; create a new process group")
        return self._engine

    def describe(self) -> dict[str, Any]:
        """The description for other ranks: host, process and addresses, as they are now."""
        found = interfaces()
        with self._lock:  # no thread closes the engine while its sockets move
            self.ports.follow(self.raw, found)
        bell = ffi.new("char[32]")
        lib.cl_engine_bell(self.raw, bell)
        return {
            "host": host_key(),
            "hostname": printable(socket.gethostname()),
            "shm": self.config.shm,
            "pid": os.getpid(),
            "life": self.life,
            "bell": ffi.string(bell).decode(),
            "meter": lib.cl_engine_meter(self.raw),
            "ports": self.ports.entries,
            "left_out": self._left_out,
            "packet_bytes": self.packet_bytes,
            **({} if self.second is None else {"second": self.second.describe()}),
        }

    def meet(self, peer: int, life: str) -> bool:
        """Notes the life of another process; False if this process has met a former life of it."""
        with self._lock:
            return self._lives.setdefault(peer, life) == life

    def incarnations(self) -> dict[str, tuple[int, bool]]:
        """The incarnations of the peers (see `incarnation.py`) that are in a later one than the first, or lost."""
        found = {}
        number = ffi.new("uint32_t *")
        with self._lock:
            peers = list(self._lives)
        for peer in peers:
            status = lib.cl_engine_incarnation(self.raw, peer, number)
            if status in (lib.CL_OK, lib.CL_EPEERLOST) and (number[0] or status != lib.CL_OK):
                found[str(peer)] = int(number[0]), bool(status == lib.CL_OK)
        return found

    def revive(self, peer: int, incarnation: int, what: str) -> None:
        """Begins an incarnation of a peer, unless it has begun. Operations with messages to or from it fail."""
        check(lib.cl_engine_revive_peer(self.raw, peer, incarnation), what)

    def stats(self) -> dict[str, int]:
        """Counters since the engine was opened, by their names in `struct cl_engine_stats`."""
        stats = ffi.new("struct cl_engine_stats *")
        lib.cl_engine_read_stats(self.raw, stats)
        found = {name: int(getattr(stats, name)) for name, _ in ffi.typeof("struct cl_engine_stats").fields}
        if self.second is None:
            return found
        return {name: found[name] + count for name, count in self.second.stats().items()}

    def ping(self, peer: int) -> None:
        """Asks another process of the job for an answer on each path; see `is_answered` of `Routes.paths`."""
        lib.cl_engine_ping(self.raw, peer)

    @staticmethod
    def no_stats() -> dict[str, int]:
        """The counters of a process without an engine: all 0."""
        return dict.fromkeys([*(name for name, _ in ffi.typeof("struct cl_engine_stats").fields), "waited_us"], 0)

    def report(self) -> Report:
        """All counters, of all groups and paths."""
        lags = self.lags.read()
        stats = {**self.stats(), "waited_us": sum(lag.waited_us for lag in lags.values())}
        paths = {}
        for peer in self.routes.peers():
            with contextlib.suppress(CommError):  # the peer is lost, and its paths with it
                paths[peer] = self.routes.paths(peer)
        return Report(stats, lags, paths)

    @classmethod
    def shared_report(cls) -> Report:
        """The counters of this process's engine, or of the one that it had. Raises ClosedError if it had none."""
        with cls._guard:
            if cls._shared is not None:
                return cls._shared.report()
            if cls._last_report is None:
                raise ClosedError("this process has no engine; create a process group first")
            return cls._last_report

    def notify(self, operation: Any, callback: Callable[[int], None]) -> int:
        """Calls `callback(status)` on a completion thread once the operation ends, and returns CL_EAGAIN. If it has
        ended already, only returns its status.

        The callback computes in the float mode of the calling thread (`torch.set_flush_denormal`): on another rank the
        operation may have ended already, and the same code runs in the calling thread."""
        mode = lib.cl_float_mode_get()

        def in_own_mode(status: int) -> None:
            lib.cl_float_mode_set(mode)
            callback(status)

        token = self._completions.expect(in_own_mode)
        status: int = lib.cl_operation_notify(operation, token)
        if status != lib.CL_EAGAIN:
            self._completions.forget(token)
        return status

    def release(self) -> None:
        """Ends one use; the last one closes the engine."""
        cls = type(self)
        with cls._guard:
            if cls._shared is not self and not self._is_private:
                return
            self._users -= 1
            if self._users > 0:
                return
            if cls._shared is self:
                cls._last_report = self.report()
                cls._shared = None
        self.close()

    def _linger(self) -> None:
        """The process ends with its groups open: peers may still need an acknowledgement from it."""
        if self._engine is not None:
            lib.cl_engine_linger(self._engine)

    def disown(self) -> None:
        """See `fork.Owned`: the engine's thread stayed in the parent. The child closes its copies of the sockets, or
        their ports would stay taken after the parent's end."""
        cls = type(self)
        cls._guard, cls._shared, cls._last_report = threading.Lock(), None, None
        self._lock = threading.Lock()
        self.routes.disown()
        engine, self._engine = self._engine, None
        if engine is not None and self._wire == "udp":
            for index in range(len(self.ports.entries)):
                socket.close(lib.cl_engine_descriptor(engine, index))

    def close(self) -> None:
        """Closes the engine and joins its threads. Idempotent."""
        with self._lock:
            engine, self._engine = self._engine, None
        if engine is None:
            return
        if self.second is not None:
            self.second.release()  # a thread may still be closing a group of it
        if self._at_exit is not None:
            self._at_exit.cancel()
        self._completions.close()
        lib.cl_engine_close(engine)


def _completions(engine: Any) -> Completions:
    events = ffi.new("struct cl_event[64]")

    def wait() -> list[tuple[int, int]] | None:
        count = lib.cl_engine_events(engine, events, len(events), 1_000_000)
        return [(event.token, event.status) for event in events[0:count]] if count >= 0 else None

    return Completions(wait, lambda: lib.cl_engine_stop_events(engine))


def host_key() -> str:
    """A key that is equal for processes that can share memory and see each other's process ids.

    They have one boot and one set of namespaces. The network namespace counts, so that containers and emulated hosts
    are hosts of their own.
    """
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return ":".join([boot, *(str(Path("/proc/self/ns", name).readlink()) for name in ("net", "pid"))])
