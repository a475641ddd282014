"""`dist.Work`: the questions of a caller to an operation in flight, done, or failed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlayer
from tests import ranks
from tests.process.compat.gloo import same_as_gloo


@ranks.on(2, same_as_gloo)
def test_done(rank: int, size: int) -> Any:
    tensor = torch.full((1000,), rank + 1.0)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    waited = [work.wait(), work.wait(timedelta(seconds=5))]
    return [
        waited,
        work.is_completed(),
        work.is_success(),
        work.get_future().wait()[0][:3],
        work.get_future().done(),
        work.get_future().then(lambda future: future.value()[0][0].item() + 1).wait(),
        tensor[:3],
    ]


def _result(rank: int, size: int) -> Any:
    outputs = [torch.zeros(2) for _ in range(size)]
    work = dist.all_gather(outputs, torch.full((2,), float(rank)), async_op=True)
    assert work is not None
    work.wait()
    assert work.exception() is None
    return [tensor.tolist() for tensor in work.result()]


def test_result() -> None:
    """gloo's depends on the collective; ours are always the tensors that were given to be filled."""
    assert ranks.run(_with_ours, 2, _result) == [[[0.0, 0.0], [1.0, 1.0]]] * 2


def _in_flight(rank: int, size: int) -> Any:
    store = ranks.store()
    if rank == 1:
        store.wait(["rank 0 looked"])
    work = dist.all_reduce(torch.ones(10), async_op=True)
    assert work is not None
    if rank == 0:
        assert not work.is_completed()
        assert not work.get_future().done()
        with pytest.raises(RuntimeError):
            work.wait(timedelta(milliseconds=50))
        store.set("rank 0 looked", "1")
    assert work.wait()  # with gloo, a wait that ends early would have ended the operation, too
    assert work.is_success()


def test_in_flight() -> None:
    ranks.run(_with_ours, 2, _in_flight)


@ranks.on(2)
def test_failed(rank: int, size: int) -> None:
    ranks.init(rank, size)
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 1:
        ranks.store().wait(["rank 0 is done"])
        return
    work = dist.all_reduce(torch.ones(10), group=group, async_op=True)
    assert work is not None
    with pytest.raises(commlayer.OperationTimeoutError):
        work.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), commlayer.OperationTimeoutError)
    with pytest.raises(RuntimeError, match="timed out"):
        work.get_future().wait()
    ranks.store().set("rank 0 is done", "1")


def _with_ours(rank: int, size: int, body: Any) -> Any:
    with ranks.job(rank, size):
        return body(rank, size)
