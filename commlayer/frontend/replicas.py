"""`Replicas`: how far the ranks' copies of a model have drifted apart, and an end to that.

    replicas = commlayer.Replicas(model, optimizer, every_steps=200, limit=1e-3)  # and the loop stays as it is

For `Policy(consistency="relaxed")`, where a result that was lost leaves a rank with its own gradient. With a share p of
results lost, a step of size lr and gradients whose variance over the ranks is s^2, a copy's distance from the mean
grows by about lr^2 p s^2 per element and step, without end: the difference is in the parameters, and no later
gradient takes it back. (Where parameters are sent and not gradients, what is lost now is replaced later, and the drift
has a limit of 2 p / (1 + p) s^2: Weintraub et al., "Training under packet loss", arXiv 2507.07114.) So they are set
equal again from time to time. With strict consistency the drift is 0.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import AllreduceOptions
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..config import Policy, number, whole
from ..errors import ConfigError
from .ddp import group_of

log = logging.getLogger("commlayer")

SAMPLES = 128
"""Elements of each parameter that a measurement compares."""


class Replicas:
    """Compares the trained parameters of all ranks now and then, and averages them when it is time.

    Every rank makes one, at the same place of its program, and calls `step` after each of its optimizer's steps; with
    `optimizer` that happens by itself, and `step` refuses to count them twice. (Not with a GradScaler: that leaves out
    a step where it finds an infinity, which with relaxed consistency may be on one rank alone. There, make it without
    the optimizer and call `step` in the loop.)

    Each `check_steps` steps the drift is estimated from a sample, the same elements on all ranks. The parameters are
    averaged, reliably, each `every_steps` steps (None: never for that reason), and when the drift is more than `limit`
    (None: likewise). With `optimizer` its state is averaged, too (momentum and the like): else it would pull the copies
    apart again. Buffers are DDP's: it broadcasts them.

    `process_group` is that of the model, None meaning WORLD; its reliable twin is used. Raises ConfigError for numbers
    out of range and arguments of another type.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        every_steps: int | None = 1000,
        limit: float | None = None,
        check_steps: int = 10,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(f"Replicas(model={model!r}): give the model, an nn.Module")
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise ConfigError(f"Replicas(optimizer={optimizer!r}): give the model's torch.optim.Optimizer, or None")
        for name, count in (("every_steps", every_steps), ("check_steps", check_steps)):
            if whole(count, 0) <= 0 and (name, count) != ("every_steps", None):
                raise ConfigError(f"Replicas({name}={count!r}): use a number of steps, at least 1")
        if limit is not None and not 0 < number(limit) < math.inf:
            raise ConfigError(f"Replicas(limit={limit!r}): use a relative drift above 0, as 1e-3, or None")
        self.steps = 0
        self.drift = math.nan
        """As last estimated, before averaging if that followed: the root mean square distance of the ranks' parameters
        from their mean, relative to the mean's norm; the same number on all ranks. NaN: not yet."""
        self.drift_of: dict[str, float] = {}
        """The same of each parameter."""
        self.averaged = 0
        """How often the parameters were set equal."""
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
        self._optimizer = optimizer
        self._every_steps, self._limit, self._check_steps = every_steps, limit, check_steps
        self._group = group_of(Policy(), process_group, "commlayer.Replicas")
        self._hook = None if optimizer is None else optimizer.register_step_post_hook(lambda *_: self._step())

    def step(self) -> None:
        """After an optimizer's step. Every rank calls it equally often.

        Raises ConfigError where the optimizer's steps count by themselves: this one would count twice.
        """
        if self._hook is not None:
            raise ConfigError(
                f"rank {self._group.rank()}: Replicas.step(): the optimizer's steps count by themselves: leave the "
                f"call out, or make Replicas without the optimizer"
            )
        self._step()

    def _step(self) -> None:
        self.steps += 1
        due = self._every_steps is not None and self.steps % self._every_steps == 0
        if not due and self.steps % self._check_steps != 0:
            return
        self.measure()
        if due or (self._limit is not None and self.drift > self._limit):
            log.info("step %d: replicas have drifted %.3g apart; averaging them", self.steps, self.drift)
            self.average()

    def close(self) -> None:
        """Leaves the optimizer alone from now on; `step` may be called then."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    @torch.no_grad()
    def measure(self) -> float:
        """Estimates `drift` and `drift_of`; returns the former. Every rank must call."""
        chosen = torch.Generator().manual_seed(self.steps)
        names, weights, samples = [], [], []
        for name, parameter in self._parameters():
            count = min(SAMPLES, parameter.numel())
            at = torch.randint(parameter.numel(), (count,), generator=chosen)
            names.append(name)
            weights.append(parameter.numel() / count)
            samples.append(parameter.reshape(-1)[at.to(parameter.device)].cpu().double())
        if not names:
            self.drift, self.drift_of = 0.0, {}
            return self.drift
        sizes = [len(each) for each in samples]
        mine = torch.cat(samples)
        mean = self._reduced(mine.clone(), dist.ReduceOp.AVG)  # exactly `mine` where all are equal: of 24 bits or less
        squares = torch.stack([each.square().sum() for each in (mine - mean).split(sizes)])
        squares = self._reduced(squares, dist.ReduceOp.AVG)
        norms = torch.stack([each.square().sum() for each in mean.split(sizes)])
        self.drift_of = dict(zip(names, _ratios(squares, norms).tolist(), strict=True))
        weight = torch.tensor(weights, dtype=torch.float64)
        self.drift = float(_ratios(weight @ squares, weight @ norms))
        return self.drift

    @torch.no_grad()
    def average(self) -> None:
        """Sets the parameters, and the optimizer's state, of all ranks to their mean. Every rank must call."""
        started = []
        for tensor in self._tensors():
            # Sums of 16-bit numbers are rounded at every addition.
            wide = tensor.float() if tensor.element_size() < 4 else tensor.contiguous()
            started.append((tensor, wide, self._group.allreduce([wide], _options(dist.ReduceOp.AVG))))
        for tensor, wide, work in started:
            work.wait()
            if wide is not tensor:
                tensor.copy_(wide)
        self.averaged += 1

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and parameter.is_floating_point() and parameter.numel():
                yield name, parameter.detach()

    def _tensors(self) -> Iterator[Tensor]:
        for _, parameter in self._parameters():
            yield parameter
        for group in () if self._optimizer is None else self._optimizer.param_groups:
            for parameter in group["params"]:
                state = self._optimizer.state.get(parameter, {}) if self._optimizer else {}
                for name in sorted(state):
                    value = state[name]
                    if name != "step" and isinstance(value, Tensor) and value.is_floating_point() and value.numel():
                        yield value

    def _reduced(self, values: Tensor, op: Any) -> Tensor:
        self._group.allreduce([values], _options(op)).wait()
        return values


def _options(op: Any) -> AllreduceOptions:
    options = AllreduceOptions()
    options.reduceOp = dist.ReduceOp(op)
    return options


def _ratios(squares: Tensor, norms: Tensor) -> Tensor:
    """Roots of quotients; 0 / 0 is 0."""
    return torch.where(squares == 0, 0.0, (squares / norms).sqrt())
