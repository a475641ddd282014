"""`LossScale`: the factor that a job multiplies its loss with, and so every gradient."""

from __future__ import annotations

import math

from ..config import number
from ..errors import ConfigError


class LossScale:
    """The scale of the gradients to come, as `GradScaler.get_scale()` returns it; 1 without a scaler."""

    def __init__(self) -> None:
        self.value = 1.0

    def set(self, scale: object, who: str = "") -> None:
        """Raises ConfigError, beginning with `who`, unless `scale` is a finite number above 0: every gradient would
        come out wrong, steps later."""
        factor = number(scale)
        if not 0 < factor < math.inf:
            raise ConfigError(
                f"{who}HookState.loss_scale={scale!r}: use a finite number above 0, as "
                f"state.loss_scale = scaler.get_scale() of a GradScaler; without one, 1.0"
            )
        self.value = factor
