"""The report of `commlayer headroom` for people, in 80 columns."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ...transport.stats import size
from .command import Report
from .split import Split
from .timing import Timing
from .verdict import seconds

_WIDTH = 80
UNKNOWN = "not measured"


def show(report: Report, out: Console) -> None:
    """Prints verdict, steps and remedies."""
    width = min(_WIDTH, out.width)
    hosts = "1 host" if report.hosts == 1 else f"{report.hosts} hosts"
    out.print(f"{report.ranks} ranks on {hosts}, backend {report.backend}; measured in {report.seconds:.0f} s\n")
    out.print(report.verdict, width=width)
    if report.next_command:
        out.print(f"\nNext: {report.next_command}", soft_wrap=True)
    found = report.split
    low, high = found.share_interval
    steps = Table(box=None, pad_edge=False, title_justify="left", width=width)
    steps.add_column("\nstep")
    steps.add_column("\nmedian", justify="right")
    steps.add_column("\nmiddle half", justify="right")
    for name, timing in _timings(found):
        steps.add_row(
            name, seconds(timing.median_s), " to ".join(seconds(quartile_s) for quartile_s in timing.quartiles_s)
        )
    out.print(steps)
    remedies = Table(box=None, pad_edge=False, width=width)
    remedies.add_column("\ncould win at most")
    remedies.add_column("\nof a step", justify="right")
    remedies.add_column("\nshare", justify="right")
    for name, most_s in _remedies(found):
        share = "" if most_s is None else f"{most_s / found.as_is.median_s:.0%}"
        remedies.add_row(name, UNKNOWN if most_s is None else seconds(most_s), share)
    out.print(remedies)
    out.print(
        f"\nThe first line is all there is ({low:.0%} to {high:.0%} with 95 % confidence). Bytes and latency add up to "
        "it. Overlap and transport are other ways to win the same time: do not add them. Slow ranks come on top.",
        width=width,
    )
    _show_engine(found, out, width)


def _timings(found: Split) -> list[tuple[str, Timing]]:
    rows = [
        ("as it is", found.as_is),
        ("with messages of a few bytes", found.short),
        ("without communication (slowest rank)", found.left_out),
        ("on commlayer, nothing else changed", None if found.engine is None else found.engine.step),
    ]
    return [(name, timing) for name, timing in rows[: 3 if found.is_on_engine else 4] if timing is not None]


def _remedies(found: Split) -> list[tuple[str, float | None]]:
    transport = "commlayer's transport (lost packets)" if found.is_lossy else "commlayer's transport"
    rows = [
        ("any communication", found.all_s),
        ("- bytes: compression", found.bytes_s),
        ("- latency: fewer messages", found.latency_s),
        ("- overlap: hide it behind computation", found.overlap_s),
    ]
    if not found.is_on_engine:
        rows.append((f"- {transport}", found.transport_s))
    return [*rows, ("slow ranks (not communication)", found.stragglers_s)]


def _show_engine(found: Split, out: Console, width: int) -> None:
    engine = found.engine
    if engine is None:
        return
    operations = "1 operation" if engine.operations == 1 else f"{engine.operations:.3g} operations"
    facts = [
        f"{operations} and {size(engine.nbytes)} per step and rank",
        f"in flight for {seconds(engine.transfer_s)}",
        f"waited {seconds(engine.waited_s)} for the last rank",
        f"round trip {seconds(engine.round_trip_s)}",
        f"{engine.loss:.2%} of the packets lost",
    ]
    out.print(f"On commlayer: {', '.join(facts)}.", width=width)
