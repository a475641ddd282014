"""DeAR's reduction of gradients, as a baseline of `bench/overlap.py`.

DeAR (Zhang et al., ICDCS 2023) cuts the all-reduce of each bucket in two halves. The reduce-scatter travels during the
backward pass. The all-gather travels during the next forward pass, in the order of the layers, and each layer waits for
its own before its step. So it defers half of the bytes, and needs no priorities.

This one starts all all-gathers at the beginning of the forward pass, as soon as the reduce-scatters are over. The steps
are those of `commlayer.overlap`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future


class Half:
    """A bucket between its reduce-scatter and its all-gather."""

    def __init__(self, buffer: Tensor) -> None:
        ranks = dist.get_world_size()
        self.buffer = buffer
        self.averaged: Future[Tensor] = Future()
        self._whole = buffer.new_zeros(-(-buffer.numel() // ranks) * ranks)
        torch.div(buffer, ranks, out=self._whole[: buffer.numel()])
        self._shard = buffer.new_empty(self._whole.numel() // ranks)
        if dist.get_backend() == "gloo":  # whose reduce-scatter is an all-reduce
            self._parts = torch.empty_like(self._whole)
            self._scattered = dist.all_to_all_single(self._parts, self._whole, async_op=True)
        else:
            self._parts = self._shard
            self._scattered = dist.reduce_scatter_tensor(self._shard, self._whole, async_op=True)

    def gather(self) -> None:
        """Waits for the reduce-scatter, and starts the all-gather."""
        assert self._scattered is not None
        self._scattered.wait()
        if self._parts is not self._shard:
            torch.sum(self._parts.view(-1, self._shard.numel()), dim=0, out=self._shard)
        gathered = dist.all_gather_into_tensor(self._whole, self._shard, async_op=True)
        assert gathered is not None
        gathered.get_future().add_done_callback(self._end)

    def _end(self, done: Future[Any]) -> None:
        try:
            done.value()  # raises the error of the all-gather
            self.averaged.set_result(self.buffer.copy_(self._whole[: self.buffer.numel()]))
        except Exception as error:
            self.averaged.set_exception(error)  # type: ignore[arg-type]  # torch's own annotation is wrong


class Dear:
    """The reductions of one model."""

    def __init__(self) -> None:
        self._halves: list[Half] = []

    def reduce(self, buffer: Tensor, *_: Any, **__: Any) -> Future[Tensor]:
        """Replaces `reduce_bucket`: averages a bucket in place."""
        self._halves.append(Half(buffer))
        return self._halves[-1].averaged

    def gather(self) -> None:
        """A forward pass begins. Its first layers are in the last bucket of the backward pass."""
        while self._halves:
            self._halves.pop().gather()
