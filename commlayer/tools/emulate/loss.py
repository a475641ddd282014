"""Loss behind the link, as nft rules of the host: a lost packet has used its share of the rate.

The rules see IP packets of every protocol alike: they must not know which transport is under test.
"""

from __future__ import annotations

from collections.abc import Mapping

from .link import Link

BURST_MS = 20
"""Bursts end by time, too. 8 full packets take 1 ms at 100 Mbit/s: what is sent steadily hardly notices."""

_UNIT = 1_000_000_000


def ruleset(links: Mapping[str, Link]) -> str:
    """The whole nft table of a host, replacing the one that is there; `links` by interface name.

    Bursts follow the two-state model of Gilbert (1960), moved on by packets, not by time. The state is in the kernel:
    an interface is in the set `bad` while it is in the bad state, which loses everything and is left with probability
    1/B per packet, so that B packets are lost in a row on average. The good state is left with probability g, where the
    mean loss p = B / (B + 1/g). A burst also ends when it has lasted BURST_MS: a sender that sends little after a loss
    would meet it for seconds otherwise, with packets that would have come long after it.
    """
    rules = []
    for interface, link in links.items():
        if link.loss == 0:
            continue
        arriving = f'iifname "{interface}"'
        if link.loss == 1 or link.loss_burst_packets == 1:
            rules.append(f"{arriving} {_chance(link.loss)} drop")
            continue
        burst, enter = link.loss_burst_packets, link.loss / (link.loss_burst_packets * (1 - link.loss))
        rules.append(f"{arriving} iifname @bad {_chance(1 / burst)} delete @bad {{ iifname }} accept")
        rules.append(f"{arriving} iifname @bad drop")
        rules.append(f"{arriving} {_chance(min(enter, 1.0))} add @bad {{ iifname timeout {BURST_MS}ms }} drop")
    return "\n".join(
        [
            "table inet emulate",  # so that there is one to delete
            "delete table inet emulate",
            "table inet emulate {",
            "set bad { type ifname; size 64; flags dynamic,timeout; }",
            "chain input {",
            "type filter hook input priority -10; policy accept;",  # before the delay, so that the lost are not kept
            *rules,
            "}",
            "}",
            "",
        ]
    )


def _chance(share: float) -> str:
    return f"numgen random mod {_UNIT} < {round(share * _UNIT)}" if share < 1 else ""
