"""`commlayer.tp`: tensor parallelism.

`overlap`: exchanges of one part of the batch travel while another part computes.

parallelize_module(model, mesh["tp"], plan)     # ColwiseParallel and RowwiseParallel, as always
handle = commlayer.tp.overlap(model)            # or: with commlayer.tp.overlap(model): ...
...                                             # the training loop is unchanged
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from .split_batch import SplitBatch
    from .travel import Codec


def overlap(
    layers: nn.Module,
    parts: int = 2,
    *,
    dim: int = 0,
    split: Sequence[str] | None = None,
    codec: Codec = "none",
) -> SplitBatch:
    """Splits each batch given to `layers` in `parts`, whose computation hides each other's all-reduces.

    `layers` is a module after parallelize_module: a stack of layers, or the whole model. It must treat each sample
    alone, and its forward takes and returns tensors with the batch as dimension `dim`. `split` names the arguments of
    its forward that have this dimension; None: the first one with a tensor.

    With a `codec` ("f16", "bf16", "int8"), the layers' sums of outputs and of input gradients are encoded between
    hosts: `int8` sends 1.03 bytes per value. That rounds activations and gradients, equally on all ranks; nothing makes
    up for it, so compare the loss. `measured()` of the handle shows the error of each layer. Needs groups of this
    package. "none" changes no bit.

    Returns a handle: its `remove()`, or the end of `with`, ends the overlap. All ranks of a tensor-parallel group call
    it alike. Raises ConfigError for layers with which results would change. Needs greenlet:
    `pip install commlayer[tp]`.
    """
    from .split_batch import SplitBatch  # loads DTensor, which takes a while

    return SplitBatch(layers, parts, dim, split, codec)
