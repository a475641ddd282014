"""The gloo backend: beneath a process group, for the operations that the engine does not do, or instead of it."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from ..config import Config
from ..errors import CommError, ConfigError
from ..transport.bootstrap import Rendezvous, settle


def connect_gloo(rendezvous: Rendezvous, interface: str, timeout: timedelta) -> Any:
    """Connects the ranks of a rendezvous with gloo, over `interface` or that of GLOO_SOCKET_IFNAME.

    Raises ConfigError if gloo cannot use the interface, and CommError if it cannot connect all ranks.
    """
    with rendezvous.alone():
        options = _options(interface, timeout)
    rendezvous.exchange("gloo", b"")  # a rank that fails before would keep the others waiting in gloo
    with rendezvous.alone():
        return _connect(dist.PrefixStore("gloo", rendezvous.store), rendezvous.rank, rendezvous.size, options)


def plain_gloo(store: dist.Store, name: str, rank: int, size: int, timeout: timedelta) -> Backend:
    """The backend of a group if COMMLAYER_DISABLE is set: gloo as torch makes it.

    Raises ConfigError if another rank runs with other settings.
    """
    rendezvous = Rendezvous(store, name, rank, size, timeout)
    with rendezvous.alone():
        config = Config.from_environment()
    settle(rendezvous, config)
    backend = dist.ProcessGroupGloo(dist.PrefixStore("gloo", rendezvous.store), rank, size, timeout=timeout)
    backend._set_sequence_number_for_group()
    return backend


def _options(interface: str, timeout: timedelta) -> Any:
    """Options with a working interface: gloo would take the address of the host's name, often 127.0.1.1 or none.

    GLOO_SOCKET_IFNAME has precedence. If it names several interfaces, gloo gets one whose link works: it would use
    all, and a dead one would stop the job.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub has another name
    options._timeout = timeout
    names = [name for each in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if (name := each.strip())]
    name = interface if not names or interface in names else names[0]
    try:
        options._devices = [dist.ProcessGroupGloo.create_device(interface=name)]
    except (RuntimeError, ValueError) as error:
        given = f"GLOO_SOCKET_IFNAME={','.join(names)}" if names else f"the interface {name or '(none)'}"
        raise ConfigError(
            f"{given}: gloo, which does the other operations, cannot use {name or 'it'} "
            f"({str(error).splitlines()[0]}); name an interface that is up and has an address with GLOO_SOCKET_IFNAME"
        ) from error
    return options


def _connect(store: dist.Store, rank: int, size: int, options: Any) -> Any:
    """Connects at once. Later (`lazy_init`) gloo would need a Store that still lives, and `monitored_barrier` would
    wait for connections instead of naming the missing ranks."""
    try:
        return dist.ProcessGroupGloo(store, rank, size, options)
    except RuntimeError as error:
        raise CommError(
            f"gloo, which does the other operations, cannot connect all ranks ({str(error).splitlines()[0]}); name "
            f"an interface that reaches them all with GLOO_SOCKET_IFNAME"
        ) from error
