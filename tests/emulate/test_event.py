from __future__ import annotations

from commlayer.emulate.event import Event


def test_an_event_in_words() -> None:
    assert str(Event(1, "link_down", host=2, nic=1)) == "link_down at host 2, NIC 1"
    assert str(Event(1, "rate", host=0, rate_bps=5e7)) == "rate 50 Mbit/s at host 0, all NICs"
    assert str(Event(1, "loss", host=0, loss=0.031)) == "loss 3.10% at host 0, all NICs"
