"""`stats` and `paths`: the counters of this process's engine, and its paths.

    before = commlayer.stats()
    ...
    lost = commlayer.stats()["packets_lost"] - before["packets_lost"]

The process has one engine for all of its groups, including those that hooks make. docs/settings.md lists the counters.
The bytes of a model's gradients that were not counted are in its HookState.
"""

from __future__ import annotations

from ..config import whole
from ..errors import ConfigError
from .native import Engine

RANK_MAX = 0xFFFF
"""The engine numbers peers with 16 bits."""


def stats() -> dict[str, int]:
    """This rank's packet counters since its first group opened the engine; they only grow.

    Data in shared memory is in no packet. Raises ClosedError while the process has no engine: before its first group is
    made (a HookState makes one in the first backward) and after the last one was destroyed.
    """
    return Engine.shared_stats()


def paths(rank: int) -> list[dict[str, int]]:
    """The paths to another rank of the job (not of a group), in their order: counters since the first group with it,
    and current estimates, in bytes and microseconds.

    Raises ClosedError as `stats` does, CommError for a rank without a path from this process, and ConfigError for a
    value that is no rank.
    """
    if not 0 <= whole(rank, -1) <= RANK_MAX:
        raise ConfigError(f"commlayer.paths({rank!r}): use the number of another rank of the job, from 0")
    return Engine.shared_paths(int(rank))
