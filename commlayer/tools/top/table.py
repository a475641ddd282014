"""The table of `commlayer top`: 80 columns of plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .summary import exposed_share, late_share

WIDTH = 80
HEAD = (
    f"rank {'host':<7}{'step':>8}{'time':>7}{'exposed':>8}{'late':>7}{'out':>6}{'in':>6}{'loss':>7}{'again':>6}"
    f"{'forgiv':>7}{'queue':>6}"
)
RANKS_NAMED = 8
DEAD_SHOWN = 3


def lines(found: dict[str, Any], *, limit: int = 0, paths: bool = False) -> list[str]:
    """The view of a job (`summary.summarize`). `limit`: most lines, by leaving out ranks; 0: all. `paths`: each rank's
    interfaces and paths, too."""
    above = head(found["job"])
    rows = [rank_lines(rank, paths=paths) for rank in found["ranks"]]
    room = limit - len(above) - 3 if limit else 0
    shown, left = _chosen(found, rows, room) if limit and sum(map(len, rows)) > room else (rows, 0)
    below = [f"and {left} more ranks: --rows 0 shows all, --json has all"] if left else []
    return [row_text[:WIDTH] for row_text in [*above, "", HEAD, *(line for row in shown for line in row), *below]]


def _chosen(found: dict[str, Any], rows: Sequence[list[str]], room: int) -> tuple[list[list[str]], int]:
    """The ranks that fit: those in trouble first, and in their order."""
    samples, slowest = found["ranks"], (found["job"]["slowest"] or {}).get("rank")

    def trouble(index: int) -> tuple[Any, ...]:
        sample = samples[index]
        share = sample["lost"] / max(sample["packets"], 1)
        return (sample["state"] != "live", sample["rank"] == slowest, share, sample["queue_us"], -index)

    order = sorted(range(len(samples)), key=trouble, reverse=True)
    chosen: list[int] = []
    used = 0
    for index in order:
        if used + len(rows[index]) > max(room, 1):
            break
        chosen.append(index)
        used += len(rows[index])
    return [rows[index] for index in sorted(chosen)], len(samples) - len(chosen)


def head(job: dict[str, Any]) -> list[str]:
    """The lines about the whole job."""
    found = [
        f"{job['live']} of {job['world']} ranks" + _step(job),
        _exposure(job),
        (
            f"network {bits(job['sent_bytes_s'])}bit/s, shared memory {amount(job['shared_bytes_s'])}B/s; "
            f"loss {share(job['loss'])}, {job['retransmitted']:,} packets sent again"
        ),
    ]
    if job["forgiven_bytes"] or job["uncounted_bytes"]:
        found.append(
            f"forgiven {amount(job['forgiven_bytes'])}B in the last second; gradients not counted so far: "
            f"{amount(job['uncounted_bytes'])}B"
        )
    if job["policies"]:
        found.append(f"gradients: {'; '.join(job['policies'])}")
    slowest = job["slowest"]
    if slowest is not None:
        place = f" on {slowest['host']}" if slowest["host"] else ""
        found.append(
            f"slowest peer: rank {slowest['rank']}{place}; {_ranks(slowest['waiting'])} waited for it, "
            f"{slowest['share']:.0%} of their time"
        )
    for name, what in (("unheard", "no sample yet from"), ("silent", "silent:"), ("ended", "ended:")):
        if job[name]:
            found.append(f"{what} {names(job[name])}")
    if job["paused"]:
        found.append(f"paused: {', '.join(job['paused'])} (commlayer ctl resume)")
    dead = job["dead_paths"]
    found += [
        f"dead path: rank {path['rank']} to rank {path['peer']}, {path['interface']} -> {path['remote']}"
        for path in dead[:DEAD_SHOWN]
    ]
    return [*found, f"and {len(dead) - DEAD_SHOWN} more dead paths"] if len(dead) > DEAD_SHOWN else found


def _step(job: dict[str, Any]) -> str:
    if job["step"] is None:
        return ", no steps seen"
    return f", step {job['step']:,}" + (f", {seconds(job['step_s'])} per step" if job["step_s"] else ", none ended")


def _exposure(job: dict[str, Any]) -> str:
    if job["exposed_step_s"] is None:
        late = f"; {job['late_share']:.0%} waiting for late ranks" if job["late_share"] else ""
        return f"exposed communication {job['exposed_share']:.0%} of the time{late}"
    late = f"; {seconds(job['late_step_s'])} of it waiting for late ranks" if job["late_step_s"] else ""
    return f"exposed communication {seconds(job['exposed_step_s'])} per step ({job['exposed_share']:.0%}){late}"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def names(ranks: Sequence[int]) -> str:
    """The first of many ranks, and the number of the others."""
    more = f" and {len(ranks) - RANKS_NAMED} more" if len(ranks) > RANKS_NAMED else ""
    return f"rank {', '.join(map(str, ranks[:RANKS_NAMED]))}{more}"


def rank_lines(sample: dict[str, Any], *, paths: bool = False) -> list[str]:
    """The row of a rank; with `paths`, rows of its interfaces and paths below."""
    name = f"{sample['rank']:>4} {sample['host'].partition('.')[0][-7:]:<7}"
    if sample["state"] != "live":
        return [f"{name} {sample['state']} for {sample['age_s']:.0f} s"]
    step = "-" if sample["step"] is None else f"{sample['step'] % 10**7}"
    figures = (
        (step, 8),
        (seconds(sample["step_s"]) if sample["step_s"] else "-", 7),
        (_exposed(sample["exposed_step_s"], exposed_share(sample)), 8),
        (_exposed(sample["late_step_s"], late_share(sample)), 7),
        (bits(sample["sent_bytes_s"]), 6),
        (bits(sample["received_bytes_s"]), 6),
        (share(sample["lost"] / max(sample["packets"], 1)), 7),
        (sample["retransmitted"], 6),
        (f"{amount(sample['forgiven_bytes'])}B" if sample["forgiven_bytes"] else "", 7),
        (micros(sample["queue_us"]), 6),
    )
    found = [name + "".join(f"{figure:>{width}}" for figure, width in figures)]
    if sample["oldest_s"] > 1.0:
        found.append(f"     a collective has been in flight for {sample['oldest_s']:.0f} s")
    if paths:
        several = len(sample["interfaces"]) > 1
        found += [
            _flow(f"     {interface['interface']}, all peers", interface)
            for interface in sample["interfaces"]
            if several
        ]
        found += [
            _flow(f"       {path['interface']} -> rank {path['peer']} {path['remote']}", path)
            for path in sample["paths"]
        ]
    return found


def _exposed(step_s: float | None, share: float) -> str:
    return f"{share:.0%}" if step_s is None else seconds(step_s)


def _flow(name: str, flow: dict[str, Any]) -> str:
    loss = share(flow["lost"] / max(flow["sent"], 1))
    state = "  DEAD" if flow["dead"] else f"{bits(flow['bytes_s']):>6}"
    return f"{name[:47]:<47}{state}{loss:>7} loss {micros(flow['round_trip_us']):>6} rtt"


def _scaled(value: float, units: Sequence[str], factor: float) -> str:
    power = 0
    while abs(value) >= 999.5 and power < len(units) - 1:
        value /= factor
        power += 1
    return f"{value:.3g}{units[power]}" if value < 99.5 else f"{value:.0f}{units[power]}"


def bits(bytes_s: float) -> str:
    """A rate in bits per second: 941M."""
    return _scaled(bytes_s * 8, ("", "k", "M", "G", "T"), 1e3)


def amount(count: float) -> str:
    """A number of bytes: 1.5Mi."""
    return _scaled(count, ("", "Ki", "Mi", "Gi", "Ti"), 1024)


def seconds(value: float) -> str:
    """A time in seconds: 41ms."""
    return micros(value * 1e6)


def micros(value: float) -> str:
    """A time in microseconds: 41ms."""
    return _scaled(value, ("us", "ms", "s"), 1e3)


def share(value: float) -> str:
    """A share: 0.12%."""
    return "0" if value == 0 else "<.001%" if value < 1e-5 else f"{value:.3%}" if value < 0.01 else f"{value:.1%}"
