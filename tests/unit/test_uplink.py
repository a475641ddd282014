"""How long links were full, from readings of the engine's paths."""

from __future__ import annotations

from typing import Any

from commlayer.transport.uplink import Uplinks

SECOND_BYTES = 1_000_000


def path(carried_bytes: int, port: int = 20001, capacity_bytes: int = SECOND_BYTES) -> dict[str, Any]:
    ends = {"interface": f"eth{port - 20001}", "address": "10.0.0.1", "port": port}
    return {**ends, "carried_bytes": carried_bytes, "capacity_bytes": capacity_bytes}


def test_time_counts_while_the_link_is_nearly_full() -> None:
    links = Uplinks()
    for now_s, carried_bytes in ((10.0, 5_000_000), (10.5, 5_450_000), (11.0, 5_500_000), (12.0, 6_400_000)):
        links.read([path(carried_bytes), path(carried_bytes)], now_s)  # two peers
    link = links.fullest()
    assert link is not None
    assert (link.interface, link.full_s, link.full_bytes) == ("eth0", 1.5, 1_350_000)
    assert link.rate_bytes == 900_000


def test_the_fullest_link_is_told() -> None:
    links = Uplinks()
    assert links.fullest() is None
    for now_s, sent in ((0.0, 0), (1.0, 700_000), (2.0, 1_400_000)):
        links.read([path(sent // 2), path(sent, 20002)], now_s)
    link = links.fullest()
    assert link is not None
    assert (link.interface, link.full_s) == ("eth1", 2.0)


def test_a_link_without_a_measured_capacity_is_not_full() -> None:
    links = Uplinks()
    for now_s in (0.0, 1.0, 1.0):
        links.read([path(int(now_s) * 500_000, capacity_bytes=0)], now_s)
    link = links.fullest()
    assert link is not None
    assert (link.full_s, link.rate_bytes) == (0.0, 0.0)
