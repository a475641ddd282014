"""Findings: defects of the network, each as a sentence with its remedy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from . import links
from .facts import joined
from .sample import Sample, Way
from .subject import Subject, explain
from .units import rate_text, time_text
from .view import View, busy_hosts, starving, suspects, usual_rates, usual_rtts

_NAMED_MAX = 3


@dataclass(frozen=True)
class Finding:
    """One defect."""

    kind: str
    """address, cpu, unreachable, rate, loss, rtt, reordering, mtu, dscp, ecn, links, crossed."""
    text: str
    remedy: str
    subject: dict[str, Any]
    ways: list[Way]

    @property
    def table(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "ways": [way._asdict() for way in self.ways]}


def find(view: View) -> list[Finding]:
    """The findings, the gravest kind first."""
    by_way = {sample.way: sample for sample in view.samples}
    reached = {way: network for way, network in view.tested.items() if by_way[way].is_reached}
    found = _cpu(view)
    for kind, bad in suspects(view).items():
        tested = view.tested if kind == "unreachable" else reached
        found_subjects = [(Subject("all"), sorted(bad))] * bool(bad) if kind == "crossed" else explain(bad, tested)
        for subject, ways in found_subjects:
            samples = [by_way[way] for way in ways]
            text, remedy = _TEXTS[kind](_Words(view, subject, ways), samples)
            found.append(Finding(kind, text, remedy, asdict(subject), ways))
    return found


def _cpu(view: View) -> list[Finding]:
    """The finding about hosts whose CPUs were busy."""
    busy = busy_hosts(view)
    if not busy:
        return []
    who = "every host" if len(busy) == len(view.hosts) > 1 else joined([view.hosts[host] for host in busy], _NAMED_MAX)
    subject = Subject("host", host=min(busy)) if len(busy) == 1 else Subject("all")
    ways = sorted(sample.way for sample in view.reached if starving(sample))
    text = f"the CPU of {who} is busy: the probe waited for it for up to {max(busy.values()):.0%} of the time"
    remedy = (
        "round trips, parallel links and rates while all hosts send are not judged there, because they would be those "
        "of the CPU. End the other programs and probe again; a job needs a free core for the engine of each rank, too"
    )
    return [Finding("cpu", text, remedy, asdict(subject), ways)]


def of_addresses(shared: Mapping[str, Sequence[tuple[str, str]]]) -> list[Finding]:
    """The findings about addresses that several hosts have, with host and interface of each."""
    found = []
    for address, ends in shared.items():
        nics = sorted({nic for _, nic in ends})
        text = f"{joined([host for host, _ in ends])} have the same address, {address} ({joined(nics)})"
        remedy = (
            "packets to it do not leave the host, so it was left out: give each host an address of its own, or leave "
            f"the interface out with COMMLAYER_IFNAME={','.join(f'^{nic}' for nic in nics)}"
        )
        found.append(Finding("address", text, remedy, asdict(Subject("all")), []))
    return found


class _Words:
    """A subject in words."""

    def __init__(self, view: View, subject: Subject, ways: Sequence[Way]) -> None:
        self.view, self.subject, self.ways = view, subject, ways

    @property
    def name(self) -> str:
        """The subject as the beginning of a sentence: "eth1 of host2"."""
        subject, way, single = self.subject, self.subject.way, self.view.has_single_nics
        if subject.kind == "all":
            return "every path"
        if subject.kind == "network":
            return f"the network of {joined(self._nics())} ({subject.network})"
        if way is None:
            return self.host if subject.nic is None or single else f"{subject.nic} of {self.host}"
        ends = [self.view.hosts[host] for host in (way.source, way.target)]
        nics = [way.source_nic, way.target_nic]
        ends = [f"{nic} of {end}" if nic and not single else end for nic, end in zip(nics, ends, strict=True)]
        return f"the path {'between' if subject.direction == 'both' else 'from'} {ends[0]} " + (
            f"and {ends[1]}" if subject.direction == "both" else f"to {ends[1]}"
        )

    @property
    def host(self) -> str:
        """The name of the subject's host."""
        return self.view.hosts[self.subject.host]

    def does(self, both: str, sending: str, receiving: str) -> str:
        """The verb for the direction of a host; `both` for all else."""
        if self.subject.kind != "host" or self.subject.direction == "both":
            return both
        return sending if self.subject.direction == "sending" else receiving

    @property
    def peers(self) -> str:
        """The other ends: "all peers", or their names if only some are concerned."""
        if self.subject.kind != "host":
            return ""
        host = self.subject.host
        tested = {
            end for way in self.view.tested for end in (way.source, way.target) if host in (way.source, way.target)
        }
        found = {end for way in self.ways for end in (way.source, way.target)} - {host}
        if found == tested - {host}:
            return "all peers"
        return joined([self.view.hosts[number] for number in sorted(found)], _NAMED_MAX)

    @property
    def link(self) -> str:
        """The link to look at."""
        if self.subject.kind == "host":
            nics = {way.source_nic if way.source == self.subject.host else way.target_nic for way in self.ways}
            parts = "its cable or its switch port" if len(nics) == 1 else "their cables or switch ports"
            return f"{joined(sorted(nics))} of {self.host}, {parts}"
        if self.subject.kind in ("all", "network"):
            return "the switch of this network"
        return "the switches between them"

    def _nics(self) -> list[str]:
        return sorted({nic for way in self.ways for nic in (way.source_nic, way.target_nic)})


