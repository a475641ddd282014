"""Parts of a batch that take turns in one thread: each runs until it has started communication, then the next one runs.

Parts are greenlets and not threads, because autograd numbers the operations of a thread: so the backward pass runs them
in one order, which is the same on all ranks.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ...errors import ConfigError

_current: ContextVar[Part | None] = ContextVar("commlayer.tp.part", default=None)

REMEDY = "let it hold around the whole call, or none of the parallel layers"


class Part:
    """One part of the batch, in one call. The parts form a ring by `following`."""

    def __init__(self) -> None:
        self.following = self
        """The part whose turn comes after this one's."""
        self.entered_at: int | None = None
        """Autograd's number at this part's first column layer since its turn began, or in an earlier turn."""
        self.entry: tuple[Tensor, int, Tensor] | None = None
        """The last input of a column layer, its version, and the tensor that stands for it (layers.py)."""
        self._is_turn_new = True
        self._modes: dict[str, Any] = {}
        self._yield: Callable[[], Any] | None = None

    def begin(self, give_up: Callable[[], Any]) -> None:
        """The part starts to run; `give_up` lets the others run."""
        self._yield = give_up
        self._modes = _modes()

    def end(self) -> None:
        """The part has run: `pass_turn` does nothing from now on."""
        self._yield = None

    def enter(self) -> None:
        """A column layer starts."""
        if self._is_turn_new:
            self.entered_at = torch.autograd._get_sequence_nr()
            self._is_turn_new = False

    def next_entered_at(self) -> int:
        """Autograd's number at which the next part in turn last entered a column layer. This part must have entered."""
        part = self.following
        while part.entered_at is None:
            part = part.following
        return part.entered_at

    def pass_turn(self, where: str) -> None:
        """Lets the other parts run, each until it passes its turn.

        Raises ConfigError if a mode of torch that began in this part would hold in the others, too.
        """
        if self._yield is None:
            return
        now = _modes()
        changed = [name for name, value in now.items() if value != self._modes[name]]
        if changed:
            raise ConfigError(f"tp.overlap: {changed[0]} began within the layers, and spans {where}: {REMEDY}")
        self._yield()
        self._is_turn_new = True


def current_part() -> Part | None:
    """The part that runs; None: no batch is split here."""
    return _current.get()


def take_turns(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Runs the functions as parts that take turns; returns their results. The first exception ends all of them."""
    from greenlet import getcurrent, greenlet

    parts = [Part() for _ in functions]
    for part, following in zip(parts, [*parts[1:], parts[0]], strict=True):
        part.following = following
    results: list[Any] = [None] * len(parts)
    runs = []
    for i, (part, function) in enumerate(zip(parts, functions, strict=True)):
        run = greenlet(function)
        run.gr_context = contextvars.copy_context()  # a greenlet begins with an empty one
        run.gr_context.run(_current.set, part)
        part.begin(getcurrent().switch)
        runs.append((i, run))
    waiting = deque(runs)
    try:
        while waiting:
            i, run = waiting.popleft()
            returned = run.switch()
            if run.dead:
                results[i] = returned
            else:
                waiting.append((i, run))
    finally:
        for part, (_, run) in zip(parts, runs, strict=True):
            part.end()
            if run:  # suspended, because another one failed
                with contextlib.suppress(Exception):
                    run.throw()
            part.entry = None
    return results


def _modes() -> dict[str, Any]:
    """Modes of this thread: a part that leaves one on would change the other parts."""
    saved = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return {
        "torch.utils.checkpoint (or another context of saved_tensors_hooks)": saved,
        "torch.no_grad (or enable_grad, or a checkpoint with use_reentrant=True)": torch.is_grad_enabled(),
        "torch.inference_mode": torch.is_inference_mode_enabled(),
        "torch.autocast": [
            (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
        ],
        "a TorchFunctionMode": torch._C._len_torch_function_stack(),
        "a TorchDispatchMode": torch._C._len_torch_dispatch_stack(),
    }
