"""The part of a tensor that this rank has, where FSDP2 divides it over ranks (DTensor)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

DIVIDED = "part of a tensor"


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


def take_apart(state: Any) -> Any:
    """A state, as of an optimizer, with this rank's parts instead of divided tensors, for `put_together`."""
    return tree_map(_described, state)


def _described(leaf: Any) -> Any:
    if not hasattr(leaf, "to_local"):
        return leaf
    return {DIVIDED: (part_of(leaf), list(leaf.placements), list(leaf.shape), list(leaf.stride()))}


def put_together(state: Any, mesh: Any) -> Any:
    """The state of which `take_apart` has returned this, with tensors that are divided over this mesh. The other ranks
    have theirs."""

    def divided(leaf: Any) -> Any:
        if not _is_divided(leaf):
            return leaf
        from torch.distributed.tensor import DTensor  # takes long to import, and is there if a tensor was divided

        part, placements, shape, stride = leaf[DIVIDED]
        size = torch.Size(shape)
        return DTensor.from_local(part, mesh, placements, run_check=False, shape=size, stride=tuple(stride))

    return tree_map(divided, state, is_leaf=_is_divided)


def _is_divided(leaf: Any) -> bool:
    return isinstance(leaf, dict) and DIVIDED in leaf
