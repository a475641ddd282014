"""Gradients that travel encoded: DDP's hook with each codec, between ranks that share no memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.compress.codec import PAIRS
from tests import ranks
from tests.residual import total

NETWORK = {"COMMLAYER_SHM": "0"}
SHAPES = ((300, 400), (100,), (33, 501), (50_000, 2))
NMSE = {"f16": 2e-7, "bf16": 1e-5, "int8": 1e-4, "int4-int8": 0.0145, "int4": 0.028}
"""Of contributions and sums together, on Gaussian values."""

CODECS = [name for name in PAIRS if name != "none"]


class Drift(nn.Module):
    """Its gradients are its inputs, independent of its parameters."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES)

    def forward(self, directions: list[Tensor]) -> Tensor:
        return torch.stack([(w * d).sum() for w, d in zip(self.weights, directions, strict=True)]).sum()


def directions(rank: int, step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def mean(size: int, step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    every = [directions(rank, step, dtype) for rank in range(size)]
    return [torch.stack(each).double().mean(0) for each in zip(*every, strict=True)]


def hooked(policy: commlayer.Policy, dtype: torch.dtype = torch.float32, **state: Any) -> Any:
    model = DistributedDataParallel(Drift(dtype), bucket_cap_mb=0.6)
    made = commlayer.HookState(policy, **state)
    model.register_comm_hook(made, commlayer.allreduce_hook)
    return model, made


def step_of(model: DistributedDataParallel, inputs: list[Tensor]) -> list[Tensor]:
    model.zero_grad()
    model(inputs).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def check_equal(tensors: list[Tensor], size: int) -> None:
    """That all ranks have the same bits."""
    for tensor in tensors:
        theirs = [torch.empty_like(tensor) for _ in range(size)]
        dist.all_gather(theirs, tensor)
        assert all(torch.equal(each, tensor) for each in theirs)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("deterministic", [False, True])
@ranks.on(3, ranks.run_job, environ=NETWORK)
def test_average_is_within_the_errors_of_the_codec(rank: int, size: int, codec: str, deterministic: bool) -> None:
    model, state = hooked(commlayer.Policy(codec=codec, deterministic=deterministic))
    for step in range(3):  # DDP regroups its buckets after the first one
        gradients = step_of(model, directions(rank, step))
        check_equal(gradients, size)
        for gradient, exact in zip(gradients, mean(size, step), strict=True):
            error = float((gradient - exact).square().mean() / exact.square().mean())
            fine = exact.dim() < 2
            assert error <= (NMSE["bf16"] if fine else NMSE[codec] * (1 if step == 0 or codec != "int4" else 2))
            assert fine or error >= 0.1 * NMSE[codec]  # it was encoded
    assert state.uncounted_bytes == 0


@pytest.mark.parametrize("residual", ["f32", "bf16"])
@ranks.on(3, ranks.run_job, environ=NETWORK)
def test_rounding_errors_come_back(rank: int, size: int, residual: Any) -> None:
    model, state = hooked(commlayer.Policy(codec="int4", residual=residual))
    results, exact = ([torch.zeros(shape, dtype=torch.float64) for shape in SHAPES] for _ in range(2))
    for step in range(6):
        for result, gradient in zip(results, step_of(model, directions(rank, step)), strict=True):
            result += gradient
        for each, one in zip(exact, mean(size, step), strict=True):
            each += one
    for parameter, result, right in zip(model.parameters(), results, exact, strict=True):
        left = total(state.feedback, parameter)
        dist.all_reduce(left)
        if parameter.dim() < 2:
            assert not left.any()
            continue
        assert left.any()
        error = (result + left / size - right).square().mean() / right.square().mean()
        assert error < (1e-10 if residual == "f32" else 1e-6)
    stored = sum(len(v) * v.itemsize for each in state.feedback._kept.values() for _, v, late in each if not late)
    assert stored == sum(p.numel() for p in model.parameters() if p.dim() > 1) * (4 if residual == "f32" else 2)


@pytest.mark.parametrize("codec", ["int8", "int4"])
@ranks.on(3, ranks.run_job, environ=NETWORK)
def test_overflow_reaches_every_rank_and_leaves_the_residual(rank: int, size: int, codec: str) -> None:
    model, state = hooked(commlayer.Policy(codec=codec))
    for step in range(2):
        step_of(model, directions(rank, step))
    before = [total(state.feedback, parameter) for parameter in model.parameters()]
    for value in (float("inf"), float("nan")):
        inputs = directions(rank, 2)
        if rank == 1:
            for each in inputs:
                each.view(-1)[7] = value
        gradients = step_of(model, inputs)
        assert not any(gradient.isfinite().all() for gradient in gradients)
        after = [total(state.feedback, parameter) for parameter in model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@ranks.on(2, ranks.run_job, environ=NETWORK)
def test_gradients_of_other_types_are_encoded_as_float32(rank: int, size: int, dtype: torch.dtype) -> None:
    model, _ = hooked(commlayer.Policy(codec="int8"), dtype)
    gradients = step_of(model, directions(rank, 0, dtype))
    check_equal(gradients, size)
    for gradient, exact in zip(gradients, mean(size, 0, dtype), strict=True):
        assert gradient.dtype == dtype
        assert float((gradient - exact).double().square().mean() / exact.square().mean()) < 2e-4


@ranks.on(2, ranks.run_job, environ=NETWORK)
def test_fine_parameters_travel_in_16_bits(rank: int, size: int) -> None:
    model = Drift()
    _, state = hooked(commlayer.Policy(codec="int4"), fine=commlayer.Fine(model, ["weights.3", "weights.0"]))
    state.fine = commlayer.Fine(model, ["weights.3", "weights.0"])
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.6)
    wrapped.register_comm_hook(state, commlayer.allreduce_hook)
    for step in range(3):
        gradients = step_of(wrapped, directions(rank, step))
        check_equal(gradients, size)
        errors = [
            float((gradient - exact).square().mean() / exact.square().mean())
            for gradient, exact in zip(gradients, mean(size, step), strict=True)
        ]
        assert max(errors[0], errors[1], errors[3]) < NMSE["bf16"]
        assert errors[2] > 0.005


@ranks.on(2, ranks.run_job)
def test_shared_memory_takes_no_codec(rank: int, size: int) -> None:
    model, _ = hooked(commlayer.Policy(codec="int4"))
    for gradient, exact in zip(step_of(model, directions(rank, 0)), mean(size, 0), strict=True):
        torch.testing.assert_close(gradient, exact.float(), rtol=1e-6, atol=1e-6)


@ranks.on(2, ranks.run_job, environ=NETWORK)
def test_ranks_with_different_codecs_are_told(rank: int, size: int) -> None:
    model, _ = hooked(commlayer.Policy(codec="int8" if rank else "int4"))
    with pytest.raises(RuntimeError, match=r"rank"):
        step_of(model, directions(rank, 0))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"codec": "int3"}, r"Policy\(codec='int3'\): use one of none, f16"),
        ({"codec": "int8", "algorithm": "ring"}, r"Policy\(codec='int8', algorithm='ring'\): a ring"),
        ({"residual": "f64"}, r"Policy\(residual='f64'\)"),
    ],
)
def test_bad_policies_are_refused_by_name(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(commlayer.ConfigError, match=match):
        commlayer.Policy(**fields)


def test_codecs_belong_to_hooks() -> None:
    with pytest.raises(commlayer.ConfigError, match=r"codec='int8'.*would round counters and metrics, too.*HookState"):
        commlayer.Options(commlayer.Policy(codec="int8"))


def test_fine_wants_a_model_and_patterns() -> None:
    names: Any = ["*head*"]
    with pytest.raises(commlayer.ConfigError, match=r"HookState\(fine=\['\*head\*'\]\): give a Fine"):
        commlayer.HookState(fine=names)
    with pytest.raises(commlayer.ConfigError, match=r"Fine\(model=\['\*head\*'\]\)"):
        commlayer.Fine(names)
    with pytest.raises(commlayer.ConfigError, match=r"Fine\(patterns='head'\): use a list"):
        commlayer.Fine(None, "head")
