"""Which optimizers can train with the codecs `sign` and `topk:SHARE`.

Adam and its relatives divide by the root of the mean squared gradient. With 1 bit per value and error feedback, a step
carries the residuals of earlier steps, whose squares are many times those of the gradient. They inflate the second
moment, so steps become too small, in some coordinates more than in others (Tang et al., "1-bit Adam", ICML 2021). With
top-k, a value that waited for n steps arrives as the sum of n gradients: its square is up to n times the sum of theirs.
"""

from __future__ import annotations

import re

from torch.optim import Optimizer

from ..config import Policy
from ..errors import ConfigError
from .codec import codec_of

_SECOND_MOMENT = re.compile(
    r"adam|adagrad|adadelta|adafactor|adabelief|adabound|adahessian|ademamix|rmsprop|lamb(?!da)|yogi|novograd|"
    r"shampoo|\bsoap|sophia|prodigy",
    re.IGNORECASE,
)
"""Words in names of such optimizers' classes. Packages other than torch have some, too: FusedAdam, Adam8bit."""

REMEDY = "use SGD with momentum, or another codec (int4 suits Adam)"
"""What was measured, see docs/compression.md. Lion is not refused, but loses with top-k."""


def check_optimizer(policy: Policy, optimizer: Optimizer | None) -> None:
    """Raises ConfigError if the optimizer cannot train with the policy's codec, or is missing and needed."""
    if not codec_of(policy.codec).bursts:
        return
    if optimizer is None:
        raise ConfigError(
            f"Policy(codec={policy.codec!r}) trains with some optimizers only, and a hook does not see the optimizer: "
            f"give HookState(optimizer=...), or set the `optimizer` of a restored HookState"
        )
    name = _second_moment(optimizer)
    if name is not None:
        raise ConfigError(
            f"Policy(codec={policy.codec!r}) with {name}: the optimizer averages squared gradients, and this codec's "
            f"residuals inflate that second moment, so training slows down or diverges (1-bit Adam, Tang et al., ICML "
            f"2021); {REMEDY}"
        )


def _second_moment(optimizer: Optimizer) -> str | None:
    """The class that averages squared gradients: that of the optimizer, of one that it wraps, or a base class."""
    inner = wrapped_by(optimizer)
    if inner is not None:
        return _second_moment(inner)
    return next((kind.__name__ for kind in type(optimizer).__mro__ if _SECOND_MOMENT.search(kind.__name__)), None)


def wrapped_by(optimizer: Optimizer) -> Optimizer | None:
    """The optimizer that makes the steps of a wrapper; None: it is no wrapper."""
    for name in ("optim", "optimizer"):  # torch's ZeroRedundancyOptimizer and PostLocalSGDOptimizer, accelerate's, ...
        inner = getattr(optimizer, name, None)
        if isinstance(inner, Optimizer) and inner is not optimizer:
            return inner
    return None
