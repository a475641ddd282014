"""Parallel links between two hosts: what the flows of a path say about them."""

from __future__ import annotations

from collections.abc import Sequence

from .flow import Flow
from .sample import Sample
from .units import rate_text, time_text

MORE_RATIO = 1.3
"""Several ports that carry this much more than one use several links."""
_RTT_LEAST_US, _RTT_SHARE = 150.0, 0.25
_LOSS_LEAST = 0.001
_PORTS_MAX = 8
_KEPT_SHARE = 0.8


def rtt_groups(flows: Sequence[Flow]) -> list[list[Flow]]:
    """The flows by their round trips: groups that are clearly apart, the fastest first."""
    answered = sorted((flow for flow in flows if flow.rtt_us), key=lambda flow: flow.rtt_us)
    groups: list[list[Flow]] = []
    for flow in answered:
        before = groups[-1][-1].rtt_us if groups else 0.0
        if not groups or flow.rtt_us - before > max(_RTT_LEAST_US, _RTT_SHARE * before):
            groups.append([])
        groups[-1].append(flow)
    return groups


def lossy(flows: Sequence[Flow], *, is_loose: bool = False) -> list[Flow]:
    """The flows that lose packets, if others lose clearly fewer; else none.

    Losses of all flows alike differ by chance, the more the longer their bursts are: the test is chi-square, with the
    bursts as the events.
    """
    sent = sum(flow.sent for flow in flows)
    bursts = sum(flow.bursts for flow in flows)
    if not bursts or bursts == sent:
        return []
    expected = [flow.sent * bursts / sent for flow in flows]
    distance = sum((flow.bursts - due) ** 2 / due for flow, due in zip(flows, expected, strict=True) if due > 0)
    freedom = len(flows) - 1
    if distance < freedom + (1.5 if is_loose else 5.0) * (2 * freedom) ** 0.5:
        return []
    return [
        flow
        for flow, due in zip(flows, expected, strict=True)
        if flow.bursts > due and flow.lost >= _LOSS_LEAST * flow.sent
    ]


def routes(flows: Sequence[Flow]) -> list[tuple[str, ...]]:
    """The different routes of the flows, as far as routers answer."""
    return sorted({tuple(flow.route) for flow in flows if flow.route})


def at_least(sample: Sample) -> int:
    """How many parallel links there are at least."""
    ratio = sample.flows_rate_bps / sample.rate_bps if sample.rate_bps and not sample.is_own_limit else 1.0
    carried = round(ratio) if ratio >= MORE_RATIO else 1
    return max(1, carried, 2 if ratio >= MORE_RATIO else 1, len(routes(sample.flows)), len(rtt_groups(sample.flows)))


def notes(samples: Sequence[Sample]) -> list[str]:
    """What the source port decides, over all paths, and whether COMMLAYER_PORTS helps."""
    found = [sample for sample in samples if sample.flows and at_least(sample) > 1]
    if not found:
        return []
    most = max(found, key=at_least)
    links, count = at_least(most), len(most.flows)
    several = f"{len(found)} of {len(samples)} directions" if len(samples) > 1 else "the path"
    text = f"the network chooses among at least {links} links by source port, for {several}"
    if ways := routes(most.flows):
        text += f" ({len(ways)} routes, by {', '.join(route[0] for route in ways[:3])})" if len(ways) > 1 else ""
    groups = rtt_groups(most.flows)
    if len(groups) > 1:
        times = " and ".join(time_text(group[len(group) // 2].rtt_us) for group in groups)
        text += f"; round trips of {times}"
    best = max(found, key=lambda path: path.flows_rate_bps / path.rate_bps if path.rate_bps else 0.0)
    if not best.is_own_limit and best.flows_rate_bps >= MORE_RATIO * best.rate_bps:
        ports = min(_PORTS_MAX, 2 * at_least(best))
        carried = f"{count} ports carry {rate_text(best.flows_rate_bps)}, one {rate_text(best.rate_bps)}"
        return [f"{text}; {carried}: set COMMLAYER_PORTS={ports}"]
    if best.is_own_limit or best.flows_rate_bps < _KEPT_SHARE * best.rate_bps:
        return [text]  # the probe was too slow to tell
    return [f"{text}; several ports carry no more than one, so leave COMMLAYER_PORTS at 1"]
