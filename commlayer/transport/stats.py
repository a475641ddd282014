"""`stats` and `paths`: the counters of this process's engine, and its paths.

    before = commlayer.stats()
    ...
    lost = commlayer.stats()["packets_lost"] - before["packets_lost"]
    print(commlayer.stats())  # for people
    print(commlayer.paths())

The process has one engine for all of its groups, including those that hooks make. After its last group was destroyed,
both functions return the last values. docs/settings.md lists the counters. The bytes of a model's gradients that were
not counted are in its HookState.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import Config, whole
from ..errors import CommError, ConfigError
from .lags import Lag
from .native import Engine

RANK_MAX = 0xFFFF
"""The engine numbers peers with 16 bits."""


class Stats(dict[str, int]):
    """Counters by name. `str()` has them for people."""

    def __init__(self, counters: Mapping[str, int], lags: Mapping[int, Lag]) -> None:
        super().__init__(counters)
        self.lags = dict(lags)
        """Lags of other ranks, by rank of the job; those that this rank never waited for are absent. Their `waited_us`
        add up to the counter of that name."""

    def __str__(self) -> str:
        counts = self
        slowest = sorted(self.lags.items(), key=lambda item: -item[1].waited_us)
        lines = [
            f"operations      {counts['operations_done']:,} done, {counts['operations_failed']:,} failed",
            f"shared memory   {size(counts['shared_bytes_received'])} received",
            (
                f"network         {size(counts['payload_bytes_sent'])} sent, "
                f"{size(counts['payload_bytes_received'])} received"
            ),
            (
                f"packets         {counts['packets_sent']:,} sent, {counts['packets_received']:,} received, "
                f"{counts['packets_lost']:,} lost ({counts['packets_spurious']:,} of them arrived late)"
            ),
            (
                f"retransmitted   {counts['packets_retransmitted']:,}: {counts['retransmitted_lost']:,} lost, "
                f"{counts['retransmitted_refused']:,} refused, {counts['retransmitted_probes']:,} probes, "
                f"{counts['retransmitted_early']:,} early"
            ),
            (
                f"bounded loss    {counts['packets_given_up']:,} packets given up, "
                f"{counts['messages_stopped']:,} messages ended early"
            ),
            f"waited          {duration(counts['waited_us'])} for the last rank",
        ]
        lines += [
            f"  rank {rank:<8} {duration(lag.waited_us)}, last in {lag.last:,} operation{'s' * (lag.last != 1)}"
            for rank, lag in slowest[:8]
        ]
        if len(slowest) > 8:
            lines.append(f"  and {len(slowest) - 8} more ranks, see stats().lags")
        return "\n".join(lines)


class Paths(list[dict[str, Any]]):
    """Paths to other ranks. `str()` has them for people."""

    def __str__(self) -> str:
        lines = []
        for path in self:
            share = path["packets_lost"] / max(path["packets_sent"], 1)
            rate = f"{path['rate_bytes'] * 8 / 1e6:,.0f} Mbit/s" if path["rate_bytes"] else "not paced"
            lines += [
                f"rank {path['rank']}: {path['interface']} {path['address']}:{path['port']} -> {path['remote']}"
                + (" (dead)" if path["is_dead"] else ""),
                (
                    f"  {rate}, window {size(path['window_bytes'])}, round trip {duration(path['round_trip_us'])}, "
                    f"queue {duration(path['queue_us'])}"
                ),
                (
                    f"  packets: {path['packets_sent']:,} sent, {path['packets_received']:,} received, "
                    f"{path['packets_lost']:,} lost ({share:.2%})"
                ),
            ]
        return "\n".join(lines) or "no paths: all ranks share this host's memory"


def stats() -> Stats:
    """This rank's counters since its first group opened the engine; they only grow.

    Raises ClosedError before the process has an engine: its first group makes one, a HookState's in the first backward.
    All are 0 with COMMLAYER_DISABLE.
    """
    if Config.is_disabled():
        return Stats(Engine.no_stats(), {})
    report = Engine.shared_report()
    return Stats(report.stats, report.lags)


def paths(rank: int | None = None) -> Paths:
    """The paths to another rank of the job (not of a group), or to all of them, in their order: addresses, counters
    since the first group with that rank, and current estimates, in bytes and microseconds.

    Raises ClosedError as `stats` does, CommError for a rank without a path from this process, and ConfigError for a
    value that is no rank. Empty with COMMLAYER_DISABLE.
    """
    if Config.is_disabled():
        return Paths()
    if rank is not None and not 0 <= whole(rank, -1) <= RANK_MAX:
        raise ConfigError(f"commlayer.paths({rank!r}): use the number of another rank of the job, from 0, or nothing")
    found = Engine.shared_report().paths
    if rank is None:
        return Paths(path for of_rank in found.values() for path in of_rank)
    if rank not in found:
        raise CommError(f"no group of this process has rank {rank}; create one with it first")
    return Paths(found[rank])


def size(count: float) -> str:
    """A number of bytes, for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def duration(count_us: float) -> str:
    """A number of microseconds, for people."""
    if count_us < 1e3:
        return f"{count_us:.0f} us"
    return f"{count_us / 1e3:.1f} ms" if count_us < 1e6 else f"{count_us / 1e6:,.1f} s"
