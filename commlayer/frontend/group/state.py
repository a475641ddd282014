"""The state of a training: what a process needs in order to go on as another one would."""

from __future__ import annotations

import io
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from ...errors import ConfigError
from .packing import Packing, unpack
from .parts import part_of, put_together, take_apart

NAMES = ("params", "param_names")
"""What a group of an optimizer has beside hyperparameters."""

KERNELS = ("foreach", "fused", "capturable")
"""Hyperparameters that suit a device, and not a training."""


class State:
    """A model (parameters and buffers), its optimizer, and the schedule of the learning rate, if there is one."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any) -> None:
        module: nn.Module = getattr(model, "_orig_mod", model)
        if isinstance(module, DistributedDataParallel):
            module = module.module
        self._module: nn.Module = getattr(module, "_orig_mod", module)
        self._optimizer, self._schedule = optimizer, schedule
        self._before: tuple[Tensor, list[Tensor]] = torch.empty(0, dtype=torch.float32, device="cpu"), []

    def step(self) -> None:
        """Steps the optimizer and the schedule."""
        self._optimizer.step()
        if self._schedule is not None:
            self._schedule.step()

    # ---- what shows that two ranks differ ----

    def hyperparameters(self) -> str:
        """Those with which the optimizer steps next, such as its learning rate, by group. Names of parameters are left
        out: DDP changes them."""
        groups = self._optimizer.param_groups
        return str([{name: _plain(value) for name, value in group.items() if name not in NAMES} for group in groups])

    def sums(self) -> str:
        """One sum of the bits of all parameters, and one of the optimizer's state of them. Reads all of it, of tensors
        that are divided over ranks this rank's parts."""
        parameters = [each for group in self._optimizer.param_groups for each in group["params"]]
        parts = [
            value
            for each in parameters
            for _, value in sorted(self._optimizer.state.get(each, {}).items())
            if isinstance(value, Tensor)
        ]
        return f"{sum(map(_sum, self._module.parameters()))} {sum(map(_sum, parts))}"

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

    def pack(self) -> Packing:
        """All of it; of tensors that are divided over ranks, this rank's parts. Call `step` only after `Packing.packed`
        has returned. A forward pass may change the buffers."""
        buffers = {name: each.clone() for name, each in self._module.named_buffers()}
        return Packing(
            {
                "tensors": {name: part_of(each) for name, each in (self._tensors() | buffers).items()},
                "optimizer": take_apart(self._optimizer.state_dict()),
                "schedule": None if self._schedule is None else self._schedule.state_dict(),
            }
        )

    def load(self, packed: Tensor) -> None:
        """Takes over the state of another process, whose `settings` are the same, and that has the same parts."""
        found = unpack(packed)
        with torch.no_grad():
            for name, each in self._tensors().items():
                part_of(each).copy_(found["tensors"][name])
        # A part of the array would keep all of it alive.
        copied = tree_map(lambda each: each.clone() if isinstance(each, Tensor) else each, found["optimizer"])
        parameters = [each for group in self._optimizer.param_groups for each in group["params"]]
        mesh = next((each.device_mesh for each in parameters if hasattr(each, "device_mesh")), None)
        states = put_together(copied, mesh)
        self._optimizer.load_state_dict(states)
        for place, parts in states["state"].items():
            state = self._optimizer.state[parameters[place]] if isinstance(place, int) else {}
            for name, part in parts.items():
                is_cast = isinstance(part, Tensor) and name in state and part.dtype != state[name].dtype
                if is_cast:  # by torch, to the type of the parameter
                    state[name] = part
        if self._schedule is not None:
            self._schedule.load_state_dict(found["schedule"])

    def course(self) -> dict[str, Any]:
        """Hyperparameters and schedule, without the state of the optimizer."""
        groups = self._optimizer.param_groups
        hyper = [{name: value for name, value in each.items() if name not in (*NAMES, *KERNELS)} for each in groups]
        return {"groups": hyper, "schedule": None if self._schedule is None else self._schedule.state_dict()}

    def follow(self, course: Mapping[str, Any], steps: int) -> None:
        """Takes over the `course` of another process, whose `settings` are the same, and goes on by so many steps of
        the schedule. The optimizer's state is empty then."""
        copied = tree_map(lambda each: each.clone() if isinstance(each, Tensor) else each, course)
        self._optimizer.state.clear()
        for ours, theirs in zip(self._optimizer.param_groups, copied["groups"], strict=True):
            ours.update(theirs)
        if self._schedule is not None:
            self._schedule.load_state_dict(copied["schedule"])
            for _ in range(steps):
                self._schedule.step()

    def settings(self) -> dict[str, Any]:
        """What must be alike at both ends, by name; as JSON has it."""
        names = {id(each): name for name, each in self._module.named_parameters()}
        return {
            "the model": {name: _described(each) for name, each in self._tensors().items()},
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


def _described(tensor: Tensor) -> str:
    placements = getattr(tensor, "placements", None)
    divided = "" if placements is None else f", divided by {', '.join(map(repr, placements))}"
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind}{list(tensor.shape)}{' (trained)' * tensor.requires_grad}{divided}"


def checksum(text: str) -> int:
    """A number above 0 that a float32 holds."""
    return 1 + zlib.crc32(text.encode()) % (1 << 16)


def _plain(value: Any) -> Any:
    """`value` as all ranks print it."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if isinstance(value, (int, float, str, type(None))) else type(value).__name__


def _sum(tensor: Tensor) -> int:
    """The sum of its bits, eight bytes at a time, which is as fast as memory; a CRC takes fifteen times as long."""
    flat = part_of(tensor).detach().contiguous().view(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    words = flat[:whole]
    if words.storage_offset() % 8:
        words = words.clone()
    return int(words.view(torch.int64).sum()) + int(flat[whole:].sum())
