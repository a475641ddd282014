"""`Tolerance`: how much of a gradient may be lost, by layer and by phase of the training.

    tolerance = ByLayer(model, {"*norm*": 0.0, "head.*": 0.004}, otherwise=BySteps({0: 0.001, 2000: 0.03}))
    state = commlayer.HookState(policy, tolerance=tolerance)

What a model tolerates differs by layer (Wang et al., DLCP, arXiv 2008.08445, and MLT, NSDI 2024: 1.1 % at the input
side and 0.4 % at the output side of one model) and by phase (Ma et al., DBLP, arXiv 2605.01989: 0.8 % in critical
regimes and 40 % outside of them).

All ranks must come to the same bounds, else their operations do not match and fail with MismatchError. So a tolerance
depends on nothing but the step, the parameter, and what the ranks have agreed on in `begin`.
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

from ..config import check_bound, number, whole
from ..errors import ConfigError

Agree = Callable[[float], float]
"""The largest of all ranks' values: every rank must call it in the same steps. It takes a small reliable operation."""

MEASURED = 10
"""`GradientNorm` looks at the last of so many parts of its window: reading all gradients costs time."""


class Tolerance(ABC):
    """How much may be lost; the base class of what a `HookState` takes. Steps count from 0, one per backward pass.

    Each different bound has plans and an adaptive deadline of its own, so a tolerance should have few of them.
    """

    def begin(self, step: int, agree: Agree) -> None:  # noqa: B027  # optional
        """A step begins: to be called once per step, before everything else of it."""

    @abstractmethod
    def bound(self, step: int, parameter: Tensor) -> float:
        """The share of packets with this parameter's gradient that may be missing, 0 to 0.5. 0: they all arrive.

        In a bucket of several parameters the smallest bound that is not 0 holds for all of them; packets with a part
        of those whose bound is 0 are protected.
        """

    def observe(self, step: int, bucket: int, gradients: Tensor) -> None:  # noqa: B027  # optional
        """The averaged gradients of a bucket, flat; any thread calls it, before the next step begins."""

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: plain values only."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027  # optional
        """Takes over what `state_dict` of an equal tolerance returned."""


class BySteps(Tolerance):
    """A schedule: `bounds` maps the step from which a bound holds to the bound; it begins with step 0."""

    def __init__(self, bounds: Mapping[int, float]) -> None:
        steps = [whole(step, -1) for step in bounds] if isinstance(bounds, Mapping) else []
        if min(steps, default=-1) != 0:
            raise ConfigError(
                f"BySteps({bounds!r}): use whole numbers of steps, the first of them 0, each with its bound, as "
                f"{{0: 0.001, 2000: 0.03}}"
            )
        shares = [check_bound(bound, f"BySteps({{{step}: {bound!r}}})") for step, bound in bounds.items()]
        schedule = dict(zip(steps, shares, strict=True))
        self._steps = sorted(schedule)
        self._bounds = [schedule[step] for step in self._steps]

    def bound(self, step: int, parameter: Tensor) -> float:  # noqa: ARG002  # the same for all
        """See `Tolerance.bound`."""
        return self._bounds[bisect_right(self._steps, step) - 1]


