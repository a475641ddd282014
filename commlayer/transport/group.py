"""`NativeGroup`: a communicator on the native engine, which runs plans.

Every call into the engine releases the GIL.
"""

from __future__ import annotations

import os
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ClosedError, CommError, ConfigError
from . import base
from .diagnosis import Diagnosis
from .fork import disowned_in_children
from .lags import Lag
from .log import log
from .native_handle import NativeHandle, NativeReceiveHandle, timeout_us_of
from .status import check, ffi, lib

if TYPE_CHECKING:
    from ..plans.plan import Plan
    from .call import Call

STAGING_BYTES = 2 << 20
"""Staging per rank and operation: it fits into the cache, and amortises the wake-up of a peer."""

TAG_MAX = 0xFFFFFFFE
ANY_SOURCE = NOBODY = 0xFFFFFFFF
"""The engine's number for "any rank", and for an unknown culprit."""

NO_CAUSES = (lib.CL_OK, lib.CL_ECLOSED, lib.CL_EABORTED)
"""States of an end of a group that do not explain why the other end has failed."""

LEAVE_S = 30.0
"""The longest wait for a thread that closes the second end. It takes milliseconds, but a signal handler that closes the
group may have interrupted that very thread."""

# The head of struct cl_operation_request: plan, input, output, timeout_us, dtype, op, and qos.priority, .treatment and
# .order. To pack them at once takes a quarter of the time that cffi needs to set the fields one by one, which shows in
# small collectives.
REQUEST_HEAD = struct.Struct("=QQQQiiBBH")
# All of struct cl_message_request, with the C compiler's padding: rank, tag, memory, length, priority, timeout_us,
# gate, done.
MESSAGE = struct.Struct("=IIQQIxxxxQQQ")


