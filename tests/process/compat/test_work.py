"""`dist.Work`: the questions of a caller to an operation that is done."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

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


@ranks.on(2, ranks.run_job)
def test_result(rank: int, size: int) -> None:
    """gloo's depends on the collective; ours are always the tensors that were given to be filled."""
    outputs = [torch.zeros(2) for _ in range(size)]
    work = dist.all_gather(outputs, torch.full((2,), float(rank)), async_op=True)
    assert work is not None
    work.wait()
    assert work.exception() is None
    assert [tensor.tolist() for tensor in work.result()] == [[0.0, 0.0], [1.0, 1.0]]
