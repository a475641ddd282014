"""`overlap`: gradients travel during the next forward pass, of DistributedDataParallel and FSDP2 models.

    model = DistributedDataParallel(net, gradient_as_bucket_view=True)    # or fully_shard(net)
    handle = commlayer.overlap(model, optimizer)
    ...                                                                   # the training loop is unchanged

Three things make this work, and keep every result as it was:

- The reduction of gradients starts in the backward pass, which does not wait for it. Gradients that the next forward
  pass needs first have the most urgent class (scheduler/order.py).
- `optimizer.step()` makes no step for gradients in flight (scheduler/deferred.py).
- Before a module's forward, a hook waits for the gradients of this module's parameters and makes their steps. So does
  any other use of such a parameter (scheduler/guard.py). All else is done when the forward pass ends (handle.py).
"""

from __future__ import annotations

import functools
from typing import cast, overload

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...compress.codec import STATELESS
from ...compress.optimizer import check_optimizer
from ...config import Config, Policy
from ...errors import ConfigError
from ...scheduler.deferred import check_per_parameter
from ..gradients.disabled import plain_overlap
from ..gradients.fsdp import sharded_modules
from ..gradients.hook_state import HookState
from .ddp import DdpOverlap, check_ddp
from .fsdp import FsdpOverlap
from .handle import Overlap, check_modules


@overload
def overlap(
    model: DistributedDataParallel,
    optimizer: Optimizer,
    policy: Policy | None = None,
    *,
    staleness: int = 0,
    state: HookState | None = None,
) -> DdpOverlap: ...


@overload
def overlap(model: nn.Module, optimizer: Optimizer, policy: Policy | None = None, *, staleness: int = 0) -> Overlap: ...


def overlap(
    model: nn.Module,
    optimizer: Optimizer,
    policy: Policy | None = None,
    *,
    staleness: int = 0,
    state: HookState | None = None,
) -> Overlap:
    """Lets the gradients of `model` travel during its next forward pass. All ranks call it, before training.

    `model` is a DistributedDataParallel with gradient_as_bucket_view=True, or has been given to `fully_shard`. `state`
    is a HookState of the caller instead of `policy`, for DDP: restored, or with a tolerance. The training loop stays as
    it is, and with `staleness` 0 so do its results, bit by bit. `staleness=1` makes each step with the gradients of the
    step before, W(t+1) = W(t) - lr g(W(t-1)): no forward pass waits for the network, but training is another one.

    Code that reads parameters before their steps are made, as a moving average, makes them. Code in C++ that does so
    (a transform of torch.func, an extension) must call `finish()` of the handle first.

    With COMMLAYER_DISABLE the model stays as it is.

    Raises ConfigError for models, optimizers and policies with which results would change.
    """
    check_per_parameter(optimizer)
    check_modules(model)
    check_staleness(staleness, "overlap")
    if state is not None and policy is not None:
        raise ConfigError("overlap(policy=..., state=...): the state has a policy; give one of both")
    if Config.is_disabled():
        return cast(Overlap, plain_overlap(model, optimizer, policy, state))
    if isinstance(model, DistributedDataParallel):
        check_ddp(model)
        state = state or HookState(policy, model.process_group, optimizer=optimizer)
        state.use_group(model.process_group, "overlap")
        state.optimizer = state.optimizer or optimizer
        check_optimizer(state.policy, state.optimizer)
        if staleness:
            check_stateless(state, "overlap")
            state.check_policy = functools.partial(check_stateless, state, "overlap")
        return DdpOverlap(model, optimizer, state, staleness)
    if sharded_modules(model):
        if state is not None:
            raise ConfigError("overlap(state=...): FSDP2 has no place for its residuals; give a policy")
        return FsdpOverlap(model, optimizer, policy, staleness)
    raise ConfigError(
        f"overlap({type(model).__name__}): give a DistributedDataParallel with gradient_as_bucket_view=True, or a "
        f"model after fully_shard"
    )


def check_staleness(staleness: object, who: str) -> None:
    """Raises ConfigError for other values than 0 and 1."""
    if type(staleness) is not int or staleness not in (0, 1):
        raise ConfigError(f"{who}(staleness={staleness!r}): use 0 (exact) or 1")


def check_stateless(state: HookState, who: str, policy: Policy | None = None) -> None:
    """Raises ConfigError if something of one step must be known in the next: with staleness 1 it is in flight then.
    `policy`: to be that of the state."""
    policy = policy or state.policy
    if policy.codec not in STATELESS or policy.loss_bound or state.tolerance is not None:
        given = f"Policy(codec={policy.codec!r}, loss_bound={policy.loss_bound})"
        raise ConfigError(
            f"{who}(staleness=1) with {given if state.tolerance is None else 'a tolerance'}: residuals of a step are "
            f"not known when the next one starts; use staleness=0, or loss_bound=0 and one of {', '.join(STATELESS)}"
        )
