"""`Started`: the average of a buffer of gradients, on its way and waited for later."""

from __future__ import annotations

import dataclasses

from torch import Tensor
from torch.futures import Future

from ...telemetry.meter import meter
from ..work.work import CommWork
from .commit import Commit
from .gradient import Reduction
from .hook_state import HookState

Memories = tuple[dict[tuple[int, str], Tensor], dict[tuple[int, str], Tensor]]
"""Host memory of even and of odd steps, where the last step's is in use during a step."""


class Started:
    """The reduction of `memory`."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.averaged: Future[Tensor] | CommWork = Future()
        """What `reduce_buffer` returned."""
        self._error: BaseException | None = None

    def reduction(self, state: HookState, memories: Memories | None, *, alone: bool = True) -> Reduction:
        """What the reductions of the model share. `alone`: without a GradScaler, each buffer is a step of its own."""
        shared = dataclasses.replace(state.reduction(), failed=self._fail)
        if state.loss_scale == 1 and alone:
            shared.commit = Commit(alone=True)
        if memories is not None:
            shared.memory = memories[state.steps % 2]
        return shared

    def wait(self) -> None:
        """Waits until the averages are in `memory`: on a device, the current stream does. Raises the error of the
        operation, with its own type."""
        if isinstance(self.averaged, CommWork):
            self.averaged.wait()
            return
        try:
            with meter.waiting():
                averaged = self.averaged.wait()
        except RuntimeError as error:
            raise self._error or error from None
        if averaged.data_ptr() != self.memory.data_ptr():  # that of a codec is reused by the next step
            self.memory.copy_(averaged)

    def _fail(self, error: BaseException) -> None:
        self._error = error
