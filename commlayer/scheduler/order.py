"""Order of gradient buckets on the wire: the class of service of each bucket.

`bucket_class` goes by the number of a bucket: a backward pass ends with the front layers. `NextUse` knows more: it has
watched a forward pass, and goes by the moment at which the next one will need the bucket's parameters. `stage_class`
goes by the order of a pipeline's forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..config import PRIORITIES
from .guard import METADATA, tensors_in

SPREAD = 2
"""Buckets of front layers get classes up to this much more urgent than the policy's, those of back layers up to this
much less urgent."""

REACH = 3
"""The same for buckets whose next use is known."""


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


def stage_class(priority: int, place: int, stages: int) -> int:
    """The class, around the policy's `priority`, of the gradients of a rank's stage.

    `place` is the place of the stage's next forward among those of the rank's `stages`: what is needed first is the
    most urgent.
    """
    if stages < 2:
        return priority
    first, last = max(priority - REACH, 0), min(priority + REACH, PRIORITIES - 1)
    return first + round(place / (stages - 1) * (last - first))


class NextUse:
    """The order in which forward passes use the parameters of a model, learned in one pass.

    `begin`, `use` for every parameter that an operation takes, and `end` describe that pass. Later passes are expected
    to be like it, and go slower if they are not.
    """

    def __init__(self, model: nn.Module) -> None:
        self._owned: dict[Tensor, None] = dict.fromkeys(model.parameters())
        self._total = sum(parameter.numel() for parameter in self._owned)
        self._places: dict[Tensor, int] = {}
        self._order: list[Tensor] = []
        self._before: dict[Tensor, int] = {}
        """Elements of all parameters that are used before this one."""
        self.is_learned = False
        """Whether a forward pass has ended."""

    @property
    def parameters(self) -> Collection[Tensor]:
        """All parameters of the model."""
        return self._owned.keys()

    def begin(self) -> None:
        """A forward pass starts. An earlier one that did not end counts for nothing."""
        self._order = []

    def use(self, parameter: Tensor) -> None:
        """An operation takes this parameter."""
        self._order.append(parameter)

    def end(self) -> None:
        """The forward pass has ended well. Parameters without a use go last."""
        self._adopt(list(dict.fromkeys([*self._order, *self._owned])))
        self.is_learned = True

    def places(self) -> list[int]:
        """The place of each parameter, in the order of the model: to be made the same on all ranks of a job."""
        return [self._places[parameter] for parameter in self._owned]

    def adopt(self, places: Sequence[int]) -> None:
        """Takes over the `places` of another rank."""
        place_of = dict(zip(self._owned, places, strict=True))
        self._adopt(sorted(self._owned, key=place_of.__getitem__))

    def _adopt(self, order: list[Tensor]) -> None:
        self._order, before = order, 0
        self._places = {parameter: place for place, parameter in enumerate(order)}
        for parameter in order:
            self._before[parameter] = before
            before += parameter.numel()

    def place_of(self, parameters: Sequence[Tensor]) -> int:
        """The place of a bucket with these parameters by next use, from 1; 0 as long as the order is not known."""
        return 1 + min(self._places[parameter] for parameter in parameters) if self.is_learned else 0

    def class_of(self, parameters: Sequence[Tensor], priority: int) -> int:
        """The class of a bucket with these parameters, around the policy's `priority`.

        The bucket that is needed first has the most urgent class. Each class has about as many elements as the others.
        """
        elements = sum(parameter.numel() for parameter in parameters)
        if not self.is_learned or elements >= self._total:
            return priority
        first, last = max(priority - REACH, 0), min(priority + REACH, PRIORITIES - 1)
        before = min(self._before[parameter] for parameter in parameters)
        after = self._total - before - elements
        if before == 0:
            return first
        return max(last - (last - first + 1) * max(after, 0) // self._total, first)


class FirstUse(TorchFunctionMode):
    """Calls `tell`, while active, with each of the `parameters` that an operation takes, before the operation."""

    def __init__(self, parameters: Collection[Tensor], tell: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._parameters = frozenset(parameters)
        self._tell = tell

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in METADATA:
            for tensor in tensors_in((args, kwargs)):
                if tensor in self._parameters:
                    self._tell(tensor)
        return func(*args, **kwargs)
