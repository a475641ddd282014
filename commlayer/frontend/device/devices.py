"""Operations on tensors that are not on the CPU: the way to another backend, or to pinned memory.

With `init_process_group("cpu:commlayer,cuda:nccl")` CUDA tensors go to NCCL; with plain `"commlayer"` they go through
pinned memory to the engine (`pinned.py`). If a backend's creator returns a `ProcessGroup`, as ours does, torch takes it
for the whole group and never makes the other backend (`_new_process_group_helper`). So we make that one, when it is
first needed, because torch knows its name only then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work, _allow_inflight_collective_as_graph_input
from torch.utils import _pytree as pytree

from ...errors import ConfigError
from ..work.settled import UnsettledError, is_settled, settled
from ..work.work import CommWork, join
from .pinned import PinnedCopies

MethodT = TypeVar("MethodT", bound=Callable[..., Any])

FORMER = {
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
"""Names of these methods in plain process groups before torch 2.13."""


def backend_for(config: str, device_type: str) -> str | None:
    """The backend for a device in a configuration like "cpu:commlayer,cuda:nccl"; None if it names none."""
    pairs = (entry.partition(":") for entry in config.split(","))
    return next((backend for device, _, backend in pairs if device == device_type), None)


class Devices:
    """The other backends of a process group, and the pinned copies that take device tensors to its own.

    `own` is the name of the group's own backend; `store`, `timeout` and `global_ranks` are as torch gave them for it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        own: str,
        store: dist.Store,
        timeout: timedelta,
        global_ranks: Sequence[int] = (),
        pinned: PinnedCopies | None = None,
    ) -> None:
        self._group = group
        self._own = own
        self._store = store
        self._timeout = timeout
        self._global_ranks = list(global_ranks)
        self.pinned = pinned or PinnedCopies()
        """Takes device tensors without another backend."""
        self._neighbours: dict[str, dist.ProcessGroup | None] = {}
        self._coalesced: list[CommWork] | None = None

    def neighbour(self, device_type: str) -> dist.ProcessGroup | None:
        """The group of the backend that the configuration names for a device; None if it is our own, or gloo.

        Raises ConfigError if torch cannot make that backend.
        """
        if device_type == "cpu":
            return None
        if device_type not in self._neighbours:
            try:
                config = dist.get_backend_config(self._group)
            except (ValueError, AssertionError, RuntimeError, TypeError):
                return None  # torch is still making the group, and does not know it yet; WORLD's is a TypeError
            name = backend_for(config, device_type)
            made = None if name in (None, self._own, "gloo") else self._make(str(name), device_type)
            self._neighbours[device_type] = made
        return self._neighbours[device_type]

    def dispatch(
        self,
        method: Callable[..., Work],
        inputs: Sequence[int],
        outputs: Sequence[int],
        args: tuple[Any, ...],
        results: Sequence[int] | None = None,
        *,
        is_message: bool = False,
    ) -> Work:
        """Calls a method of the group, or the same method of the backend for the device of its tensors.

        `inputs` and `outputs` are the positions in `args` of the tensors, or nested lists, that it reads and writes on
        this rank, and `results` those that its work returns (None: `outputs`). `is_message`: it is a send or receive.
        """
        given = {at: pytree.tree_flatten(args[at]) for at in {*inputs, *outputs} if at < len(args)}
        tensors = [leaf for leaves, _ in given.values() for leaf in leaves if isinstance(leaf, Tensor)]
        if not is_settled(tensors):
            raise UnsettledError
        kinds = {leaf.device.type for leaf in tensors if leaf.device.type != "cpu" or self.pinned.takes(leaf)}
        written = [leaf for at in outputs if at in given for leaf in given[at][0]]
        returned = written if results is None else [leaf for at in results if at in given for leaf in given[at][0]]
        is_receive = is_message and not inputs  # these need no order among the others
        if not kinds and (is_receive or not self.pinned.busy):
            return method(*args)
        for argument in args:
            if hasattr(argument, "asyncOp"):
                argument.asyncOp = True  # the thread that starts operations shall not wait for them
        if not kinds:
            return self.pinned.run(lambda *_: method(*args), [], returned)
        neighbour = self.neighbour(min(kinds))
        if neighbour is not None:
            name = method.__name__
            return getattr(neighbour, name if hasattr(neighbour, name) else FORMER[name])(*args)  # type: ignore[no-any-return]
        read = [leaf for at in inputs if at in given for leaf in given[at][0]]
        # on_host keeps places, not tensors: the caller's must be free once its stream has them.
        place = {id(leaf): number for number, leaf in enumerate((*read, *written))}
        places = {at: ([place[id(leaf)] for leaf in leaves], spec) for at, (leaves, spec) in given.items()}
        others = [None if at in places else argument for at, argument in enumerate(args)]

        def on_host(host_read: Sequence[Tensor], host_written: Sequence[Tensor]) -> Work:
            host, moved = (*host_read, *host_written), list(others)
            for at, (numbers, spec) in places.items():
                moved[at] = pytree.tree_unflatten([host[number] for number in numbers], spec)
            return method(*moved)

        work = self.pinned.run(on_host, read, written, at_once=is_receive, is_message=is_message, results=returned)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def begin_coalescing(self, device: torch.device) -> None:
        """Also notes operations on that device until `end_coalescing`, or lets its own backend coalesce them."""
        neighbour = self.neighbour(device.type)
        if neighbour is not None:
            neighbour._start_coalescing(device)
        else:
            self._coalesced = []

    def end_coalescing(self, device: torch.device) -> Work:
        """One work for all operations since `begin_coalescing`."""
        neighbour = self.neighbour(device.type)
        if neighbour is not None:
            return neighbour._end_coalescing(device)
        works, self._coalesced = self._coalesced or [], None
        return join(works)

    def close(self, *, abort: bool = False) -> None:
        """Shuts the other backends down, and the pinned copies."""
        for group in self._neighbours.values():
            if group is not None:
                group.abort() if abort else group.shutdown()
        if not abort:
            self.pinned.close()

    def _make(self, name: str, device_type: str) -> dist.ProcessGroup:
        device = torch.device(device_type)
        store = dist.PrefixStore(f"{device_type}/", self._store)
        rank, size = self._group.rank(), self._group.size()
        plugin = dist.Backend._plugins.get(name.upper())
        if name == "nccl" and dist.is_nccl_available():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            options.global_ranks_in_group = self._global_ranks
            options.group_name = self._group.group_name
            backend: Any = dist.ProcessGroupNCCL(store, rank, size, options)
            kind = dist.ProcessGroup.BackendType.NCCL
        elif plugin is not None and plugin.extended_api:
            request = dist.distributed_c10d._DistributedBackendOptions()
            request.store, request.group_rank, request.group_size = store, rank, size
            request.timeout, request.group_id = self._timeout, self._group.group_name
            request.global_ranks_in_group = self._global_ranks
            backend = plugin.creator_fn(request, None)
            kind = dist.ProcessGroup.BackendType.CUSTOM
        elif plugin is not None:
            backend = plugin.creator_fn(store, rank, size, self._timeout)
            kind = dist.ProcessGroup.BackendType.CUSTOM
        else:
            number = (self._global_ranks or range(size))[rank]
            raise ConfigError(
                f"rank {number}: backend {name!r} for {device_type} beside {self._own!r} is not available here; use "
                f"'cpu:{self._own},{device_type}:nccl' with a torch built with NCCL, or {self._own!r} alone"
            )
        # A plain group: the backend itself lacks today's names of the collectives.
        group = dist.ProcessGroup(store, rank, size)
        group._set_default_backend(kind)
        group._register_backend(device, kind, backend)
        if name == "nccl":
            self._group._register_backend(device, kind, backend)  # for C++ code that asks the group for its backend
        return group


