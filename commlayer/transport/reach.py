"""`Reach`: packets are tried between the ranks when a group is made, so that a closed firewall shows then.

A new peer gets a PING on each path. A path works once the peer has acknowledged one; until then it is asked again. In
jobs of many hosts each rank tries a few others, which together connect all hosts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import UnreachableError
from .log import log
from .members import Members
from .native import Engine
from .paths import Path, pair_paths

PATIENCE_S = 3.0
"""Seconds without an answer after which a rank is unreachable; the peer timeout if that is longer."""
PATH_PATIENCE_S = 1.0
"""Seconds without an answer after which one of several paths is reported, if another one works."""
ALL_HOSTS_MAX = 64
"""The largest number of hosts of which all ranks are tried."""
TOLD_MAX = 3
"""Pairs of hosts, or paths, that a message names."""

FIRST_PAUSE_S = 0.0005
LONGEST_PAUSE_S = 0.02
FIRST_ASK_S = 0.02
LONGEST_ASK_S = 0.2


def ranks_to_try(hosts: Sequence[Sequence[int]], rank: int) -> list[int]:
    """The ranks that a rank tries: those of all other hosts or, in large jobs, one on each host that is 1, 2, 4, ...
    places away."""
    own = next(number for number, ranks in enumerate(hosts) if rank in ranks)
    if len(hosts) <= ALL_HOSTS_MAX:
        return [other for number, ranks in enumerate(hosts) if number != own for other in ranks]
    steps = [1 << bit for bit in range(len(hosts).bit_length()) if 1 << bit <= len(hosts) // 2]
    near = {(own + sign * step) % len(hosts) for step in steps for sign in (1, -1)}
    place = list(hosts[own]).index(rank)
    return [hosts[number][place % len(hosts[number])] for number in sorted(near)]


class Reach:
    """The paths from one rank of a group to those that it tries."""

    def __init__(
        self, engine: Engine, members: Members, hosts: Sequence[Sequence[int]], descriptions: Sequence[Any]
    ) -> None:
        self._engine, self._members, self._rank = engine, members, members.rank
        self._descriptions = descriptions
        self._tried = ranks_to_try(hosts, members.rank)
        self._places = {rank: number for number, ranks in enumerate(hosts) for rank in ranks}
        self._patience_s = max(PATIENCE_S, engine.config.peer_timeout_s)

    def is_known(self) -> bool:
        """Whether each of the ranks has answered, perhaps for another group."""
        return all(any(path["is_answered"] for path in self._states(other)) for other in self._tried)

    def check(self, exchange: Callable[[str, bytes], list[bytes]]) -> None:
        """Tries the paths; all ranks call it, and each gets the same error. A path that fails beside a working one is
        logged.

        Raises UnreachableError, which names the pairs of ranks between which no packet arrives.
        """
        self._ask()
        silent = {other: self._states(other) for other in self._tried}
        self._warn({other: states for other, states in silent.items() if _is_half_answered(states)})
        lost = self._one_of_each([pair for other, states in silent.items() for pair in self._lost(other, states)])
        answers = [json.loads(text) for text in exchange("reached", json.dumps(lost[: TOLD_MAX + 1]).encode())]
        pairs = self._one_of_each([(source, target) for answer in answers for source, target in answer])
        if pairs:
            raise UnreachableError(f"{self._members.who}: {self._failure(pairs)}")

    def _states(self, other: int) -> list[dict[str, int]]:
        return self._engine.routes.paths(self._descriptions[other]["peer"])

    def _ask(self) -> None:
        """Asks the ranks until each has answered on all paths, or has had its time."""
        start = time.monotonic()
        next_ask, ask_s, pause_s = start, FIRST_ASK_S, FIRST_PAUSE_S
        waiting = self._tried
        while True:
            states = {other: self._states(other) for other in waiting}
            waiting = [other for other, paths in states.items() if not all(path["is_answered"] for path in paths)]
            now = time.monotonic()
            half = all(_is_half_answered(states[other]) for other in waiting)
            if not waiting or now - start >= (PATH_PATIENCE_S if half else self._patience_s):
                return
            if now >= next_ask:
                for other in waiting:
                    self._engine.ping(self._descriptions[other]["peer"])
                next_ask, ask_s = now + ask_s, min(2 * ask_s, LONGEST_ASK_S)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _lost(self, other: int, states: Sequence[dict[str, int]]) -> list[tuple[int, int]]:
        """The direction, as (source, target), in which no packet arrived; none if a path works."""
        if any(path["is_answered"] for path in states):
            return []
        heard = any(path["packets_received"] for path in states)
        return [(self._rank, other) if heard else (other, self._rank)]

    def _one_of_each(self, pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """The first pair of ranks for each pair of hosts and direction; both directions follow each other."""
        found: dict[tuple[int, int], tuple[int, int]] = {}
        for source, target in sorted(pairs):
            found.setdefault((self._places[source], self._places[target]), (source, target))
        return [found[hosts] for hosts in sorted(found, key=lambda hosts: (sorted(hosts), hosts))]

    def _warn(self, half: dict[int, list[dict[str, int]]]) -> None:
        """Logs the paths that did not answer, of ranks of which another path did."""
        own = self._descriptions[self._rank]
        silent = [
            (other, path, states[number]["packets_received"] > 0)
            for other, states in half.items()
            for number, path in enumerate(pair_paths(own, self._descriptions[other]))
            if not states[number]["is_answered"]
        ]
        if not silent:
            return
        told = [
            f"no {self._packet()} {'to' if heard else 'from'} {self._end(other, self._rank, [path])}"
            for other, path, heard in silent[:TOLD_MAX]
        ]
        log.warning(
            "%s: %s%s in %g s; other paths work: firewall, or the wrong interface? (%s)",
            self._members.who,
            ", ".join(told),
            " and others" * (len(silent) > len(told)),
            PATH_PATIENCE_S,
            self._settings(),
        )

    def _failure(self, pairs: Sequence[tuple[int, int]]) -> str:
        told = []
        for source, target in pairs[:TOLD_MAX]:
            one, other = self._descriptions[source], self._descriptions[target]
            ends = ", ".join([other.get("hostname", ""), *_ends(pair_paths(one, other))])
            told.append(
                f"no {self._packet()} from {self._end(source, target, pair_paths(other, one))} to "
                f"rank {self._members.ranks[target]} ({ends})"
            )
        what = f"{', '.join(told)}{' and others' * (len(pairs) > len(told))} in {self._patience_s:g} s"
        hosts = {self._descriptions[target].get("hostname", "") for _, target in pairs}
        firewall = f"firewall of {hosts.pop()}" if len(hosts) == 1 else "firewall"
        return f"{what}: {firewall}, or the wrong interface? ({self._settings()})"

    def _end(self, other: int, rank: int, paths: Sequence[Path]) -> str:
        """Another rank, as `rank` sees it: "rank 1 (hostb, 10.0.0.2:20001 via eth0)"."""
        ports = self._descriptions[rank]["ports"]
        places = [f"{end} via {ports[path.local]['ifname']}" for end, path in zip(_ends(paths), paths, strict=False)]
        host = self._descriptions[other].get("hostname", "")
        return f"rank {self._members.ranks[other]} ({', '.join([host, *places])})"

    def _packet(self) -> str:
        return "UDP packet" if self._engine.config.wire == "udp" else "packet"

    def _settings(self) -> str:
        return "COMMLAYER_IFNAME" + ", COMMLAYER_PORT_RANGE" * (self._engine.config.wire == "udp")


def _ends(paths: Sequence[Path]) -> list[str]:
    return [f"{path.address}:{path.port}" for path in paths[:TOLD_MAX]]


def _is_half_answered(states: Sequence[dict[str, int]]) -> bool:
    answered = [path["is_answered"] for path in states]
    return any(answered) and not all(answered)
