"""Gradients that travel as low-rank factors: DDP's hook with `powersgd:RANK`, between ranks that share no memory."""

import os
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from tests import ranks
from tests.drift import SHAPES, Drift, check_equal, directions, hooked, mean, nmse, step_of

POWERSGD = commlayer.Policy(codec="powersgd:2")
LOW_RANK = (0, 2)
"""Indices of the parameters that are compressed."""


def errors_of(state: commlayer.HookState) -> dict[int, Tensor]:
    """The errors by index of the parameter."""
    powersgd = state.low_rank.state_dict()["powersgd"]
    return {len(SHAPES) - 1 - number: error.clone() for number, error in powersgd["errors"].items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@ranks.on(3, ranks.run_job, environ=ranks.NETWORK)
def test_replicas_agree_and_errors_come_back(rank: int, size: int, dtype: torch.dtype) -> None:
    model, state = hooked(POWERSGD, dtype)
    results, exact = ([torch.zeros(shape, dtype=torch.float64) for shape in SHAPES] for _ in range(2))
    for step in range(5):
        gradients = step_of(model, directions(rank, step, dtype))
        check_equal(gradients, size)
        for i, gradient in enumerate(gradients):
            right = mean(size, step, dtype)[i]
            assert (nmse(gradient, right) > 0.5) == (i in LOW_RANK)  # random matrices have no low rank
            results[i] += gradient
            exact[i] += right
    errors = errors_of(state)
    assert set(errors) == set(LOW_RANK)
    for i, error in errors.items():
        left = error.double()
        torch.distributed.all_reduce(left)
        assert nmse(results[i] + left / size, exact[i]) < (1e-10 if dtype == torch.float32 else 1e-5)
    assert state.uncounted_bytes == 0


@ranks.on(3, ranks.run_job, environ=ranks.NETWORK)
def test_matrices_of_low_rank_arrive(rank: int, size: int) -> None:
    model, _ = hooked(POWERSGD)
    generator = torch.Generator().manual_seed(1)
    common = [
        torch.randn(rows, 2, generator=generator) @ torch.randn(2, columns, generator=generator)
        for rows, columns in ((300, 400), (33, 501))
    ]
    inputs = directions(0, 0)
    for i, tensor in zip(LOW_RANK, common, strict=True):
        inputs[i] = tensor * (rank + 1)
    for _ in range(3):
        gradients = step_of(model, inputs)
        for i, tensor in zip(LOW_RANK, common, strict=True):
            assert nmse(gradients[i], tensor * 2) < 1e-4


class Layouts(nn.Module):
    """Matrices that lie in memory row by row, column by column, channels last, and with gaps."""

    def __init__(self) -> None:
        super().__init__()
        images = torch.zeros(64, 32, 3, 3).to(memory_format=torch.channels_last)
        shapes = torch.zeros(120, 80), torch.zeros(80, 120).t(), images, torch.zeros(120, 90)[:, :80]
        self.weights = nn.ParameterList(nn.Parameter(shape) for shape in shapes)

    def forward(self, directions: list[Tensor]) -> Tensor:
        return torch.stack([(w * d).sum() for w, d in zip(self.weights, directions, strict=True)]).sum()


@pytest.mark.parametrize("is_view", [False, True])
@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_matrices_arrive_however_they_lie_in_memory(rank: int, size: int, is_view: bool) -> None:
    """A bucket has the values of a parameter in the order of the parameter's memory."""
    model = DistributedDataParallel(Layouts(), gradient_as_bucket_view=is_view)
    model.register_comm_hook(
        commlayer.HookState(commlayer.Policy(codec="powersgd:2", exact_steps=0)), commlayer.allreduce_hook
    )
    generator = torch.Generator().manual_seed(1)
    inputs = []
    for weight in model.module.weights:
        rows, columns = len(weight), weight[0].numel()
        matrix = torch.randn(rows, 2, generator=generator) @ torch.randn(2, columns, generator=generator)
        inputs.append(matrix.view(weight.shape))
    for _ in range(3):
        gradients = step_of(model, [tensor * (rank + 1) for tensor in inputs])
        for gradient, tensor in zip(gradients, inputs, strict=True):
            assert nmse(gradient, tensor * 1.5) < 1e-4


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_errors_of_another_rank_are_dropped(rank: int, size: int) -> None:
    model, state = hooked(POWERSGD)
    step_of(model, directions(rank, 0))
    saved = state.state_dict()
    saved["low_rank"] = saved["low_rank"] | {"owner": 0}
    again, restored = hooked(commlayer.Policy())
    restored.load_state_dict(saved)
    step_of(again, [torch.zeros(shape) for shape in SHAPES])  # their errors wait
    assert set(errors_of(restored)) == set(LOW_RANK)
    assert all(error.any() == (rank == 0) for error in errors_of(restored).values())
    state.low_rank.begin_step(7, 1.0, "rank 7")  # the process has another rank after a restart of the group
    assert not errors_of(state)


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_a_state_of_another_model_is_refused(rank: int, size: int) -> None:
    model, state = hooked(POWERSGD)
    step_of(model, directions(rank, 0))
    saved = state.state_dict()
    replica = DistributedDataParallel(nn.Linear(400, 200, bias=False))
    restored = commlayer.HookState()
    restored.load_state_dict(saved | {"feedback": {}})
    replica.register_comm_hook(restored, commlayer.allreduce_hook)
    with pytest.raises(RuntimeError, match=r"PowerSGD state has values for parameter 3 from the end.*another model's"):
        replica(torch.ones(1, 400)).sum().backward()
    again, restored = hooked(commlayer.Policy())
    restored.load_state_dict(saved)
    restored.policy = commlayer.Policy(codec="powersgd:4", exact_steps=0)
    with pytest.raises(RuntimeError, match="restored PowerSGD state has rank=2, but this one has 4"):
        step_of(again, directions(rank, 0))


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_accumulated_gradients_are_averaged_once(rank: int, size: int) -> None:
    model, state = hooked(POWERSGD)
    model.zero_grad()
    with model.no_sync():
        model(directions(rank, 0)).backward()
    model(directions(rank, 1)).backward()
    assert state.steps == 1
    gradients = [parameter.grad for parameter in model.parameters()]
    for i, (gradient, one, two) in enumerate(zip(gradients, mean(size, 0), mean(size, 1), strict=True)):
        left = errors_of(state).get(i, torch.zeros(SHAPES[i])).double()
        torch.distributed.all_reduce(left)
        assert nmse(gradient + left / size, one + two) < (1e-10 if i in LOW_RANK else 1e-5)


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_overflow_reaches_every_rank_and_leaves_the_errors(rank: int, size: int) -> None:
    model, state = hooked(POWERSGD)
    for step in range(2):
        step_of(model, directions(rank, step))
    before = errors_of(state)
    inputs = directions(rank, 2)
    if rank == 1:
        for tensor in inputs:
            tensor.view(-1)[7] = float("inf")
    assert not any(gradient.isfinite().all() for gradient in step_of(model, inputs))
    after = errors_of(state)
    assert all(torch.equal(before[i], after[i]) for i in LOW_RANK)


def test_a_lost_rank_fails_every_bucket() -> None:
    ended = ranks.outcomes(_lose_rank_2, 3, environ=ranks.NETWORK | {"COMMLAYER_PEER_TIMEOUT_S": "1"})
    for outcome in ended[:2]:
        assert outcome.error is None, outcome.error
        assert outcome.result < 25  # the timeout is 30 s


def _lose_rank_2(rank: int, size: int) -> float:
    """Returns the time until the others learn it."""
    ranks.init(rank, size)
    futures = []

    def hook(state: commlayer.HookState, bucket: Any) -> Any:
        if rank == 2 and state.steps == 2 and bucket.is_last():
            os._exit(0)
        futures.append(commlayer.allreduce_hook(state, bucket))
        return futures[-1]

    model = DistributedDataParallel(Drift(), bucket_cap_mb=0.1)
    hook.__annotations__ = commlayer.allreduce_hook.__annotations__  # DDP checks them
    model.register_comm_hook(commlayer.HookState(commlayer.Policy(codec="powersgd:2", exact_steps=0)), hook)
    step_of(model, directions(rank, 0))
    futures.clear()
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 2"):
        step_of(model, directions(rank, 1))
    took = time.monotonic() - begin
    assert len(futures) > 1
    for future in futures:
        with pytest.raises(RuntimeError, match="rank 2"):
            future.wait()
    return took


@pytest.mark.parametrize("codec", ["powersgd", "powersgd:", "powersgd:0", "powersgd:x", "powersgd:04", "powersgd:1025"])
def test_bad_ranks_are_refused_by_name(codec: str) -> None:
    with pytest.raises(commlayer.ConfigError, match=rf"codec='{codec}'\): .*RANK is a whole number from 1 to 1024"):
        commlayer.Policy(codec=codec)
    commlayer.Policy(codec="powersgd:1024")