def root_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """The root among the arguments of a collective: a number, or in its options."""
    given = (getattr(argument, "rootRank", argument) for argument in (*args[1:], *kwargs.values()))
    return next((root for root in given if isinstance(root, int)), None)


def registered(work: Work) -> Work:
    """Registers the work of a collective where torch does that in C++: within
    `allow_inflight_collective_as_graph_input_ctx`. Those of other backends are registered already."""
    if _allow_inflight_collective_as_graph_input() and isinstance(work, CommWork):
        work.register()
    return work


def placed(
    *,
    inputs: Sequence[int] = (),
    outputs: Sequence[int] = (),
    root: Literal["reads", "writes"] | None = None,
    is_message: bool = False,
) -> Callable[[MethodT], MethodT]:
    """A decorator: dispatches a collective by the device of its tensors, see `Devices.dispatch`, once these are there.

    `inputs` and `outputs` are the positions (self not counted) of the arguments that it reads and writes. `root`:
    the root alone reads, and the others write ("reads"), or all read, and the root alone writes ("writes").
    """

    def decorate(method: MethodT) -> MethodT:
        @functools.wraps(method)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                if self.devices is None:  # no accelerator in this machine
                    return registered(method(self, *args, **kwargs))
                of_group = functools.partial(method, self, **kwargs)
                of_group.__name__ = method.__name__  # type: ignore[attr-defined]
                read, written = inputs, outputs
                if root is not None:
                    is_root = self.rank() == root_of(args, kwargs)
                    read = inputs if is_root or root == "writes" else ()
                    written = outputs if is_root == (root == "writes") else ()
                return registered(self.devices.dispatch(of_group, read, written, args, outputs, is_message=is_message))
            except UnsettledError:
                args, kwargs = settled(args), settled(kwargs)
            return wrapper(self, *args, **kwargs)

        return wrapper  # type: ignore[return-value]

    return decorate
