"""The native engine as Python sees it: `Engine` (one per process) and `NativeGroup`, a `base.Group` that runs plans.

This is the only module that touches the compiled one. Every call into it releases the GIL.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from .._native import ffi, lib
from ..config import Config
from ..errors import (
    AbortedError,
    ClosedError,
    CommError,
    ConfigError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
)
from . import base
from .paths import PATHS_MAX, pair_paths

if TYPE_CHECKING:
    from ..plans.plan import Plan

log = logging.getLogger("commlayer")

STAGING_BYTES = 2 << 20
"""Staging per rank and operation: small enough to stay in the cache, large enough to amortise waking a peer."""

SPIN_US = 60
"""Longest spin before a blocked wait sleeps, where every rank of the host can have a core."""

STASH_BYTES = 16 << 20
"""Bound on memory for packets that arrive before this rank has called the operation."""

LOOPBACK_MTU_BYTES = 9000
IP_UDP_HEADER_BYTES = {4: 28, 6: 48}

VIRTUAL_INTERFACES = ("docker", "virbr", "br-", "cni", "flannel")
"""Bridges that exist on every host with the same addresses; used only when COMMLAYER_IFNAME names them."""

PLANS_LIMIT = 4096

_ERRORS: dict[int, tuple[type[CommError], str]] = {
    lib.CL_EINVAL: (CommError, "this is a defect of commlayer: please report it"),
    lib.CL_ENOMEM: (CommError, "free memory, or use smaller buckets"),
    lib.CL_ESYSTEM: (CommError, "see the kernel's log and the limits of this process (ulimit -a)"),
    lib.CL_ETIMEDOUT: (
        OperationTimeoutError,
        "a rank is late or never called this operation; compare the ranks' logs, or raise the timeout",
    ),
    lib.CL_EPEERLOST: (PeerLostError, "look at that rank's log; restart the job or the group without it"),
    lib.CL_EABORTED: (AbortedError, "look for the first error in the other ranks' logs"),
    lib.CL_ECLOSED: (ClosedError, "no operation may follow destroy_process_group"),
    lib.CL_EMISMATCH: (
        MismatchError,
        "all ranks must call the same operations in the same order with the same sizes and dtypes",
    ),
}


def check(status: int, what: str) -> None:
    """Raises the CommError of a native status, unless it is 0."""
    if status != 0:
        kind, remedy = _ERRORS.get(status, (CommError, "unknown status"))
        raise kind(f"{what}: {ffi.string(lib.cl_error_text(status)).decode()}; {remedy}")


def kernels_level() -> str:
    """The instruction set of this process's kernels: avx512, avx2 or scalar."""
    return ffi.string(lib.cl_kernels_level()).decode()


def interfaces() -> list[dict[str, Any]]:
    """The network interfaces that are up, one entry per address."""
    found = ffi.new("struct cl_interface[64]")
    count = lib.cl_interfaces(found, 64)
    if count < 0:
        check(count, "listing the network interfaces")
    return [
        {
            "ifname": ffi.string(each.name).decode(),
            "address": ffi.string(each.address).decode(),
            "prefix": each.prefix_bits,
            "mtu": each.mtu,
            "loopback": bool(each.is_loopback),
            "version": 6 if each.is_ipv6 else 4,
        }
        for each in found[0:count]
    ]


def choose_ports(config: Config) -> list[dict[str, Any]]:
    """The addresses to open a socket on: the chosen interfaces', and loopback for ranks of this host.

    Raises ConfigError when COMMLAYER_IFNAME matches nothing.
    """
    found = interfaces()
    by_name: dict[str, dict[str, Any]] = {}
    for each in sorted(found, key=lambda port: port["version"]):  # IPv4 where there is a choice
        by_name.setdefault(each["ifname"], each)
    usable = [name for name, port in by_name.items() if not port["loopback"]]
    if config.ifname:
        names = config.choose_interfaces(list(by_name))
        if all(pattern.startswith("^") for pattern in config.ifname):
            names = [name for name in names if name in usable]
    else:
        names = [name for name in usable if not name.startswith(VIRTUAL_INTERFACES)]
    ports = [by_name[name] for name in names][:PATHS_MAX]
    loopback = next((port for port in by_name.values() if port["loopback"]), None)
    if loopback is not None and loopback not in ports:
        ports = [*ports[: PATHS_MAX - 1], loopback]
    return ports


