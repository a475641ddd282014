"""`Held`: one version of a state; `Pool`: the blocks of memory in which versions lie."""

from __future__ import annotations

import dataclasses
import threading

import torch
from torch import Tensor

from .content import Whole
from .layout import Layout


@dataclasses.dataclass(frozen=True, eq=False)
class Held:
    """A version of a state, all of it. Nothing changes its memory while it is held."""

    version: int
    digest: str
    whole: Whole
    layout: Layout
    """The layout of this version: a publisher that begins anew may have another one."""

    @property
    def memory(self) -> Tensor:
        """The values."""
        return self.whole.memory


class Pool:
    """Blocks of one size, used again: fresh memory costs more than the copy into it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._guard = threading.Lock()
        self._back: list[Tensor] = []

    def take(self) -> Tensor:
        """A block whose content does not matter."""
        with self._guard:
            if self._back:
                return self._back.pop()
        return torch.empty(self._size, dtype=torch.uint8, device="cpu")

    def give(self, memory: Tensor) -> None:
        """Takes a block back that nobody uses any more."""
        with self._guard:
            self._back.append(memory)
