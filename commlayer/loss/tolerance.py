"""`Tolerance`: the loss bound of a gradient, by layer and by phase of the training.

    tolerance = ByLayer(model, {"*norm*": 0.0, "head.*": 0.004}, otherwise=BySteps({0: 0.001, 2000: 0.03}))
    state = commlayer.HookState(policy, tolerance=tolerance)

The loss that a model tolerates differs by layer (Wang et al., DLCP, arXiv 2008.08445, and MLT, NSDI 2024: 1.1 % at the
input side and 0.4 % at the output side of one model) and by phase (Ma et al., DBLP, arXiv 2605.01989: 0.8 % in critical
regimes and 40 % outside of them).

All ranks must come to the same loss bounds; otherwise their operations fail with MismatchError. So a tolerance depends
only on the step, the parameter, and the numbers that the ranks have agreed on in `begin`.
"""

from __future__ import annotations

import fnmatch
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..config import check_loss_bound, number, whole
from ..errors import ConfigError

Agree = Callable[[float], float]
"""Returns the largest of all ranks' values. Every rank must call it in the same steps. It takes a small reliable
operation."""

MEASURED = 10
"""`GradientNorm` measures the last tenth of its window, because reading all gradients costs time."""


class Tolerance(ABC):
    """Loss bounds by step and parameter: the base class for `HookState(tolerance=...)`. Steps count from 0, one per
    backward pass.

    Each different loss bound has plans and an adaptive deadline of its own, so a tolerance should have few of them.
    """

    def begin(self, step: int, agree: Agree) -> None:  # noqa: B027  # optional
        """Begins a step. Called once per step, before all other calls for it."""

    @abstractmethod
    def loss_bound(self, step: int, parameter: Tensor) -> float:
        """The share of packets with this parameter's gradient that may be missing, 0 (no loss) to 0.5.

        In a bucket of several parameters the smallest loss bound above 0 holds for all of them; packets with a part of
        a parameter whose loss bound is 0 are protected.
        """

    def observe(self, step: int, bucket: int, gradients: Tensor) -> None:  # noqa: B027  # optional
        """Takes the averaged gradients of a bucket, flat. Called on any thread, before the next step begins."""

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint: plain values only."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027  # optional
        """Takes over the value of `state_dict` of an equal tolerance."""


class BySteps(Tolerance):
    """A schedule: `loss_bounds` maps the first step of each phase to its loss bound. The first phase begins with 0.

    Raises ConfigError for steps that are not whole numbers or lack 0, and for a loss bound out of range.
    """

    def __init__(self, loss_bounds: Mapping[int, float]) -> None:
        steps = [whole(step, -1) for step in loss_bounds] if isinstance(loss_bounds, Mapping) else []
        if min(steps, default=-1) != 0:
            raise ConfigError(
                f"BySteps({loss_bounds!r}): use whole numbers of steps, the first of them 0, each with its loss bound, "
                f"as {{0: 0.001, 2000: 0.03}}"
            )
        shares = [check_loss_bound(share, f"BySteps({{{step}: {share!r}}})") for step, share in loss_bounds.items()]
        schedule = dict(zip(steps, shares, strict=True))
        self._steps = sorted(schedule)
        self._loss_bounds = [schedule[step] for step in self._steps]

    def loss_bound(self, step: int, parameter: Tensor) -> float:  # noqa: ARG002  # the same for all
        """See `Tolerance.loss_bound`."""
        return self._loss_bounds[bisect_right(self._steps, step) - 1]


