"""`dist.shrink_group`: the ranks of a group go on without some of them, which may be dead.

torch has it for NCCL. It puts what `Backend.shrink` returns into a group of its own, which must be a backend of C++. So
`shrink_group` takes the place of its function for our groups, with torch's own checks of the arguments.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .options import Options
from .split import policy_of, subgroup

IDLE_PAUSE_S = 0.001


def shrink_group(
    ranks_to_exclude: list[int], group: Any = None, shrink_flags: int = c10d.SHRINK_DEFAULT, pg_options: Any = None
) -> Any:
    """`dist.shrink_group` for a group of ours. All ranks of `group` call it, but those to exclude.

    `ranks_to_exclude` are ranks of `group` (None: WORLD), dead or alive. With SHRINK_DEFAULT, operations in flight end
    first, as they do without this call; with SHRINK_ABORT they fail with AbortedError on all ranks. Returns the new
    group, in the order of the old ranks, with the policy and the timeout of `group`, unless `pg_options` gives another
    policy. A new WORLD takes the place of WORLD, and all other groups are gone.

    Raises TypeError, ValueError and RuntimeError for wrong arguments, as torch; the errors of `Exclusion.agree`, after
    which `group` is as before; and those of a new group.
    """
    c10d._validate_shrink_inputs(ranks_to_exclude, shrink_flags)
    given = c10d._prepare_shrink_target_group(group)
    parent: Any = given["process_group"]
    policy = policy_of(parent, pg_options)
    excluded = c10d._validate_and_process_excluded_ranks(ranks_to_exclude, given)
    is_world: bool = given["is_default_group"]
    aborts = shrink_flags == c10d.SHRINK_ABORT
    ending: list[Any] = (
        [torch_group for torch_group in c10d._world.pg_map if hasattr(torch_group, "exclude")] if is_world else [parent]
    )
    if not aborts:
        while any(torch_group.is_busy() for torch_group in ending):
            time.sleep(IDLE_PAUSE_S)
    name = parent.exclude(excluded, aborts=aborts)
    options = Options(policy, timeout=parent.timeout)
    if aborts:
        _abort(ending, f"rank {dist.get_rank()} shrank a group with SHRINK_ABORT")
    if is_world:
        return _world_without(parent, excluded, name, options)
    ranks = [rank for place, rank in enumerate(dist.get_process_group_ranks(parent)) if place not in excluded]
    whole = str(c10d._world.pg_map[parent][0])
    shrunk = subgroup(ranks, whole, name, options, parent.timeout, f"{parent.group_desc}:shrunk")
    dist.destroy_process_group(parent)
    return shrunk


def _world_without(world: Any, excluded: Collection[int], name: str, options: Options) -> Any:
    """WORLD without these ranks: a job of its own, in which the ranks have new numbers."""
    store = dist.PrefixStore(name, c10d._world.pg_map[world][1])
    staying = [rank for rank in range(world.size()) if rank not in excluded]
    whole, device = str(c10d._world.pg_map[world][0]), getattr(world, "bound_device_id", None)
    c10d._destroy_all_other_groups(exclude_group=world)
    dist.destroy_process_group()
    dist.init_process_group(
        whole,
        store=store,
        rank=staying.index(world.rank()),
        world_size=len(staying),
        timeout=world.timeout,
        pg_options=options,
        device_id=device,
    )
    shrunk = dist.group.WORLD
    shrunk._set_group_desc("default:shrunken")  # type: ignore[union-attr]  # as torch calls it
    return shrunk


def _abort(groups: Collection[Any], reason: str) -> None:
    """Aborts groups, those of all others before WORLD."""
    for backend in sorted(groups, key=lambda group: group is dist.group.WORLD):
        backend.abort(reason)
