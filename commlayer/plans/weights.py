"""Shares by speed: the hosts with slower links own less of an all-reduce.

Of an all-reduce of S bytes between n hosts, host i with the share w[i] of the result receives (n-1) w[i] S bytes of
contributions and (1 - w[i]) S of results, and sends as many: S (1 + (n-2) w[i]). With equal shares every port carries
2 (n-1)/n S, and the slowest decides. The time is the least possible, for links of rate r[i], if each host that owns
anything takes the same time T:

    w[i] = max(0, (T r[i] / S - 1) / (n-2))        with T such that the shares add up to 1

A host of share 0 still receives S. Between two hosts every port carries S with any shares.

This takes a tensor in many segments, whose halves overlap: while one is gathered, the next is reduced. With equal
shares both halves load both directions of a link equally, and nothing need overlap. With others, one direction of a
link is idle during the first half of the first segment and the second half of the last: with k segments a host sends
S (1 + (n-2) w[i] + |n w[i] - 1| / k). So each choice of shares has a least number of segments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

LEVEL = 1.15
"""Up to this ratio, a link counts as fast as the fastest: measured rates of equal links differ by as much."""

WORTH = 0.95
"""Other shares must shorten the time by this factor, or the present ones stay."""

SEGMENTS_MOST = 16
"""All-reduces of more segments are not told apart."""

UNITS = 128
"""The largest weight: there are few different weights, and few plans."""

SLOWEST = 1 / 256
"""A link counts as at least this share of the fastest."""

BELIEVED_BYTES = 1e13
"""The highest rate per second that is believed: nothing is faster."""

REACHED = 0.85
"""A port that receives this share of all that the others could send to it is not what limits them."""

SENT_ERROR = 1.25
"""The rate of sending is overrated by up to this factor: acknowledgements come late, and then together."""


class Rates(NamedTuple):
    """The rates of a host's links in bytes per second, as measured under load. Anything but a positive number of a
    believable size: unknown."""

    sent: float
    received: float


class Weights(NamedTuple):
    """The hosts' shares."""

    weights: tuple[int, ...]
    """See `Settings.weights`."""
    segments: int
    """All-reduces of fewer segments are faster with equal shares."""


EQUAL = Weights((), 1)


def weights_for(rates: Sequence[Rates], present: Weights = EQUAL) -> Weights:
    """The weights of the hosts for these rates.

    The `present` weights stay while a rate is unknown, and unless others are clearly faster. A pure function: all ranks
    that have the same rates get the same weights.
    """
    if len(rates) < 3:
        return EQUAL
    if not all(map(_is_known, rates)):
        return present
    measured = _links(rates)
    fastest = max(measured)
    if fastest <= LEVEL * min(measured):
        return EQUAL
    links = [fastest if fastest <= LEVEL * link else max(link, SLOWEST * fastest) for link in measured]
    shares = _shares(links)
    largest = max(shares)
    weights = tuple(round(UNITS * share / largest) for share in shares)
    # A link near LEVEL of the fastest is now level and now not. Unequal shares must not go to and fro with it: others
    # have to be faster with the rates as measured, too.
    judged = [links, measured] if present.weights else [links]
    if any(time_of(weights, each) >= WORTH * time_of(present.weights, each) for each in judged):
        return present
    enough = WORTH * time_of((), links)
    otherwise = EQUAL if time_of((), links) < WORTH * time_of(present.weights, links) else present
    return next(
        (Weights(weights, count) for count in range(1, SEGMENTS_MOST + 1) if time_of(weights, links, count) < enough),
        otherwise,
    )


def time_of(weights: Sequence[int], links: Sequence[float], segments: float = math.inf) -> float:
    """The time of an all-reduce in so many segments over these links, for each byte. (): equal shares."""
    n, total = len(links), sum(weights)
    shares = [weight / total for weight in weights] or [1 / n] * n
    return max(
        (1 + (n - 2) * share + abs(n * share - 1) / segments) / link for share, link in zip(shares, links, strict=True)
    )


def _is_known(rates: Rates) -> bool:
    return all(math.isfinite(rate) and 0 < rate <= BELIEVED_BYTES for rate in rates)


def _links(rates: Sequence[Rates]) -> list[float]:
    """The rate of each host's link: the slower direction. What came in is no limit of the port if the others could not
    send more."""
    sent = sum(rate.sent for rate in rates)
    links = []
    for rate in rates:
        link = min(rate)
        if rate.received >= REACHED * (sent - rate.sent) / (len(rates) - 1):
            link = max(link, rate.sent / SENT_ERROR)
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
