"""The part of a tensor that this rank has, where FSDP2 divides it over ranks (DTensor)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def part_of(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter or of a gradient that FSDP2 shards; any other tensor as it is."""
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():  # the memory itself, and not a view that autograd follows
        return tensor.detach().to_local()  # type: ignore[attr-defined, no-any-return]


def whole_of(part: Tensor, like: Any) -> Tensor:
    """The tensor that is divided as `like` is, and has this part here. The other ranks give theirs."""
    if not hasattr(like, "to_local"):
        return part
    from torch.distributed.tensor import DTensor  # takes long to import, and is there if `like` is one

    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