class Engine:
    """The process's native engine: a thread, its sockets, its peers."""

    _shared: ClassVar[Engine | None] = None
    _users: ClassVar[int] = 0
    _guard: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def shared(cls, config: Config) -> Engine:
        """The process's engine, opened by its first user; each user calls `release` once."""
        with cls._guard:
            if cls._shared is None:
                log.setLevel(config.log.upper())
                cls._shared = cls(config, choose_ports(config))
                cls._users = 0
            cls._users += 1
            return cls._shared

    def __init__(self, config: Config, ports: list[dict[str, Any]], wire: str = "udp", loss_ppm: int = 0) -> None:
        self.config = config
        self._ports = ports
        self._tokens = itertools.count(1)
        self._callbacks: dict[int, Callable[[int], None]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        addresses = [ffi.new("char[]", port["address"].encode()) for port in ports]
        array = ffi.new("char *[]", addresses)
        names = (ffi.new("char[]", wire.encode()), ffi.new("char[]", config.congestion.encode()))
        options = ffi.new(
            "struct cl_engine_options *",
            {
                "wire": names[0],
                "addresses": ffi.cast("const char *const *", array),
                "address_count": len(ports),
                "datagram_bytes": self._datagram_bytes(),
                "congestion": names[1],
                "fixed_rate_bps": config.rate_bps,
                "stash_bytes": STASH_BYTES,
                "peer_timeout_us": int(config.peer_timeout_s * 1e6),
                "mem_loss_ppm": loss_ppm,
            },
        )
        out = ffi.new("cl_engine **")
        where = ", ".join(f"{port['ifname']} {port['address']}" for port in ports) or "no address"
        check(lib.cl_engine_open(options, out), f"opening the engine on {where}")
        self._engine = out[0]
        number = ffi.new("uint32_t *")
        for index, port in enumerate(ports):
            check(lib.cl_engine_port(self._engine, index, number), f"asking for the port of {port['address']}")
            port["port"] = number[0]

    def _datagram_bytes(self) -> int:
        sizes: list[int] = []
        for port in self._ports:
            mtu = min(port["mtu"], LOOPBACK_MTU_BYTES) if port["loopback"] else port["mtu"]
            sizes.append(min(mtu, self.config.mtu or mtu) - IP_UDP_HEADER_BYTES[port["version"]])
        # One size for all paths: any packet may take any of them. Loopback only counts when there is nothing else.
        outside = [size for size, port in zip(sizes, self._ports, strict=True) if not port["loopback"]]
        return min(outside or sizes or [1472])

    @property
    def raw(self) -> Any:
        """The cl_engine pointer, for NativeGroup."""
        if self._engine is None:
            raise ClosedError("the engine of this process is closed; create a new process group")
        return self._engine

    def describe(self) -> dict[str, Any]:
        """What other ranks need to know: which host and process this is, and its addresses."""
        bell = ffi.new("char[32]")
        lib.cl_engine_bell(self.raw, bell)
        return {
            "host": host_key(),
            "shm": self.config.shm,
            "pid": os.getpid(),
            "bell": ffi.string(bell).decode(),
            "ports": self._ports,
        }

    def stats(self) -> dict[str, int]:
        """Counters since the engine was opened; names as in `struct cl_engine_stats`."""
        stats = ffi.new("struct cl_engine_stats *")
        lib.cl_engine_read_stats(self.raw, stats)
        return {name: int(getattr(stats, name)) for name, _ in ffi.typeof("struct cl_engine_stats").fields}

    def notify(self, operation: Any, callback: Callable[[int], None]) -> int:
        """Has `callback(status)` called on the completion thread; returns CL_EAGAIN, or the status if it ended."""
        with self._lock:
            if self._thread is None and self._engine is not None:
                self._thread = threading.Thread(
                    target=self._complete, args=(self._engine,), name="commlayer-completions", daemon=True
                )
                self._thread.start()
        token = next(self._tokens)
        self._callbacks[token] = callback
        status: int = lib.cl_operation_notify(operation, token)
        if status != lib.CL_EAGAIN:
            del self._callbacks[token]
        return status

    def _complete(self, engine: Any) -> None:
        events = ffi.new("struct cl_event[64]")
        while (count := lib.cl_engine_events(engine, events, 64, 1_000_000)) >= 0:
            for event in events[0:count]:
                try:
                    self._callbacks.pop(event.token)(event.status)
                except Exception:
                    log.exception("a completion callback raised")
            if self._thread is None:
                return  # a callback closed the engine

    def release(self) -> None:
        """Gives up one use; the last one closes the engine."""
        cls = type(self)
        with cls._guard:
            if cls._shared is not self:
                return
            cls._users -= 1
            if cls._users > 0:
                return
            cls._shared = None
        self.close()

    def close(self) -> None:
        """Closes the engine and joins its threads. Idempotent."""
        with self._lock:
            engine, self._engine = self._engine, None
            thread = self._thread
        if engine is None:
            return
        lib.cl_engine_stop_events(engine)
        if thread is threading.current_thread():
            self._thread = None
        elif thread is not None:
            thread.join()
        lib.cl_engine_close(engine)


def host_key() -> str:
    """Equal for processes that can share memory and see each other's process ids: one boot, one set of namespaces.

    The network namespace is part of it, so that containers, and emulated hosts, count as hosts of their own.
    """
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return ":".join([boot, *(str(Path("/proc/self/ns", name).readlink()) for name in ("net", "pid"))])


def group_hosts(descriptions: Sequence[dict[str, Any]]) -> tuple[tuple[int, ...], ...]:
    """Group ranks by host; ranks with shared memory turned off are hosts of their own."""
    hosts: dict[str, list[int]] = {}
    for rank, each in enumerate(descriptions):
        hosts.setdefault(each["host"] if each["shm"] else f"rank {rank}", []).append(rank)
    return tuple(tuple(ranks) for ranks in hosts.values())


class NativeHandle:
    """A `base.Handle`: one operation in flight."""

    __slots__ = ("_group", "_operation")

    def __init__(self, group: NativeGroup, operation: Any) -> None:
        self._group = group
        self._operation = ffi.gc(operation, lib.cl_operation_release)

    def done(self) -> bool:
        """See `base.Handle.done`."""
        return bool(lib.cl_operation_status(self._operation) != lib.CL_EAGAIN)

    def wait(self, timeout_s: float | None = None) -> None:
        """See `base.Handle.wait`."""
        if timeout_s is None:
            status = lib.cl_operation_wait(self._operation, 0)
        elif timeout_s <= 0:
            status = lib.cl_operation_status(self._operation)
        else:
            status = lib.cl_operation_wait(self._operation, _timeout_us(timeout_s))
        if status == lib.CL_EAGAIN:
            raise OperationTimeoutError(
                f"rank {self._group.rank} of group {self._group.name!r}: still in flight after waiting "
                f"{timeout_s:g} s; wait longer, or abort the group"
            )
        if status != 0:
            raise self._group.error(status)

    def on_done(self, callback: Callable[[BaseException | None], None]) -> None:
        """See `base.Handle.on_done`; at most one callback per handle."""

        def ended(status: int) -> None:
            callback(None if status == 0 else self._group.error(status))

        status = self._group.engine.notify(self._operation, ended)
        if status != lib.CL_EAGAIN:
            ended(status)


class NativeGroup:
    """A communicator on the native engine; see `base.Group`. Made by `open`."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        rank: int,
        hosts: tuple[tuple[int, ...], ...],
        group: Any,
        interface: str,
    ) -> None:
        self.engine = engine
        self.name = name
        self.rank = rank
        self.size = sum(map(len, hosts))
        self.hosts = hosts
        self.interface = interface
        self.staging_bytes = STAGING_BYTES
        self._group = group
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._calls = 0  # threads inside the native group, which must not be freed under them
        self._plans: dict[int, tuple[Plan, Any]] = {}
        self._lost: int | None = None

    @staticmethod
    def open(
        engine: Engine,
        name: str,
        rank: int,
        size: int,
        descriptions: Sequence[dict[str, Any]],
        job: int,
        group: int,
        exchange: Callable[[str, bytes], list[bytes]],
    ) -> NativeGroup:
        """Opens this rank's end of a group whose ranks described their engines; every rank calls it.

        `exchange(key, value)` all-gathers through the Store. `job` and `group` are the same numbers on every rank.
        """
        what = f"rank {rank} of group {name!r}"
        peers = [each["peer"] for each in descriptions]
        check(lib.cl_engine_identify(engine.raw, job, peers[rank], 0), f"{what}: joining job {job:x}")
        hosts = group_hosts(descriptions)
        local = next(ranks for ranks in hosts if rank in ranks)
        fd, problem = _share_memory(local, rank, descriptions, exchange)
        try:
            problems = [each.decode() for each in exchange("mapped", problem.encode())]
            if any(problems):
                # Everybody sees the same answers, so everybody falls back.
                log.warning("%s: no shared memory (%s): using the network instead", what, next(filter(None, problems)))
                lib.cl_host_close_fd(fd)
                hosts, local, fd = tuple((each,) for each in range(size)), (rank,), -1
            for other in range(size):
                if other in local:
                    if other != rank:
                        _watch(engine, what, other, descriptions[other])
                else:
                    _add_peer(engine, what, other, descriptions[rank], descriptions[other])
            bells = b"".join(descriptions[each]["bell"].encode().ljust(32, b"\0") for each in local)
            keep = (ffi.new("uint16_t[]", peers), ffi.new("uint32_t[]", local), ffi.from_buffer(bells))
            options = ffi.new(
                "struct cl_group_options *",
                {
                    "id": group,
                    "rank": rank,
                    "size": size,
                    "peers": keep[0],
                    "local": keep[1],
                    "local_count": len(local),
                    "host_fd": fd,
                    "staging_bytes": STAGING_BYTES,
                    "spin_us": SPIN_US if len(local) <= len(os.sched_getaffinity(0)) else 0,
                    "bells": ffi.cast("const char *", keep[2]),
                },
            )
            out = ffi.new("cl_group **")
            check(lib.cl_group_open(engine.raw, options, out), f"{what}: opening the group")
        finally:
            lib.cl_host_close_fd(fd)
        try:
            exchange("open", b"")  # nobody's first packet or post comes before everybody is there to see it
        except BaseException:
            lib.cl_group_close(out[0])
            raise
        return NativeGroup(engine, name, rank, hosts, out[0], _interface(descriptions, rank))

    def submit(
        self,
        plan: Plan,
        source: int,
        target: int,
        dtype: base.DType,
        op: base.Op,
        *,
        timeout_s: float,
        priority: int = 0,
    ) -> NativeHandle:
        """See `base.Group.submit`."""
        out = ffi.new("cl_operation **")
        group = self._enter()
        try:
            status = lib.cl_submit(
                group,
                self._native_plan(plan),
                ffi.cast("void *", source),
                ffi.cast("void *", target),
                dtype,
                op,
                priority,
                _timeout_us(timeout_s),
                out,
            )
        finally:
            self._leave()
        if status != 0:
            raise self.error(status)
        return NativeHandle(self, out[0])

    def run(
        self,
        plan: Plan,
        source: int,
        target: int,
        dtype: base.DType,
        op: base.Op,
        *,
        timeout_s: float,
        priority: int = 0,
    ) -> None:
        """See `base.Group.run`."""
        group = self._enter()
        try:
            status = lib.cl_run(
                group,
                self._native_plan(plan),
                ffi.cast("void *", source),
                ffi.cast("void *", target),
                dtype,
                op,
                priority,
                _timeout_us(timeout_s),
            )
        finally:
            self._leave()
        if status != 0:
            raise self.error(status)

    def abort(self, reason: str) -> None:
        """See `base.Group.abort`."""
        log.warning("rank %d of group %r aborts: %s", self.rank, self.name, reason)
        with self._lock:
            if self._group is not None:
                lib.cl_group_abort(self._group, lib.CL_EABORTED)

    def close(self) -> None:
        """See `base.Group.close`."""
        with self._lock:
            group, self._group = self._group, None
            if group is None:
                return
            self._lost = self._culprit(group)
            if self._calls:
                lib.cl_group_abort(group, lib.CL_ECLOSED)
                self._idle.wait_for(lambda: self._calls == 0)
        lib.cl_group_close(group)
        self._plans.clear()
        self.engine.release()

    def error(self, status: int) -> CommError:
        """The exception for a status of one of this group's operations."""
        kind, remedy = _ERRORS.get(status, (CommError, "unknown status"))
        with self._lock:
            rank = self._lost if self._group is None else self._culprit(self._group)
        blame = "" if rank is None else f" (rank {rank})"
        text = ffi.string(lib.cl_error_text(status)).decode()
        return kind(f"rank {self.rank} of group {self.name!r}: {text}{blame}; {remedy}")

    def _culprit(self, group: Any) -> int | None:
        rank = ffi.new("uint32_t *")
        lib.cl_group_status(group, rank)
        return None if rank[0] == 0xFFFFFFFF else int(rank[0])

    def _enter(self) -> Any:
        with self._lock:
            if self._group is not None:
                self._calls += 1
                return self._group
        raise self.error(lib.CL_ECLOSED)

    def _leave(self) -> None:
        with self._lock:
            self._calls -= 1
            self._idle.notify_all()

    def _native_plan(self, plan: Plan) -> Any:
        known = self._plans.get(id(plan))
        if known is not None:
            return known[1]
        if len(self._plans) >= PLANS_LIMIT:
            self._plans.clear()
        out = ffi.new("cl_plan **")
        steps = ffi.from_buffer("struct cl_step[]", plan.steps) if len(plan.steps) else ffi.NULL
        successors = ffi.from_buffer("uint32_t[]", plan.successors) if len(plan.successors) else ffi.NULL
        # Plans know sizes, not tensors: the frontends vouch for INPUT and OUTPUT, the engine checks what is its own.
        unbounded = 1 << 62
        status = lib.cl_plan_create(
            steps,
            len(plan.steps),
            successors,
            len(plan.successors),
            plan.rank,
            plan.world_size,
            unbounded,
            unbounded,
            plan.scratch_bytes,
            self.staging_bytes,
            out,
        )
        check(status, f"rank {self.rank} of group {self.name!r}: loading a plan of {len(plan.steps)} steps")
        native = ffi.gc(out[0], lib.cl_plan_release)  # by whoever uses it last
        self._plans[id(plan)] = (plan, native)
        return native


def _timeout_us(timeout_s: float) -> int:
    return int(min(max(timeout_s * 1e6, 1), 1 << 63))  # 0 would mean for ever


def _share_memory(
    local: Sequence[int],
    rank: int,
    descriptions: Sequence[dict[str, Any]],
    exchange: Callable[[str, bytes], list[bytes]],
) -> tuple[int, str]:
    """A descriptor of the memory this host's ranks share (-1: none needed), and what went wrong, if anything."""
    fd = ffi.new("int32_t *", -1)
    problem = ""
    if len(local) > 1 and rank == local[0]:
        status = lib.cl_host_create(len(local), STAGING_BYTES, fd)
        problem = "" if status == 0 else f"rank {rank} cannot create shared memory"
    try:
        offers: list[int] = [json.loads(each) for each in exchange("memory", json.dumps(fd[0]).encode())]
    except BaseException:
        lib.cl_host_close_fd(fd[0])
        raise
    if len(local) > 1 and rank != local[0]:
        owner = local[0]
        status = -1 if offers[owner] < 0 else lib.cl_host_open(descriptions[owner]["pid"], offers[owner], fd)
        problem = "" if status == 0 else f"rank {rank} cannot open the shared memory of rank {owner}"
    return fd[0], problem


def _watch(engine: Engine, what: str, other: int, peer: dict[str, Any]) -> None:
    status = lib.cl_engine_watch_process(engine.raw, peer["peer"], peer["pid"])
    if status != 0:
        log.warning("%s: cannot watch rank %d, process %d: its death will show as a timeout", what, other, peer["pid"])


def _interface(descriptions: Sequence[dict[str, Any]], rank: int) -> str:
    """The interface through which this rank reaches all others."""
    one_host = len({each["host"] for each in descriptions}) == 1
    ports = sorted(descriptions[rank]["ports"], key=lambda port: port["loopback"] != one_host)
    return str(ports[0]["ifname"]) if ports else ""


def _add_peer(engine: Engine, what: str, other: int, own: dict[str, Any], peer: dict[str, Any]) -> None:
    paths = pair_paths(own, peer)
    if not paths:
        raise ConfigError(
            f"{what}: no network path to rank {other}: this host has {_addresses(own)}, that one {_addresses(peer)}; "
            f"name interfaces that can reach each other with COMMLAYER_IFNAME on every rank"
        )
    texts = [ffi.new("char[]", path.address.encode()) for path in paths]
    addresses = ffi.new("char *[]", texts)
    status = lib.cl_engine_add_peer(
        engine.raw,
        peer["peer"],
        len(paths),
        ffi.new("uint32_t[]", [path.local for path in paths]),
        ffi.cast("const char *const *", addresses),
        ffi.new("uint32_t[]", [path.port for path in paths]),
    )
    check(status, f"{what}: adding rank {other} at {_addresses(peer)}")


def _addresses(description: dict[str, Any]) -> str:
    return ", ".join(f"{port['ifname']} {port['address']}" for port in description["ports"]) or "no address"
