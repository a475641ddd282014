"""The gloo backend: beneath a process group, for the operations that the engine does not do, or instead of it.

Beneath a group, two ranks connect when an operation first needs it: a full mesh would cost each group a socket per rank
in every process, and the Store the cube of the number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import Backend
from torch.utils._pytree import tree_leaves

from ...config import Config
from ...errors import ConfigError
from ...transport.bootstrap import Rendezvous, settle
from ...transport.log import log
from ..device.devices import FORMER
from ..work.context import NeedsHostError, current_words
from ..work.settled import UnsettledError, is_settled
from .tensors import has_memory, op_name, reduction_kind


def connect_gloo(rendezvous: Rendezvous, interface: str, timeout: timedelta) -> Any:
    """A gloo group of the ranks of a rendezvous, over `interface` or that of GLOO_SOCKET_IFNAME. No rank is connected
    yet.

    gloo's threads look up an address when two ranks first meet. They find it in a Store of this process: the Store of
    the job may be gone by then, or be written in Python and need the interpreter's lock.

    Raises ConfigError if gloo cannot use the interface.
    """
    addresses = dist.HashStore()
    with rendezvous.alone():
        group = dist.ProcessGroupGloo(addresses, rendezvous.rank, rendezvous.size, _options(interface, timeout))
    _exchange_addresses(rendezvous, addresses, "")
    return group


def _exchange_addresses(rendezvous: Rendezvous, addresses: dist.Store, prefix: str) -> None:
    """Puts those of the other ranks beside this rank's, which gloo has put into this Store."""
    keys = [f"{prefix}0/{rank}" for rank in range(rendezvous.size)]  # gloo's names: the device and the rank
    with rendezvous.alone():
        own = addresses.get(keys[rendezvous.rank])
    for key, address in zip(keys, rendezvous.exchange("gloo", own), strict=True):
        addresses.set(key, address)  # type: ignore[arg-type]  # bytes pass, the stub says str


class ReconfigurableGloo:
    """A gloo group that gets other ranks, since torch 2.14; it has none before the first `connect`."""

    def __init__(self, rank: int, size: int, timeout: timedelta) -> None:
        self._addresses = dist.HashStore()
        self._count = 0
        options = _options("lo", timeout)  # each `connect` gives it a device of its own
        options.enable_reconfigure = True
        self.group: Any = dist.ProcessGroupGloo(self._addresses, rank, size, options)

    def connect(self, rendezvous: Rendezvous, interface: str) -> Any:
        """The group, which has the ranks of this rendezvous from now on: as of `connect_gloo`. What gloo has in flight
        fails once another rank has called this."""
        self._count += 1
        request = _distributed_c10d.ReconfigureOptions()  # type: ignore[attr-defined]  # not in the stub of torch 2.13
        request.uuid = self._count
        # gloo counts the handles, and looks for its own: that is all that it reads in them.
        request.handles = [f"gloo:{rank}:-2:{rank}:" for rank in range(rendezvous.size)]
        request.handles = [
            *request.handles[: rendezvous.rank],
            self.group.get_reconfigure_handle(),
            *request.handles[rendezvous.rank + 1 :],
        ]
        with rendezvous.alone():
            self.group.options._devices = _options(interface, self.group.options._timeout)._devices
            self.group.reconfigure(request)
        _exchange_addresses(rendezvous, self._addresses, f"reconfigure/{self._count}/")
        return self.group


def plain_gloo(
    store: dist.Store, name: str, rank: int, size: int, timeout: timedelta, ranks: Sequence[int] = ()
) -> Backend:
    """The backend of a group if COMMLAYER_DISABLE is set: gloo as torch makes it.

    Raises ConfigError if another rank runs with other settings.
    """
    rendezvous = Rendezvous(store, name, rank, size, timeout, ranks)
    with rendezvous.alone():
        config = Config.from_environment()
    settle(rendezvous, config)
    backend = dist.ProcessGroupGloo(dist.PrefixStore("gloo", rendezvous.store), rank, size, timeout=timeout)
    backend._set_sequence_number_for_group()
    return backend


def reconfigurable_gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Backend:
    """The same for a group that can be reconfigured, since torch 2.14. It meets nobody: settings are not compared."""
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout, enable_reconfigure=True)  # type: ignore[call-arg]


class Fallback:
    """The gloo group beneath, by the names of a `ProcessGroup`. Logs once why a kind of operation comes here."""

    def __init__(self, group: dist.ProcessGroup, describe: Callable[[], str], check: Callable[[], None]) -> None:
        """`check` raises the reason for which no operation may start."""
        self._group = group
        self._check = check
        self._describe = describe
        self._told: set[tuple[str, str]] = set()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._group, name if hasattr(self._group, name) else FORMER[name])

        def call(*args: Any) -> Any:
            if current_words() is not None:
                raise NeedsHostError
            if not is_settled(tree_leaves(args)):
                raise UnsettledError
            self._check()
            self._tell(name, args)
            return method(*args)

        return call

    def _tell(self, name: str, args: tuple[Any, ...]) -> None:
        reason = _reason(args)
        if (name, reason) not in self._told:
            self._told.add((name, reason))
            log.info("%s: %s goes to gloo: %s", self._describe(), name, reason)


def _reason(args: tuple[Any, ...]) -> str:
    """Why the engine does not do an operation with these arguments."""
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return "sparse tensors"
    wrappers = {type(tensor).__name__ for tensor in tensors if not has_memory(type(tensor))}
    if wrappers:
        return f"tensors that wrap others: {', '.join(sorted(wrappers))}"
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
    if len(dtypes) > 1:
        return f"tensors of several types: {', '.join(dtypes)}"
    op = next((argument.reduceOp for argument in args if hasattr(argument, "reduceOp")), None)
    if tensors and op is not None and reduction_kind(tensors, op) is None:
        return f"no kernel for {op_name(op)} of {dtypes[0]}"
    return "its arguments do not fit; gloo words the error"


def _options(interface: str, timeout: timedelta) -> Any:
    """Options with a working interface: gloo would take the address of the host's name, often 127.0.1.1 or none.

    GLOO_SOCKET_IFNAME has precedence. If it names several interfaces, gloo gets one whose link works: it would use
    all, and a dead one would stop the job.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub has another name
    options._timeout = timeout
    names = [name for part in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if (name := part.strip())]
    name = interface if not names or interface in names else names[0]
    try:
        # One per group: gloo numbers the connections of a device by rank, and a group that ends closes its device.
        options._devices = [dist.ProcessGroupGloo.create_device(interface=name, lazy_init=True)]
    except (RuntimeError, ValueError) as error:
        given = f"GLOO_SOCKET_IFNAME={','.join(names)}" if names else f"the interface {name or '(none)'}"
        raise ConfigError(
            f"{given}: gloo, which does the other operations, cannot use {name or 'it'} "
            f"({str(error).splitlines()[0]}); name an interface that is up and has an address with GLOO_SOCKET_IFNAME"
        ) from error
    return options
