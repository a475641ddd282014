"""`PlainStage`: the gradients of a pipeline stage whose parameters are whole on every rank.

Segments are made when the first step reduces: from the parameters that had a gradient on some rank by then. All others
keep the gradient None, as without commlayer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ...dynamo import untraced
from ...errors import ConfigError
from ...scheduler.deferred import AwaitedStep, DeferredStep
from ...scheduler.segment import Segment
from ..work.context import in_order, labelled

Reduce = Callable[[list[Tensor], bool, Tensor, int], Callable[[], None]]
"""Starts the average of the gradients of some parameters, in a flat buffer; whether it is the last one of the step; and
its class. Returns the function that waits."""


class AttachedStage:
    """One stage of a schedule, whose gradients are reduced in a class and a place of their own."""

    def __init__(self, stage: Any, steps: DeferredStep | AwaitedStep) -> None:
        self.stage = stage
        self.steps = steps
        self.priority = 0
        """The class of its gradients."""
        self.place = 0
        """Their place within the class, see `in_order`."""
        self.is_last = False
        """Whether it is the last stage of a step to reduce, for a HookState."""


@untraced
class PlainStage(AttachedStage):
    """One stage. `reduce` starts reductions, and `agree` tells which of some flags are set on any rank.

    `early`: divisor of gradients in schedules that call `perform_reduce_grad` late; segments are then launched by the
    last backward pass itself, if each of the step's `passes` had a gradient of each parameter.
    """

    def __init__(
        self,
        stage: Any,
        steps: DeferredStep | AwaitedStep,
        reduce: Reduce,
        agree: Callable[[list[bool]], list[bool]],
        *,
        early: int | None,
        passes: int,
    ) -> None:
        super().__init__(stage, steps)
        self.parameters = [parameter for parameter in stage.submod.parameters() if parameter.requires_grad]
        self._reduce, self._agree, self._early, self._passes = reduce, agree, early, passes
        self._segments: list[Segment] = []
        self._launched = 0
        self._used: list[tuple[str, Tensor]] = []
        self._unused: list[tuple[str, Tensor]] = [] if self.parameters else list(stage.submod.named_parameters())
        self._hooks: list[RemovableHandle] = []
        self._complete: set[int] = set()
        """Segments whose gradients of this step are complete."""
        self._is_running = False

    @property
    def has_buckets(self) -> bool:
        """Whether it has gradients to reduce."""
        return bool(self.parameters)

    def begin(self) -> None:
        """A step of the schedule starts."""
        self._is_running = True
        self._launched = 0
        self._complete.clear()
        for segment in self._segments:
            segment.restart()

    def end(self) -> None:
        """A step of the schedule has ended. Raises ConfigError if it had backward passes and reduced nothing."""
        self._is_running = False
        if self.stage.has_backward and self.has_buckets and not self._launched:
            raise ConfigError(
                f"pipeline.attach: the schedule did not call perform_reduce_grad of stage {self.stage.stage_index}, so "
                f"its gradients are not reduced; use a schedule of torch.distributed.pipelining"
            )

    def enter(self) -> None:
        """Makes the steps of the parameters before a forward pass. Raises the error of a reduction."""
        self.steps.use(self.parameters)
        if self.stage.has_backward and torch.is_grad_enabled():
            for segment in self._segments:
                segment.arm(self.steps.needs)

    def reduce(self, grad_scale_factor: int) -> None:
        """Replaces `stage.perform_reduce_grad`, which runs after the last backward pass of a step."""
        if not self.stage.has_backward:
            return
        if self.has_buckets and not self._segments:
            self._learn()
        self._check_parameters()
        while self._launched < len(self._segments):
            self._launch(grad_scale_factor)

    def remove(self) -> None:
        """Ends the work on this stage."""
        for hook in self._hooks:
            hook.remove()

    def _launch(self, factor: int) -> None:
        """Starts the next reduction."""
        segment = self._segments[self._launched]
        self._launched += 1
        segment.arm(self.steps.needs)  # it is, unless this is the first step
        with in_order(self.place), labelled(f"segment {self._launched - 1} of stage {self.stage.stage_index}"):
            reduction = segment.launch(factor, self.priority)
        self.steps.add(reduction)

    def _learn(self) -> None:
        """Makes the segments: one of each dtype and device, of the parameters that have a gradient on some rank."""
        has = self._agree([parameter.grad is not None for parameter in self.parameters])
        kinds: dict[Any, list[Tensor]] = {}
        for parameter, is_used in zip(self.parameters, has, strict=True):
            if is_used:
                kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        if not kinds:
            raise ConfigError(
                f"pipeline.attach: stage {self.stage.stage_index} has {len(self.parameters)} parameters, and none of "
                f"them has a gradient after its backward passes; freeze them with requires_grad_(False)"
            )
        for number, parameters in enumerate(kinds.values()):
            is_last = self.is_last and number == len(kinds) - 1
            start = functools.partial(self._reduce, parameters, is_last)
            self._segments.append(Segment(parameters, start, self._passes))
        used = {parameter for parameters in kinds.values() for parameter in parameters}
        named = list(self.stage.submod.named_parameters())
        self._used = [(name, parameter) for name, parameter in named if parameter in used]
        self._unused = [(name, parameter) for name, parameter in named if parameter not in used]
        for number, segment in enumerate(self._segments if self._early is not None else ()):
            hook = functools.partial(self._accumulated, number)
            self._hooks += [parameter.register_post_accumulate_grad_hook(hook) for parameter in segment.parameters]

    def _check_parameters(self) -> None:
        """Raises ConfigError for a gradient that the first step did not have on any rank, and for a parameter that was
        frozen since."""
        for name, parameter in self._unused:
            if parameter.grad is not None:
                raise ConfigError(
                    f"pipeline.attach: parameter {name!r} of stage {self.stage.stage_index} has a gradient, and was "
                    f"frozen or without one in the first step; use it in the first step, or call remove() and attach() "
                    f"again when parameters are unfrozen"
                )
        for name, parameter in self._used:
            if not parameter.requires_grad:
                raise ConfigError(
                    f"pipeline.attach: parameter {name!r} of stage {self.stage.stage_index} was frozen after the first "
                    f"step; call zero_grad(), remove() and attach() again when parameters are frozen"
                )

    def _accumulated(self, number: int, parameter: Tensor) -> None:
        """A backward pass has accumulated the gradient of a parameter of segment `number`."""
        if not self._is_running or not self._segments[number].count(parameter):
            return
        self._complete.add(number)
        while self._launched in self._complete and self._early is not None:
            self._launch(self._early)
