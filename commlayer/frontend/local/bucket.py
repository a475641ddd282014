"""`Bucket`: gradients that exact steps average together; `buckets_of`: those of a model."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...scheduler.gradient import gradient_view
from ..gradients.ddp import reduce_buffer
from ..gradients.gradient import Place
from ..gradients.hook_state import HookState
from ..gradients.started import Started
from ..group.parts import part_of
from .site import Site

BYTES = 1 << 20
"""Gradients of a bucket, at least: at 200 Mbit/s they travel for 40 ms in float32, beside the backward pass."""
MOST = 64
"""Buckets of a large model, about: each costs calls in Python."""


class Bucket:
    """The gradients of some parameters, or this rank's parts of them, one after the other. Each replica of a site
    averages its shard with its peers in the other sites. `given`: by parameter, what stands for this rank's part."""

    def __init__(self, given: Mapping[Tensor, Tensor], site: Site) -> None:
        self.parameters, parts = list(given), list(given.values())
        first, sizes = parts[0], [part.numel() for part in parts]
        starts = [0, *itertools.accumulate(sizes)]
        self._site = site
        self._memory = torch.zeros(site.padded(starts[-1]), dtype=first.dtype, device=first.device)
        stretches = self._memory[: starts[-1]].split(sizes)
        self._views = [gradient_view(stretch, part) for stretch, part in zip(stretches, parts, strict=True)]
        self._whole_shard = site.shard(self._memory)
        begin = site.rank * len(self._whole_shard)
        self._shard = self._whole_shard[: max(starts[-1] - begin, 0)]  # without the tail
        end = begin + len(self._shard)
        inside = [at for at, start in enumerate(starts[:-1]) if start < end and starts[at + 1] > begin]
        self._sent = [parts[at] for at in inside]
        """The parameters of the shard, or of which a part is in it."""
        self._starts = [starts[at] - begin for at in inside]
        self.awaited: dict[Tensor, int] = {}
        """How often gradients of these parameters are still to be accumulated in this backward pass."""
        self._started: Started | None = None

    @property
    def has_shard(self) -> bool:
        """Whether this rank's shard has values: those of small buckets may be all in the shards of others."""
        return bool(self._sent)

    @property
    def is_started(self) -> bool:
        """Whether its average is on the way."""
        return self._started is not None

    def arrived(self, parameter: Tensor) -> None:
        """A gradient of the parameter was accumulated."""
        left = self.awaited.pop(parameter, 1) - 1
        if left:
            self.awaited[parameter] = left

    def fill(self, *, on_host: bool = False) -> None:
        """Takes the gradients of now; absent ones are zeros. `on_host`: waits until they are there, on the host."""
        with torch.no_grad():
            for parameter, view in zip(self.parameters, self._views, strict=True):
                if parameter.grad is None:
                    view.zero_()
                else:
                    view.copy_(part_of(parameter.grad))
        self._started = Started(self._shard.cpu() if on_host else self._shard)

    def start(self, state: HookState, index: int, *, is_last: bool) -> None:
        """Starts the average, after `fill`. All ranks of the group start equal buckets in the same order."""
        started = self._started
        assert started is not None  # noqa: S101  # fill() was called
        place = Place(index, is_last=is_last)
        started.averaged = reduce_buffer(
            started.memory,
            self._sent,
            state,
            lambda: started.reduction(state, None, alone=False),
            place,
            starts=self._starts,
        )

    def wait(self) -> None:
        """Waits for the average of the shard: on a device, the current stream does. Raises the operation's error."""
        started, self._started = self._started, None
        if started is not None and self.has_shard:
            started.wait()
            if started.memory is not self._shard:
                self._shard.copy_(started.memory)

    def put(self, has: Sequence[bool]) -> None:
        """Makes the averages the gradients of the parameters of which a rank has one. All replicas call."""
        if self._site.size > 1:
            self._memory.copy_(self._site.gather(self._whole_shard))
        with torch.no_grad():
            for parameter, view, is_there in zip(self.parameters, self._views, has, strict=True):
                if is_there and parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                if is_there and parameter.grad is not None:
                    part_of(parameter.grad).copy_(view)


def buckets_of(given: Mapping[Tensor, Tensor], site: Site) -> list[Bucket]:
    """Buckets of BYTES or more, each of one device, in the order of these parameters, as DDP divides them."""
    limit = max(BYTES, sum(part.nbytes for part in given.values()) // MOST)
    return _divided(given, site, limit)


def whole_buckets_of(given: Mapping[Tensor, Tensor], site: Site) -> list[Bucket]:
    """One bucket for each device."""
    return _divided(given, site, sys.maxsize)


def _divided(given: Mapping[Tensor, Tensor], site: Site, limit: int) -> list[Bucket]:
    found, _ = dist._compute_bucket_assignment_by_size(list(given.values()), [limit])
    pairs = list(given.items())
    return [Bucket(dict(pairs[at] for at in indices), site) for indices in found]
