"""A process that joins applies the outcomes that are not in the state that it gets, each once, in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from commlayer.frontend.group import kept
from commlayer.frontend.group.joining import Joining


class Receiving:
    """A state of four syncs, which comes with the third piece."""

    def __init__(self) -> None:
        self.pieces = 0

    def pump(self, *, waits: bool = False) -> torch.Tensor | None:  # noqa: ARG002
        self.pieces += 1
        return torch.zeros(1) if self.pieces == 3 else None


class Transfers:
    receiving: Receiving | None = None

    def listen(self) -> None:
        """Nothing is on its way."""


def test_outcomes_of_the_state_are_dropped_and_the_others_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "KEPT_BYTES", 40)
    monkeypatch.setattr(kept, "KEPT_LEAST", 3)
    applied: list[int] = []
    transfers: Any = Transfers()
    site = Joining[int](transfers, lambda _: None, lambda turn: turn >= 4, applied.append, lambda _: 16)
    assert not site.catch_up(waits=True)  # nobody sends
    site.keep(1)
    transfers.receiving = Receiving()
    site.begin()  # what came before the sender knew of this site is in its state
    for turn in (2, 3):
        site.keep(turn)
    assert not site.is_full
    for turn in (4, 5):
        site.keep(turn)
    assert site.is_full
    assert site.catch_up(waits=True)
    assert not site.catch_up()
    assert site.catch_up()
    assert (site.is_loaded, site.is_done, site.is_full, applied) == (True, False, False, [])
    assert site.catch_up()
    site.keep(6)
    while site.catch_up():
        pass
    assert (site.is_done, applied) == (True, [4, 5, 6])
