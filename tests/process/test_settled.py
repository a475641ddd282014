"""Collectives of tensors that wrap others: results of functional collectives in flight, and DTensors."""

import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from commlayer.tools.bench.collectives import all_gather_single, reduce_scatter_single
from tests import ranks

ROUNDS = 6
COUNT = 6


def in_flight(values: Tensor) -> Tensor:
    """The sum of these on rank 0 and of zeros on the others, which nobody has waited for."""
    own = values.clone() if dist.get_rank() == 0 else torch.zeros_like(values)
    found: Tensor = funcol.all_reduce(own, "sum", dist.group.WORLD)
    return found


def _send(tensor: Tensor, other: Tensor) -> list[Tensor]:
    if dist.get_rank() == 0:
        dist.send(tensor, 1)
    elif dist.get_rank() == 1:
        dist.recv(other, 0)
    return [other]


def _in_place(call: Callable[[Tensor], object]) -> Callable[[Tensor, Tensor], list[Tensor]]:
    def called(tensor: Tensor, _: Tensor) -> list[Tensor]:
        call(tensor)
        return [tensor]

    return called


def _gathered(call: Callable[[list[Tensor], Tensor], object]) -> Callable[[Tensor, Tensor], list[Tensor]]:
    def called(tensor: Tensor, other: Tensor) -> list[Tensor]:
        outputs = [other, *(torch.zeros(COUNT) for _ in range(dist.get_world_size() - 1))]
        call(outputs, tensor)
        return outputs

    return called


def _of_root(tensor: Tensor, outputs: list[Tensor]) -> None:
    dist.gather(tensor, outputs if dist.get_rank() == 1 else None, 1)


def _of_parts(output: Tensor, whole: Tensor) -> list[Tensor]:
    reduce_scatter_single(output[: COUNT // dist.get_world_size()], whole)
    return [output]


def _of_wholes(shard: Tensor, output: Tensor) -> list[Tensor]:
    all_gather_single(output, shard[: COUNT // dist.get_world_size()])
    return [output]


def _exchanged(tensor: Tensor, other: Tensor) -> list[Tensor]:
    dist.all_to_all_single(other, tensor)
    return [other]


COLLECTIVES: dict[str, Callable[[Tensor, Tensor], list[Tensor]]] = {
    "all_reduce": _in_place(dist.all_reduce),
    "async": _in_place(lambda tensor: dist.all_reduce(tensor, async_op=True).wait()),
    "reduce": _in_place(lambda tensor: dist.reduce(tensor, 1)),
    "broadcast": _in_place(lambda tensor: dist.broadcast(tensor, 1)),
    "all_gather": _gathered(dist.all_gather),
    "gather": _gathered(lambda outputs, tensor: _of_root(tensor, outputs)),
    "reduce_scatter": _of_parts,
    "all_gather_single": _of_wholes,
    "all_to_all_single": _exchanged,
    "send": _send,
}


@pytest.mark.parametrize("name", list(COLLECTIVES))
@ranks.on(2)
def test_results_in_flight_are_waited_for(rank: int, size: int, name: str) -> None:
    """Each rank draws by itself which of its tensors are such results."""
    chance, shared = random.Random(rank), random.Random(0)
    with ranks.job(rank, size):
        for _ in range(ROUNDS):
            first, second = (torch.tensor([float(shared.randrange(9)) for _ in range(COUNT)]) for _ in range(2))
            wrapped = in_flight(first), in_flight(second)
            plain = COLLECTIVES[name](first.clone(), second.clone())
            drawn = [one if chance.random() < 0.5 else two for one, two in zip(wrapped, (first, second), strict=True)]
            found = COLLECTIVES[name](drawn[0], drawn[1])
            assert [each.tolist() for each in found] == [each.tolist() for each in plain]


@ranks.on(2)
def test_a_dtensor_is_refused_before_anything_is_sent(rank: int, size: int) -> None:
    with ranks.job(rank, size):
        mesh = init_device_mesh("cpu", (size,))
        divided = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
        with pytest.raises(NotImplementedError, match="c10d"):
            dist.all_reduce(divided)
        with pytest.raises(NotImplementedError, match="c10d"):
            dist.broadcast(divided, 0)
        own = divided.to_local().clone()
        dist.all_reduce(own)
        assert own.tolist() == [4.0, 6.0, 8.0, 10.0]
