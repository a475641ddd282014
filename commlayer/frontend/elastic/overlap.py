"""`Overlap`: gradients travel while the backward pass makes the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from ...errors import ConfigError
from ..gradients.passes import Passes
from .contribution import Contribution


class Overlap:
    """Starts the buckets of a contribution in the last backward pass of each step. The first step shows how many passes
    a step has, and how often each of them makes a gradient: all its buckets start at its end."""

    def __init__(self, parameters: Sequence[nn.Parameter], begin: Callable[[], Contribution | None]) -> None:
        """`begin` gives the contribution to the step that is due; None: its buckets must not start before its end."""
        self._begin_step = begin
        self._passes = Passes(parameters, self._begin, self._accumulated, self._end)
        self._expected = 0
        """Passes of a step; 0: not known."""
        self._times: dict[Tensor, int] = {}
        """How often the last pass of a step makes the gradient of each parameter."""
        self._awaited: dict[Tensor, int] = {}
        self._contribution: Contribution | None = None

    def stepped(self) -> None:
        """A step was made, or it failed: another one begins."""
        self._contribution = None
        if self._passes.count:
            self._expected = self._passes.count
        self._passes.stepped()

    def remove(self) -> None:
        """Takes the hooks off the parameters."""
        self._passes.remove()

    def _begin(self) -> None:
        if self._contribution is not None:
            raise ConfigError(
                f"elastic: backward pass {self._passes.count} of a step, whose gradients were taken after "
                f"{self._expected}, as in the step before: make equally many in each step (a checkpoint with "
                f"use_reentrant=True can make one), or send gradients in job.step() alone by elastic(overlap=False)"
            )
        if self._passes.count == self._expected:
            self._contribution = self._begin_step()
            self._awaited = dict(self._times)
        elif not self._expected:
            self._times = {}

    def _accumulated(self, parameter: Tensor) -> None:
        contribution = self._contribution
        if contribution is None:
            if not self._expected:
                self._times[parameter] = self._times.get(parameter, 0) + 1
            return
        left = self._awaited.get(parameter, 1) - 1
        if left < 0:
            raise ConfigError(
                f"elastic: a gradient of shape {tuple(parameter.shape)} was accumulated more often than in the first "
                f"step, when it may have been on its way already: checkpoint with use_reentrant=False, or give "
                f"elastic(overlap=False)"
            )
        self._awaited[parameter] = left
        while (bucket := contribution.next) is not None:
            if any(self._awaited.get(each, 1) for each in bucket.parameters):
                break
            contribution.start()

    def _end(self) -> None:
        if self._contribution is not None:
            while self._contribution.next is not None:
                self._contribution.start()
