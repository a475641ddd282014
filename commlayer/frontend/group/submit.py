"""`Submitter`: turns a collective on memory into operations of the engine, and those into a work.

It finds the plans, keeps memory alive while the engine may touch it, and copies results to the caller's tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from torch._C._distributed_c10d import Work

from ...compress.codec import CodecPair
from ...loss.operation_policy import PartialPolicy
from ...plans.cache import PlanCache
from ...plans.delivery import Lengths, deliver
from ...plans.plan import Plan
from ...plans.select import Collective, Settings, plan_for
from ...transport.base import DType, Group, Handle, MessageRequest, Op, Qos, Request
from ...transport.call import Call, Calls
from ..work.context import NeedsHostError, current_label, current_order, current_priority, current_words
from ..work.work import CommWork, DividedHandle, JoinedHandle, ReceiveWork, join
from .profile import profiled
from .shares import LEAST_BYTES, Shares, Store
from .tensors import Kind, are_plain, check_distinct, copy_back, flatten, is_stretch, space

HandleT = TypeVar("HandleT", bound=Handle)
StartT = TypeVar("StartT", bound=Callable[..., Any])

UNSET = timedelta(milliseconds=-1)
"""torch's value in the options of an operation that has the timeout of its group."""

SCALARS_KEPT = 256
"""The latest works of one element, which are kept in any case."""

HOSTS_LEAST = 3
"""Shares need so many hosts: between two, every link carries as much, whatever they are."""

UNWAITED_MAX = 1 << 16
"""Works of one element that are kept until a caller waits for them: a job that never waits must not grow."""


DIVIDED = ("all_reduce", "broadcast", "reduce")
"""The collectives of which each engine can do a part: one range of every rank's memory."""

DIVIDED_LEAST_BYTES = 1 << 20
"""Shorter ones would gain less than it costs to wake a second thread."""

DIVIDED_AT = 4096
"""The parts begin at multiples of so many elements: whole lines of caches, and whole blocks of the codecs."""

SECOND_KEY = 1 << 63
"""The bit that the codec key of a second part has, and no key of a call."""


class Operation(NamedTuple):
    """One operation of the engine: the part of its `Request` that differs within a collective."""

    plan: Plan
    source: int
    target: int
    dtype: DType
    op: Op


class SecondOperation(Operation):
    """An operation of the second engine."""

    __slots__ = ()


