"""Loss and bleaching behind the link, by nft rules of the host: a lost packet has already used the link.

The rules treat IP packets of every protocol alike, so that no transport is favoured.
"""

from __future__ import annotations

from collections.abc import Mapping

from .link import Link

BURST_MS = 20
"""Longest burst. Steady traffic ends bursts earlier: 8 full packets take 1 ms at 100 Mbit/s."""

_UNIT = 1_000_000_000


def ruleset(links: Mapping[str, Link]) -> str:
    """The nft table of a host, which replaces the present one; `links` by interface name.

    Bursts follow the two-state model of Gilbert (1960), moved on by packets, not by time. The state is in the kernel:
    the set `bad` holds the interfaces in the bad state, which loses all packets. Each packet ends it with probability
    1/B, so that B packets are lost in a row on average. In the good state each packet ends it with probability g, where
    the mean loss p = B / (B + 1/g). A burst also ends after BURST_MS: otherwise it would last for seconds if the sender
    sends little after a loss.
    """
    rules = []
    for interface, link in links.items():
        arriving = f'iifname "{interface}"'
        rules += [f"{arriving} ip dscp set 0"] * link.bleach_dscp + [f"{arriving} ip ecn set 0"] * link.bleach_ecn
        if link.loss == 0:
            continue
        if link.loss == 1 or link.loss_burst_packets == 1:
            rules.append(f"{arriving} {_chance(link.loss)} drop")
            continue
        burst, enter = link.loss_burst_packets, link.loss / (link.loss_burst_packets * (1 - link.loss))
        rules.append(f"{arriving} iifname @bad {_chance(1 / burst)} delete @bad {{ iifname }} accept")
        rules.append(f"{arriving} iifname @bad drop")
        rules.append(f"{arriving} {_chance(min(enter, 1.0))} add @bad {{ iifname timeout {BURST_MS}ms }} drop")
    return "\n".join(
        [
            "table inet emulate",  # so that the next line finds a table
            "delete table inet emulate",
            "table inet emulate {",
            "set bad { type ifname; size 64; flags dynamic,timeout; }",
            "chain input {",
            "type filter hook input priority -10; policy accept;",  # before the delay, which need not hold lost packets
            *rules,
            "}",
            "}",
            "",
        ]
    )


def _chance(share: float) -> str:
    return f"numgen random mod {_UNIT} < {round(share * _UNIT)}" if share < 1 else ""
