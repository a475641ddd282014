"""Order of gradient buckets on the wire: the class of service of each bucket."""

from __future__ import annotations

from ..config import PRIORITIES

SPREAD = 2
"""Buckets of front layers get classes up to this much more urgent than the policy's, those of back layers up to this
much less urgent."""


def bucket_class(priority: int, index: int, buckets: int) -> int:
    """The class, 0 (most urgent) to 7, of bucket `index` of `buckets` around the policy's `priority`.

    The backward pass ends with the front layers, so the last bucket holds them. It goes first, because the next forward
    pass needs it first. `buckets` is 0 until one step has shown the number: DDP learns the order of the gradients in
    its first step and then regroups its buckets.
    """
    if buckets < 2:
        return priority
    first, last = max(priority - SPREAD, 0), min(priority + SPREAD, PRIORITIES - 1)
    return last - round(min(index / (buckets - 1), 1.0) * (last - first))
