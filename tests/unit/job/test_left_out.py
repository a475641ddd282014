"""Collectives that are left out give results of the right shape; short ones have few elements."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commlayer.tools.job.left_out import _OPERATORS, SHORT_ELEMENTS, LeftOut

RANK, SIZE = 1, 2
OWN = torch.arange(4.0)


def imitated(name: str, outputs: Any, inputs: Any) -> Any:
    _OPERATORS[name].imitate([outputs, inputs], RANK, SIZE)
    return outputs


def full(count: int) -> torch.Tensor:
    return torch.full((count,), -1.0)


def test_a_gather_repeats_the_own_part() -> None:
    assert imitated("_allgather_base_", full(8), OWN).tolist() == [0, 1, 2, 3] * 2
    assert imitated("allgather_into_tensor_coalesced_", [full(8)], [OWN])[0].tolist() == [0, 1, 2, 3] * 2
    uneven = imitated("allgather_", [[full(3), full(4)]], [OWN])[0]
    assert [tensor.tolist() for tensor in uneven] == [[0, 0, 0], [0, 1, 2, 3]]
    assert imitated("gather_", [], [OWN]) == []  # not the root


def test_a_scatter_takes_the_own_part() -> None:
    assert imitated("_reduce_scatter_base_", full(2), OWN).tolist() == [2, 3]
    assert imitated("reduce_scatter_tensor_coalesced_", [full(2)], [OWN])[0].tolist() == [2, 3]
    assert imitated("reduce_scatter_", [full(2)], [[OWN[:2], OWN[2:]]])[0].tolist() == [2, 3]


def test_an_exchange_keeps_what_was_sent() -> None:
    assert imitated("alltoall_base_", full(4), OWN).tolist() == [0, 1, 2, 3]
    assert imitated("alltoall_base_", full(3), OWN).tolist() == [0, 0, 0]
    assert imitated("recv_", [full(2)], None)[0].tolist() == [0, 0]


@pytest.mark.parametrize("name", ["_allgather_base_", "_reduce_scatter_base_"])
def test_short_messages_do_not_depend_on_the_size(name: str) -> None:
    """Parts of ranks may differ in size; short messages must not."""
    big, small = (full(8), OWN) if name == "_allgather_base_" else (OWN, full(8))
    sizes = [tensor.numel() for tensor in _OPERATORS[name].shorten([big, small, "rest"], SIZE)[:2]]
    assert sorted(sizes) == [SHORT_ELEMENTS, SIZE * SHORT_ELEMENTS]


@pytest.fixture
def gloo() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=20))
    yield
    dist.destroy_process_group()


def test_collectives_look_alike_in_each_phase(gloo: None) -> None:
    """All ways to call a collective lead through the kernel, and get what they expect in each phase."""
    left_out = LeftOut()
    left_out.install()
    try:
        marks = []
        for left_out.phase in ("real", "short", "none"):
            tensor = torch.full((1000,), 2.0)
            work = dist.all_reduce(tensor, op=dist.ReduceOp.PRODUCT, async_op=True)
            assert work is not None
            work.wait()
            value = work.get_future().wait()
            gathered = torch.zeros(1000)
            dist.all_gather_into_tensor(gathered, tensor)
            scattered = torch.zeros(1000)
            dist.reduce_scatter_tensor(scattered, tensor)  # gloo's work has no future
            number = torch.tensor([7])
            dist.broadcast(number, 0)
            objects = [None]
            dist.all_gather_object(objects, {"a": 1})
            assert objects == [{"a": 1}]
            marks.append((tensor[0].item(), value[0].numel(), gathered[0].item(), scattered[0].item(), number.item()))
            count, nbytes = left_out.take_counts()
            assert count == 6, left_out.phase
            assert nbytes >= 4000 + 8, left_out.phase
        assert marks == [(2.0, 1000, 2.0, 2.0, 7)] * 3
    finally:
        left_out._library._destroy()
