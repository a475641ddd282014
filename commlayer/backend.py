"""The `commlayer` backend of torch.distributed.

`CommProcessGroup` is a hybrid: it holds a complete gloo group, and takes from it the collectives that the engine makes
faster. What it does not take (point to point, gather, all-to-all, other devices, sparse tensors, bitwise reductions)
falls through to gloo. The two never share a channel, so their operations need no common order.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    Backend,
    BarrierOptions,
    BroadcastOptions,
    ReduceScatterOptions,
    Work,
    _DistributedBackendOptions,
)

from .config import Config, Policy
from .errors import ConfigError
from .plans.plan import Plan
from .plans.select import Settings, plan_for
from .tensors import MOVES, REDUCTIONS, Kind, are_alike, are_plain, copy_back, flatten, space
from .transport.base import DType, Handle, Op
from .transport.bootstrap import Rendezvous, connect
from .work import CommWork, JoinedHandle

NAME = "commlayer"

PLANS_LIMIT = 4096
"""Plans a group remembers before it forgets all of them: a job whose sizes never repeat must not grow."""

_UNSET = timedelta(milliseconds=-1)  # what torch writes into an operation's options for "as the group says"

OptionsT = TypeVar("OptionsT")


class Options(Backend.Options):
    """What to pass as `pg_options=`, or in a DeviceMesh's `backend_override`, to give a group its policy."""

    def __init__(self, policy: Policy | None = None, *, timeout: timedelta = timedelta(minutes=30)) -> None:
        super().__init__(NAME, timeout)
        self.policy = policy or Policy()
        """Of all operations of the group."""


class _Launch(NamedTuple):
    """One operation of the engine: the arguments of `Group.submit` that differ from one to the next."""

    plan: Plan
    source: int
    target: int
    dtype: DType
    op: Op


