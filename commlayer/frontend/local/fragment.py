"""`Fragment`: a part of a model's parameters that is sent as a whole; its shared weights and their momentum."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions

from ...compress.fine import Fine
from ..group.parts import part_of
from .outer import Outer
from .site import Site

STRIPES = 8
"""Stripes of each fragment, at least, but for small models."""
STRIPE_LEAST = 256
"""Values of the shortest stripe: a block of the codec `int4`."""


class Stripe(NamedTuple):
    """Values of a parameter that lie one after the other in memory."""

    parameter: Tensor
    start: int
    end: int

    def values(self) -> Tensor:
        """The values, as a flat view."""
        return flat(self.parameter)[self.start : self.end]


def flat(parameter: Tensor) -> Tensor:
    """This rank's values of a dense tensor as they lie in memory, as a flat view."""
    plain = part_of(parameter).detach()
    return plain.as_strided((plain.numel(),), (1,), plain.storage_offset())


def cut(parameters: Sequence[Tensor], fragments: int) -> list[list[Stripe]]:
    """Deals stripes of the parameters to the fragments in turn, so that fragments are equally long, and each has
    values of all depths of the model (strided fragments: Douillard et al., arXiv 2501.18512)."""
    sizes = [part_of(parameter).numel() for parameter in parameters]
    total = sum(sizes)
    length = max(total // (fragments * STRIPES), STRIPE_LEAST)
    dealt: list[list[Stripe]] = [[] for _ in range(fragments)]
    number, room = 0, length
    for parameter, size in zip(parameters, sizes, strict=True):
        start = 0
        while start < size:
            end = min(start + room, size)
            dealt[number % fragments].append(Stripe(parameter, start, end))
            room -= end - start
            start = end
            if not room:
                number, room = number + 1, length
    return dealt


class Part(NamedTuple):
    """Values of a shard that travel by one operation: (start, end) in elements of the shard."""

    start: int
    end: int
    is_fine: bool


class Fragment:
    """One fragment, and this rank's shard of its shared weights G, float32 on the CPU: 4 bytes per value, and 4 for the
    momentum."""

    def __init__(self, coarse: Sequence[Stripe], fine: Sequence[Stripe], site: Site) -> None:
        self._stripes = [*coarse, *fine]
        self._site = site
        self.size = sum(stripe.end - stripe.start for stripe in self._stripes)
        middle = sum(stripe.end - stripe.start for stripe in coarse)
        self.shared = self.weights()
        """This rank's shard of G."""
        self.momentum = torch.zeros(0, dtype=torch.float32, device="cpu")
        """The outer optimizer's momentum, as long as `shared`; empty without one."""
        shard = len(self.shared)
        middle = min(max(middle - site.rank * shard, 0), shard)
        self.parts = [part for part in (Part(0, middle, False), Part(middle, shard, True)) if part.start < part.end]

    def whole(self) -> Tensor:
        """All of the model's weights of now that replicas share, in memory of their own."""
        whole = torch.zeros(self._site.padded(self.size), dtype=torch.float32, device="cpu")
        at = 0
        for stripe in self._stripes:
            end = at + stripe.end - stripe.start
            whole[at:end].copy_(stripe.values())
            at = end
        return whole

    def weights(self) -> Tensor:
        """This rank's shard of the model's weights of now, in memory of its own."""
        whole = self.whole()
        return self._site.shard(whole).clone() if self._site.size > 1 else whole

    def add(self, shard: Tensor) -> None:
        """Adds to the model's weights, of which this is a rank's shard. All replicas call."""
        self._each(self._site.gather(shard), lambda weights, values: weights.add_(values))

    def put(self, shard: Tensor) -> None:
        """Replaces the model's weights, of which this is a rank's shard. All replicas call."""
        self.put_whole(self._site.gather(shard))

    def put_whole(self, whole: Tensor) -> None:
        """Replaces the model's weights by these, which are like `whole`."""
        self._each(whole, lambda weights, values: weights.copy_(values))

    def _each(self, whole: Tensor, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        at = 0
        for stripe in self._stripes:
            end = at + stripe.end - stripe.start
            weights = stripe.values()
            change(weights, whole[at:end].to(weights.device))
            at = end

    def update(self, average: Tensor, outer: Outer) -> Tensor:
        """Changes the shared weights by the sites' average change; returns G' - G as float32 has it."""
        if outer.momentum and not len(self.momentum):
            self.momentum = torch.zeros_like(self.shared)
        former = self.shared
        self.shared = former + outer.change(average, self.momentum)
        return self.shared - former

    def digest(self) -> int:
        """32 bits by which the ranks compare their shared weights."""
        return digest_of(self.shared)


def adopt(group: dist.ProcessGroup, fragments: Sequence[Fragment]) -> None:
    """Gives all sites the shared weights of the first site, where exact steps have left others on a site: CPUs of
    several types round differently. All ranks call."""
    told: list[Any] = [None] * group.size()
    dist.all_gather_object(told, [fragment.digest() for fragment in fragments], group=group)
    if any(digests != told[0] for digests in told):
        options = BroadcastOptions()
        options.rootRank = 0
        for fragment in fragments:
            group.broadcast([fragment.shared], options).wait()


def digest_of(values: Tensor) -> int:
    """A checksum of 32 bits of a tensor's bytes, or of this rank's part of it."""
    plain = part_of(values).detach().cpu().contiguous()
    if not plain.nbytes:
        return 0
    return zlib.crc32((ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()))


def fragments_of(parameters: Sequence[Tensor], count: int, fine: Fine, site: Site) -> list[Fragment]:
    """The parameters in `count` fragments; those in `fine` lie at the end of each."""
    coarse = cut([parameter for parameter in parameters if parameter not in fine], count)
    precise = cut([parameter for parameter in parameters if parameter in fine], count)
    return [Fragment(*pair, site) for pair in zip(coarse, precise, strict=True)]
