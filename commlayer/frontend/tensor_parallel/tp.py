"""`commlayer.tp`: tensor parallelism.

`overlap`: exchanges of one part of the batch travel while another part computes. `mesh`: a linear layer in two, two and
a half or three dimensions.

parallelize_module(model, mesh["tp"], plan)     # ColwiseParallel and RowwiseParallel, as always
handle = commlayer.tp.overlap(model)            # or: with commlayer.tp.overlap(model): ...
...                                             # the training loop is unchanged
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from .mesh import MeshLinear
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
    `pip install greenlet`.
    """
    from .split_batch import SplitBatch  # loads DTensor, which takes a while

    return SplitBatch(layers, parts, dim, split, codec)


def mesh(
    linear: nn.Linear,
    form: Literal["2d", "2.5d", "3d"],
    *,
    group: dist.ProcessGroup | None = None,
    depth: int = 1,
    swapped: bool = False,
    kept: bool = True,
    panels: int = 2,
) -> MeshLinear:
    """A linear layer whose input, weights and output are all split among the ranks of `group` (None: WORLD).

    `form` is "2d" (SUMMA: Xu et al., arXiv 2104.05343; q x q ranks), "2.5d" (Tesseract, arXiv 2105.14500; q x q x
    `depth` ranks) or "3d" (Bian et al., arXiv 2105.14450; q x q x q ranks). The module that it returns has this rank's
    blocks as `weight` and `bias`. It takes this rank's block of the input, [rows / (q depth), ..., columns / q] or in
    3-D [rows / q², ..., columns / q], which `split(x)` cuts from a whole one, and returns that of the output. In 3-D
    these lie on different axes: every second layer of a chain is `swapped`. docs/parallelism.md says who has which
    block, what each form sends, and when that is less than other layouts send.

    Rows travel in `panels`: while one is multiplied, the next one is on its way. What was gathered is `kept` for the
    backward pass, or gathered again. Gradients are those of the sum of all ranks' losses. Sums are those of one
    process, in another order. All ranks call it alike, with equal weights; it copies its blocks.

    Raises ConfigError for a group of another backend, a number of ranks that is no square or cube, widths that do not
    divide, a weight that another module shares, dropout, other modules than nn.Linear; MismatchError if the ranks'
    calls or weights differ.
    """
    from .mesh import MeshLinear

    return MeshLinear(linear, form, group, depth, swapped=swapped, kept=kept, panels=panels)
