"""DistributedDataParallel models of an unchanged script: the hook, the overlap and the bucket size of `[ddp]`.

`commlayer_autoload` calls this module where a file of settings, or a COMMLAYER_DDP_ variable, may ask for them. The
script's own code has precedence: its arguments, its communication hook, its call of `overlap`. So the hook comes with
the first forward pass that records gradients; by then a script has registered its own, and has made its optimizer.
"""

from __future__ import annotations

import gc
import inspect
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...compress.optimizer import wrapped_by
from ...config import Config, Ddp, Policy, changed, ddp_of_job, policy_of_job
from ...dynamo import untraced
from ...errors import ConfigError
from ..gradients.ddp import allreduce_hook
from ..gradients.hook_state import HookState
from .overlap import overlap

log = logging.getLogger("commlayer")

_installed: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
"""Models whose hook or overlap comes from the settings."""


def arguments(init: Callable[..., None], args: tuple[Any, ...], given: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a DistributedDataParallel, with those that the settings add. `init`: its own __init__,
    which the script gives `args` and `given`."""
    asked = _asked()
    if asked is None:
        return given
    in_order = list(inspect.signature(init).parameters)[1 : 1 + len(args)]
    in_script = {*in_order, *(name for name, value in given.items() if value is not None)}
    added: dict[str, Any] = {}
    if asked.bucket_mb:
        if in_script.isdisjoint(("bucket_cap_mb", "bucket_cap_mb_list")):
            added["bucket_cap_mb"] = asked.bucket_mb
        else:
            log.info("[ddp] bucket_mb = %g: the script gives its own bucket_cap_mb", asked.bucket_mb)
    if asked.overlap and "gradient_as_bucket_view" not in in_script:
        added["gradient_as_bucket_view"] = True  # gradients are views of the buckets, as `overlap` needs them
    return given | added


def prepare(model: DistributedDataParallel) -> None:
    """Lets the first forward pass register the hook that the settings ask for."""
    asked = _asked()
    if asked is not None and (asked.hook or asked.overlap):
        model.register_forward_pre_hook(_begin, prepend=True)


def _asked() -> Ddp | None:
    """The settings, if they have an effect. Raises ConfigError for faulty ones."""
    asked = ddp_of_job()
    return None if asked == Ddp() or Config.is_disabled() else asked


@untraced
def _begin(model: DistributedDataParallel, _: Any) -> None:
    """A forward pass is about to begin; the hook stays until one records gradients."""
    if not torch.is_grad_enabled():
        return
    for number, hook in list(model._forward_pre_hooks.items()):
        if hook is _begin:  # the function decides: a copy of the model has a copy of the hook
            del model._forward_pre_hooks[number]
            model._forward_pre_hooks_with_kwargs.pop(number, None)
    if model._comm_hooks:
        log.info("[ddp]: the script registers a communication hook itself, and keeps it")
        return
    _install(model, ddp_of_job(), policy_of_job())


def _install(model: DistributedDataParallel, asked: Ddp, policy: Policy) -> None:
    optimizers = _optimizers(model)
    if asked.overlap:
        if len(optimizers) != 1:
            kinds = ", ".join(type(made).__name__ for made in optimizers) or "none"
            raise ConfigError(
                f"[ddp] overlap = true: it needs the one optimizer of {type(model.module).__name__}, and before the "
                f"first forward pass the job has {kinds}; make one before training, or set overlap = false"
            )
        try:
            overlap(model, optimizers[0], policy, staleness=asked.staleness)
        except ConfigError as error:
            raise ConfigError(f"[ddp] overlap = true: {error}; or set overlap = false") from None
    else:
        optimizer = optimizers[0] if len(optimizers) == 1 else None
        state = HookState(policy, model.process_group, optimizer=optimizer)
        state.group()  # a collective: made here, where all ranks are
        model.register_comm_hook(state, allreduce_hook)
    _installed.add(model)
    _tell(model, asked, policy)


def is_reached() -> bool:
    """Whether this process has a model that the settings reach: the script gives it no communication hook."""
    models = [item for item in gc.get_objects() if issubclass(type(item), DistributedDataParallel)]
    return any(not model._comm_hooks or model in _installed for model in models)


def _optimizers(model: DistributedDataParallel) -> list[Optimizer]:
    """The job's optimizers with parameters of the model. Of a wrapper, as Accelerate's, and the optimizer in it, only
    the latter, which makes the steps; but both of a ZeroRedundancyOptimizer, whose inner one has other parameters."""
    own = {id(parameter) for parameter in model.parameters()}
    # isinstance is no way: it would ask proxies for their class, and some of them then import modules.
    every: list[Any] = [item for item in gc.get_objects() if issubclass(type(item), Optimizer)]
    found = {id(optimizer): optimizer for optimizer in every if not own.isdisjoint(_parameters(optimizer))}

    def is_wrapper(optimizer: Optimizer) -> bool:
        inner = wrapped_by(optimizer)
        return inner is not None and id(inner) in found and _parameters(inner) == _parameters(optimizer)

    return [optimizer for optimizer in found.values() if not is_wrapper(optimizer)]


def _parameters(optimizer: Optimizer) -> set[int]:
    """The ids of its parameters."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _tell(model: DistributedDataParallel, asked: Ddp, policy: Policy) -> None:
    """The log of the first rank; a warning where training differs."""
    if dist.get_rank(model.process_group):
        return
    differs = policy.codec != "none" or policy.loss_bound > 0 or asked.staleness > 0
    given = ", ".join(f"{name}={value!r}" for name, value in changed(policy, Policy).items())
    log.log(
        logging.WARNING if differs else logging.INFO,
        "%s is averaged by commlayer's %s, as the settings ask: policy %s%s",
        type(model.module).__name__,
        f"overlap(staleness={asked.staleness})" if asked.overlap else "hook",
        given or "defaults",
        "; gradients are not exact; `commlayer config` shows where that is set" if differs else "",
    )
