"""`Kept`: outcomes in their order, up to a number of bytes."""

from __future__ import annotations

import pytest
import torch

from commlayer.frontend.local import kept
from commlayer.frontend.local.kept import Ended, Kept
from commlayer.frontend.local.sync import Outcome


def ended_of(turn: int) -> Ended:
    return Ended(turn, Outcome([], torch.zeros(4), False, torch.zeros(0)))


def test_order_and_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "KEPT_BYTES", 40)
    monkeypatch.setattr(kept, "KEPT_LEAST", 3)
    found = Kept()
    for turn in range(3):
        assert not found.is_full
        found.add(ended_of(turn))
    assert found.is_full
    assert (found.first.turn, found.take().turn, len(found), found.is_full) == (0, 0, 2, False)
    monkeypatch.setattr(kept, "KEPT_BYTES", 16)
    assert not found.is_full  # so many are kept, whatever their size
