"""`SlicedStage`: a stage that computes slices of a sequence, one after the other, with the keys and values of earlier
ones (TeraPipe, arXiv 2102.07988)."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from ...errors import ConfigError
from ..gradients.fsdp import sharded_modules

WHO = "pipeline.slices"

PAST = "past"
"""The argument of a stage's module that has the keys and values of earlier slices."""


class _Unit(NamedTuple):
    """One slice of one micro-batch, from its forward to its backward pass."""

    inputs: Tensor
    output: Tensor
    made: list[Tensor]
    """Its keys and values, in its own graph."""
    kept: list[Tensor]
    """The same as the later slices see them: their gradients add up here."""


class SlicedStage:
    """One stage. `lengths` are those of the slices, in tokens."""

    def __init__(self, stage: Any, lengths: Sequence[int]) -> None:
        self.stage = stage
        self.number: int = stage.stage_index
        self._lengths = lengths
        self._past: dict[int, list[Any]] = {}
        self._units: dict[tuple[int, int], _Unit] = {}

    @property
    def who(self) -> str:
        """The beginning of errors."""
        return f"{WHO}: stage {self.number}"

    def begin(self) -> None:
        """A step of the schedule starts."""
        self._past.clear()
        self._units.clear()

    def forward(self, microbatch: int, index: int, inputs: Tensor) -> Tensor:
        """The output of slice `index` of a micro-batch, whose earlier slices have been computed.

        Raises ConfigError if the module returns anything else than an output of as many tokens, and tensors.
        """
        if not self.stage.is_first and torch.is_grad_enabled():
            inputs = inputs.detach().requires_grad_()
        past = self._past.setdefault(microbatch, [])
        output, state = self._parts(self.stage.submod(inputs, **{PAST: tuple(past)}), inputs)
        made, spec = pytree.tree_flatten(state)
        kept = [part.detach().requires_grad_(part.requires_grad) for part in made]
        if index + 1 == len(self._lengths):
            del self._past[microbatch]
        else:
            past.append(pytree.tree_unflatten(kept, spec))
        if torch.is_grad_enabled():
            self._units[microbatch, index] = _Unit(inputs, output, made, kept)
        return output

    def has_run(self, microbatch: int, index: int) -> bool:
        """Whether a slice is between its forward and its backward pass."""
        return (microbatch, index) in self._units

    def output(self, microbatch: int, index: int) -> Tensor:
        """The output of a slice whose backward pass is still to come."""
        return self._units[microbatch, index].output

    def backward(self, microbatch: int, index: int, gradient: Tensor | None) -> Tensor | None:
        """The gradient of a slice's inputs, from that of its output; None on the first stage. The later slices'
        backward passes are over: their gradients of this slice's keys and values have been added up."""
        unit = self._units.pop((microbatch, index))
        pairs = [(unit.output, gradient), *((made, kept.grad) for made, kept in zip(unit.made, unit.kept, strict=True))]
        pairs = [(result, own) for result, own in pairs if own is not None and result.requires_grad]
        if pairs:
            torch.autograd.backward([result for result, _ in pairs], [own for _, own in pairs])
        if self.stage.is_first:
            return None
        found = unit.inputs.grad
        return torch.zeros_like(unit.inputs) if found is None else found

    def _parts(self, result: Any, inputs: Tensor) -> tuple[Tensor, Any]:
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor)):
            raise ConfigError(
                f"{self.who} returned {type(result).__name__}, given past keys and values; return a pair of the output "
                f"and this slice's keys and values"
            )
        output, state = result
        if output.shape[:2] != inputs.shape[:2]:
            raise ConfigError(
                f"{self.who} returned an output of shape {list(output.shape)} for {list(inputs.shape[:2])} sequences "
                f"and tokens; the first two dimensions of inputs and outputs are those"
            )
        others = [type(part).__name__ for part in pytree.tree_leaves(state) if not isinstance(part, Tensor)]
        if others:
            raise ConfigError(
                f"{self.who} returned keys and values with a part of type {others[0]}; return tensors, in tuples, "
                f"lists or dicts"
            )
        return output, state


def fault_of(stage: Any) -> str:
    """Why a stage cannot compute slices as it computes whole sequences, with the remedy; empty: it can."""
    module: nn.Module = stage.submod
    forward = inspect.signature(getattr(module, "_orig_mod", module).forward).parameters
    if PAST not in forward:
        return (
            f"the forward of {type(module).__name__} has no argument {PAST!r}, so a slice would not see the tokens "
            f"before it; take {PAST}: a tuple of the keys and values that it returned for each earlier slice"
        )
    if isinstance(module, DistributedDataParallel) or sharded_modules(module):
        return f"{type(module).__name__} reduces gradients by itself; leave it out, and use pipeline.attach"
    if "perform_reduce_grad" in vars(stage):
        return "its schedule has been given to attach(); call slices first"
    config = getattr(module, "config", None)
    if getattr(config, "tie_word_embeddings", False) and stage.num_stages > 1:
        return "its config ties the head to the embedding of another stage; set tie_word_embeddings=False"
    for name, part in module.named_modules():
        if _drops(part):
            return f"module {name!r} has dropout, whose masks would differ from those of whole sequences; set it to 0"
        if isinstance(part, _BatchNorm):
            return f"module {name!r} takes statistics over the tokens of a slice; use LayerNorm or RMSNorm"
    return ""


def _drops(module: nn.Module) -> bool:
    share = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0.0)
    return isinstance(share, float) and share > 0
