"""`AwaitedStep`: an optimizer that waits in `step()` for reductions that backward passes have started."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .gradient import PendingReduction


class AwaitedStep:
    """Waits in `step()` for the reductions that `add` brings. It has the interface of `DeferredStep`."""

    staleness = 0

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._open: list[PendingReduction] = []
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    def add(self, reduction: PendingReduction) -> None:
        """Takes a reduction that a backward pass has started, and replaces its gradients by PendingGradients."""
        reduction.place()
        self._open.append(reduction)

    def use(self, parameters: Iterable[Tensor]) -> None:
        """These parameters are about to be used. There is nothing to do."""

    def needs(self, reduction: PendingReduction) -> bool:  # noqa: ARG002
        """Whether a step is to be made with the result. `step()` has made it."""
        return False

    def drain(self) -> None:
        """Waits for all reductions. Raises the error of one."""
        while self._open:
            self._open[0].wait()
            self._open.pop(0)

    def forget(self) -> None:
        """Nothing is kept."""

    def remove(self) -> None:
        """Drops the reductions that are left, and leaves the optimizer as it was."""
        self._hook.remove()
        self._open.clear()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        self.drain()