class Submitter:
    """Starts the operations of one group.

    `timeout` returns the group's current timeout, for operations that have none of their own. With a `store`, the
    hosts' shares of sums follow the rates of their links. With `second`, the end of the group on a second engine, that
    one does half of each long operation.
    """

    def __init__(
        self,
        group: Group,
        settings: Settings,
        priority: int,
        timeout: Callable[[], timedelta],
        calls: Calls | None = None,
        store: Store | None = None,
        second: Group | None = None,
    ) -> None:
        self._group = group
        self._second = second
        self._settings = settings
        self._priority = priority
        self._timeout = timeout
        self._plans = PlanCache()
        self._shares = None
        if store is not None and len(group.hosts) >= HOSTS_LEAST:
            self._shares = Shares(group, settings, store, lambda: timeout().total_seconds())
        self.calls = calls or Calls()
        """The calls of the group."""
        self.profile: Callable[[Call, StartT], StartT] = lambda _, start: start
        """Returns a function that starts a call: the given one, or that with an event in torch's profiler."""
        self._in_flight: deque[tuple[Handle, list[Tensor]]] = deque()
        self._scalars: deque[CommWork] = deque()
        self._coalesced: list[CommWork] | None = None
        self._lock = threading.Lock()

    def collective(
        self,
        name: Collective,
        kind: Kind,
        count: int,
        source: Tensor,
        target: Tensor,
        root: int = 0,
        *,
        partial: PartialPolicy | None = None,
        pair: CodecPair | None = None,
        signed: tuple[object, ...] = (),
    ) -> list[Operation]:
        """The operations for a collective of `plan_for` on `count` elements: one, two with a second engine, or none if
        `count` is 0.

        Every rank passes the same count, so all ranks start the operation or none does. With `partial`, contributions
        may be lost: the caller starts the operation with `partial.qos`. With `pair`, messages between hosts are
        encoded. `signed`: see `OperationPolicy`.
        """
        if count == 0:
            return []
        itemsize = source.element_size() // kind.parts
        length = count * kind.parts * itemsize
        settings = self._settings if partial is None else partial.settings
        half = 0  # the elements of the first part; 0: it is whole
        if self._second is not None and partial is None and name in DIVIDED and length >= DIVIDED_LEAST_BYTES:
            self.check_no_words()  # words tell the end of one operation; which ranks have some depends on the moment
            half = self._half(count, source.element_size(), _coded(settings, pair))
        weights: tuple[int, ...] = ()
        if self._shares is not None and name == "all_reduce" and kind.op == Op.SUM and length >= LEAST_BYTES:
            if partial is not None or pair is not None:
                self.check_no_words()  # `start` may refuse them, and each all-reduce must ask for weights once
            weights = self._shares.weights(length, _coded(settings, pair), 2 if half else 1)
        partial_key = None if partial is None else partial.plan_key
        plans = []
        for elements in (half, count - half) if half else (count,):
            numel = elements * kind.parts
            key = (name, numel, itemsize, kind.average, root, partial_key, kind.element, signed, pair, weights)
            plan = self._plans.find(key)
            if plan is None:
                coded = _coded(settings, pair)
                made = plan_for(
                    name,
                    rank=self._group.rank,
                    hosts=self._group.hosts,
                    numel=numel,
                    itemsize=itemsize,
                    average=kind.average,
                    root=root,
                    element=kind.element,
                    signed=signed,
                    settings=dataclasses.replace(coded, weights=weights) if weights else coded,
                )
                plan = self._plans.add(key, made)
            plans.append(plan)
        operations = [Operation(plans[0], source.data_ptr(), target.data_ptr(), kind.dtype, kind.op)]
        if half:
            offset = half * source.element_size()
            places = source.data_ptr() + offset, target.data_ptr() + offset
            operations.append(SecondOperation(plans[1], *places, kind.dtype, kind.op))
        return operations

    def _half(self, count: int, element_bytes: int, settings: Settings) -> int:
        """The elements of the first of two parts. 0: the operation stays whole, as only one part would be encoded."""
        half = -(-count // (2 * DIVIDED_AT)) * DIVIDED_AT
        is_short = settings.is_short(len(self._group.hosts), (count - half) * element_bytes)
        return 0 if settings.codecs is not None and is_short else half

    def delivery(
        self,
        what: tuple[object, ...],
        sent: Lengths,
        received: Lengths,
        source: Tensor,
        target: Tensor,
        *,
        same: bool = False,
    ) -> list[Operation]:
        """The operation that delivers bytes, see `plans.delivery`; also for 0 bytes, because other ranks may have some.

        `what` identifies the collective, and is the same on all ranks.
        """
        group, staging_bytes = self._group, self._settings.staging_bytes
        plan = self._plans.get(
            (what, sent, received, same),
            lambda: deliver(group.rank, group.hosts, sent, received, staging_bytes, same=same, what=what),
        )
        return [Operation(plan, source.data_ptr(), target.data_ptr(), DType.U8, Op.SUM)]

    def barrier(self) -> list[Operation]:
        """The operation of a barrier."""
        group, settings = self._group, self._settings
        plan = self._plans.get(
            "barrier",
            lambda: plan_for("barrier", rank=group.rank, hosts=group.hosts, numel=0, itemsize=1, settings=settings),
        )
        return [Operation(plan, 0, 0, DType.U8, Op.SUM)]

    def start(
        self,
        call: Call,
        operations: Sequence[Operation],
        opts: Any,
        results: list[Tensor],
        memory: list[Tensor],
        copies: list[tuple[Tensor, list[Tensor]]],
        *,
        qos: Qos | None = None,
        priority: int | None = None,
        codec_key: int | None = None,
        finish: Callable[[], None] | None = None,
    ) -> CommWork:
        """Runs or submits a call's operations. `memory` stays alive until they end; then `copies` (from, to) are done,
        or `finish` runs.

        `qos` None: nothing is lost. `priority` None: that of the context (`priority.py`), else of the group.
        `codec_key` None: nothing is encoded.
        """
        words = current_words()
        if words is not None:
            if len(operations) != 1 or copies or finish or qos is not None or codec_key is not None:
                raise NeedsHostError
            words.check(operations[0].source, operations[0].target)
        timeout: timedelta = opts.timeout
        if timeout == UNSET:
            timeout = self._timeout()
        timeout_s = timeout.total_seconds()
        priority = self._class() if priority is None else priority
        call.priority, call.label = priority, current_label()
        call.weights = operations[0].plan.weights if operations else ()
        if copies:
            check_distinct(copies)
            finish = functools.partial(copy_back, copies)
        self.calls.begin(call)
        is_plain = words is None and qos is None and codec_key is None
        is_divided = self._second is not None and _is_divided(operations)
        if is_plain and not is_divided and not getattr(opts, "asyncOp", True):
            self.profile(call, self._run)(call, operations, timeout_s, priority, finish)
            return CommWork(None, results, call=call)
        gate, done = (0, 0) if words is None else words[:2]
        shared = timeout_s, priority, current_order(), qos, codec_key or 0, gate, done
        handles = self.profile(call, self._submit)(call, operations, memory, shared)
        if not handles:
            call.ended_s = call.submitted_s
            return CommWork(None, results, call=call)
        kind = DividedHandle if is_divided else JoinedHandle
        joined = call.handle = handles[0] if len(handles) == 1 else kind(handles)
        work = CommWork(joined, results, memory, finish, call=call)
        if len(results) == 1 and results[0].numel() == 1:
            self._keep_scalar(work)
        return self._noted(work)

    def _run(
        self,
        call: Call,
        operations: Sequence[Operation],
        timeout_s: float,
        priority: int,
        finish: Callable[[], None] | None,
    ) -> None:
        """Runs a call's operations, and returns when they have ended."""
        self.calls.note_callers(call)
        try:
            for operation in operations:
                self._group.run(Request(*operation, timeout_s=timeout_s, priority=priority), call=call)
        except BaseException:
            call.is_failed = True
            raise
        call.ended_s = time.monotonic()
        if finish is not None:
            finish()
        if self._in_flight:
            with self._lock:
                self._let_go()

    def _submit(
        self, call: Call, operations: Sequence[Operation], memory: list[Tensor], shared: tuple[Any, ...]
    ) -> list[Handle]:
        """Starts a call's operations. `shared`: the rest of their requests. All that can wait comes afterwards: packets
        leave first."""
        handles = []
        try:
            for operation in operations:
                request, group = Request(*operation, *shared), self._group
                if self._second is not None and isinstance(operation, SecondOperation):
                    # The blocks of both parts have the numbers from 0 on: another key gives them other rotations.
                    request, group = request._replace(codec_key=request.codec_key ^ SECOND_KEY), self._second
                handle = group.submit(request, call=call)
                self._keep(handle, memory)
                handles.append(handle)
        except BaseException:
            call.is_failed = True  # no rank waits for it
            raise
        finally:
            self.calls.note_callers(call)
        return handles

    @profiled
    def send(self, tensors: list[Tensor], to: int, tag: int) -> Work | None:
        """Sends one tensor to another rank, which receives it with the same tag. None: as of `Collectives`."""
        if len(tensors) != 1:
            return None
        source = tensors[0]
        if not is_stretch(source):
            if not are_plain(tensors):
                return None
            source = flatten(tensors)
        return self._message("send", self._group.send, CommWork, tensors, source, to, tag)

    @profiled
    def receive(self, tensors: list[Tensor], source: int | None, tag: int) -> Work | None:
        """Receives one tensor from a rank or, with None, from any. None: as of `Collectives`."""
        if len(tensors) != 1:
            return None
        target, finish = tensors[0], None
        if not is_stretch(target):
            if not are_plain(tensors):
                return None
            target = space(tensors)
            finish = functools.partial(copy_back, [(target, tensors)])
        return self._message("receive", self._group.receive, ReceiveWork, tensors, target, source, tag, finish)

    def _message(
        self,
        name: str,
        start: Callable[..., Handle],
        kind: type[CommWork],
        tensors: list[Tensor],
        memory: Tensor,
        other: int | None,
        tag: int,
        finish: Callable[[], None] | None = None,
    ) -> Work:
        """Starts a message from or to `memory`. All that can wait comes afterwards, as in `_submit`."""
        address, words, gate, done = memory.data_ptr(), current_words(), 0, 0
        if words is not None:
            words.check(address)
            gate, done = words[:2]
        priority, shapes, label = self._class(), [tensors[0].shape], current_label()
        if name == "send":
            call = Call(name, memory.dtype, shapes, (), "", other, tag, (), priority, label)
        else:
            call = Call(name, memory.dtype, (), shapes, "", other, tag, (), None, label)
            gate = 0  # it reads nothing
        timeout_s = self._timeout().total_seconds()
        message = MessageRequest(address, memory.nbytes, other, tag, timeout_s, priority, gate, done)
        self.calls.begin(call)
        held = [memory]
        try:
            call.handle = handle = self.profile(call, start)(message, call=call)
            if not handle.done():
                self._keep(handle, held)
        except BaseException:
            call.is_failed = True
            raise
        finally:
            self.calls.note_callers(call)
        return self._noted(kind(handle, tensors, held, finish, call=call))

    @property
    def local(self) -> tuple[int, ...]:
        """The ranks of this rank's host."""
        return next(host for host in self._group.hosts if self._group.rank in host)

    def check_no_words(self) -> None:
        """Raises NeedsHostError, before anything has started, if the operation that starts here has words."""
        if current_words() is not None:
            raise NeedsHostError

    def begin_coalescing(self) -> None:
        """Also notes all works from now on, for `end_coalescing`."""
        self._coalesced = []

    def end_coalescing(self) -> Work:
        """One work for all operations since `begin_coalescing`."""
        works, self._coalesced = self._coalesced or [], None
        return join(works)

    def is_busy(self) -> bool:
        """Whether an operation of this rank has not ended."""
        with self._lock:
            in_flight = [handle for handle, _ in self._in_flight]
        return not all(handle.done() for handle in in_flight) or any(
            call.is_running() for call in list(self.calls.latest)
        )

    def forget(self) -> None:
        """Frees the memory that was kept for the engine, which must have left the group."""
        with self._lock:
            self._in_flight.clear()
            self._scalars.clear()

    def _class(self) -> int:
        """The class of an operation without a policy of its own."""
        current = current_priority()
        return self._priority if current is None else current

    def _noted(self, work: CommWork) -> CommWork:
        coalesced = self._coalesced
        if coalesced is not None:
            coalesced.append(work)
        return work

    def _keep(self, handle: Handle, memory: list[Tensor]) -> None:
        """Keeps an operation's memory until it ends, whatever the caller does with the work."""
        with self._lock:
            self._let_go()
            self._in_flight.append((handle, memory))

    def _keep_scalar(self, work: CommWork) -> None:
        """Keeps the work of one element until a caller has waited for it.

        DDP.join() gives such a work to C++ alone. C++ keeps only its own part of a work alive, and would wait for ever
        on that. It waits in the backward pass, however many other operations were started in between.
        """
        with self._lock:
            scalars = self._scalars
            scalars.append(work)
            while len(scalars) > SCALARS_KEPT:
                if len(scalars) <= UNWAITED_MAX and not scalars[0].waited:
                    scalars.rotate(-1)  # the next call looks at another one
                    return
                scalars.popleft()

    def _let_go(self) -> None:
        """Forgets the operations that have ended, up to the first that has not.

        That one moves to the end of the queue, because a receive may wait for long: the next call looks at others.
        """
        while self._in_flight:
            if not self._in_flight[0][0].done():
                self._in_flight.rotate(-1)
                return
            self._in_flight.popleft()


def _is_divided(operations: Sequence[Operation]) -> bool:
    return any(isinstance(operation, SecondOperation) for operation in operations)


def _coded(settings: Settings, pair: CodecPair | None) -> Settings:
    if pair is None:
        return settings
    return dataclasses.replace(settings, codecs=pair[:2], keep_errors=pair.keeps_errors, keep_sums=pair.keeps_sums)
