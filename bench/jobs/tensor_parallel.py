"""What bench.overlap_tp trains: layers of tensor parallelism whose computation is a sleep, and their gradients."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import commlayer
from bench.harness.turns import Accelerator

LAYERS, BATCH, HIDDEN = 4, 8, 16

SERIAL, WEIGHTS, OURS = "DTensor", "beside weight gradients", "tp.overlap"
INT8 = "tp.overlap, int8"


class Layer(nn.Module):
    """A narrow MLP: large activations, and a sleep instead of large matrices."""

    def __init__(self, width: int, forward_s: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, width, bias=False)
        self.sample_s = forward_s / BATCH

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.up(self.norm(x)))
        computed = Accelerator.apply(hidden, self.sample_s * x.shape[0])  # type: ignore[no-untyped-call]
        down: Tensor = self.down(computed)
        return x + down


class Column(torch.autograd.Function):
    """A column layer whose input gradient is reduced while its weight gradient is computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.seconds = seconds
        time.sleep(seconds)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        time.sleep(ctx.seconds)
        of_input = gradient @ weight
        work = dist.all_reduce(of_input, async_op=True)
        time.sleep(ctx.seconds)
        of_weight = gradient.T @ x
        assert work is not None
        work.wait()
        return of_input, of_weight, None


class Row(torch.autograd.Function):
    """The all-reduce of a row layer."""

    @staticmethod
    def forward(_: Any, values: Tensor) -> Tensor:
        reduced = values.clone()
        dist.all_reduce(reduced)
        return reduced

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


class WeightsLayer(Layer):
    """The same, all-reduced beside its weight gradients; its matrices are a rank's shards."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = Column.apply(self.norm(x), self.up.weight, self.sample_s * x.shape[0])  # type: ignore[no-untyped-call]
        down: Tensor = Row.apply(torch.relu(hidden) @ self.down.weight.T)  # type: ignore[no-untyped-call]
        return x + down


def model(system: str, width: int, forward_s: float, mesh: DeviceMesh) -> nn.Sequential:
    """The layers of one system; those of OURS and INT8 are split for good."""
    torch.manual_seed(1)
    if system == WEIGHTS:
        return nn.Sequential(*(WeightsLayer(width, forward_s) for _ in range(LAYERS)))
    layers = nn.Sequential(*(Layer(width, forward_s) for _ in range(LAYERS)))
    for layer in layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if system != SERIAL:
        commlayer.tp.overlap(layers, codec="int8" if system == INT8 else "none")
    return layers


class Gradients:
    """One buffer per layer: all-reduced after the layer's backward pass, waited for before its next forward pass."""

    def __init__(self, layers: nn.Sequential, group: dist.ProcessGroup, values: int, *, by_class: bool) -> None:
        self._group, self._by_class = group, by_class
        self._buffers = [torch.ones(values) for _ in layers]
        self._works: list[Any] = [None] * len(layers)
        for i, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda _, __, i=i: self.wait(i))
            last = layer.get_parameter("norm.weight")
            last.register_post_accumulate_grad_hook(lambda _, i=i: self._start(i))

    def wait(self, i: int) -> None:
        work, self._works[i] = self._works[i], None
        if work is not None:
            work.wait()

    def finish(self) -> None:
        for i in range(len(self._works)):
            self.wait(i)

    def _start(self, i: int) -> None:
        with commlayer.priority(1 + i if self._by_class else 0):
            self._works[i] = dist.all_reduce(self._buffers[i], group=self._group, async_op=True)
