"""`Report`: what the sites tell each other in a new group; `outcome_of`: that of a sync which some of them lack."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions

from ..group.backend import CommProcessGroup
from .sync import Head, Outcome


class Report(NamedTuple):
    """What the sites tell each other in a new group."""

    ended: int
    """Syncs that have ended there; -1: it has just come."""
    last: tuple[Sequence[Head], bool] | None
    """Heads and `is_rest` of the last one."""
    lacks: bool
    """Whether it lacks the state."""
    is_listening: bool
    is_away: bool
    """Whether its loop is away, which would pack its state."""
    transfers: Mapping[str, Any]
    """As of `Transfers.report`."""


def outcome_of(
    group: CommProcessGroup, told: Sequence[Report], last: Outcome | None, like: Callable[[], tuple[Tensor, Tensor]]
) -> Outcome | None:
    """The outcome of the latest sync, if some sites lack it: one of those that have it sends it to all. None here, if
    this site has it, or lacks more than that. All sites call, with the reports of all.

    `last`: the outcome of this site's latest sync. `like` returns memory for the averages of the latest one.
    """
    most = max(each.ended for each in told)
    if not any(0 <= each.ended < most for each in told):
        return None
    options = BroadcastOptions()
    options.rootRank = next(rank for rank, each in enumerate(told) if each.ended == most)
    own = told[group.rank()].ended
    if own < most:
        known = told[options.rootRank].last
        assert known is not None  # noqa: S101  # a site that has ended a sync keeps its outcome
        heads, is_rest = known
        average, buffers = like()
        last = Outcome(list(heads), average, is_rest, buffers)
    assert last is not None  # noqa: S101  # for mypy
    for values in (last.average, last.buffers):
        if len(values):
            group.broadcast([values], options).wait()
    return last if 0 <= own < most else None
