"""Shares by speed: the hosts with slower links own less of an all-reduce.

Of an all-reduce of S bytes between n hosts, host i with the share w[i] of the result receives (n-1) w[i] S bytes of
contributions and (1 - w[i]) S of results, and sends as many: S (1 + (n-2) w[i]). With equal shares every port carries
2 (n-1)/n S, and the slowest decides. The time is the least possible, for links of rate r[i], if each host that owns
anything takes the same time T:

    w[i] = max(0, (T r[i] / S - 1) / (n-2))        with T such that the shares add up to 1

A host of share 0 still receives S. Between two hosts every port carries S with any shares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

LEVEL = 1.15
"""Up to this ratio of the fastest link to the slowest, shares are equal: measured rates differ by as much."""

WORTH = 0.95
"""Other shares must shorten the time by this factor, or the present ones stay."""

UNITS = 128
"""The largest weight: there are few different weights, and few plans."""

SLOWEST = 1 / 256
"""A link counts as at least this share of the fastest."""

BELIEVED_BYTES = 1e13
"""Per second: nothing is faster."""

REACHED = 0.85
"""A port that receives this share of all that the others could send to it is not what limits them."""

SENT_ERROR = 1.25
"""The rate of sending is overrated by up to this factor: acknowledgements come late, and then together."""


class Rates(NamedTuple):
    """The rates of a host's links in bytes per second, as measured under load. Anything but a positive number of a
    believable size: unknown."""

    sent: float
    received: float


def weights_for(rates: Sequence[Rates], present: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The weights of the hosts (`Settings.weights`) for these rates; () are equal shares.

    The `present` weights stay while a rate is unknown, and unless others are clearly faster. A pure function: all ranks
    that have the same rates get the same weights.
    """
    if len(rates) < 3:
        return ()
    if not all(map(_is_known, rates)):
        return present
    links = _links(rates)
    if max(links) <= LEVEL * min(links):
        return ()
    links = [max(link, SLOWEST * max(links)) for link in links]
    shares = _shares(links)
    largest = max(shares)
    weights = tuple(round(UNITS * share / largest) for share in shares)
    return weights if time_of(weights, links) < WORTH * time_of(present, links) else present


def time_of(weights: Sequence[int], links: Sequence[float]) -> float:
    """The time of an all-reduce over these links, for each byte. (): equal shares."""
    weights = weights or [1] * len(links)
    total = sum(weights)
    return max((1 + (len(links) - 2) * weight / total) / link for weight, link in zip(weights, links, strict=True))


def _is_known(rates: Rates) -> bool:
    return all(math.isfinite(rate) and 0 < rate <= BELIEVED_BYTES for rate in rates)


def _links(rates: Sequence[Rates]) -> list[float]:
    """The rate of each host's link: the slower direction. What came in is no limit of the port if the others could not
    send more."""
    sent = sum(each.sent for each in rates)
    links = []
    for each in rates:
        link = min(each)
        if each.received >= REACHED * (sent - each.sent) / (len(rates) - 1):
            link = max(link, each.sent / SENT_ERROR)
        links.append(link)
    return links


def _shares(links: Sequence[float]) -> list[float]:
    """The shares with which all hosts that own anything take the same time; their sum is 1."""
    owners = sorted(links, reverse=True)
    # With k owners: sum of (T r - 1) = n - 2 over the fastest k. The slowest of them must own something.
    while True:
        time = (len(links) - 2 + len(owners)) / sum(owners)
        if time * owners[-1] >= 1 or len(owners) == 1:
            return [max(time * link - 1, 0) / (len(links) - 2) for link in links]
        owners.pop()
