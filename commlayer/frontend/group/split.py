"""`dist.split_group`: a group makes groups of some of its ranks, in one call of all its ranks. `group_among`: some
ranks of the job make a group by themselves. `name_of`: the names of both.

Since torch 2.15 that ends in `CommProcessGroup.split_group`. Before, torch refuses to split any group on a machine
without an accelerator, so `split_group` takes the place of its function for our groups.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ...config import Policy
from ...errors import ConfigError
from .options import NAME, Options

_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()
"""How many groups of each kind this process has made of the ranks of a group."""


def name_of(parent: dist.ProcessGroup, kind: str) -> str:
    """A name for a new group of ranks of `parent`. They agree on it, and it is a new one: all of them count their calls
    with this `kind`.

    The names that torch gives count the groups of a process. After a `new_group` of some ranks these counts differ, and
    after a group was destroyed a name comes again.
    """
    counts = _made.setdefault(parent, Counter())
    counts[kind] += 1
    return f"{kind}:{counts[kind]}"


def forget_names(parent: dist.ProcessGroup) -> None:
    """`parent` counts from 1 again: it has other members."""
    _made.pop(parent, None)


def policy_of(parent: Any, options: Any) -> Policy:
    """The policy of a group that `parent` splits off: that of `options`, or the parent's.

    torch 2.13 hands over the options of the parent's backend where the script gives none. Raises ConfigError.
    """
    if options is None or isinstance(options, dist.ProcessGroupGloo._Options):  # type: ignore[attr-defined]
        return parent.policy  # type: ignore[no-any-return]
    if not isinstance(options, Options):
        raise ConfigError(f"pg_options={options!r}: pass commlayer.Options(commlayer.Policy(...)), or nothing")
    return options.policy


def check_ranks(parent: Any, split_ranks: Sequence[Sequence[int]] | None) -> Sequence[Sequence[int]]:
    """Returns `split_ranks`. Raises ValueError unless they are lists of ranks of `parent`, no rank in two of them."""
    if not split_ranks or not all(split_ranks):
        raise ValueError(f"split_ranks={split_ranks!r}: give one list of ranks for each new group, none of them empty")
    named = [rank for ranks in split_ranks for rank in ranks]
    for rank in named:
        if not 0 <= rank < parent.size():
            raise ValueError(f"split_ranks={split_ranks!r}: there is no rank {rank} in a group of {parent.size()}")
        if named.count(rank) > 1:
            raise ValueError(f"split_ranks={split_ranks!r}: rank {rank} is there twice")
    return split_ranks


def split_group(
    parent: Any,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> Any:
    """`dist.split_group` for a group of ours, before torch 2.15. All ranks of `parent` call it, with the same lists.

    `split_ranks` are ranks of `parent`; their order in a list does not matter. Returns this rank's group; for a rank in
    none of the lists None, or what torch 2.14 has for that. The new group has the policy of `parent`, unless
    `pg_options` gives another.

    Raises ValueError for wrong ranks or another backend than the parent's, and the errors of a new group.
    """
    split_ranks = check_ranks(parent, split_ranks)
    whole = str(c10d._world.pg_map[parent][0])
    if backend is not None and backend.lower() not in {whole, *whole.split(",")}:
        raise ValueError(f"backend={backend!r}: the parent's is {whole!r}; name that, a device of it, or none")
    options = Options(policy_of(parent, pg_options))
    own = next((sorted(ranks) for ranks in split_ranks if parent.rank() in ranks), None)  # torch sorts them, too
    name = parent.name_of_split(own or split_ranks[0])
    if own is None:
        return None if _release() < (2, 14) else dist.GroupMember.NON_GROUP_MEMBER
    return subgroup(
        [dist.get_global_rank(parent, rank) for rank in own],
        backend or whole,
        name,
        options,
        timeout or c10d.default_pg_timeout,
        group_desc or f"{parent.group_desc}:split",
    )


def subgroup(ranks: Sequence[int], backend: str, name: str, options: Options, timeout: timedelta, desc: str) -> Any:
    """A new group, which torch knows, of these ranks of the job; this process is one of them. The others do the same.

    Raises the errors of a new group.
    """
    own = dist.get_rank()
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(own),
        list(ranks),
        backend,
        c10d._world.pg_map[c10d._get_default_group()][1],
        name,  # type: ignore[arg-type]  # torch's GroupName is a str
        backend_options=options,
        timeout=timeout,
        group_desc=desc,
    )
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def group_among(ranks: Sequence[int], kind: str, policy: Policy | None = None, timeout: timedelta | None = None) -> Any:
    """A group of ours of these ranks of the job, in their order. They all call, and no others: with the same ranks and
    `kind`, which is also its description. `timeout`: that of operations; None: torch's default.

    Raises the errors of a new group.
    """
    options, world = Options(policy), c10d._get_default_group()
    members = hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:16]  # a name of 1,000 ranks is too long
    of_these = f"{kind}:{members}"
    name = name_of(world, of_these)
    try:
        return subgroup(ranks, NAME, name, options, timeout or c10d.default_pg_timeout, kind)
    except BaseException:
        _made[world][of_these] -= 1  # ranks that did not come have not counted; they may come to the next attempt
        raise


def _release() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split(".")[:2])