class CommProcessGroup(dist.ProcessGroup):
    """A process group whose collectives run on the native engine. torch makes it, see `create`.

    Operations of one group run in the order they are called, which must be the same on all ranks; any thread may call
    them. The collectives have the names, arguments and errors of `torch.distributed.ProcessGroup`.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str,
        global_ranks: Sequence[int] = (),
        policy: Policy | None = None,
    ) -> None:
        # The stub in torch gives the signature of the C++ class; only this one makes an object that C++ calls back.
        super().__init__(rank, size)  # type: ignore[call-arg]
        config = Config.from_environment()
        self.policy = policy or Policy()
        """Of all operations of this group."""
        self.closed = False
        """Whether `shutdown` or `abort` was called."""
        rendezvous = Rendezvous(store, name, rank, size, timeout)
        peer = global_ranks[rank] if global_ranks else rank
        self._native = connect(rendezvous, config, peer=peer, is_world=not global_ranks)
        self._gloo = dist.ProcessGroupGloo(
            dist.PrefixStore("gloo", rendezvous.store), rank, size, _gloo_options(self._native.interface, timeout)
        )
        # The same gloo as a plain group: the gloo object itself lacks today's names of the collectives.
        self._fallback = dist.ProcessGroup(store, rank, size)
        for group in (self, self._fallback):
            for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
                group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, self._gloo)
            group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        self._settings = Settings(
            algorithm=self.policy.algorithm or config.algorithm,
            deterministic=self.policy.deterministic,
            staging_bytes=self._native.staging_bytes,
        )
        if config.segment_bytes:
            self._settings = dataclasses.replace(self._settings, segment_bytes=config.segment_bytes)
        self._plans: dict[tuple[str, int, int, bool, int], Plan] = {}
        self._in_flight: deque[tuple[Handle, list[Tensor]]] = deque()
        self._lock = threading.Lock()

    # What is ours. One method stands for all overloads of the name, which the stub wants to see one by one (hence the
    # `override` ignored). It either finds its arguments plain and starts the engine, or hands them untouched to gloo,
    # which also words the complaint when they make no sense. The aliases are the names of torch 2.11 and 2.12.

    def allreduce(  # type: ignore[override]
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> Work:
        tensors, opts = _as_list(tensors), _options(AllreduceOptions, op if opts is None else opts, timeout)
        work = self._all_reduce(tensors, opts) if len(tensors) == 1 else None
        return work or self._fallback.allreduce(tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        opts = _options(AllreduceCoalescedOptions, opts)
        return self._all_reduce(tensors, opts) or self._fallback.allreduce_coalesced(tensors, opts)

    def reduce_scatter(  # type: ignore[override]
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> Work:
        opts = _options(ReduceScatterOptions, op if opts is None else opts, timeout)
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        work = None
        if len(outputs) == len(inputs) == 1 and are_alike(inputs[0], outputs[0]):
            work = self._reduce_scatter([(outputs[0], inputs[0])], opts)
        return work or self._fallback.reduce_scatter(outputs, inputs, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:  # noqa: A002
        opts = _options(ReduceScatterOptions, opts)
        return self._reduce_scatter([(output, [input])], opts) or _reduce_scatter_single(
            self._fallback, output, input, opts
        )

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        opts = _options(ReduceScatterOptions, opts)
        pairs = [(output, [each]) for output, each in zip(outputs, inputs, strict=True)]
        return self._reduce_scatter(pairs, opts) or _reduce_scatter_coalesced(self._fallback, outputs, inputs, opts)

    def allgather(  # type: ignore[override]
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        opts = _options(AllgatherOptions, opts, timeout)
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        work = None
        if len(outputs) == len(inputs) == 1 and are_alike(outputs[0], inputs[0]):
            work = self._all_gather([(outputs[0], inputs[0])], opts)
        return work or self._fallback.allgather(outputs, inputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:  # noqa: A002
        opts = _options(AllgatherOptions, opts)
        return self._all_gather([([output], input)], opts) or _all_gather_single(self._fallback, output, input, opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        opts = _options(AllgatherOptions, opts)
        pairs = [([output], each) for output, each in zip(outputs, inputs, strict=True)]
        return self._all_gather(pairs, opts) or _all_gather_coalesced(self._fallback, outputs, inputs, opts)

    def broadcast(  # type: ignore[override]
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, root: int | None = None
    ) -> Work:
        tensors, opts = _as_list(tensors), _options(BroadcastOptions, root if opts is None else opts, timeout)
        kind = MOVES.get(tensors[0].element_size())
        if len(tensors) != 1 or kind is None or not are_plain(tensors):
            return self._fallback.broadcast(tensors, opts)
        memory = flatten(tensors)
        launches = self._launch("broadcast", kind, tensors[0].numel(), memory, memory, root=opts.rootRank)
        return self._start(launches, opts, tensors, [memory], [] if memory is tensors[0] else [(memory, tensors)])

    def all_to_all_single(self, *arguments: Any) -> Work:
        # Inherited, it would enter gloo with the GIL held: gloo's threads may wait for that with a lock in their hands.
        work: Work = _all_to_all_single(self._fallback, *arguments)
        return work

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:  # type: ignore[override]
        opts = _options(BarrierOptions, opts, timeout)
        return self._start([_Launch(self._plan("barrier", 0, 1), 0, 0, DType.U8, Op.SUM)], opts, [], [], [])

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]
    _allgather_base = all_gather_single
    alltoall_base = all_to_all_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    def abort(self) -> None:
        """Fails every operation in flight, here and on the peers; the group is of no use afterwards."""
        self._native.abort(f"rank {self.rank()} aborted its process group")

    def shutdown(self) -> None:
        """Leaves the group and joins what works for it. Idempotent; `destroy_process_group` calls it."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
        self._native.close()
        self._in_flight.clear()
        super().shutdown()

    def getBackendName(self) -> str:  # noqa: N802  # C++ calls it by this name
        return NAME

    def _all_reduce(self, tensors: list[Tensor], opts: Any) -> Work | None:
        kind = REDUCTIONS.get((tensors[0].dtype, opts.reduceOp.op.value))
        if kind is None or not are_plain(tensors):
            return None
        memory = flatten(tensors)
        count = tensors[0].numel() if len(tensors) == 1 else sum(tensor.numel() for tensor in tensors)
        launches = self._launch("all_reduce", kind, count, memory, memory)
        copies = [] if memory is tensors[0] else [(memory, tensors)]
        return self._start(launches, opts, tensors, [memory, *tensors], copies)

    def _reduce_scatter(self, pairs: list[tuple[Tensor, list[Tensor]]], opts: Any) -> Work | None:
        """Each pair: an output, and the inputs that lie one after the other, all together n times as long."""
        kind = REDUCTIONS.get((pairs[0][0].dtype, opts.reduceOp.op.value))
        if kind is None or not self._are_shards(pairs):
            return None
        launches, memory, copies = [], [], []
        for output, inputs in pairs:
            source, target = flatten(inputs), space([output])
            launches += self._launch("reduce_scatter", kind, output.numel(), source, target)
            memory += [source, target, *inputs]
            if target is not output:
                copies.append((target, [output]))
        return self._start(launches, opts, [output for output, _ in pairs], memory, copies)

    def _all_gather(self, pairs: list[tuple[list[Tensor], Tensor]], opts: Any) -> Work | None:
        """Each pair: the outputs that lie one after the other, all together n times as long as the input."""
        kind = MOVES.get(pairs[0][1].element_size())
        if kind is None or not self._are_shards((each, outputs) for outputs, each in pairs):
            return None
        launches, memory, copies = [], [], []
        for outputs, each in pairs:
            source, target = flatten([each]), space(outputs)
            launches += self._launch("all_gather", kind, each.numel(), source, target)
            memory += [source, target, *outputs]
            if target is not outputs[0]:
                copies.append((target, outputs))
        return self._start(launches, opts, [output for outputs, _ in pairs for output in outputs], memory, copies)

    def _are_shards(self, pairs: Iterable[tuple[Tensor, list[Tensor]]]) -> bool:
        """Whether each pair is a shard and a whole of one type on the CPU, the whole as long as a shard per rank."""
        dtype = None
        for shard, whole in pairs:
            dtype = dtype or shard.dtype
            if shard.dtype != dtype or not (are_plain([shard, *whole])):
                return False
            if sum(tensor.numel() for tensor in whole) != shard.numel() * self.size():
                return False
        return True

    def _launch(
        self, collective: str, kind: Kind, count: int, source: Tensor, target: Tensor, root: int = 0
    ) -> list[_Launch]:
        """The operations for a collective on `count` elements: one, or none when there is nothing to do."""
        if count == 0:
            return []
        dtype, op, average, parts = kind
        plan = self._plan(collective, count * parts, source.element_size() // parts, average, root)
        return [_Launch(plan, source.data_ptr(), target.data_ptr(), dtype, op)]

    def _plan(self, collective: str, numel: int, itemsize: int, average: bool = False, root: int = 0) -> Plan:
        key = (collective, numel, itemsize, average, root)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= PLANS_LIMIT:
                self._plans.clear()
            plan = self._plans[key] = plan_for(
                collective,
                rank=self.rank(),
                hosts=self._native.hosts,
                numel=numel,
                itemsize=itemsize,
                average=average,
                root=root,
                settings=self._settings,
            )
        return plan

    def _start(
        self,
        launches: list[_Launch],
        opts: Any,
        results: list[Tensor],
        memory: list[Tensor],
        copies: list[tuple[Tensor, list[Tensor]]],
    ) -> Work:
        """Runs or submits operations. `memory` stays alive until they end; then `copies` go to where they belong."""
        timeout: timedelta = opts.timeout
        if timeout == _UNSET:
            timeout = self._gloo.options._timeout  # where torch's set_timeout and _set_pg_timeout put it
        timeout_s, priority = timeout.total_seconds(), self.policy.priority
        if not getattr(opts, "asyncOp", True):
            for launch in launches:
                self._native.run(*launch, timeout_s=timeout_s, priority=priority)
            copy_back(copies)
            if self._in_flight:
                with self._lock:
                    self._let_go()
            return CommWork(None, results)
        handles = []
        for launch in launches:
            handle = self._native.submit(*launch, timeout_s=timeout_s, priority=priority)
            self._keep(handle, memory)
            handles.append(handle)
        if not handles:
            return CommWork(None, results)
        joined = handles[0] if len(handles) == 1 else JoinedHandle(handles)
        return CommWork(joined, results, memory, partial(copy_back, copies) if copies else None)

    def _keep(self, handle: Handle, memory: list[Tensor]) -> None:
        """Holds an operation's memory until it ends, whatever the caller does with the work."""
        with self._lock:
            self._let_go()
            self._in_flight.append((handle, memory))

    def _let_go(self) -> None:
        """Forgets the operations that have ended, up to the first that has not."""
        while self._in_flight and self._in_flight[0][0].done():
            self._in_flight.popleft()


def _gloo_options(interface: str, timeout: timedelta) -> Any:
    """gloo takes the address that the host's name resolves to, often 127.0.1.1 or none: give it a working interface.

    GLOO_SOCKET_IFNAME still has the last word.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub has another name
    options._timeout = timeout
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
    names = chosen.split(",") if chosen else [interface]
    options._devices = [dist.ProcessGroupGloo.create_device(interface=name) for name in names]
    return options


def _former(*names: str) -> Any:
    """The first of these methods that this version of torch has."""
    return next(getattr(dist.ProcessGroup, name) for name in names if hasattr(dist.ProcessGroup, name))


_reduce_scatter_single = _former("reduce_scatter_single", "_reduce_scatter_base")
_reduce_scatter_coalesced = _former("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
_all_gather_single = _former("all_gather_single", "_allgather_base")
_all_to_all_single = _former("all_to_all_single", "alltoall_base")
_all_gather_coalesced = _former("all_gather_single_coalesced", "allgather_into_tensor_coalesced")


def _as_list(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _options(kind: type[OptionsT], given: Any, timeout: timedelta | None = None) -> OptionsT:
    """The options of a call: given as such, or made of what torch's other overloads take in their place."""
    if isinstance(given, kind):
        return given
    options: Any = kind()
    if isinstance(given, timedelta):
        options.timeout = given
    elif isinstance(given, int):
        options.rootRank = given
    elif given is not None:
        options.reduceOp = given
    if timeout is not None:
        options.timeout = timeout
    return options  # type: ignore[no-any-return]


def create(opts: _DistributedBackendOptions, pg_options: Any = None) -> CommProcessGroup:
    """Makes a process group; torch calls this for `init_process_group("commlayer")` and `new_group`."""
    if not isinstance(pg_options, (Options, type(None))):
        raise ConfigError(f"pg_options={pg_options!r}: pass commlayer.Options(commlayer.Policy(...)), or nothing")
    return CommProcessGroup(
        opts.store,
        opts.group_rank,
        opts.group_size,
        opts.timeout,
        opts.group_id,
        opts.global_ranks_in_group,
        pg_options.policy if pg_options else None,
    )


if NAME not in dist.Backend.backend_list:
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
