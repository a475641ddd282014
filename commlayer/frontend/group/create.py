"""`create`: the process group that torch asks for."""

from __future__ import annotations

from typing import Any

from torch._C._distributed_c10d import Backend, _DistributedBackendOptions

from ...config import Config
from ...errors import ConfigError, OperationTimeoutError, UnreachableError
from .backend import CommProcessGroup
from .gloo import plain_gloo, reconfigurable_gloo
from .options import Options
from .uncaught import tell_torchrun


def create(opts: _DistributedBackendOptions, pg_options: Any = None) -> CommProcessGroup | Backend:
    """Makes a process group. `commlayer_autoload` calls this for `init_process_group("commlayer")` and `new_group`.
    With COMMLAYER_DISABLE it is a backend of gloo's, which torch puts in a group of its own.

    Raises ConfigError, MismatchError, OperationTimeoutError or CommError, see `bootstrap.connect`.
    """
    tell_torchrun()
    if not isinstance(pg_options, (Options, type(None))):
        raise ConfigError(f"pg_options={pg_options!r}: pass commlayer.Options(commlayer.Policy(...)), or nothing")
    policy = pg_options.policy if pg_options else None
    if getattr(opts, "enable_reconfigure", False):  # since torch 2.14
        if Config.is_disabled():
            return reconfigurable_gloo(opts.store, opts.group_rank, opts.group_size, opts.timeout)
        from .reconfigure import ReconfigurableGroup  # here: few jobs need it, and it costs all 5 ms at their start

        return ReconfigurableGroup(opts.store, opts.group_rank, opts.group_size, opts.timeout, opts.group_id, policy)
    if Config.is_disabled():
        return plain_gloo(
            opts.store,
            opts.group_id,
            opts.group_rank,
            opts.group_size,
            opts.timeout,
            opts.global_ranks_in_group,
        )
    try:
        return CommProcessGroup(
            opts.store,
            opts.group_rank,
            opts.group_size,
            opts.timeout,
            opts.group_id,
            opts.global_ranks_in_group,
            policy,
        )
    except (ConfigError, OperationTimeoutError, UnreachableError) as error:
        # Faults of the job, not of this package: its frames, times the ranks, would only hide the text.
        raise error.with_traceback(None) from None
