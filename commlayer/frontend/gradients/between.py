"""`between`: for averages in two levels, the group of the ranks of all hosts that have the same place in their host.

The ranks of a model's group agree first on what `HookState(within=...)` of each of them is. So all of them make their
groups, or all raise the same error: a rank that raised alone would leave the others waiting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...config import Policy
from ...errors import CommError, ConfigError
from ..group.backend import CommProcessGroup
from ..work.context import AHEAD, labelled, priority
from .hook_group import group_of, largest_of

NOT_A_MEMBER, UNKNOWN, FACTORS = -1, -2, -3
"""Faults of a rank, in place of the number of its group's ranks."""

FAULTS = {
    NOT_A_MEMBER: "it is not a member of the group that it was given; give it the group of its own host",
    UNKNOWN: "torch does not know its group, which is destroyed, or of another world; make it after init_process_group",
    FACTORS: "the codec or the restored state is of PowerSGD or auto, which need whole buckets; use another codec",
}


def between(whole: CommProcessGroup, within: Any, policy: Policy, *, fault: int = 0) -> CommProcessGroup:
    """The group of this rank's peers, a commlayer group with this policy; group rank i is of host i.

    `whole` is a group of the model's ranks, which all call. `within` is this rank's `HookState(within=...)`. `fault`:
    one of FAULTS that the caller has found. Raises ConfigError, with the same text on all ranks, if that of one rank
    makes no sense; and the errors of a new group.
    """
    ranks = dist.get_process_group_ranks(whole)
    with priority(AHEAD), labelled("within"):
        rows = _rows(whole, _row(within, fault, len(ranks)))
        text = fault_of(dict(zip(ranks, rows, strict=True)))
        if text:
            # A rank that goes away now would be lost for ranks that have not got all rows.
            with contextlib.suppress(CommError):
                whole.barrier().wait()
            raise ConfigError(f"{whole.who}: HookState(within=...): {text}")
        hosts = sorted({tuple(row) for row in rows}, key=lambda host: ranks.index(host[0]))
        place = rows[whole.rank()].index(ranks[whole.rank()])
        return _made(whole, [host[place] for host in hosts], policy)


def fault_of(groups: dict[int, list[int]]) -> str:
    """Why the ranks' groups are not hosts of equal size, which have each rank once; empty if they are.

    `groups` has, by rank of the job, the ranks of its group, or one of FAULTS alone.
    """
    for rank, group in groups.items():
        if group[0] in FAULTS:
            return f"rank {rank}: {FAULTS[group[0]]}"
        for member in group:
            if member not in groups:
                return (
                    f"the group of rank {rank} has rank {member}, which is none of the ranks {sorted(groups)} that "
                    f"average these gradients; give groups of these alone"
                )
            if groups[member] != group:
                return (
                    f"rank {rank} has a group of the ranks {group}, and rank {member} one of {groups[member]}; give "
                    f"all ranks of a host the same group, and each rank one"
                )
    first, size = next(iter(groups)), len(next(iter(groups.values())))
    for rank, group in groups.items():
        if len(group) != size:
            return (
                f"the group of rank {rank} has {len(group)} ranks, and that of rank {first} {size}; all hosts must "
                f"have as many ranks, or leave within out"
            )
    return ""


def _row(within: Any, fault: int, count: int) -> list[int]:
    """What this rank tells the others: the number of its group's ranks and these, or a fault. `count`: all ranks."""
    ranks: list[int] = []
    if not fault and not isinstance(within, dist.ProcessGroup):
        fault = NOT_A_MEMBER
    elif not fault:
        try:
            ranks = dist.get_process_group_ranks(within)[: count + 1]  # so many have one that is none of ours
        except (KeyError, ValueError, RuntimeError):
            fault = UNKNOWN
    return [fault or len(ranks), *ranks, *[0] * (count + 1 - len(ranks))]


def _rows(whole: CommProcessGroup, own: Sequence[int]) -> list[list[int]]:
    """The groups of all ranks, without padding."""
    mine = torch.tensor(own, dtype=torch.int64, device="cpu")
    rows = mine.new_empty((whole.size(), len(mine)))
    whole.all_gather_single(rows, mine).wait()
    return [row[1 : 1 + row[0]] if row[0] > 0 else row[:1] for row in rows.tolist()]


def _made(whole: CommProcessGroup, ranks: list[int], policy: Policy) -> CommProcessGroup:
    """The group of these ranks. If it fails on one rank, it fails on all."""
    failure: Exception | None = None
    made: CommProcessGroup | None = None
    try:
        made = group_of(policy, whole, ranks)
    except Exception as error:
        failure = error
    failed = int(largest_of(whole, [0 if failure is None else 1 + whole.rank()])[0])
    if failed:
        raise failure or CommError(
            f"{whole.who}: HookState(within=...): rank {dist.get_global_rank(whole, failed - 1)} could not make its "
            f"group between the hosts; its error has the reason"
        )
    assert made is not None  # noqa: S101  # or there is a failure
    return made
