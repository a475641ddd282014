"""The `commlayer` backend of torch.distributed: its names, arguments and overloads.

`CommProcessGroup` is a hybrid. Operations on CPU tensors run on the engine (`collectives.py`), the monitored barrier
through the Store (`attendance.py`). A complete gloo group beneath does the rest: sparse tensors and reductions that no
type defines. gloo also raises the errors for arguments that make no sense. docs/collectives.md lists them. The engine
and gloo share no channel, so their operations need no common order. CUDA tensors go through `devices.py`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import threading
from collections.abc import Collection, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    Backend,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Work,
)

from ...compress.codec import CodecPair, Coding, codec_of
from ...config import LOSS_BOUND_MAX, Config, Policy, policy_of_groups
from ...dynamo import untraced
from ...errors import ConfigError
from ...loss.operation_policy import OperationPolicy
from ...plans.settings import Settings
from ...transport.attendance import Attendance
from ...transport.bootstrap import Rendezvous, connect
from ...transport.call import Calls
from ...transport.exclusion import Exclusion
from ...transport.flight import recorder
from ...transport.fork import disowned_in_children
from ...transport.native import Engine
from ..device.devices import Devices, placed
from ..device.pinned import PinnedCopies, pinned_share
from ..work.work import CommWork
from .arguments import as_list, options_of
from .collectives import Collectives
from .gloo import Fallback, connect_gloo
from .options import NAME
from .record import description_of, open_record
from .report import Report
from .split import check_ranks, name_of, policy_of
from .submit import Submitter


@untraced
class CommProcessGroup(dist.ProcessGroup):
    """A process group whose collectives run on the native engine. torch makes it, see `create.py`.

    Operations of one group start in the order of the calls, which must be the same on all ranks. Any thread may call.
    The collectives have the names, arguments and errors of `torch.distributed.ProcessGroup`.
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
        *,
        own_job: bool = False,
        engine: Engine | None = None,
    ) -> None:
        """`own_job` and `engine`: see `bootstrap.connect`."""
        # torch's stub has the signature of the C++ class; only this one makes an object that C++ calls back.
        super().__init__(rank, size)  # type: ignore[call-arg]
        ranks = list(global_ranks) or list(range(size))
        self._begin(store, name, ranks)
        rendezvous = Rendezvous(store, name, rank, size, timeout, ranks)
        self._open(rendezvous, timeout, global_ranks, policy, own_job=own_job, engine=engine)

    def _begin(self, store: dist.Store, name: str, ranks: Sequence[int]) -> None:
        self.closed = False
        """Whether `shutdown` or `abort` was called."""
        self._is_shut_down = False
        self._ranks = ranks
        self._store, self._name = store, name
        self._lock = threading.Lock()
        disowned_in_children(self)

    def _open(
        self,
        rendezvous: Rendezvous,
        timeout: timedelta,
        global_ranks: Sequence[int],
        policy: Policy | None,
        *,
        own_job: bool,
        engine: Engine | None = None,
    ) -> None:
        """Meets the other ranks. Arguments: as of `__init__`; `timeout` is that of operations."""
        rank, size, name, store = rendezvous.rank, rendezvous.size, self._name, self._store
        with rendezvous.alone():
            config = Config.from_environment()
            given = policy or policy_of_groups(config)
        self.policy = given
        """The policy of all operations of this group."""
        agreed = dataclasses.asdict(self.policy)
        calls = Calls()
        self._native = connect(
            rendezvous,
            config,
            agreed,
            peer=self._ranks[rank],
            is_world=not global_ranks,
            own_job=own_job,
            engine=engine,
            calls=calls,
            describe=description_of(self),
        )
        try:
            self._gloo = self._connect_gloo(rendezvous, timeout)
        except BaseException as error:
            rendezvous.give_up(error)
            self._native.close()
            raise
        self._attendance = Attendance(dist.PrefixStore("attendance", rendezvous.store), rendezvous.members)
        staying = dist.PrefixStore("exclusion", rendezvous.store)
        self._exclusion = Exclusion(staying, rendezvous.members, self._native.lost)
        self._native.farewell = self._exclusion.farewell
        # gloo as a plain group: the gloo object itself lacks today's names of the collectives.
        beneath = dist.ProcessGroup(store, rank, size)
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        kind = "" if found is None else found.type
        self._fallback: Any = Fallback(beneath, lambda: f"group {name!r}", self._native.check_process)
        for group in (self, beneath):
            for device in ("cpu", kind) if kind else ("cpu",):
                group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, self._gloo)
            group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        settings = Settings(
            algorithm=self.policy.algorithm,
            deterministic=self.policy.deterministic,
            packet_bytes=self._native.packet_bytes,
            staging_bytes=self._native.staging_bytes,
        )
        native = self._native

        @functools.lru_cache(maxsize=256)
        def operation_policy(policy: Policy) -> OperationPolicy:
            packets = (native.packet_bytes, native.largest_packet_bytes)
            return OperationPolicy.of(policy, native.hosts, packets, settings)

        self._operation_policy = operation_policy
        self.can_lose = operation_policy(Policy(loss_bound=LOSS_BOUND_MAX)).partial is not None
        """Whether a network between the ranks could lose contributions, if a policy allows it."""
        self.hosts = native.hosts
        """The ranks of the group by host."""
        self.host_count = len(native.hosts)
        # torch's set_timeout and _set_pg_timeout put the group's timeout into gloo's options.
        priority, options = self.policy.service_class, self._gloo.options
        agreement = dist.PrefixStore("shares", rendezvous.store)
        self._submitter = Submitter(
            native, settings, priority, lambda: options._timeout, calls, agreement, native.second
        )
        self._native.on_left = self._submitter.forget
        self._record = open_record(self, name, global_ranks or range(size), self._native, self._submitter, config)
        self._collectives = Collectives(
            self._submitter, rank, size, operation_policy(self.policy).without_class(), lambda: native.who
        )
        self._report = Report.open(self._native, config, self.policy, settings, calls)
        self.devices: Devices | None = None
        """Takes tensors that are not on the CPU; None without an accelerator."""
        if kind:
            pinned = PinnedCopies(stream_wait=config.streams_wait(), limit_bytes=config.pinned_bytes or pinned_share())
            self.devices = Devices(self, NAME, store, timeout, global_ranks, pinned)

    def _connect_gloo(self, rendezvous: Rendezvous, timeout: timedelta) -> Any:
        return connect_gloo(rendezvous, self._native.interface, timeout)

    def disown(self) -> None:
        """See `fork.Owned`. The child never frees this group: the destructors of gloo and of torch's Store would take
        the parent's sockets out of an epoll instance that the two processes share."""
        self.closed = True
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    # One method stands for all overloads of a name. (The stub lists them one by one, hence `type: ignore[override]`.)
    # It starts the engine if that can do the operation, and otherwise passes its arguments to gloo. The aliases below
    # are the names of torch 2.11 and 2.12.

    @placed(inputs=[0], outputs=[0])
    def allreduce(  # type: ignore[override]
        self,
        tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
        policy: Policy | None = None,
        key: int | None = None,
    ) -> Work:
        """`policy` and `key`: as of `allreduce_from`, for any floating-point type. A codec excludes loss. Without a key
        nothing is encoded."""
        tensors, opts = as_list(tensors), options_of(AllreduceOptions, op if opts is None else opts, timeout)
        own, coding = self._coded(policy, key or 0)
        coding = None if key is None else coding
        work = self._collectives.all_reduce(tensors, opts, own, coding) if len(tensors) == 1 else None
        return work or self._fallback.allreduce(tensors, opts)

    @placed(inputs=[0], outputs=[0])
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        opts = options_of(AllreduceCoalescedOptions, opts)
        return self._collectives.all_reduce(tensors, opts) or self._fallback.allreduce_coalesced(tensors, opts)

    @placed(inputs=[0], outputs=[0], root="writes")
    def reduce(  # type: ignore[override]
        self, tensors: Any, root: Any = None, op: Any = None, timeout: timedelta | None = None, *, opts: Any = None
    ) -> Work:
        if isinstance(root, int):
            opts = options_of(ReduceOptions, op, timeout)
            opts.rootRank = root
        tensors, opts = as_list(tensors), options_of(ReduceOptions, root if opts is None else opts)
        return self._collectives.reduce(tensors, opts) or self._fallback.reduce(tensors, opts)

    @placed(inputs=[1], outputs=[0])
    def reduce_scatter(  # type: ignore[override]
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> Work:
        opts = options_of(ReduceScatterOptions, op if opts is None else opts, timeout)
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        work = None
        if len(outputs) == len(inputs) == 1:
            work = self._collectives.reduce_scatter_list(outputs[0], inputs[0], opts)
        return work or self._fallback.reduce_scatter(outputs, inputs, opts)

    @placed(inputs=[1], outputs=[0])
    def reduce_scatter_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002
        opts: Any = None,
        *,
        policy: Policy | None = None,
        key: int = 0,
    ) -> Work:
        """`policy` and `key`: as of `allreduce_from`. A codec encodes contributions, and excludes loss."""
        opts = options_of(ReduceScatterOptions, opts)
        work = self._collectives.reduce_scatter([(output, [input])], opts, *self._coded(policy, key))
        return work or self._fallback.reduce_scatter_single(output, input, opts)

    @placed(inputs=[1], outputs=[0])
    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        opts = options_of(ReduceScatterOptions, opts)
        pairs = [(output, [tensor]) for output, tensor in zip(outputs, inputs, strict=True)]
        work = self._collectives.reduce_scatter(pairs, opts)
        return work or self._fallback.reduce_scatter_single_coalesced(outputs, inputs, opts)

    @placed(inputs=[1], outputs=[0])
    def allgather(  # type: ignore[override]
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        opts = options_of(AllgatherOptions, opts, timeout)
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        work = None
        if len(outputs) == len(inputs) == 1:
            work = self._collectives.all_gather_list(outputs[0], inputs[0], opts)
        return work or self._fallback.allgather(outputs, inputs, opts)

    @placed(inputs=[1], outputs=[0])
    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        opts = options_of(AllgatherOptions, opts)
        work = self._collectives.all_gather_lists(outputs, inputs, opts)
        return work or self._fallback.allgather_coalesced(outputs, inputs, opts)

    @placed(inputs=[1], outputs=[0])
    def all_gather_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002
        opts: Any = None,
        *,
        policy: Policy | None = None,
        key: int = 0,
    ) -> Work:
        """`policy` and `key`: as of `allreduce_from`. A codec rounds all shards, this rank's own, too."""
        opts = options_of(AllgatherOptions, opts)
        work = self._collectives.all_gather([([output], input)], opts, *self._coded(policy, key))
        return work or self._fallback.all_gather_single(output, input, opts)

    @placed(inputs=[1], outputs=[0])
    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        opts = options_of(AllgatherOptions, opts)
        pairs = [([output], tensor) for output, tensor in zip(outputs, inputs, strict=True)]
        work = self._collectives.all_gather(pairs, opts)
        return work or self._fallback.all_gather_single_coalesced(outputs, inputs, opts)

    @placed(inputs=[0], outputs=[0], root="reads")
    def broadcast(  # type: ignore[override]
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, root: int | None = None
    ) -> Work:
        tensors, opts = as_list(tensors), options_of(BroadcastOptions, root if opts is None else opts, timeout)
        return self._collectives.broadcast(tensors, opts) or self._fallback.broadcast(tensors, opts)

    @placed(inputs=[1], outputs=[0])
    def gather(  # type: ignore[override]
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, *, root: int | None = None
    ) -> Work:
        opts = options_of(GatherOptions, root if opts is None else opts, timeout)
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs] if outputs else [], [inputs]
        work = None
        if len(inputs) == 1 and len(outputs) <= 1:
            work = self._collectives.gather(outputs[0] if outputs else [], inputs[0], opts)
        return work or self._fallback.gather(outputs, inputs, opts)

    @placed(inputs=[1], outputs=[0])
    def scatter(  # type: ignore[override]
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, *, root: int | None = None
    ) -> Work:
        opts = options_of(ScatterOptions, root if opts is None else opts, timeout)
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs] if inputs else []
        work = None
        if len(outputs) == 1 and len(inputs) <= 1:
            work = self._collectives.scatter(outputs[0], inputs[0] if inputs else [], opts)
        return work or self._fallback.scatter(outputs, inputs, opts)

    @placed(inputs=[1], outputs=[0])
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        opts = options_of(AllToAllOptions, opts)
        return self._collectives.all_to_all(outputs, inputs, opts) or self._fallback.alltoall(outputs, inputs, opts)

    @placed(inputs=[1], outputs=[0])
    def all_to_all_single(  # type: ignore[override]
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002
        output_split_sizes: Iterable[Any],
        input_split_sizes: Iterable[Any],
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        policy: Policy | None = None,
        key: int = 0,
    ) -> Work:
        """The split sizes may be arrays of numpy, as Megatron's, or tensors. `policy` and `key`: as of
        `allreduce_from`. A codec rounds the rows for other hosts; nothing keeps its errors, and nothing is lost."""
        opts = options_of(AllToAllOptions, opts, timeout)
        splits = [int(rows) for rows in output_split_sizes], [int(rows) for rows in input_split_sizes]
        work = self._collectives.all_to_all_single(output, input, *splits, opts, *self._coded(policy, key))
        return work or self._fallback.alltoall_base(output, input, *splits, opts)

    @placed()
    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:  # type: ignore[override]
        return self._collectives.barrier(options_of(BarrierOptions, opts, timeout))

    @placed(inputs=[0], is_message=True)
    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> Work:  # noqa: N803
        return self._submitter.send(tensors, dstRank, tag) or self._fallback.send(tensors, dstRank, tag)

    @placed(outputs=[0], is_message=True)
    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> Work:  # noqa: N803
        return self._submitter.receive(tensors, srcRank, tag) or self._fallback.recv(tensors, srcRank, tag)

    @placed(outputs=[0], is_message=True)
    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        return self._submitter.receive(tensors, None, tag) or self._fallback.recv_anysource(tensors, tag)

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: Any = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,  # noqa: ARG002  # the child has all devices of its parent
    ) -> CommProcessGroup | None:
        """A group of these ranks of this group, for `dist.split_group`; None on a rank that is not among them.

        It has the timeout and the policy of this group, unless `timeout` and `opts` give others.
        Raises ValueError for wrong ranks, and the errors of a new group.
        """
        check_ranks(self, [new_ranks])
        policy = policy_of(self, opts)
        name = self.name_of_split(new_ranks)
        if self.rank() not in new_ranks:
            return None
        child = CommProcessGroup(
            dist.PrefixStore(f"{name}/", self._store),
            new_ranks.index(self.rank()),
            len(new_ranks),
            timeout or self.timeout,
            name,
            [self._ranks[rank] for rank in new_ranks],
            policy,
        )
        child._set_group_name(group_name or name)  # type: ignore[arg-type]  # torch's GroupName is a str
        child._set_group_desc(group_desc or f"{self.group_desc}:split")
        return child

    def name_of_split(self, new_ranks: Sequence[int]) -> str:
        """A name for the group of these ranks, on which they agree: every rank of this group counts all calls."""
        return f"{name_of(self, f'{self._name}:split')}:{new_ranks[0]}"

    supports_shrinking = True
    supports_reconfigure = False
    """Since torch 2.14; without this and the two methods, torch would ask gloo beneath."""

    def get_reconfigure_handle(self) -> str:
        """Raises ConfigError: see `ReconfigurableGroup`."""
        raise self._not_reconfigurable()

    def reconfigure(self, opts: Any) -> Work:  # noqa: ARG002  # torch's name
        """Raises ConfigError: see `ReconfigurableGroup`."""
        raise self._not_reconfigurable()

    def _not_reconfigurable(self) -> ConfigError:
        return ConfigError(
            f"{self.who}: only a WORLD that was made with init_process_group(..., enable_reconfigure=True) can be "
            f"reconfigured; make such a one, or a new group"
        )

    def exclude(self, ranks: Collection[int], *, aborts: bool) -> str:
        """Agrees with the other ranks that stay on those of this group that go: see `Exclusion.agree`. Returns a name
        for what is left, the same on all of them."""
        self._native.check_process()
        number = self._exclusion.agree(ranks, aborts=aborts, timeout_s=self.timeout.total_seconds())
        return f"{self._name}:shrunk:{number}"

    def is_busy(self) -> bool:
        """Whether an operation of the engine has not ended on this rank."""
        return not self.closed and self._submitter.is_busy()

    def get_group_store(self) -> dist.Store:
        """The Store that the group was made with."""
        return self._store

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names all ranks that do not come, whatever `wait_all_ranks`. See `Attendance.barrier`."""
        timeout = self.timeout if timeout is None else timeout
        self._native.check_process()
        self._attendance.barrier(timeout.total_seconds(), all_ranks=wait_all_ranks)

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: the calls of a group are numbered from 1."""

    def _get_sequence_number_for_group(self) -> int:
        """The number of the latest collective."""
        return self._submitter.calls.collective_count

    def _start_coalescing(self, device: torch.device) -> None:
        """Also notes operations until `_end_coalescing`, which returns one work for all of them."""
        if self.devices is not None and device.type != "cpu":
            self.devices.begin_coalescing(device)
        else:
            self._submitter.begin_coalescing()

    def _end_coalescing(self, device: torch.device) -> Work:
        if self.devices is not None and device.type != "cpu":
            return self.devices.end_coalescing(device)
        return self._submitter.end_coalescing()

    def _get_backend(self, device: torch.device) -> Backend:
        if self.devices is not None:
            self.devices.neighbour(device.type)  # makes the backend, and registers it here
        return super()._get_backend(device)

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    @placed(inputs=[0], outputs=[1])
    def allreduce_from(
        self,
        source: Tensor,
        target: Tensor,
        opts: Any,
        protect: Tensor | None = None,
        *,
        policy: Policy | None = None,
        key: int = 0,
        pair: CodecPair | None = None,
    ) -> CommWork:
        """All-reduces `source` into `target`, see `Collectives.all_reduce_from`. `missing` of the work returns the
        contributions in `source` that were not counted.

        `policy` gives the priority, the losses and the codec of this operation.
        The rest of its plan follows the policy of the group. `key`, the same on all ranks, chooses the codec's
        rotations; each operation needs another one. `pair` replaces the codecs of the policy.
        """
        own, coding = self._coded(policy, key)
        coding = coding if pair is None else Coding(pair, key)
        return self._collectives.all_reduce_from(source, target, opts, protect, own, coding)

    def _coded(self, policy: Policy | None, key: int) -> tuple[OperationPolicy | None, Coding | None]:
        """The arguments of `Collectives` for an operation with a policy of its own."""
        if policy is None:
            return None, None
        pair = codec_of(policy.codec).pair
        return self._operation_policy(policy), None if pair is None else Coding(pair, key)

    @property
    def timeout(self) -> timedelta:
        """The timeout of operations without one of their own."""
        timeout: timedelta = self._gloo.options._timeout
        return timeout

    @property
    def who(self) -> str:
        """This rank of the job and the group, with its description: the beginning of errors."""
        return self._native.who

    @property
    def packet_bytes(self) -> int:
        """Payload of the smallest full packet between two ranks of this group."""
        return self._native.packet_bytes

    def abort(self, reason: str = "") -> None:
        """Fails every operation in flight, here and on the peers, and leaves the job. Idempotent; from any thread.

        The group cannot be used afterwards, and need not be shut down. The process may join another job. An operation
        that has ended here may still be under way on a peer, and then fails there.
        """
        if self._native.is_inherited:
            return
        self.closed = True
        if self._report is not None:
            self._report.close(self._submitter.calls)
        self._native.abort(reason)
        recorder.close(self._record)
        if self.devices is not None:
            self.devices.close(abort=True)

    def shutdown(self) -> None:
        """Leaves the group and joins its threads. Idempotent; `destroy_process_group` calls it."""
        if self._native.is_inherited:
            return
        with self._lock:
            if self._is_shut_down:
                return
            self._is_shut_down = self.closed = True
        if self.devices is not None:
            self.devices.pinned.settle()
        recorder.close(self._record)
        if self._report is not None:
            self._report.close(self._submitter.calls)
        self._native.close()
        if self.devices is not None:
            self.devices.close()
        super().shutdown()

    def getBackendName(self) -> str:  # noqa: N802  # the name that C++ calls
        return NAME
