from typing import Any

import pytest

from commlayer.errors import ConfigError
from commlayer.tools.emulate.event import Event


def test_an_event_in_words() -> None:
    assert str(Event(1, "link_down", host=2, nic=1)) == "link_down at host 2, NIC 1"
    assert str(Event(1, "rate", host=0, rate_bps=5e7)) == "rate 50 Mbit/s at host 0, all NICs"
    assert str(Event(1, "loss", host=0, loss=0.031)) == "loss 3.10% at host 0, all NICs"


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        ("at_s", {"at_s": float("inf"), "action": "link_down"}),
        ("at_s", {"at_s": float("nan"), "action": "link_down"}),
        ("at_s", {"at_s": 1e9, "action": "link_down"}),
        ("at_s", {"at_s": -1.0, "action": "link_down"}),
        ("loss_burst_packets", {"action": "loss", "loss": 0.1, "loss_burst_packets": 0.0}),
        ("loss_burst_packets", {"action": "loss", "loss": 0.1, "loss_burst_packets": 10_001.0}),
        ("loss_burst_packets", {"action": "link_down", "loss_burst_packets": 8.0}),
        ("loss", {"action": "loss", "loss": 1.1}),
        ("rate_bps", {"action": "rate", "rate_bps": float("inf")}),
        ("rate_bps", {"action": "rate", "rate_bps": 1e30}),
        ("rate_bps", {"action": "rate", "rate_bps": 1.0}),
    ],
)
def test_values_out_of_range_are_refused(key: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{key} = "):
        Event(**{"at_s": 1.0, "host": 0, **fields})
