"""`ExactSteps`: steps with the average gradient of all sites, before local steps begin, or instead of them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions

from ...compress.fine import Fine
from ...errors import CommError, ConfigError
from ...plans.codec import VALUE_BYTES
from ..gradients.hook_group import largest_of
from ..gradients.samples import weigh
from ..group.backend import CommProcessGroup
from ..work.context import labelled
from ..work.work import CommWork
from .fragment import adopt, flat, fragments_of
from .meeting import on_all
from .site import Site
from .sync import no_count
from .turns import least_every
from .weights import Weights

MEASURED = 6
"""Exact steps before `every="auto"` decides. The first is not counted: it makes plans."""


class Measured(NamedTuple):
    """The measured terms of H*, see `least_every`."""

    sites: int
    values: int
    """Those that a rank sends: its site's, or its shard of them."""
    value_bytes: float
    """Bytes of a value on one of its two ways, in the codec of local steps."""
    rate: float
    """Bytes per second that a rank sends, and receives as many, in an average."""
    step_s: float
    """Seconds of a step without the average."""

    @property
    def every(self) -> int:
        """H*."""
        return least_every(self.sites, self.values, self.value_bytes, self.rate, self.step_s)

    @property
    def average_s(self) -> float:
        """Seconds that an exact step takes for its average, in float32."""
        return 2 * (self.sites - 1) / self.sites * self.values * VALUE_BYTES / self.rate

    def __str__(self) -> str:
        return (
            f"measured: {self.rate * 8e-6:.3g} Mbit/s, {self.step_s * 1e3:.3g} ms per step; {self.values} values in "
            f"{self.value_bytes:.3g} bytes between {self.sites} sites: H* = {self.every}"
        )


