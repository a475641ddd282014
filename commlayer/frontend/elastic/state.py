"""The state of a training: what a process needs in order to go on as another one would."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...errors import ConfigError


class State:
    """A model (parameters and buffers), its optimizer, and the schedule of the learning rate, if there is one."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any) -> None:
        module: nn.Module = getattr(model, "_orig_mod", model)
        if isinstance(module, DistributedDataParallel):
            module = module.module
        self._module: nn.Module = getattr(module, "_orig_mod", module)
        self._optimizer, self._schedule = optimizer, schedule
        self._before: tuple[Tensor, list[Tensor]] = torch.empty(0), []

    def step(self) -> None:
        """Steps the optimizer and the schedule."""
        self._optimizer.step()
        if self._schedule is not None:
            self._schedule.step()

    # ---- a batch that is made again ----

    def keep(self) -> None:
        """Keeps what a forward pass changes: the CPU's random numbers and the buffers."""
        self._before = torch.get_rng_state(), [each.clone() for each in self._module.buffers()]

    def restore(self) -> None:
        """Back to what `keep` has kept."""
        generator, buffers = self._before
        torch.set_rng_state(generator)
        with torch.no_grad():
            for each, before in zip(self._module.buffers(), buffers, strict=True):
                each.copy_(before)

    # ---- another process ----

    def check(self, who: str) -> None:
        """Raises ConfigError if the settings of the optimizer or the schedule cannot travel to another process."""
        settings = self._optimizer.state_dict()["param_groups"]
        for owner, found in (
            (self._optimizer, settings),
            (self._schedule, None if self._schedule is None else self._schedule.state_dict()),
        ):
            file = io.BytesIO()
            try:
                torch.save(found, file)
                file.seek(0)
                torch.load(file, weights_only=True)
            except Exception as error:
                told = str(error).partition("\n")[0]
                raise ConfigError(
                    f"{who}: the state of {type(owner).__name__} cannot travel to a process that joins ({told}); its "
                    f"state_dict() must hold tensors and Python's own types alone, no numpy values and no functions"
                ) from error

    def pack(self) -> Tensor:
        """All of it, in bytes of torch's format of files."""
        file = io.BytesIO()
        torch.save(
            {
                "tensors": self._tensors(),
                "optimizer": self._optimizer.state_dict(),
                "schedule": None if self._schedule is None else self._schedule.state_dict(),
            },
            file,
        )
        return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)

    def load(self, packed: Tensor) -> None:
        """Takes over the state of another process, whose `settings` are the same."""
        found = torch.load(io.BytesIO(packed.numpy().data), weights_only=True)
        with torch.no_grad():
            for name, each in self._tensors().items():
                each.copy_(found["tensors"][name])
        self._optimizer.load_state_dict(found["optimizer"])
        if self._schedule is not None:
            self._schedule.load_state_dict(found["schedule"])

    def settings(self) -> dict[str, Any]:
        """What must be alike at both ends, by name; as JSON has it."""
        names = {id(each): name for name, each in self._module.named_parameters()}
        return {
            "the model": {
                name: f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}{' (trained)' * each.requires_grad}"
                for name, each in self._tensors().items()
            },
            "the order of the parameters": [name for name, _ in self._module.named_parameters()],
            "the optimizer": {
                type(self._optimizer).__name__: [
                    [names.get(id(each), "another tensor") for each in group["params"]]
                    for group in self._optimizer.param_groups
                ]
            },
            "the schedule": type(self._schedule).__name__ if self._schedule is not None else "none",
        }

    def _tensors(self) -> dict[str, Tensor]:
        return {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
