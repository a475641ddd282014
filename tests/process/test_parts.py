"""A tensor that is divided over ranks has a part here, and is made of the ranks' parts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from commlayer.frontend.group.packing import Packing, unpack
from commlayer.frontend.group.parts import part_of, put_together, take_apart, whole_of
from tests import ranks


def test_a_tensor_that_is_not_divided_is_its_part() -> None:
    plain = torch.ones(3)
    assert part_of(plain) is plain
    assert whole_of(plain, torch.zeros(3)) is plain


@ranks.on(2)
def test_parts_of_unequal_lengths(rank: int, size: int) -> None:
    ranks.init(rank, size)
    for length in (5, 1):  # of one, rank 1 has nothing
        values = torch.arange(2.0 * length).view(length, 2)
        divided = distribute_tensor(values, init_device_mesh("cpu", (size,)), [Shard(0)])
        own = part_of(divided)
        assert torch.equal(own, [*values.chunk(size), values[:0]][rank])
        made = whole_of(10 * own, divided)
        assert made.shape == values.shape
        assert torch.equal(made.full_tensor(), 10 * values)  # type: ignore[attr-defined]
        own.zero_()  # the memory itself
        assert divided.full_tensor().eq(0).all()
    dist.destroy_process_group()


@ranks.on(2)
def test_a_state_travels_in_parts(rank: int, size: int) -> None:
    ranks.init(rank, size)
    mesh = init_device_mesh("cpu", (size,))
    values = torch.arange(15.0).view(3, 5)
    tensors: list[torch.Tensor] = [distribute_tensor(values, mesh, [Shard(dim)]) for dim in (0, 1)]
    state = {"rows": tensors[0], "columns": tensors[1], "step": torch.tensor(7.0), "lr": 0.1}
    apart = take_apart(state)
    found = put_together(unpack(Packing(apart).packed()), mesh)
    assert torch.equal(found["rows"].full_tensor(), values)
    assert torch.equal(found["columns"].full_tensor(), values)
    assert found["columns"].placements == (Shard(1),)
    assert (found["step"], found["lr"]) == (7.0, 0.1)
    dist.destroy_process_group()