def _rate(words: _Words, samples: Sequence[Sample]) -> tuple[str, str]:
    rate = statistics.median(sample.rate_bps for sample in samples)
    usual = usual_rates(words.view.reached)[samples[0].network]
    verb = words.does("carries", "sends", "receives")
    if words.subject.kind == "host" and words.subject.direction == "both":
        verb = "sends and receives"
    peers = {"sends": f" to {words.peers}", "receives": f" from {words.peers}"}.get(verb, "")
    less = f"{usual / rate:.1f} times less than the median host ({rate_text(usual)})"
    return f"{words.name} {verb} {rate_text(rate)}{peers}, {less}", (
        f"look at {words.link} (speed, duplex, errors: ethtool, ip -s link). Collectives run at the pace of the "
        'slowest host; until it is fixed, Policy(codec="int8") sends a quarter of the bytes'
    )


def _loss(words: _Words, samples: Sequence[Sample]) -> tuple[str, str]:
    sent, lost, bursts = (sum(getattr(sample, name) for sample in samples) for name in ("sent", "lost", "bursts"))
    share, length = lost / sent, lost / bursts
    how = f"in bursts of {length:.1f} packets" if length >= 1.5 else "one by one"
    lossy = words.does(
        f"loses {share:.1%} of its packets",
        f"loses {share:.1%} of the packets it sends",
        f"loses {share:.1%} of the packets it receives",
    )
    peers = f", {words.does('with', 'to', 'from')} {words.peers}" if words.subject.kind == "host" else ""
    step = 10.0 ** math.floor(math.log10(share * 1.5))
    bound = min(0.5, math.ceil(share * 1.5 / step) * step)
    return f"{words.name} {lossy}, {how}{peers}", (
        f"look at {words.link}: errors and drops in ethtool -S and ip -s link. commlayer sends lost packets again; "
        f"with Policy(loss_bound={bound:.3g}) gradients go on without them"
    )


def _unreachable(words: _Words, _samples: Sequence[Sample]) -> tuple[str, str]:
    where = f"between {words.name} and {words.peers}" if words.subject.kind == "host" else f"on {words.name}"
    return f"no UDP packet passes {where}", (
        "open the firewall for UDP between the hosts (COMMLAYER_PORT_RANGE limits the ports), or leave the interface "
        "out with COMMLAYER_IFNAME"
    )


def _rtt(words: _Words, samples: Sequence[Sample]) -> tuple[str, str]:
    rtt = statistics.median(sample.rtt_us[0] for sample in samples)
    usual = usual_rtts(words.view.reached)[samples[0].network]
    return f"{words.name}: a round trip takes {time_text(rtt)}, that of the median host {time_text(usual)}", (
        f"look at {words.link}: a detour, a busy switch, or a sleeping CPU. Large buckets and commlayer.overlap hide "
        "latency"
    )


def _reordering(words: _Words, samples: Sequence[Sample]) -> tuple[str, str]:
    share = sum(sample.reordered for sample in samples) / sum(sample.sent for sample in samples)
    return f"{words.name}: {share:.1%} of the packets are overtaken by later ones", (
        "commlayer tolerates it, TCP less so; have the switches choose links by flow, not by packet, and use several "
        "with COMMLAYER_PORTS=4"
    )