class NativeGroup:
    """A communicator on the native engine; see `base.Group`. Made by `joining.join`."""

    def __init__(
        self,
        diagnosis: Diagnosis,
        hosts: tuple[tuple[int, ...], ...],
        group: Any,
        interface: str,
        unreachable: frozenset[int] = frozenset(),
        *,
        packet_bytes: int,
        largest_packet_bytes: int,
        peers: Sequence[int],
    ) -> None:
        self.diagnosis = diagnosis
        self.engine = diagnosis.engine
        self.rank = diagnosis.rank
        self.size = sum(map(len, hosts))
        self.hosts = hosts
        self.interface = interface
        self.packet_bytes = packet_bytes
        self.largest_packet_bytes = largest_packet_bytes
        self.staging_bytes = STAGING_BYTES
        self._group = group
        self._unreachable = unreachable
        self._partners = frozenset(range(self.size)) - unreachable - {self.rank}
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._inside: list[None] = []  # an entry per thread inside the native group; it is freed when there are none
        self._plans: dict[int, tuple[int, Any]] = {}  # each living plan's address and owner, by id(plan)
        # For reuse: requests without a Qos, their bytes, and places for the operations that they become.
        self._requests: list[tuple[Any, Any, Any]] = []
        self._messages: list[tuple[Any, Any, Any]] = []
        self._failure: tuple[int | None, str, bool] = (None, "", False)  # of a closed group, see `_read_failure`
        self._end = lib.CL_ECLOSED  # the status of operations on a closed group
        self._peers = peers
        self.second: NativeGroup | None = None
        """The end of the same group on the second engine, for a part of long operations. It ends with this one. Either
        fails when an error of the other is made."""
        self._other: Callable[[], NativeGroup | None] = lambda: None
        self._left = threading.Event()
        self.on_failure: Callable[[], None] = lambda: None
        self.on_left: Callable[[], None] = lambda: None
        self.farewell: Callable[[], str] = str
        self.engine.lags.open(id(self), self._lags)
        self.is_inherited = False
        self._owner = os.getpid()
        disowned_in_children(self)

    def pair(self, second: NativeGroup) -> None:
        """Gives the group its end on the second engine, whose errors are those of this group from now on."""
        self.second = second
        self._other, second._other = weakref.ref(second), weakref.ref(self)
        second.diagnosis = self.diagnosis
        whole = weakref.proxy(self)
        second.on_failure = lambda: whole.on_failure()
        second.farewell = lambda: whole.farewell()

    def disown(self) -> None:
        """See `fork.Owned`."""
        self.is_inherited = True
        self._group = None
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._inside = []

    def check_process(self) -> None:
        if self.is_inherited:
            raise self.error(lib.CL_ECLOSED)

    def submit(self, request: base.Request, call: Call | None = None) -> NativeHandle:
        plan, _, _, dtype, op, _, priority, order, qos, codec_key, gate, done = request
        if plan.encodes and (dtype, op) != (base.DType.F32, base.Op.SUM):
            raise ConfigError(f"{self.who}: {op.name} of {dtype.name} with a codec: codecs are for sums of float32")
        native_qos = None if qos is None else self._native_qos(qos, priority, order, dtype, op)
        group = self._enter()
        try:
            native = self._native_request(request)
            if native_qos is not None:
                native[0].qos = native_qos[0]
            native[0].codec_key = codec_key
            has_words = gate != 0 or done != 0
            if has_words:
                native[0].gate = ffi.cast("uint32_t *", gate)
                native[0].done = ffi.cast("uint32_t *", done)
            status = lib.cl_submit(group, native[0], native[2])
            operation = native[2][0]
            if native_qos is None and not has_words:
                self._requests.append(native)
        finally:
            self._leave()
        if status != 0:
            raise self.error(status, call)
        return NativeHandle(self, operation, call)

    def run(self, request: base.Request, call: Call | None = None) -> None:
        group = self._enter()
        try:
            native = self._native_request(request)
            native[0].codec_key = 0
            status = lib.cl_run(group, native[0])
            self._requests.append(native)
        finally:
            self._leave()
        if status != 0:
            raise self.error(status, call)

    def _native_request(self, request: base.Request) -> tuple[Any, Any, Any]:
        native = _free_or_new(self._requests, "struct cl_operation_request *")
        plan, source, target, dtype, op, timeout_s, priority, order, *_ = request
        address, timeout_us = self._native_plan(plan), timeout_us_of(timeout_s)
        REQUEST_HEAD.pack_into(native[1], 0, address, source, target, timeout_us, dtype, op, priority, 0, order)
        return native

    def send(self, message: base.MessageRequest, call: Call | None = None) -> NativeHandle:
        return NativeHandle(self, self._start(lib.cl_send, message, message.priority, call), call)

    def receive(self, message: base.MessageRequest, call: Call | None = None) -> NativeReceiveHandle:
        return NativeReceiveHandle(self, self._start(lib.cl_receive, message, 0, call), call)

    def _check_message(self, other: int | None, tag: int) -> None:
        """Raises ConfigError if no message can go to, or come from, rank `other` with this tag."""
        problem = ""
        if other == self.rank:
            problem = "a rank cannot send to itself or receive from itself; copy the tensor"
        elif other is not None and not 0 <= other < self.size:
            problem = f"the group has no rank {other}; use 0 to {self.size - 1}"
        elif other is None and self.size == 1:
            problem = "the group has no other rank to receive from; use a larger group"
        elif other in self._unreachable or len(self._unreachable) == self.size - 1:
            named = "any other rank" if other is None else f"rank {self.diagnosis.number(other)}"
            problem = f"no network path leads to {named}, not even loopback; set the interface lo up"
        elif not 0 <= tag <= TAG_MAX:
            problem = f"tag {tag} is out of range; use 0 to {TAG_MAX}"
        if problem:
            raise ConfigError(f"{self.who}: {problem}")

    def _start(self, function: Any, message: base.MessageRequest, priority: int, call: Call | None) -> Any:
        """Asks the engine for a point-to-point operation; returns the operation."""
        address, length, peer, tag, timeout_s, _, gate, done = message
        if peer not in self._partners or not 0 <= tag <= TAG_MAX:
            self._check_message(peer, tag)
        native = _free_or_new(self._messages, "struct cl_message_request *")
        request, memory, out = native
        rank = ANY_SOURCE if peer is None else peer
        MESSAGE.pack_into(memory, 0, rank, tag, address, length, priority, timeout_us_of(timeout_s), gate, done)
        group = self._enter()
        try:
            status = function(group, request, out)
        finally:
            self._leave()
        operation = out[0]
        self._messages.append(native)
        if status != 0:
            raise self.error(status, call)
        return operation

    def abort(self, reason: str) -> None:
        with self._lock:  # in a forked child there is no group
            if self._group is None:
                return
            if reason:
                log.warning("%s aborts: %s", self.who, reason)
            else:  # the caller means it, as `elastic` where ranks have gone
                log.info("%s ends: abort()", self.who)
            self.diagnosis.is_aborted_here = True
        reason = reason or f"rank {self.diagnosis.number(self.rank)} aborted its process group"
        if self.diagnosis.inquiry is not None:
            # The reason goes before the abort: peers that hear of it look for the reason, and not for long.
            self.diagnosis.inquiry.abort(reason)
        if self.second is not None:
            self.second._abort()
        self._abort()

    def fail_other(self) -> None:
        """Ends the group's end on the other engine, if there is one, and if this end has failed. Never blocks."""
        if (other := self._other()) is None:
            return
        with self._lock:
            has_failed = self._group is None or lib.cl_group_status(self._group, ffi.NULL) != lib.CL_OK
        if has_failed:
            other._fail()

    def _fail(self) -> None:
        """Ends all operations of this end, here and on the peers: the other end has failed."""
        with self._lock:
            if self._group is not None:
                lib.cl_group_abort(self._group, lib.CL_EABORTED)

    def _abort(self) -> None:
        with self._lock:
            if self._group is None:  # another thread was faster
                return
            lib.cl_group_abort(self._group, lib.CL_EABORTED)
            self._end = lib.cl_group_status(self._group, ffi.new("uint32_t *"))  # the first failure
        self._leave_engine()

    def rates(self) -> tuple[float, float]:
        others = [self._peers[rank] for host in self.hosts if self.rank not in host for rank in host]
        found = {
            self.engine.ports.address(path.port): (path.delivered_bytes, path.arrived_bytes)
            for _, _, path in self.engine.routes.counters(others)
            if not path.is_dead
        }
        return sum(sent for sent, _ in found.values()), sum(received for _, received in found.values())

    def awaited(self) -> list[int]:
        flags = ffi.new("uint8_t[]", self.size)
        with self._lock:
            if self._group is not None:
                lib.cl_group_awaited(self._group, flags)
        beside = [] if self.second is None else self.second.awaited()
        return [rank for rank, flag in enumerate(flags) if flag or rank in beside]

    def lost(self) -> list[int]:
        number = ffi.new("uint32_t *")
        with self._lock:
            if self._group is None:
                return []
            found = [lib.cl_engine_incarnation(self.engine.raw, peer, number) for peer in self._peers]
        beside = [] if self.second is None else self.second.lost()
        return [rank for rank, status in enumerate(found) if status == lib.CL_EPEERLOST or rank in beside]

    def status(self) -> tuple[str, int | None]:
        status, culprit = self._status()
        if self.second is not None and status in (lib.CL_OK, lib.CL_EABORTED):
            other, its_culprit = self.second._status()
            if other not in NO_CAUSES or (status == lib.CL_OK and other == lib.CL_EABORTED):
                status, culprit = other, its_culprit
        if status in (lib.CL_OK, lib.CL_ECLOSED):
            return "", None
        return ffi.string(lib.cl_error_text(status)).decode(), None if culprit == NOBODY else culprit

    def _status(self) -> tuple[int, int]:
        culprit = ffi.new("uint32_t *")
        with self._lock:
            if self._group is None:  # what an aborted group failed with; a closed one has not failed
                return self._end, NOBODY if self._failure[0] is None else self._failure[0]
            return int(lib.cl_group_status(self._group, culprit)), int(culprit[0])

    def _lags(self) -> dict[int, Lag]:
        """The lags of the ranks by their number in the job."""
        lags = ffi.new("struct cl_lag[]", self.size)
        lib.cl_group_read_lags(self._group, lags, self.size)
        return {peer: Lag(lag.last, lag.waited_us) for peer, lag in zip(self._peers, lags, strict=True)}

    def close(self) -> None:
        self._leave_engine()
        self._end = lib.CL_ECLOSED

    def _leave_engine(self) -> None:
        """Ends everything in flight, and the use of the engine. Idempotent."""
        if self.is_inherited:
            return
        if self.diagnosis.waits is not None:
            self.diagnosis.waits.close()
        if self.second is not None:
            self.second._leave_engine()
            self.second._left.wait(LEAVE_S)  # another thread may be closing it
        self.engine.lags.close(id(self))  # the group goes after this: no thread reads its lags from here on
        with self._lock:
            group, self._group = self._group, None
            if group is None:
                return
            self._failure = self._read_failure(group)
        try:
            with self._lock:
                if self._inside:
                    lib.cl_group_abort(group, lib.CL_ECLOSED)
                    self._idle.wait_for(lambda: not self._inside)
            lib.cl_group_close(group)
        finally:
            self._left.set()
        on_left, self.on_left = self.on_left, lambda: None  # its owner and this group would keep each other
        on_left()
        self._plans.clear()
        self.engine.release()

    @property
    def who(self) -> str:
        """See `base.Group.who`."""
        return self.diagnosis.who

    def error(self, status: int, call: Call | None = None) -> CommError:
        """The exception for a status of one of this group's operations."""
        if self.is_inherited:
            return ClosedError(
                f"{self.who}: the group belongs to process {self._owner}, and this is process {os.getpid()}, forked "
                f"from it; communicate in process {self._owner}, or make a process group here after "
                f"destroy_process_group"
            )
        if status != lib.CL_ECLOSED:
            self.on_failure()
            self.fail_other()
        other = self._other()
        if status == lib.CL_EABORTED and other is not None:
            cause, _ = other._status()
            if cause not in NO_CAUSES:
                return other.error(cause, call)
        with self._lock:
            culprit, detail, left = self._failure if self._group is None else self._read_failure(self._group)
        return self.diagnosis.error(status, culprit, detail, call, self.farewell, left=left)

    def _read_failure(self, group: Any) -> tuple[int | None, str, bool]:
        """The culprit, if it is known; for ranks that run an operation in different classes, these, too; and whether
        the culprit has closed the group, and not died."""
        rank, own, theirs = (ffi.new("uint32_t *") for _ in range(3))
        status, detail = lib.cl_group_status(group, rank), ""
        culprit = None if rank[0] == 0xFFFFFFFF else int(rank[0])
        if status == lib.CL_EMISMATCH and lib.cl_group_classes(group, rank, own, theirs) != 0:
            number = self.diagnosis.number
            detail = f": priority {own[0]} on rank {number(self.rank)}, {theirs[0]} on rank {number(rank[0])}"
        left = status == lib.CL_EPEERLOST and culprit is not None and lib.cl_group_left(group, culprit) != 0
        return culprit, detail, left

    def _enter(self) -> Any:
        # A list needs no lock. The order matters: whoever closes the group looks for threads when it has taken it away.
        self._inside.append(None)
        group = self._group
        if group is None:
            self._leave()
            raise self.error(self._end)
        return group

    def _leave(self) -> None:
        self._inside.pop()
        if self._group is None:
            with self._lock:
                self._idle.notify_all()

    def _native_qos(self, qos: base.Qos, priority: int, order: int, dtype: base.DType, op: base.Op) -> Any:
        wrong = ""
        if not 0 <= qos.loss_bound <= base.LOSS_BOUND_MAX:
            wrong = f"loss_bound={qos.loss_bound}: use 0 to {base.LOSS_BOUND_MAX}"
        elif qos.treatment not in list(base.Treatment):
            wrong = f"treatment={qos.treatment}: use one of {', '.join(treatment.name for treatment in base.Treatment)}"
        elif qos.loss_bound and (dtype not in base.FLOATS or op != base.Op.SUM):
            wrong = f"{op.name} of {dtype.name}: use it for sums of floating-point numbers only"
        elif qos.protect and qos.protect_bytes <= 0:
            wrong = f"protect_bytes={qos.protect_bytes}: use the bytes per bit of the map, above 0"
        if wrong:
            raise ConfigError(f"{self.who}: partial operation with {wrong}")
        return ffi.new(
            "struct cl_qos *",
            {
                "priority": priority,
                "treatment": qos.treatment,
                "order": order,
                "loss_bound": qos.loss_bound,
                "deadline_us": qos.deadline_us,
                "protect": ffi.cast("const uint64_t *", qos.protect),
                "protect_bytes": qos.protect_bytes,
            },
        )

    def _native_plan(self, plan: Plan) -> int:
        """The address of the engine's copy of the plan."""
        known = self._plans.get(id(plan))
        if known is not None:
            return known[0]
        out = ffi.new("cl_plan **")
        steps = ffi.from_buffer("struct cl_step[]", plan.steps) if len(plan.steps) else ffi.NULL
        successors = ffi.from_buffer("uint32_t[]", plan.successors) if len(plan.successors) else ffi.NULL
        # Plans know no tensors: the frontend vouches for the sizes of INPUT and OUTPUT, the engine checks the others.
        unbounded = 1 << 62
        options = {
            "steps": steps,
            "step_count": len(plan.steps),
            "successors": successors,
            "successor_count": len(plan.successors),
            "rank": plan.rank,
            "world_size": plan.world_size,
            "input_bytes": unbounded,
            "output_bytes": unbounded,
            "scratch_bytes": plan.scratch_bytes,
            "staging_bytes": self.staging_bytes,
            "signature": plan.signature,
        }
        status = lib.cl_plan_create(ffi.new("struct cl_plan_options *", options), out)
        check(status, f"{self.who}: loading a plan of {len(plan.steps)} steps")
        native = ffi.gc(out[0], lib.cl_plan_release)  # freed after its last use, here or in the engine
        address = int(ffi.cast("uintptr_t", native))
        kept = self._plans.setdefault(id(plan), (address, native))
        if kept[1] is native:  # else another thread was faster, and may be using its copy
            weakref.finalize(plan, self._plans.pop, id(plan), None).atexit = False
        return kept[0]


def _free_or_new(free: list[tuple[Any, Any, Any]], kind: str) -> tuple[Any, Any, Any]:
    """A request that nobody uses: the struct, its bytes, and a place for the operation that it becomes."""
    try:
        return free.pop()
    except IndexError:
        made = ffi.new(kind)
        return made, ffi.buffer(made), ffi.new("cl_operation **")
