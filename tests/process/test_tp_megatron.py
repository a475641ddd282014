"""`commlayer.tp.overlap` on layers that look like Megatron-core's: which is not installed here."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commlayer
from tests import ranks
from tests.fake_transport import on_fake

WIDTH, BATCH = 8, 4


class Sum(torch.autograd.Function):
    """An all-reduce of values, of their gradient, or of both."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, in_forward: bool, in_backward: bool) -> Tensor:
        ctx.in_backward = in_backward
        return reduced(values) if in_forward else values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return reduced(gradient) if ctx.in_backward else gradient, None, None


def reduced(values: Tensor) -> Tensor:
    values = values.clone()
    dist.all_reduce(values)
    return values


class ColumnParallelLinear(nn.Linear):
    """The attributes and the communication of Megatron-core's, for one argument."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(WIDTH, 4 * WIDTH // size, bias=False)
        self.weight.data = torch.randn(4 * WIDTH, WIDTH).chunk(size)[rank].clone()
        self.tp_group = dist.group.WORLD
        self.sequence_parallel = self.explicit_expert_comm = self.disable_grad_reduce = False
        self.allreduce_dgrad = True

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if not (self.allreduce_dgrad or self.disable_grad_reduce):
            raise AssertionError("Megatron-core would copy, with an all-reduce of its own")
        values = Sum.apply(input_, False, True) if self.allreduce_dgrad else input_  # type: ignore[no-untyped-call]
        return super().forward(values), None


class RowParallelLinear(nn.Linear):
    def __init__(self, rank: int, size: int, skip_bias_add: bool) -> None:
        super().__init__(4 * WIDTH // size, WIDTH)
        self.weight.data = torch.randn(WIDTH, 4 * WIDTH).chunk(size, 1)[rank].clone()
        self.tp_group = dist.group.WORLD
        self.sequence_parallel = self.explicit_expert_comm = False
        self.skip_bias_add = skip_bias_add

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        values = input_ @ self.weight.T
        if not self.explicit_expert_comm:
            values = Sum.apply(values, True, False)  # type: ignore[no-untyped-call]
        return (values, self.bias) if self.skip_bias_add else (values + self.bias, None)


for kind in (ColumnParallelLinear, RowParallelLinear):
    kind.__module__ = "megatron.core.tensor_parallel.layers"


class Mlp(nn.Module):
    def __init__(self, rank: int, size: int, skip_bias_add: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear_fc1 = ColumnParallelLinear(rank, size)
        self.linear_fc2 = RowParallelLinear(rank, size, skip_bias_add)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ValueError("broken")
        hidden, _ = self.linear_fc1(self.norm(x))
        out, bias = self.linear_fc2(torch.relu(hidden))
        added: Tensor = x + (out if bias is None else out + bias)
        return added


def block(rank: int, size: int) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(Mlp(rank, size, skip_bias_add=i % 2 == 0) for i in range(4)))


def results(layers: nn.Module) -> tuple[Tensor, Tensor, list[Tensor]]:
    torch.manual_seed(2)
    x = torch.randn(5, BATCH, WIDTH, requires_grad=True)  # sequence, batch, hidden
    output = layers(x)
    output.square().mean().backward()
    gradients = [parameter.grad for parameter in layers.parameters() if parameter.grad is not None]
    layers.zero_grad()
    assert x.grad is not None
    return output.detach(), x.grad, gradients


@ranks.on(2, ranks.run_job)
def test_results_are_those_of_the_whole_batch(rank: int, size: int) -> None:
    layers = block(rank, size)
    expected, before = results(layers), [dict(vars(module)) for module in layers.modules()]
    with commlayer.tp.overlap(layers, dim=1):
        found = results(layers)
        layers[2].fails = True  # type: ignore[assignment]
        with pytest.raises(ValueError, match="broken"):
            results(layers)
        layers[2].fails = False  # type: ignore[assignment]
        again = results(layers)
    for output, gradient, weights in (found, again):
        assert torch.equal(output, expected[0])
        assert torch.equal(gradient, expected[1])
        torch.testing.assert_close(weights, expected[2], rtol=1e-5, atol=1e-6)
    after = [vars(module) for module in layers.modules()]
    names = ("allreduce_dgrad", "disable_grad_reduce", "explicit_expert_comm", "skip_bias_add")
    assert [[row.get(name) for name in names] for row in after] == [[e.get(name) for name in names] for e in before]


@ranks.on(2, ranks.run_job)
def test_a_gradient_that_is_reduced_elsewhere_is_not_reduced(rank: int, size: int) -> None:
    layers = block(rank, size)
    for layer in layers:
        layer.linear_fc1.disable_grad_reduce, layer.linear_fc1.allreduce_dgrad = True, False  # type: ignore[union-attr]
    expected = results(layers)
    with commlayer.tp.overlap(layers, dim=1):
        output, gradient, _ = results(layers)
    assert torch.equal(output, expected[0])
    assert torch.equal(gradient, expected[1])


@ranks.on(2, on_fake)
def test_each_layer_reduces_once_per_direction_and_part(rank: int, size: int) -> None:
    layers, world = block(rank, size), dist.group.WORLD
    operations = world._native.operations  # type: ignore[union-attr]
    for parts, classes in ((0, {4}), (2, {0})):
        if parts:
            commlayer.tp.overlap(layers, parts, dim=1)
        operations.clear()
        results(layers)
        assert len(operations) == 2 * 4 * max(parts, 1)
        assert {priority for _, _, priority in operations} == classes


@ranks.on(1, on_fake)
def test_refusals(rank: int, size: int) -> None:
    def refused(text: str, layers: nn.Module) -> None:
        with pytest.raises(commlayer.ConfigError, match=text):
            commlayer.tp.overlap(layers, dim=1)

    layers = block(rank, size)
    for attribute, text in (("sequence_parallel", "sequence_parallel=True"), ("explicit_expert_comm", "an expert")):
        setattr(layers[1].linear_fc1, attribute, True)
        refused(f"1.linear_fc1 .ColumnParallelLinear. .*{text}", layers)
        setattr(layers[1].linear_fc1, attribute, False)
    engine = type("TELinear", (nn.Linear,), {"__module__": "transformer_engine.pytorch"})
    refused("1 .TELinear. is a layer of Transformer Engine", nn.Sequential(layers, engine(2, 2)))
