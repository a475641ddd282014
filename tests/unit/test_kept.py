"""`Kept`: outcomes in their order, up to a number of bytes."""

from __future__ import annotations

import pytest

from commlayer.frontend.group import kept
from commlayer.frontend.group.kept import Kept


def test_order_and_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "KEPT_BYTES", 40)
    monkeypatch.setattr(kept, "KEPT_LEAST", 3)
    found = Kept[int](lambda _: 16)
    for outcome in range(3):
        assert not found.is_full
        found.add(outcome)
    assert found.is_full
    assert (found.first, found.take(), len(found), found.is_full) == (0, 0, 2, False)
    monkeypatch.setattr(kept, "KEPT_BYTES", 16)
    assert not found.is_full  # so many are kept, whatever their size
    found.add(3)
    assert found.is_full
    found.clear()
    assert (len(found), found.is_full) == (0, False)
