"""COMMLAYER_DISABLE=1: functions that need the engine leave a model as it is, or refuse where training would differ.

The backend is then plain gloo (`gloo.plain_gloo`), and DDP's hook torch's own (`ddp.allreduce_hook`).
"""

from __future__ import annotations

import logging
from typing import NoReturn

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...config import Policy
from ...errors import ConfigError
from .hook_state import HookState

log = logging.getLogger("commlayer")


def warn(who: str, what: str) -> None:
    """Tells that a call has no effect."""
    log.warning("COMMLAYER_DISABLE=1: %s has no effect: %s", who, what)


def refuse(who: str, reason: str) -> NoReturn:
    """Refuses a call without which training would be another one."""
    raise ConfigError(
        f"COMMLAYER_DISABLE=1: {who} needs the engine: {reason}, or unset COMMLAYER_DISABLE on every rank"
    )


class PlainOverlap:
    """What `overlap` returns: a handle of a model that averages its gradients by itself."""

    def __init__(self, state: HookState | None) -> None:
        self.by_next_use = True
        self.is_removed = False
        if state is not None:
            self.state = state

    def finish(self) -> None:
        """Nothing is in flight."""

    def remove(self) -> None:
        self.is_removed = True


def plain_overlap(model: nn.Module, optimizer: Optimizer, policy: Policy | None, state: HookState | None) -> object:
    """The handle of `overlap`. For DDP it has a state, which counts nothing."""
    warn("overlap", "gradients are averaged within backward(), as by gloo")
    if isinstance(model, DistributedDataParallel):
        state = state or HookState(policy, model.process_group, optimizer=optimizer)
    return PlainOverlap(state)