class ByLayer(Tolerance):
    """A loss bound, or another tolerance, for each class of layers.

    `loss_bounds` maps patterns of parameter names (as of file names: *, ? and [...]) to loss bounds or tolerances. The
    first pattern that matches a name is used, and `otherwise` if none does. `model` is the model of the HookState,
    wrapped in DistributedDataParallel or not.

    Raises ConfigError for a pattern that matches no parameter, for one that is never used because earlier patterns
    match all its parameters, for a loss bound out of range, and for arguments of another type.
    """

    def __init__(
        self, model: nn.Module, loss_bounds: Mapping[str, float | Tolerance], otherwise: float | Tolerance
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(f"ByLayer(model={model!r}): give the model that gets the hook, an nn.Module")
        if not isinstance(loss_bounds, Mapping) or not all(isinstance(pattern, str) for pattern in loss_bounds):
            raise ConfigError(
                f"ByLayer(loss_bounds={loss_bounds!r}): use patterns of parameters' names, each with its loss bound, "
                f"as {{'*norm*': 0.0}}"
            )

        def checked(bound: float | Tolerance, whose: str) -> float | Tolerance:
            return bound if isinstance(bound, Tolerance) else check_loss_bound(bound, f"ByLayer: {bound!r} for {whose}")

        classes = {pattern: checked(bound, repr(pattern)) for pattern, bound in loss_bounds.items()}
        rest = checked(otherwise, "otherwise")
        self._of: dict[Tensor, float | Tolerance] = {}
        unmatched, unused = set(classes), set(classes)
        plain = model.module if isinstance(model, DistributedDataParallel) else model
        for name, parameter in plain.named_parameters():
            matching = [pattern for pattern in classes if fnmatch.fnmatchcase(name, pattern)]
            unmatched -= set(matching)
            unused -= set(matching[:1])
            self._of[parameter] = classes[matching[0]] if matching else rest
        if unmatched:
            raise ConfigError(
                f"ByLayer: {', '.join(map(repr, sorted(unmatched)))} matches no parameter's name; use names as "
                f"model.named_parameters() gives them, without 'module.'"
            )
        if unused:
            raise ConfigError(
                f"ByLayer: {', '.join(map(repr, sorted(unused)))} is never used: earlier patterns match all its "
                f"parameters; move it up"
            )
        self._inner = list(dict.fromkeys(bound for bound in (*classes.values(), rest) if isinstance(bound, Tolerance)))

    def begin(self, step: int, agree: Agree) -> None:
        """See `Tolerance.begin`."""
        for tolerance in self._inner:
            tolerance.begin(step, agree)

    def loss_bound(self, step: int, parameter: Tensor) -> float:
        """See `Tolerance.loss_bound`. Raises ConfigError for a parameter of another model."""
        bound = self._of.get(parameter)
        if bound is None:
            raise ConfigError(
                f"ByLayer: a parameter of shape {tuple(parameter.shape)} belongs to another model; make the tolerance "
                f"for the model that has the hook"
            )
        return bound.loss_bound(step, parameter) if isinstance(bound, Tolerance) else bound

    def observe(self, step: int, bucket: int, gradients: Tensor) -> None:
        """See `Tolerance.observe`."""
        for tolerance in self._inner:
            tolerance.observe(step, bucket, gradients)

    def state_dict(self) -> dict[str, Any]:
        """See `Tolerance.state_dict`."""
        return {"inner": [tolerance.state_dict() for tolerance in self._inner]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Tolerance.load_state_dict`."""
        for tolerance, saved in zip(self._inner, state["inner"], strict=True):
            tolerance.load_state_dict(saved)


class GradientNorm(Tolerance):
    """The loss bound `low` while training is in a critical regime, and `high` while it is not.

    A regime is critical where the norm of the gradient changes. Every `every_steps` steps (an epoch, say) the mean norm
    is compared with that of the window before; the next window is critical if the norm has changed by the share
    `threshold` of its former value or more. The first two windows are critical, and so is a window after one without a
    finite norm. The rule is that of DBLP (Ma et al., arXiv 2605.01989) and Accordion (Agarwal et al., MLSys 2021),
    whose threshold is 0.5.

    The norm is that of the averaged gradient as the optimizer gets it. A loss scale (AMP) is a part of it: a window in
    which the scale changes counts as critical.

    Raises ConfigError for values out of range.
    """

    def __init__(self, low: float, high: float, *, every_steps: int, threshold: float = 0.5) -> None:
        low = check_loss_bound(low, f"GradientNorm(low={low!r})")
        high = check_loss_bound(high, f"GradientNorm(high={high!r})")
        if low > high:
            raise ConfigError(f"GradientNorm(low={low}, high={high}): critical steps tolerate less: use low <= high")
        if whole(every_steps, 0) <= 0:
            raise ConfigError(f"GradientNorm(every_steps={every_steps!r}): use a number of steps, at least 1")
        if not 0 < number(threshold) < math.inf:
            raise ConfigError(
                f"GradientNorm(threshold={threshold!r}): use a relative change above 0, as 0.5, and finite"
            )
        self.low, self.high, self.every_steps, self.threshold = low, high, int(every_steps), float(threshold)
        self.critical = True
        """Whether `low` holds."""
        self._former = 0.0  # the norm of the window before; 0: not known
        self._squares: dict[int, dict[int, float]] = {}  # squares of this window, by step and bucket

    def begin(self, step: int, agree: Agree) -> None:
        """See `Tolerance.begin`."""
        if step == 0 or step % self.every_steps != 0:
            return
        # Kernels of different processors round differently. So the ranks agree on a number first, and decide alike.
        norm = agree(self._mean_norm())
        known = self._former > 0 and norm > 0
        self.critical = not known or abs(norm - self._former) >= self.threshold * self._former
        self._former = norm
        self._squares = {}

    def loss_bound(self, step: int, parameter: Tensor) -> float:  # noqa: ARG002  # the same for all
        """See `Tolerance.loss_bound`."""
        return self.low if self.critical else self.high

    def observe(self, step: int, bucket: int, gradients: Tensor) -> None:
        """See `Tolerance.observe`."""
        if step % self.every_steps >= self.every_steps - max(self.every_steps // MEASURED, 1):
            norm = float(torch.linalg.vector_norm(gradients, dtype=torch.float32))
            self._squares.setdefault(step, {})[bucket] = norm * norm

    def state_dict(self) -> dict[str, Any]:
        """See `Tolerance.state_dict`. The norms of the current window are left out: its mean is that of the rest."""
        return {"critical": self.critical, "norm": self._former}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Tolerance.load_state_dict`."""
        self.critical, self._former, self._squares = bool(state["critical"]), float(state["norm"]), {}

    def _mean_norm(self) -> float:
        """Mean over the steps with a finite norm; 0 if there is none."""
        norms = [math.sqrt(math.fsum(step.values())) for step in self._squares.values()]
        finite = [norm for norm in norms if math.isfinite(norm)]
        return math.fsum(finite) / len(finite) if finite else 0.0


def bucket_loss_bound(
    tolerance: Tolerance, step: int, parameters: Sequence[Tensor], who: str
) -> tuple[float, list[int]]:
    """The loss bound of a bucket, and the indices of its parameters that may lose nothing.

    The loss bound is the smallest one above 0 among its parameters, or 0 if there is none. Raises ConfigError,
    beginning with `who`, if the tolerance returns a loss bound out of range.
    """
    shares = []
    for parameter in parameters:
        share = tolerance.loss_bound(step, parameter)
        where = f"for step {step} and a parameter of shape {tuple(parameter.shape)}"
        what = f"{who}{type(tolerance).__name__}.loss_bound {where} returned {share!r}"
        shares.append(check_loss_bound(share, what))  # anybody may write a tolerance
    above_0 = [share for share in shares if share > 0]
    return min(above_0, default=0.0), [i for i, share in enumerate(shares) if share == 0] if above_0 else []
