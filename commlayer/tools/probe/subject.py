"""Names the hosts, links or networks that bad paths have in common."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from .sample import Way

Kind = Literal["path", "pair", "host", "network", "all"]
Direction = Literal["sending", "receiving", "both"]

_HOST_SHARE = 0.6  # share of a host's paths that are bad: a short measurement may miss a defect on one of three
_NETWORK_SHARE = 0.9


@dataclass(frozen=True)
class Subject:
    """What a set of bad paths has in common."""

    kind: Kind
    direction: Direction = "both"
    host: int = -1
    nic: str | None = None
    """None: all interfaces of the host."""
    way: Way | None = None
    """The hosts of a path or a pair: from which to which. A pair has all paths between these hosts."""
    network: str | None = None


def explain(bad: Iterable[Way], tested: dict[Way, str]) -> list[tuple[Subject, list[Way]]]:
    """The subjects that explain the bad paths, each with its bad paths; `tested` has the network of every path.

    The subject that explains most comes first; each good path of a subject counts as half a bad one that it does not
    explain. A host is named only if it has trouble with two others or more.
    """
    wrong = set(bad)
    if not wrong:
        return []
    left = set(wrong)
    candidates = [(subject, ways, ways & wrong) for subject, ways in _candidates(tested)]
    candidates = [
        candidate for candidate in candidates if candidate[2] and _is_likely(candidate[0], candidate[1], candidate[2])
    ]
    found = []
    while left:
        subject, _, hits = max(candidates, key=lambda candidate: _merit(candidate[0], candidate[1], candidate[2], left))
        found.append((subject, sorted(hits & left)))
        left -= hits
    return found


def _merit(subject: Subject, ways: set[Way], hits: set[Way], left: set[Way]) -> tuple[float, int, int, bool]:
    order: list[Kind] = ["network", "all", "host", "pair", "path"]
    good = len(ways) - len(hits)
    return len(hits & left) - good / 2, -len(ways), order.index(subject.kind), subject.nic is not None


def _is_likely(subject: Subject, ways: set[Way], hits: set[Way]) -> bool:
    if subject.kind in ("path", "pair"):
        return len(hits) == len(ways)
    if len(hits) < (_HOST_SHARE if subject.kind == "host" else _NETWORK_SHARE) * len(ways):
        return False
    hosts = {host for way in hits for host in (way.source, way.target)}
    if subject.kind == "host":
        return len(hosts - {subject.host}) > 1
    return len(hosts) > 2


def _candidates(tested: dict[Way, str]) -> Iterator[tuple[Subject, set[Way]]]:
    """Every subject that could explain bad paths, with its paths; the most specific ones last, which win ties."""
    groups: dict[Subject, set[Way]] = {}

    def put(subject: Subject, way: Way) -> None:
        groups.setdefault(subject, set()).add(way)

    for way, network in tested.items():
        put(Subject("all"), way)
        put(Subject("network", network=network), way)
        for host, nic, direction in (
            (way.source, way.source_nic, "sending"),
            (way.target, way.target_nic, "receiving"),
        ):
            for port in (None, nic):
                put(Subject("host", "both", host, port), way)
                put(Subject("host", "sending" if direction == "sending" else "receiving", host, port), way)
        between = Way(way.source, "", way.target, "")
        put(Subject("pair", "sending", way=between), way)
        put(Subject("pair", "both", way=min(between, between.back)), way)
        put(Subject("path", "sending", way=way), way)
        put(Subject("path", "both", way=min(way, way.back)), way)
    yield from groups.items()
