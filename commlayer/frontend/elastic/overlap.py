"""`Overlap`: gradients travel while the backward pass makes the others."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from torch import Tensor, nn

from ...errors import ConfigError
from ..gradients.passes import Passes
from .contribution import Contribution


class Overlap:
    """Starts the buckets of a contribution in the last backward pass of each step. The first step of a kind shows how
    many passes such steps have, and how often each of them makes a gradient: all its buckets start at its end."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        begin: Callable[[], Contribution | None],
        kind: Callable[[], Hashable],
    ) -> None:
        """`begin` gives the contribution to the step that is due; None: its buckets must not start before its end.
        `kind`: that of the step, on which the number of passes may depend."""
        self._begin_step, self._kind_of = begin, kind
        self._passes = Passes(parameters, self._begin, self._accumulated, self._end)
        self._kind: Hashable = None
        self._expected: dict[Hashable, int] = {}
        """The most passes of a step, by its kind."""
        self._times: dict[Tensor, int] = {}
        """How often a pass has made the gradient of each parameter, at most."""
        self._seen: dict[Tensor, int] = {}
        """How often this one has."""
        self.contribution: Contribution | None = None
        """To the step that is due, if a part of it is on its way already."""

    def stepped(self) -> None:
        """A step was made, or it failed: another one begins."""
        self.contribution = None
        if self._passes.count:
            self._expected[self._kind] = max(self._passes.count, self._expected.get(self._kind, 0))
        self._passes.stepped()

    def remove(self) -> None:
        """Takes the hooks off the parameters."""
        self._passes.remove()

    def _begin(self) -> None:
        if self.contribution is not None:
            raise ConfigError(
                f"elastic: another backward pass of a step, whose gradients are on their way since pass "
                f"{self._expected[self._kind]}, the last one of such steps before: make equally many in each step (a "
                f"checkpoint with use_reentrant=True can make one), step after zero_grad(), or send all gradients in "
                f"job.step() by elastic(overlap=False)"
            )
        self._kind, self._seen = self._kind_of(), {}
        if self._passes.count == self._expected.get(self._kind):
            self.contribution = self._begin_step()

    def _accumulated(self, parameter: Tensor) -> None:
        contribution, seen = self.contribution, self._seen.get(parameter, 0) + 1
        self._seen[parameter] = seen
        if contribution is None:
            self._times[parameter] = max(seen, self._times.get(parameter, 0))
            return
        if seen > self._times.get(parameter, 1):
            raise ConfigError(
                f"elastic: a gradient of shape {tuple(parameter.shape)} was accumulated more often than in the steps "
                f"before, when it may have been on its way already, or this pass was begun twice: checkpoint with "
                f"use_reentrant=False, or give elastic(overlap=False)"
            )
        while (bucket := contribution.next) is not None:
            if any(self._seen.get(each, 0) < self._times.get(each, 1) for each in bucket.parameters):
                break
            contribution.start()

    def _end(self) -> None:
        if self.contribution is not None:
            while self.contribution.next is not None:
                self.contribution.start()
            self.contribution.seal()
