"""`HandOver`: activations and gradients of slices between the stages of a schedule, as messages of any length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import ConfigError, MismatchError

URGENT = 0
"""The class of messages between stages: computation waits for them."""

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""The types of activations, by their number in an announcement."""

DIMENSIONS_MAX = 8

Direction = Literal["F", "B"]
"""F: an output, to the next stage. B: the gradient of an input, to the stage before."""


class Form(NamedTuple):
    """The outputs of a stage: their type, and their shape without the dimension of tokens (1)."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @staticmethod
    def of(output: Tensor) -> Form:
        """The form of one output."""
        return Form(output.dtype, (*output.shape[:1], *output.shape[2:]))

    def empty(self, tokens: int, device: torch.device) -> Tensor:
        """Memory for a slice of so many tokens."""
        return torch.empty(self.shape[0], tokens, *self.shape[1:], dtype=self.dtype, device=device)


class HandOver:
    """The messages of the stages of one rank. `units`: slices of all micro-batches in one step of the schedule.

    Each message has a tag of its own, because stages of two ranks may send in another order than they receive.
    Neighbouring stages of one rank hand tensors over without a message.
    """

    def __init__(self, stages: Sequence[Any], units: int) -> None:
        self._units = units
        self._group = stages[0].group
        self._rank = stages[0].group_rank
        self._ranks = dict(stages[0].stage_index_to_group_rank)
        self._device = torch.device(stages[0].device)
        self._here: dict[tuple[Direction, int, int], Tensor] = {}
        self._awaited: dict[tuple[Direction, int, int], tuple[Any, Tensor]] = {}
        self._sent: list[tuple[Any, Tensor]] = []

    def announce(self, stage: int, form: Form | None) -> None:
        """Tells `stage` the form of its inputs in this step. None: this step is refused."""
        if not self.is_remote(stage):
            return
        fields = [0] * (3 + DIMENSIONS_MAX)
        if form is not None:
            fields[:3] = 1, TYPES.index(form.dtype), len(form.shape)
            fields[3 : 3 + len(form.shape)] = form.shape
        self._send(torch.tensor(fields, device=self._device, dtype=torch.int64), stage, self._announcement(stage))

    def hear(self, stage: int) -> Form:
        """The form of the inputs of `stage`, whose stage before is on another rank.

        Raises MismatchError if an earlier stage refuses the step, after the later ones have been told.
        """
        fields = torch.empty(3 + DIMENSIONS_MAX, dtype=torch.int64, device=self._device)
        self._received(fields, stage - 1, self._announcement(stage)).wait()
        is_sound, number, dimensions, *shape = fields.tolist()
        if not is_sound:
            self.refuse(stage)
            raise MismatchError(
                f"rank {dist.get_rank()}: pipeline.slices: an earlier stage than {stage} has refused this step; see "
                f"the error of its rank"
            )
        return Form(TYPES[number], tuple(shape[:dimensions]))

    def refuse(self, stage: int) -> None:
        """Tells the stages after `stage` that this step is refused."""
        if stage + 1 in self._ranks:
            self.announce(stage + 1, None)
        self.end()

    def is_remote(self, stage: int) -> bool:
        """Whether a stage is on another rank."""
        return bool(self._ranks[stage] != self._rank)

    def send(self, direction: Direction, stage: int, unit: int, tensor: Tensor) -> None:
        """Sends to `stage`, which takes it when it gets to that unit."""
        if self.is_remote(stage):
            self._send(tensor.detach().contiguous(), stage, self._tag(direction, stage, unit))
        else:
            self._here[direction, stage, unit] = tensor.detach()

    def expect(self, direction: Direction, stage: int, unit: int, source: int, memory: Tensor) -> None:
        """Begins to receive what `stage` will take, from the stage `source`."""
        if self.is_remote(source):
            tag = self._tag(direction, stage, unit)
            self._awaited[direction, stage, unit] = self._received(memory, source, tag), memory

    def is_expected(self, direction: Direction, stage: int, unit: int) -> bool:
        """Whether `expect` was called for it, or it is here."""
        return (direction, stage, unit) in self._awaited or (direction, stage, unit) in self._here

    def take(self, direction: Direction, stage: int, unit: int) -> Tensor:
        """What was sent to `stage` for that unit, once it is here."""
        if (direction, stage, unit) in self._here:
            return self._here.pop((direction, stage, unit))
        work, memory = self._awaited.pop((direction, stage, unit))
        work.wait()
        return memory

    def end(self) -> None:
        """Waits until everything that was sent has left."""
        while self._sent:
            work, _ = self._sent.pop()
            work.wait()

    def _send(self, tensor: Tensor, stage: int, tag: int) -> None:
        work = dist.isend(tensor, group=self._group, group_dst=self._ranks[stage], tag=tag)
        self._sent.append((work, tensor))

    def _received(self, memory: Tensor, stage: int, tag: int) -> Any:
        return dist.irecv(memory, group=self._group, group_src=self._ranks[stage], tag=tag)

    def _tag(self, direction: Direction, stage: int, unit: int) -> int:
        return 1 + 2 * (stage * self._units + unit) + (direction == "B")

    def _announcement(self, stage: int) -> int:
        return 1 + 2 * len(self._ranks) * self._units + stage


def check_form(output: Tensor, who: str) -> None:
    """Raises ConfigError for an output that no announcement describes."""
    if output.dtype not in TYPES or output.dim() > DIMENSIONS_MAX:
        raise ConfigError(
            f"{who}: an output of {output.dtype} {list(output.shape)} for the next stage; return float32, float64, "
            f"bfloat16 or float16 in at most {DIMENSIONS_MAX} dimensions"
        )
