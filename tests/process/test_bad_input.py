"""Programs that cannot work, with tensors of a device, a fake of a GPU: each rank gets an error that says why."""

from __future__ import annotations

import math
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlayer
from tests import ranks
from tests.gpu.lab import FakeGpu

MODES = pytest.mark.parametrize("stream_wait", [False, True], ids=["blocking", "stream"])


def lab_of(stream_wait: bool) -> FakeGpu:
    lab = FakeGpu(stream_wait=stream_wait)
    lab.stage()
    return lab


@MODES
@ranks.on(2, ranks.run_job)
def test_tensors_of_the_host_beside_those_of_a_device(rank: int, size: int, stream_wait: bool) -> None:
    """Results on the host are there when `wait()` returns, as no stream orders their reading."""
    lab = lab_of(stream_wait)
    own, whole = lab.tensor(torch.full((3,), rank + 1.0)), torch.zeros(6)
    dist.all_gather_into_tensor(whole, own)
    assert whole.tolist() == [1.0] * 3 + [2.0] * 3
    gathered = lab.tensor(torch.zeros(6))
    dist.all_gather_into_tensor(gathered, torch.full((3,), rank + 5.0))
    assert lab.read(gathered).tolist() == [5.0] * 3 + [6.0] * 3


@MODES
@ranks.on(2, ranks.run_job)
def test_sparse_tensors_of_a_device(rank: int, size: int, stream_wait: bool) -> None:
    lab = lab_of(stream_wait)
    sparse = lab.cuda.adopt(torch.eye(3).to_sparse())
    with pytest.raises(commlayer.ConfigError, match=rf"^rank {rank}: torch\.sparse_coo tensors on cpu: use to_dense"):
        dist.all_reduce(sparse)
    tensor = lab.tensor(torch.ones(3))  # the group goes on
    dist.all_reduce(tensor)
    assert lab.read(tensor).tolist() == [2.0] * 3


@MODES
@ranks.on(2)
def test_a_peer_that_never_calls(rank: int, size: int, stream_wait: bool) -> None:
    ranks.init(rank, size, timeout=timedelta(seconds=2))
    lab = lab_of(stream_wait)
    ranks.meet("both have their group", size)
    if rank == 0:
        tensor = lab.tensor(torch.ones(5))
        work: Any = dist.all_reduce(tensor, async_op=True)
        if stream_wait:  # the stream has no error to give
            work.wait()
            assert math.isnan(float(lab.read(tensor)[0]))
        call = (lambda: dist.all_reduce(tensor)) if stream_wait else work.wait
        with pytest.raises(
            commlayer.OperationTimeoutError, match=r"all_reduce 1 of .*rank 1 did not call it"
        ) as caught:
            call()
        assert (caught.value.rank, caught.value.culprit) == (0, 1)
    ranks.meet("it was told", size)


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@ranks.on(2)
def test_two_threads_that_call_in_another_order_on_each_rank(rank: int, size: int, on_device: bool) -> None:
    ranks.init(rank, size)
    lab = lab_of(stream_wait=False)
    ranks.meet("both have their group", size)
    first_has_called = threading.Event()
    works: list[Any] = []

    def reduce() -> None:
        if rank == 1:
            first_has_called.wait(10)
        values = torch.ones(5)
        works.append(dist.all_reduce(lab.tensor(values) if on_device else values, async_op=True))
        first_has_called.set()

    def broadcast() -> None:
        if rank == 0:
            first_has_called.wait(10)
        values = torch.ones(7)
        works.append(dist.broadcast(lab.tensor(values) if on_device else values, 0, async_op=True))
        first_has_called.set()

    threads = [threading.Thread(target=call) for call in (reduce, broadcast)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with pytest.raises(commlayer.MismatchError, match=r"ranks disagree on the operation") as caught:
        works[0].wait()
    assert "called all_reduce 1 of" in str(caught.value)
    assert "called broadcast 1 of" in str(caught.value)
    ranks.meet("it was told", size)
