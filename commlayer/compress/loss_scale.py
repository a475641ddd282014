"""`LossScale`: the factor that a job multiplies its loss with, and so every gradient."""

from __future__ import annotations

import gc
import logging
import math
import weakref

from torch.amp import GradScaler

from ..config import number
from ..errors import ConfigError

log = logging.getLogger("commlayer")


class LossScale:
    """The scale of the gradients to come: the one that was set, or else that of the job's GradScaler; 1 without one."""

    def __init__(self) -> None:
        self.given: float | None = None
        """The scale that was set; None: none was."""
        self._scalers: list[weakref.ref[GradScaler]] = []

    @property
    def value(self) -> float:
        """Raises ConfigError if several scalers have different scales: only the job knows which one is meant."""
        if self.given is not None:
            return self.given
        found = (scaler() for scaler in self._scalers)
        scales = {float(scaler.get_scale()) for scaler in found if scaler is not None and scaler.is_enabled()}
        if len(scales) > 1:
            raise ConfigError(
                f"the job has GradScalers of different scales ({', '.join(map(str, sorted(scales)))}): before each "
                f"backward, set HookState.loss_scale = scaler.get_scale() of this model's scaler"
            )
        return scales.pop() if scales else 1.0

    def set(self, scale: object, who: str = "") -> None:
        """Raises ConfigError, beginning with `who`, unless `scale` is a finite number above 0: every gradient would
        come out wrong, steps later."""
        factor = number(scale)
        if not 0 < factor < math.inf:
            raise ConfigError(
                f"{who}HookState.loss_scale={scale!r}: use a finite number above 0, as "
                f"state.loss_scale = scaler.get_scale() of a GradScaler; without one, 1.0"
            )
        self.given = factor

    def find_scalers(self) -> None:
        """Looks for the job's scalers, which exist before the first gradient does: residuals of a step in another scale
        would be added with the wrong factor. It takes some 50 ms."""
        if self.given is not None:
            return
        # isinstance is no way: it would ask proxies for their class, and some of them then import modules.
        found = [item for item in gc.get_objects() if issubclass(type(item), GradScaler)]
        if len(found) > len(self._scalers):
            log.info(
                "residuals follow the scale of the job's GradScaler; where this model's loss is not scaled, set "
                "HookState.loss_scale = 1.0"
            )
        self._scalers = [weakref.ref(scaler) for scaler in found]
