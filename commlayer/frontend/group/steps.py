"""`watch_steps`: notes each `step()` of an optimizer, for the flight record and for `commlayer top`."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ...scheduler.deferred import is_in_parts
from ...telemetry.meter import meter
from ...transport.flight import recorder

_is_watching = False


def watch_steps() -> None:
    """Notes the steps of this process from now on. Another call changes nothing."""
    global _is_watching
    if not _is_watching:
        _is_watching = True
        register_optimizer_step_post_hook(after_step)


def after_step(optimizer: Optimizer, *_: Any) -> None:
    """An optimizer has made a step. Of deferred steps, which are made in parts, that of the caller counts."""
    if torch.compiler.is_compiling() or is_in_parts(optimizer):
        return
    recorder.note_step(optimizer)
    if meter.is_on:
        meter.optimizer_steps(optimizer)


after_step.reads_nothing = True  # type: ignore[attr-defined]  # so deferred steps stay deferred
