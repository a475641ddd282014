"""`Changes`: settings that `commlayer ctl` changes reach a hook on all ranks at the same step.

Every few steps the ranks of the hook's group all-reduce the number of the change that each has in its mailbox, beside
the step's gradients. If all have the same one, all apply it at the beginning of the next step; otherwise none does. So
no rank can be late, and nobody waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, Work

from ...telemetry.control import Change, apply_port, mailbox, policy_fields

if TYPE_CHECKING:
    from .hook_state import HookState

EVERY_STEPS = 4
"""Steps from one agreement to the next."""


class Changes:
    """The changes of one hook."""

    def __init__(self) -> None:
        self.number = 0
        """The number of the latest change that was applied."""
        self._offered: Change | None = None
        self._values = torch.zeros(2, dtype=torch.float64, device="cpu")
        self._work: Work | None = None
        self._group: dist.ProcessGroup | None = None

    def begin_step(self, state: HookState) -> None:
        """A step begins on all ranks of the group. `state.steps` is the same on all of them."""
        work, self._work = self._work, None
        if work is not None and self._group is state.group():
            work.wait()
            most, least = int(self._values[0]), -int(self._values[1])
            if self._offered is not None and most == least == self._offered.number:
                self._apply(state, self._offered)
        if state.steps % EVERY_STEPS == 0:
            self._offered = mailbox.waiting(self.number)
            number = 0.0 if self._offered is None else float(self._offered.number)
            self._values = torch.tensor([number, -number], dtype=torch.float64, device="cpu")
            options = AllreduceOptions()
            options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
            options.asyncOp = True
            self._group = state.group()
            self._work = self._group.allreduce([self._values], options)

    def _apply(self, state: HookState, change: Change) -> None:
        apply_port(change)
        state.change_policy(policy_fields(change))
        self.number = change.number
        mailbox.applied(change, state, state.steps)