class ExactSteps:
    """Averages the gradients in front of each step of the optimizer, in float32, and waits for that."""

    def __init__(self, group: CommProcessGroup, weights: Weights, site: Site) -> None:
        self._group, self._weights, self._site = group, weights, site
        self._parameters = list(weights.parameters.values())
        self._size = sum(parameter.numel() for parameter in self._parameters)
        self.steps = 0
        """Exact steps of this rank, including those before a checkpoint."""
        self._ended_s = 0.0  # the end of the last step
        self._step_s: list[float] = []  # of steps without the average
        self._sent_s: list[float] = []  # of averages

    def average(self, samples: float) -> None:
        """Replaces the gradients by the average of all sites, by their samples. Where no site has a gradient of a
        parameter, it keeps None.

        Raises ConfigError for sparse gradients, CommError if another rank makes no more steps, and the errors of
        operations.
        """
        found = [parameter.grad for parameter in self._parameters]
        if any(gradient is not None and gradient.layout != torch.strided for gradient in found):
            raise ConfigError(f"{self._group.who}: LocalSteps: sparse gradients; use sparse=False")
        gradients = torch.zeros(self._site.padded(self._size))
        at = 0
        for parameter, gradient in zip(self._parameters, found, strict=True):
            if gradient is not None:
                like = (
                    gradient if gradient.stride() == parameter.stride() else torch.empty_like(parameter).copy_(gradient)
                )
                gradients[at : at + parameter.numel()].copy_(flat(like))
            at += parameter.numel()
        begin_s = time.perf_counter()  # after the copies, which wait for the device: calls only launch its work
        known = [gradient is not None for gradient in found]
        has, averaged = self._sum(gradients, samples, known, is_leaving=False)
        whole = self._site.gather(averaged, self._weights.device)
        at = 0
        for parameter, has_one in zip(self._parameters, has, strict=True):
            if has_one:
                if parameter.grad is None or parameter.grad.stride() != parameter.stride():
                    parameter.grad = torch.empty_like(parameter)
                flat(parameter.grad).copy_(whole[at : at + parameter.numel()])
            at += parameter.numel()
        if self._ended_s and self.steps:
            self._step_s.append(begin_s - self._ended_s)

    def _sum(
        self, gradients: Tensor, samples: float, has: Sequence[bool], *, is_leaving: bool
    ) -> tuple[list[bool], Tensor]:
        """Which parameters have a gradient anywhere, and this rank's shard of the average. All ranks of a site raise if
        one of them does."""
        return self._site.agreed(
            lambda: self._exchanged(gradients, samples, has, is_leaving=is_leaving), self._weights.device
        )

    def _exchanged(
        self, gradients: Tensor, samples: float, has: Sequence[bool], *, is_leaving: bool
    ) -> tuple[list[bool], Tensor]:
        size, me = self._group.size(), self._group.rank()
        leaves = [float(is_leaving and place == me) for place in range(size)]
        counts = [samples if place == me else 0.0 for place in range(size)]
        told = torch.tensor([*counts, *leaves, *map(float, has)], dtype=torch.float64)
        shard = self._site.shard(gradients)
        weigh(shard, samples)
        options = AllreduceOptions()  # sums
        with labelled(f"exact step {self.steps}"):
            words = self._group.allreduce([told], options)
            work = self._group.allreduce([shard], options)
        words.wait()
        work.wait()
        times = work.times() if isinstance(work, CommWork) else None
        if times is not None:
            self._sent_s.append(times.ended_s - times.submitted_s)
        counts, flags = told[:size].tolist(), told[size:].bool().tolist()
        for at, count in enumerate(counts):
            if math.isnan(count):
                rank = dist.get_global_rank(self._group, at)
                raise on_all(ConfigError(no_count(self._group.who, rank)), rank)
        self._check(flags[:size])
        return flags[size:], shard.div_(sum(counts) or 1.0)

    def _check(self, leaving: Sequence[bool]) -> None:
        if any(leaving) and not all(leaving):
            ranks = [dist.get_global_rank(self._group, at) for at, leaves in enumerate(leaving) if leaves]
            text = (
                f"{self._group.who}: rank {ranks[0]} has ended `with LocalSteps(...)`, and others make another exact "
                f"step: make equally many on all ranks, or end the exact steps before (exact_steps=, every=)"
            )
            raise on_all(CommError(text), ranks[0])

    @property
    def can_tell(self) -> bool:
        """Whether enough steps were measured."""
        return len(self._sent_s) >= MEASURED

    def stepped(self) -> None:
        """The optimizer has made its step."""
        self.steps += 1
        self._ended_s = time.perf_counter()

    def leave(self) -> None:
        """The training ends with exact steps: all ranks take the weights of the first site, and average their buffers.
        Raises CommError if other ranks go on."""
        nothing = torch.zeros(self._site.padded(self._size))
        self._sum(nothing, 0.0, [False] * len(self._parameters), is_leaving=True)
        fragments = fragments_of(self._parameters, 1, Fine(), self._site)
        adopt(self._group, fragments)
        for fragment in fragments:
            fragment.put(fragment.shared)
        buffers = self._weights.flat_buffers()
        if len(buffers):
            self._group.allreduce([buffers], op=dist.ReduceOp(dist.ReduceOp.AVG)).wait()
            self._weights.put_buffers(buffers)

    def measured(self, value_bytes: float) -> Measured:
        """What these steps tell of the least number of local steps, the same on all ranks, all of which call.

        The time of a step is that of the slowest rank. That of an average is that of the rank that came last, which has
        waited for no other.
        """
        step_s, sent_s = statistics.median(self._step_s[1:]), statistics.median(self._sent_s[1:])
        values = self._site.padded(self._size) // self._site.size
        step_s, negative_s = largest_of(self._group, self._site.largest([step_s, -sent_s], self._weights.device))
        sites = self._group.size()
        rate = 2 * (sites - 1) / sites * values * VALUE_BYTES / max(-negative_s, 1e-9)
        return Measured(sites, values, value_bytes, rate, max(step_s, 1e-9))
