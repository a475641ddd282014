"""`Exchange`: all-to-alls of rows that autograd follows. `start`: one of them, by the group of this package."""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllToAllOptions, Work
from torch.autograd.function import once_differentiable

from ...config import Config, Policy
from ...errors import ConfigError
from ..group.backend import CommProcessGroup
from ..group.rows import FLOATS

log = logging.getLogger("commlayer")

CODECS = ("none", "f16", "bf16", "int8", "int4")
"""The codecs of rows. The others keep rounding errors for the next step of a gradient, which rows do not have."""

_keys: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()
"""The codec keys of each group's next all-to-alls: equal on all ranks, because all make the same calls."""


class Route(NamedTuple):
    """How the rows of one tensor travel. `sent[r]` rows go to rank r, and `received[r]` come from it."""

    group: dist.ProcessGroup
    sent: Sequence[int]
    received: Sequence[int]
    policy: Policy

    @property
    def back(self) -> Route:
        """The opposite way."""
        return self._replace(sent=self.received, received=self.sent)


def group_of(group: dist.ProcessGroup | None, caller: str) -> dist.ProcessGroup:
    """The group itself (None: WORLD), which must be of this package unless COMMLAYER_DISABLE is set.

    Raises ConfigError for another one.
    """
    found = dist.distributed_c10d._get_default_group() if group is None else group
    if isinstance(found, CommProcessGroup):
        return found
    if Config.is_disabled():
        _warn(caller)
        return found
    raise ConfigError(
        f"rank {dist.get_rank()}: {caller}: the group {getattr(found, 'group_name', found)!r} is not commlayer's; call "
        f"init_process_group('commlayer'), or give a group of dist.new_group(backend='commlayer')"
    )


def hosts_of(group: dist.ProcessGroup) -> tuple[tuple[int, ...], ...]:
    """The ranks of the group by host. Without the engine, each rank is a host."""
    return group.hosts if isinstance(group, CommProcessGroup) else tuple((rank,) for rank in range(group.size()))


def who(group: dist.ProcessGroup) -> str:
    """The beginning of errors."""
    return group.who if isinstance(group, CommProcessGroup) else f"rank {dist.get_rank()}"


def fault_of(policy: Policy, dtype: torch.dtype) -> str:
    """The fault of a policy for rows of this type, with the remedy; empty: it has none."""
    if not isinstance(policy, Policy):
        return f"policy={policy!r}: give a Policy, as Policy(codec='int8')"
    if policy.codec not in CODECS:
        return (
            f"Policy(codec={policy.codec!r}): rows have no next step that could make up for what it leaves out; use "
            f"one of {', '.join(CODECS)}"
        )
    if policy.loss_bound:
        return f"Policy(loss_bound={policy.loss_bound}): no row may be missing; use loss_bound=0"
    if policy.codec != "none" and dtype not in FLOATS:
        return f"{dtype} with codec {policy.codec!r}: codecs are for floating-point rows; use Policy(), without a codec"
    return ""


def start(output: Tensor, rows: Tensor, route: Route, *, async_op: bool = True) -> Work:
    """Starts an all-to-all whose splits fit on all ranks."""
    options: Any = AllToAllOptions()
    options.asyncOp = async_op
    group, received, sent = route.group, list(route.received), list(route.sent)
    if not isinstance(group, CommProcessGroup):
        return group.alltoall_base(output, rows, received, sent, options)
    key = next(_keys.setdefault(group, itertools.count()))
    return group.all_to_all_single(output, rows, received, sent, options, policy=route.policy, key=key)


def exchange(routes: Sequence[Route], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Sends the rows (of dimension 0) of each tensor by its route; returns what arrives. Autograd sends gradients back.

    The tensors travel at the same time. All ranks need the same ones to require gradients.
    """
    found: tuple[Tensor, ...] = Exchange.apply(routes, *tensors)  # type: ignore[no-untyped-call]
    return found


class Exchange(torch.autograd.Function):
    """See `exchange`."""

    @staticmethod
    def forward(ctx: Any, routes: Sequence[Route], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.routes = routes
        outputs = _exchanged(routes, tensors)
        needed = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(
            *(output for output, is_needed in zip(outputs, needed, strict=True) if not is_needed)
        )
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[1:]
        pairs = [
            (route.back, gradient)
            for route, gradient, needs in zip(ctx.routes, gradients, needed, strict=True)
            if needs
        ]
        found = iter(_exchanged([route for route, _ in pairs], [gradient for _, gradient in pairs]))
        return None, *(next(found) if needs else None for needs in needed)


def _exchanged(routes: Sequence[Route], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    outputs, works = [], []
    for route, tensor in zip(routes, tensors, strict=True):
        outputs.append(tensor.new_empty((sum(route.received), *tensor.shape[1:])))
        works.append(start(outputs[-1], tensor.detach().contiguous(), route, async_op=len(tensors) > 1))
    for work in works:
        work.wait()
    return tuple(outputs)


@functools.cache
def _warn(caller: str) -> None:
    log.warning("COMMLAYER_DISABLE=1: %s sends rows as they are, by the backend of the group", caller)
