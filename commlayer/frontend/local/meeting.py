"""`meet`: the ranks tell each other how they have called LocalSteps, and which weights they have, before they train."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ...errors import AbortedError, CommError, ConfigError, OperationTimeoutError, PeerLostError
from ..group.backend import CommProcessGroup
from ..work.odd import differing, odd_ones, usual

HERE = "at with LocalSteps"
"""The key in a group's Store of the times that a rank has come."""

LATE_S = 1.0
"""Ranks that live may come so much later than one that has noticed the end of another one."""

LOST = (PeerLostError, AbortedError, OperationTimeoutError)
"""Errors of a sync after which the other sites can go on: a site died, ended its `with` by an exception, or hangs."""

REMEDIES = {
    "digests": "all sites start with the same weights; call torch.manual_seed with one number before the model is "
    "made, or load one checkpoint on all ranks",
    "model": "make the same model on all ranks",
    "order of gradients": "restore checkpoints that all ranks saved after the same step",
    "syncs": "restore checkpoints that all ranks saved after the same sync",
}
"""Advice for values that differ between the ranks."""


@dataclasses.dataclass
class Introduction:
    """What a rank says of itself."""

    fault: str = ""
    """Text of the error that it would raise; empty: none."""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Values that must be alike, by name."""
    digests: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Checksums of tensors that must be equal, by name."""
    token: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))


def meet(group: dist.ProcessGroup, own: Introduction, remedies: Mapping[str, str]) -> str:
    """Returns a name that no other meeting has. Raises ConfigError with the same text on all ranks if one of them has a
    fault, other settings or other tensors.

    All ranks of the group call. `remedies`: advice by the name of a setting.
    """
    told: list[Any] = [None] * group.size()
    dist.all_gather_object(told, dataclasses.asdict(own), group=group)
    ranks = [dist.get_global_rank(group, member) for member in range(group.size())]
    all_told = [Introduction(**fields) for fields in told]
    fault = next((other.fault for other in all_told if other.fault), "")
    if fault:
        faulty = [str(rank) for rank, other in zip(ranks, all_told, strict=True) if other.fault == fault]
        raise ConfigError(f"rank{'s' * (len(faulty) > 1)} {', '.join(faulty)}: {fault}")
    for name in dict.fromkeys(name for other in all_told for name in other.settings):
        values = [other.settings.get(name) for other in all_told]
        if found := differing(values, ranks):
            raise ConfigError(f"LocalSteps: {name} differs: {found}; {remedies.get(name, 'use the same on all ranks')}")
    for name in all_told[0].digests:
        values = [other.digests.get(name) for other in all_told]
        if odd := odd_ones(values):
            others = ranks[usual(values)]
            raise ConfigError(
                f"LocalSteps: {name!r} has other values on rank {ranks[odd[0]]} than on rank {others}: "
                f"{remedies['digests']}"
            )
    return all_told[0].token


def attend(group: dist.ProcessGroup) -> None:
    """Returns once all ranks of the group have come, if its backend for the CPU is commlayer or gloo. Raises
    PeerLostError if one of them has ended, for which a new group would wait until its timeout. All ranks call."""
    if isinstance(group, CommProcessGroup):
        group.barrier().wait()
    elif "cpu:gloo" in dist.get_backend_config(group).split(","):
        _, store = dist.distributed_c10d._world.pg_map[group]
        times = store.add(f"{HERE} {group.rank()}", 1)
        try:
            dist.all_reduce(torch.zeros(1, dtype=torch.float32, device="cpu"), group=group)
        except RuntimeError as error:
            raise PeerLostError(_absent(group, store, times, error)) from error


def _absent(group: dist.ProcessGroup, store: Any, times: int, error: RuntimeError) -> str:
    """The text of an error: gloo does not name the rank that has ended. The others have come so many times."""
    time.sleep(LATE_S)
    ranks, absent = dist.get_process_group_ranks(group), list[str]()
    with contextlib.suppress(RuntimeError):  # without a Store
        absent = [str(rank) for at, rank in enumerate(ranks) if store.add(f"{HERE} {at}", 0) < times]
    who = f"rank(s) {', '.join(absent)}" if absent else "another rank"
    return (
        f"rank {dist.get_rank()}: LocalSteps: {who} of its group, {', '.join(map(str, ranks))}, ended before `with`, "
        f"or did not come to it in time; start all of them again ({error})"
    )


ErrorT = TypeVar("ErrorT", bound=CommError)


def on_all(error: ErrorT, culprit: int) -> ErrorT:
    """Marks an error that all ranks raise, from what they have told each other: an abort would only hide it."""
    error.culprit = culprit
    vars(error)["is_on_all"] = True
    return error


def is_on_all(error: BaseException) -> bool:
    """Whether the other ranks raise this error, too."""
    return bool(vars(error).get("is_on_all"))
