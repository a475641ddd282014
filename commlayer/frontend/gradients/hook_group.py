"""`group_of`: the group on which a hook averages; hooks share it. `check_alike`: its ranks compare their settings.
`largest_of`: what they agree by."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...config import Config, Policy
from ...errors import CommError, ConfigError, MismatchError
from ..group.backend import CommProcessGroup
from ..group.split import group_among
from ..group.told import told_by_all
from ..work.context import labelled
from ..work.odd import differing, odd_ones

# Collectives of groups of any backend: the names of torch 2.13, and those before.
plain_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
plain_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Policy, tuple[int, ...]], CommProcessGroup]] = (
    weakref.WeakKeyDictionary()
)
"""The groups that hooks share, by the group of their model, their policy and their ranks."""

OF_HOOK = ("codec", "exact_steps", "allow_state", "residual")
"""The fields of a policy that are the hook's alone: it gives each operation its policy."""


def group_of(
    policy: Policy, process_group: dist.ProcessGroup | None, ranks: Sequence[int] | None = None
) -> CommProcessGroup:
    """A commlayer group with this policy and the ranks of `process_group` (None: WORLD): that one, or one that hooks
    with the same policy share, because each group has threads and descriptors of its own.

    `ranks`: some of its ranks instead, as numbers of the job. Every rank of the group must call. A group that it makes
    has the timeout of `process_group`.
    """
    if Config.is_disabled():
        raise ConfigError("COMMLAYER_DISABLE=1: a HookState has no group without the engine; unset it on every rank")
    policy = _of_group(policy)
    given = process_group or dist.distributed_c10d._get_default_group()
    whole = dist.get_process_group_ranks(given)
    members = tuple(ranks or whole)
    if isinstance(given, CommProcessGroup) and _of_group(given.policy) == policy and list(members) == whole:
        return given
    known = _made.setdefault(given, {})
    found = known.get((policy, members))
    if found is not None and is_usable(found):
        return found
    made = group_among(members, "commlayer.HookState", policy, _timeout_of(given))
    assert isinstance(made, CommProcessGroup)  # noqa: S101  # this rank is a member
    known[policy, members] = made
    return made


def met_group(
    policy: Policy, process_group: dist.ProcessGroup | None, compare: Callable[[CommProcessGroup], None]
) -> CommProcessGroup:
    """As `group_of`, once `compare` has compared the ranks' hooks. All ranks call, and compare on their model's group
    if it is one of ours: only some of them might want another one."""
    given = process_group or dist.distributed_c10d._get_default_group()
    if isinstance(given, CommProcessGroup):
        compare(given)
        return group_of(policy, given)
    made = group_of(policy, given)  # its ranks compare the policies of their groups
    compare(made)
    return made


def check_alike(group: CommProcessGroup, settings: Mapping[str, Any]) -> None:
    """Raises MismatchError, with the same reason on all ranks of the group, if their `settings` of a hook differ.

    All ranks of the group call: what they would do next, as making a group, could be different things.
    """
    ranks = dist.get_process_group_ranks(group)
    with labelled("the policies of its comm hook"):
        told = told_by_all(group, settings)
        by_name = {name: [each[name] for each in told] for name in settings}
        found = {name: text for name, values in by_name.items() if (text := differing(values, ranks))}
        if not found:
            return
        with contextlib.suppress(CommError):  # a rank that goes away now would be lost for those that have not got all
            group.barrier().wait()
    error = MismatchError(
        f"{group.who}: the policies of the communication hook (HookState) differ: "
        f"{'; '.join(f'{name}: {text}' for name, text in found.items())}; use the same on all ranks"
    )
    error.rank, error.group = ranks[group.rank()], group.group_name
    error.culprit = ranks[odd_ones(by_name[next(iter(found))])[0]]
    raise error


def _timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The timeout of a group's operations; None: it tells none."""
    if isinstance(group, CommProcessGroup):
        return group.timeout
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return getattr(options, "_timeout", None)


def _of_group(policy: Policy) -> Policy:
    """The part of a hook's policy that its group must have."""
    defaults = Policy()
    return dataclasses.replace(policy, **{name: getattr(defaults, name) for name in OF_HOOK})


def check_ranks(has: dist.ProcessGroup | None, given: dist.ProcessGroup, who: str) -> None:
    """Raises ConfigError if a HookState has a group of other ranks than `given`, which `who` hands to it."""
    if has is None:
        return
    ranks, wanted = (sorted(dist.get_process_group_ranks(group)) for group in (has, given))
    if ranks != wanted:
        raise ConfigError(
            f"{who}(state=...): its process_group has ranks {ranks}, and the gradients are those of ranks {wanted}; "
            f"make the HookState with their group, or without one"
        )


def is_usable(group: CommProcessGroup | None) -> bool:
    """Whether torch has not let go of a group."""
    return group is not None and (not group.closed or group in dist.distributed_c10d._world.pg_map)


def is_no_member(given: object) -> bool:
    """Whether it is what `dist.new_group` returns on ranks that are not members."""
    return given is dist.GroupMember.NON_GROUP_MEMBER


def largest_of(group: dist.ProcessGroup, own: Sequence[float], device: torch.device | str = "cpu") -> list[float]:
    """The largest of all ranks' values, one by one. `device` is that of the exchange."""
    values = torch.tensor(own, dtype=torch.float64, device=device)
    group.allreduce([values], op=dist.ReduceOp(dist.ReduceOp.MAX)).wait()
    return [float(value) for value in values.tolist()]
