"""Groups: subgroups of all kinds, made and destroyed."""

from typing import Any

import torch
import torch.distributed as dist

from tests import ranks
from tests.process.compat.gloo import same_as_gloo


def _total(rank: int, group: Any = None) -> float:
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


@ranks.on(4, same_as_gloo)
def test_subgroups(rank: int, size: int) -> Any:
    results = []
    for members in ([0], [1, 3], [3, 0, 2], None):
        group = dist.new_group(members)
        if members is None or rank in members:
            results.append([_total(rank, group), dist.get_rank(group), dist.get_process_group_ranks(group)])
    groups = [dist.new_subgroups(2)[0], dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]]
    results += [[_total(rank, group), dist.get_world_size(group)] for group in groups]
    dist.destroy_process_group(groups[0])
    return [*results, _total(rank, groups[1])]


@ranks.on(3, same_as_gloo)
def test_local_synchronization(rank: int, size: int) -> None:
    if rank in (0, 2):  # the other one takes no part
        group = dist.new_group([0, 2], use_local_synchronization=True)
        assert _total(rank, group) == 4.0