class ByLayer(Tolerance):
    """A bound, or another tolerance, for each class of layers.

    `bounds` maps patterns (as of file names: *, ? and [...]) of parameter names to them; the first that matches counts,
    and `otherwise` where none does. `model` is that of the HookState, wrapped in DistributedDataParallel or not.
    Raises ConfigError for a pattern that no parameter's name matches, for one that counts nowhere, and for arguments of
    another type.
    """

    def __init__(self, model: nn.Module, bounds: Mapping[str, float | Tolerance], otherwise: float | Tolerance) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(f"ByLayer(model={model!r}): give the model that gets the hook, an nn.Module")
        if not isinstance(bounds, Mapping) or not all(isinstance(pattern, str) for pattern in bounds):
            raise ConfigError(
                f"ByLayer(bounds={bounds!r}): use patterns of parameters' names, each with its bound, as "
                f"{{'*norm*': 0.0}}"
            )

        def checked(each: float | Tolerance, whose: str) -> float | Tolerance:
            return each if isinstance(each, Tolerance) else check_bound(each, f"ByLayer: {each!r} for {whose}")

        classes = {pattern: checked(each, repr(pattern)) for pattern, each in bounds.items()}
        rest = checked(otherwise, "otherwise")
        self._of: dict[Tensor, float | Tolerance] = {}
        unmatched, beaten = set(classes), set(classes)
        plain = model.module if isinstance(model, DistributedDataParallel) else model
        for name, parameter in plain.named_parameters():
            matching = [pattern for pattern in classes if fnmatch.fnmatchcase(name, pattern)]
            unmatched -= set(matching)
            beaten -= set(matching[:1])
            self._of[parameter] = classes[matching[0]] if matching else rest
        if unmatched:
            raise ConfigError(
                f"ByLayer: no parameter's name matches {', '.join(map(repr, sorted(unmatched)))}; names are as "
                f"model.named_parameters() gives them, without 'module.'"
            )
        if beaten:
            raise ConfigError(
                f"ByLayer: {', '.join(map(repr, sorted(beaten)))} counts nowhere: patterns before it match all its "
                f"parameters, and the first that matches counts; put it before them"
            )
        self._inner = list(dict.fromkeys(each for each in (*classes.values(), rest) if isinstance(each, Tolerance)))

    def begin(self, step: int, agree: Agree) -> None:
        """See `Tolerance.begin`."""
        for each in self._inner:
            each.begin(step, agree)

    def bound(self, step: int, parameter: Tensor) -> float:
        """See `Tolerance.bound`. Raises ConfigError for a parameter that is not of the model."""
        each = self._of.get(parameter)
        if each is None:
            raise ConfigError(
                f"ByLayer: a parameter of shape {tuple(parameter.shape)} is not of the model it was made for: make it "
                f"for the model that has the hook"
            )
        return each.bound(step, parameter) if isinstance(each, Tolerance) else each

    def observe(self, step: int, bucket: int, gradients: Tensor) -> None:
        """See `Tolerance.observe`."""
        for each in self._inner:
            each.observe(step, bucket, gradients)

    def state_dict(self) -> dict[str, Any]:
        """See `Tolerance.state_dict`."""
        return {"inner": [each.state_dict() for each in self._inner]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Tolerance.load_state_dict`."""
        for each, saved in zip(self._inner, state["inner"], strict=True):
            each.load_state_dict(saved)


class GradientNorm(Tolerance):
    """The bound `low` while training is in a critical regime, and `high` while it is not.

    Critical is where the norm of the gradient changes: every `every_steps` steps (an epoch, say) the mean norm is
    compared with that of the window before, and the next window is critical if it has changed by `threshold` of it or
    more. The first two windows are critical, and one after a window without a finite norm. The rule is that of DBLP (Ma
    et al., arXiv 2605.01989) and Accordion (Agarwal et al., MLSys 2021), whose threshold is 0.5.

    The norm is that of the averaged gradient as the optimizer gets it. A loss scale (AMP) is a part of it: where that
    changes, the window counts as critical.
    """

    def __init__(self, low: float, high: float, *, every_steps: int, threshold: float = 0.5) -> None:
        low = check_bound(low, f"GradientNorm(low={low!r})")
        high = check_bound(high, f"GradientNorm(high={high!r})")
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
        self._squares: dict[int, dict[int, float]] = {}  # of this window, by step and bucket

    def begin(self, step: int, agree: Agree) -> None:
        """See `Tolerance.begin`."""
        if step == 0 or step % self.every_steps != 0:
            return
        # Kernels of different processors round differently: so the ranks agree on a number, and then decide alike.
        norm = agree(self._mean_norm())
        known = self._former > 0 and norm > 0
        self.critical = not known or abs(norm - self._former) >= self.threshold * self._former
        self._former = norm
        self._squares = {}

    def bound(self, step: int, parameter: Tensor) -> float:  # noqa: ARG002  # the same for all
        """See `Tolerance.bound`."""
        return self.low if self.critical else self.high

    def observe(self, step: int, bucket: int, gradients: Tensor) -> None:
        """See `Tolerance.observe`."""
        if step % self.every_steps >= self.every_steps - max(self.every_steps // MEASURED, 1):
            norm = float(torch.linalg.vector_norm(gradients, dtype=torch.float32))
            self._squares.setdefault(step, {})[bucket] = norm * norm

    def state_dict(self) -> dict[str, Any]:
        """See `Tolerance.state_dict`. What this window has seen so far is left out: its norm is that of the rest."""
        return {"critical": self.critical, "norm": self._former}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Tolerance.load_state_dict`."""
        self.critical, self._former, self._squares = bool(state["critical"]), float(state["norm"]), {}

    def _mean_norm(self) -> float:
        """Over the steps with a finite norm; 0 if there is none."""
        norms = [math.sqrt(math.fsum(step.values())) for step in self._squares.values()]
        finite = [norm for norm in norms if math.isfinite(norm)]
        return math.fsum(finite) / len(finite) if finite else 0.0


def bucket_bound(tolerance: Tolerance, step: int, parameters: Sequence[Tensor], who: str) -> tuple[float, list[int]]:
    """The loss bound of a bucket, and the indices of its parameters that may lose nothing.

    The bound is the smallest of its parameters' bounds above 0, or 0 if there is none. Raises ConfigError, beginning
    with `who`, if the tolerance returns a bound that is out of range.
    """
    bounds = []
    for parameter in parameters:
        bound = tolerance.bound(step, parameter)
        what = f"{type(tolerance).__name__}.bound for step {step} and a parameter of shape {tuple(parameter.shape)}"
        bounds.append(check_bound(bound, f"{who}{what} returned {bound!r}"))  # anybody may write a tolerance
    above_0 = [bound for bound in bounds if bound > 0]
    return min(above_0, default=0.0), [i for i, bound in enumerate(bounds) if bound == 0] if above_0 else []
