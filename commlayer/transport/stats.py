"""What a job may ask of this process's engine: how much it sent, how much was lost, and how its paths are.

    before = commlayer.stats()
    ...
    lost = commlayer.stats()["packets_lost"] - before["packets_lost"]

The engine is one per process and serves all of its groups, also those that hooks make. docs/settings.md has the
counters; how much of a model's gradients was not counted, its HookState knows.
"""

from __future__ import annotations

from ..config import whole
from ..errors import ConfigError
from .native import Engine

RANK_MAX = 0xFFFF
"""The engine numbers peers with 16 bits."""


def stats() -> dict[str, int]:
    """This rank's counters since its engine was opened, which the first group does; they only grow.

    What goes through shared memory is in no packet. Raises ClosedError when the process has no engine: before its
    first group is made, for a HookState that is in the first backward, and after the last one was destroyed.
    """
    return Engine.shared_stats()


def paths(rank: int) -> list[dict[str, int]]:
    """The paths to another rank (a rank of the job, not of a group), in their order: counters since it was met, and
    estimates of the moment, in bytes and microseconds.

    Raises ClosedError as `stats` does, CommError for a rank that no group of this process sends packets to, and
    ConfigError for what is no rank.
    """
    if not 0 <= whole(rank, -1) <= RANK_MAX:
        raise ConfigError(f"commlayer.paths({rank!r}): use the number of another rank of the job, from 0 on")
    return Engine.shared_paths(int(rank))
