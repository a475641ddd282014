"""`NativeGroup`: a communicator on the native engine, a `base.Group` that runs plans.

Every call into the engine releases the GIL.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import CommError, ConfigError, OperationTimeoutError
from . import base
from .native import ERRORS, Engine, check, ffi, lib, log
from .paths import pair_paths

if TYPE_CHECKING:
    from ..plans.plan import Plan

STAGING_BYTES = 2 << 20
"""Staging per rank and operation: small enough to stay in the cache, large enough to amortise waking a peer."""

SPIN_US = 60
"""Longest spin before a blocked wait sleeps, where every rank of the host can have a core."""

TAG_MAX = 0xFFFFFFFE
ANY_SOURCE = 0xFFFFFFFF
"""What the engine takes for a rank that may be any."""


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


class NativeReceiveHandle(NativeHandle):
    """A `base.ReceiveHandle`: one receive in flight."""

    __slots__ = ()

    @property
    def source(self) -> int:
        """See `base.ReceiveHandle.source`."""
        rank = ffi.new("uint32_t *")
        status = lib.cl_operation_source(self._operation, rank)
        if status == lib.CL_EAGAIN:
            raise RuntimeError("the receive is still in flight: its source is not known yet; wait for it first")
        if status != 0:
            raise self._group.error(status)
        return int(rank[0])


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
        unreachable: frozenset[int] = frozenset(),
    ) -> None:
        self.engine = engine
        self.name = name
        self.rank = rank
        self.size = sum(map(len, hosts))
        self.hosts = hosts
        self.interface = interface
        self.staging_bytes = STAGING_BYTES
        self._group = group
        self._unreachable = unreachable
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._calls = 0  # threads inside the native group, which must not be freed under them
        self._plans: dict[int, Any] = {}  # by id(plan), as long as the plan lives
        self._lost: int | None = None

    @staticmethod
    def open(
        engine: Engine,
        name: str,
        rank: int,
        size: int,
        descriptions: Sequence[dict[str, Any]],
        job: int,
        key: bytes,
        group: int,
        exchange: Callable[[str, bytes], list[bytes]],
    ) -> NativeGroup:
        """Opens this rank's end of a group whose ranks described their engines; every rank calls it.

        `exchange(key, value)` all-gathers through the Store. `job`, its `key` (16 bytes, secret) and `group` are the
        same on every rank.
        """
        what = f"rank {rank} of group {name!r}"
        peers = [each["peer"] for each in descriptions]
        epoch = job & 0xFFFF  # of the job's lives this one: packets of the others are told from forged ones
        check(lib.cl_engine_identify(engine.raw, job, key, peers[rank], epoch), f"{what}: joining job {job:x}")
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
            unreachable = set()
            for other in range(size):
                if other == rank:
                    continue
                if pair_paths(descriptions[rank], descriptions[other]) or other not in local:
                    _add_peer(engine, what, other, descriptions[rank], descriptions[other])
                else:
                    unreachable.add(other)  # no network here at all: shared memory still does for the host's plans
                if other in local:
                    _watch(engine, what, other, descriptions[other])
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
        return NativeGroup(engine, name, rank, hosts, out[0], _interface(descriptions, rank), frozenset(unreachable))

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

    def send(self, source: int, length: int, to: int, tag: int, *, timeout_s: float, priority: int = 0) -> NativeHandle:
        """See `base.Group.send`."""
        self._check_message(to, tag)
        memory = ffi.cast("void *", source)
        return NativeHandle(self, self._start(lib.cl_send, to, tag, memory, length, priority, _timeout_us(timeout_s)))

    def receive(
        self,
        target: int,
        length: int,
        source: int | None,
        tag: int,
        *,
        timeout_s: float,
        priority: int = 0,  # noqa: ARG002  # the sender's counts
    ) -> NativeReceiveHandle:
        """See `base.Group.receive`."""
        self._check_message(source, tag)
        memory = ffi.cast("void *", target)
        rank = ANY_SOURCE if source is None else source
        return NativeReceiveHandle(self, self._start(lib.cl_receive, rank, tag, memory, length, _timeout_us(timeout_s)))

    def _check_message(self, other: int | None, tag: int) -> None:
        """Raises ConfigError for what cannot be the other rank or the tag of a message."""
        what = f"rank {self.rank} of group {self.name!r}"
        if other == self.rank:
            raise ConfigError(f"{what}: a rank cannot send to or receive from itself; copy the tensor")
        if other is not None and not 0 <= other < self.size:
            raise ConfigError(f"{what}: there is no rank {other}; ranks are 0 to {self.size - 1}")
        if other is None and self.size == 1:
            raise ConfigError(f"{what}: there is no other rank to receive from")
        if other in self._unreachable or len(self._unreachable) == self.size - 1:
            raise ConfigError(
                f"{what}: no network path to {'any other rank' if other is None else f'rank {other}'}, not even "
                f"loopback; set the interface lo up"
            )
        if not 0 <= tag <= TAG_MAX:
            raise ConfigError(f"{what}: tag {tag} is out of range; tags are 0 to {TAG_MAX}")

    def _start(self, function: Any, *arguments: Any) -> Any:
        """Calls a function of the engine that makes an operation of this group; returns the operation."""
        out = ffi.new("cl_operation **")
        group = self._enter()
        try:
            status = function(group, *arguments, out)
        finally:
            self._leave()
        if status != 0:
            raise self.error(status)
        return out[0]

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
        kind, remedy = ERRORS.get(status, (CommError, "unknown status"))
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
            return known
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
        lib.cl_plan_sign(out[0], plan.signature)
        native = ffi.gc(out[0], lib.cl_plan_release)  # by whoever uses it last
        self._plans[id(plan)] = native
        weakref.finalize(plan, self._plans.pop, id(plan), None).atexit = False
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