def _mtu(words: _Words, samples: Sequence[Sample]) -> tuple[str, str]:
    least, most = min(sample.mtu for sample in samples), max(sample.interface_mtu for sample in samples)
    return f"{words.name}: packets above {least} bytes disappear, although the interfaces have an MTU of {most}", (
        f"set COMMLAYER_MTU={least}, or the MTU of the switches and tunnels between to {most}"
    )


def _dscp(words: _Words, samples: Sequence[Sample]) -> tuple[str, str]:
    arrivals = {(int(sent), arrived) for sample in samples for sent, arrived in sample.dscp.items()}
    changed = sorted((sent, arrived) for sent, arrived in arrivals if sent != arrived and arrived is not None)
    where = words.does("", " of the packets it sends", " of the packets it receives")
    if changed and all(arrived == 0 for _, arrived in changed):
        text = f"{words.name} clears DSCP{where}"
    elif changed:
        text = f"{words.name} changes DSCP{where}: {', '.join(f'{sent} to {arrived}' for sent, arrived in changed[:3])}"
    else:
        text = f"{words.name} drops packets with a DSCP"
    return text, (
        "leave COMMLAYER_DSCP at 0: priorities have no effect there; or let the switches trust DSCP"
        if changed
        else "leave COMMLAYER_DSCP at 0"
    )


def _ecn(words: _Words, samples: Sequence[Sample]) -> tuple[str, str]:
    changed = any(
        arrived is not None and arrived != int(sent) for sample in samples for sent, arrived in sample.ecn.items()
    )
    where = words.does("", " of the packets it sends", " of the packets it receives")
    return f"{words.name} {'clears ECN' if changed else 'drops packets with ECN'}{where}", (
        "ECN marks of switches get lost there, so that COMMLAYER_DSCP=1 and DCTCP learn of no queue: "
        "let routers and tunnels keep the ECN bits"
    )


def _links(words: _Words, samples: Sequence[Sample]) -> tuple[str, str]:
    worst = max(samples, key=lambda sample: sum(flow.lost for flow in links.lossy(sample.flows)))
    bad = links.lossy(worst.flows)
    share = sum(flow.lost for flow in bad) / sum(flow.sent for flow in bad)
    others = [flow for flow in worst.flows if flow not in bad]
    rest = sum(flow.lost for flow in others) / sum(flow.sent for flow in others) if others else 0.0
    routes = {flow.route[0] for flow in bad if flow.route} - {flow.route[0] for flow in others if flow.route}
    through = f", all through {joined(sorted(routes))}" if len(routes) == 1 else ""
    return (
        f"{words.name}: {len(bad)} of {len(worst.flows)} source ports lose {share:.1%} of their packets{through}, the "
        f"others {rest:.1%}: one of several parallel links loses packets"
    ), (
        f"look at the parallel links (ECMP, bonds) of {words.link}: a bad one hits some connections only. With "
        "COMMLAYER_PORTS=4 commlayer has paths over several links and prefers the good ones"
    )


def _crossed(words: _Words, samples: Sequence[Sample]) -> tuple[str, str]:
    crossed = [sample.crossed for sample in samples if sample.crossed]
    rate, alone = (statistics.median(sample.rate_bps for sample in some) for some in (crossed, samples))
    full = statistics.median(flow.rtt_us[1] for flow in crossed)
    measured = sum(sample.crossed is not None for sample in words.view.samples)
    hosts = words.view.hosts
    ends = joined([f"{hosts[sample.way.source]} to {hosts[sample.way.target]}" for sample in samples], _NAMED_MAX)
    return (
        f"while all hosts send at once, {len(samples)} of {measured} directions carry {rate_text(rate)}, "
        f"{alone / rate:.1f} times less than alone ({rate_text(alone)}), with round trips of {time_text(full)}: {ends}"
    ), (
        "they share links: the uplinks of their switches, or links that are half-duplex. Collectives send like that: "
        "let neighbouring ranks be hosts of one switch, or send fewer bytes (Policy(codec=...))"
    )


_TEXTS: dict[str, Callable[[_Words, Sequence[Sample]], tuple[str, str]]] = {
    "unreachable": _unreachable,
    "rate": _rate,
    "loss": _loss,
    "rtt": _rtt,
    "reordering": _reordering,
    "mtu": _mtu,
    "dscp": _dscp,
    "ecn": _ecn,
    "links": _links,
    "crossed": _crossed,
}
