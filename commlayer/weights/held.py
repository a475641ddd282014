"""`Held`: one version of a state; `Pool`: the blocks of memory in which versions lie."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass
class Held:
    """A version of a state, all of it. Nothing changes its memory while it is held."""

    version: int
    digest: str
    memory: Tensor
    sends: list[Any] = dataclasses.field(default_factory=list)
    """zmq's trackers of messages that may still use the memory."""


class Pool:
    """Blocks of one size, used again: fresh memory costs more than the copy into it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._guard = threading.Lock()
        self._back: list[tuple[Tensor, list[Any]]] = []

    def take(self) -> Tensor:
        """A block whose content does not matter."""
        with self._guard:
            for number, (memory, sends) in enumerate(self._back):
                if all(each.done for each in sends):
                    del self._back[number]
                    return memory
        return torch.empty(self._size, dtype=torch.uint8)

    def give(self, memory: Tensor, sends: list[Any] | None = None) -> None:
        """Takes a block back, once the sends that use it have ended."""
        with self._guard:
            self._back.append((memory, sends or []))
