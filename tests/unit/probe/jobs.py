"""Hosts as the ranks know them."""

from typing import Any

from commlayer.tools.probe.meeting import Host

FACTS: dict[str, Any] = {
    "governor": None,
    "receive_buffer_bytes": 8 << 20,
    "send_buffer_bytes": 8 << 20,
}


def hosts(count: int, nics: int = 1, speed_mbit_s: int | None = None) -> list[Host]:
    """Hosts with interfaces in the networks 10.87.0.0/24, 10.87.1.0/24, ..."""
    facts = {"driver": "veth", "speed_mbit_s": speed_mbit_s, "mtu": 1500}
    names = [f"eth{nic}" for nic in range(nics)]
    return [
        Host(
            f"host{number}",
            number,
            1,
            [
                {"ifname": name, "address": f"10.87.{nic}.{number + 1}", "prefix": 24, "mtu": 1500, "port": 4000}
                for nic, name in enumerate(names)
            ],
            {**FACTS, "nics": {name: dict(facts) for name in names}},
            2e9,
        )
        for number in range(count)
    ]
