"""The report for people: findings first, then notes, and the rates as a heat map. It fits into 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from .command import Report
from .sample import Sample
from .units import rate_text, time_text

COLUMNS = 76
"""The width of a line, which fits in 80 columns with the prefix of `commlayer emulate`, too."""
_NUMBERS_MAX = 8
"""Hosts that a heat map has numbers for; above, a character each."""
_MAP_MAX = 60
_NAME_MAX = 12
_ROWS_MAX = 24
_SHADES = ((0.8, "█", "#", "green"), (0.6, "▓", "=", "yellow"), (0.3, "▒", "-", "dark_orange"), (0.0, "░", ".", "red"))


def show(report: Report, console: Console) -> None:
    """Prints the report."""
    _findings(report, console)
    if report.notes:
        console.print("\nNotes", style="bold")
        for note in report.notes:
            console.print(textwrap.fill(note, COLUMNS, initial_indent="- ", subsequent_indent="  "))
    for network in dict.fromkeys(sample.network for sample in report.samples):
        _map(report, [sample for sample in report.samples if sample.network == network], network, console)
    if len(report.samples) <= _ROWS_MAX:
        _rows(report, console)
    console.print()


def _findings(report: Report, console: Console) -> None:
    count = len(report.findings)
    said = f"{count} finding{'s' * (count != 1)}" if count else "No findings: all paths are alike and lose nothing"
    extent = f"({len(report.hosts)} hosts, {len(report.samples)} directions, {report.seconds:.0f} s)"
    console.print(textwrap.fill(f"{said} {extent}", COLUMNS), style="bold red" if count else "bold green")
    for number, finding in enumerate(report.findings, 1):
        mark = f"{number}. "
        console.print()
        console.print(
            textwrap.fill(finding.text, COLUMNS, initial_indent=mark, subsequent_indent=" " * len(mark)), style="bold"
        )
        indent = " " * len(mark)
        console.print(textwrap.fill(finding.remedy, COLUMNS, initial_indent=indent, subsequent_indent=indent))


def _map(report: Report, samples: Sequence[Sample], network: str, console: Console) -> None:
    """Rates from the row's host to the column's: numbers, or shades where the hosts are many."""
    hosts = sorted({host for sample in samples for host in (sample.way.source, sample.way.target)})
    cells: dict[tuple[int, int], Sample] = {}
    for sample in samples:
        ends = sample.way.source, sample.way.target
        if ends not in cells or sample.rate_bps < cells[ends].rate_bps:
            cells[ends] = sample  # the slowest of several paths
    most = max((sample.rate_bps for sample in samples), default=0.0)
    if len(hosts) > _MAP_MAX:
        console.print(f"\n{len(hosts)} hosts: too many for a map here; use --png FILE")
        return
    many = len(hosts) > _NUMBERS_MAX
    unit, name = (1e9, "Gbit/s") if most >= 1e9 else (1e6, "Mbit/s")
    console.print(f"\nRate in {name}, from row to column, network {network}", style="bold")
    ascii_only = console.options.ascii_only
    names = {host: _short(report.hosts[host].name) for host in hosts}
    width = max(map(len, names.values()))
    if not many:
        console.print(" " * width + "".join(f" {names[host][-7:]:>7}" for host in hosts))
    for row in hosts:
        line = Text(f"{names[row]:<{width}}" + " " * many)
        for column in hosts:
            line.append_text(_cell(cells.get((row, column)), most, unit, many, ascii_only))
        console.print(line)
    if many:
        shades = [f"{shade[2] if ascii_only else shade[1]} from {shade[0]:.0%}" for shade in _SHADES]
        legend = f"{', '.join(shades)} of {rate_text(most)}; x no answer; space: not measured"
        console.print(textwrap.fill(legend, COLUMNS))


def _cell(sample: Sample | None, most: float, unit: float, many: bool, ascii_only: bool) -> Text:
    if sample is None:
        return Text(" " if many else f" {'.':>7}")
    if not sample.is_reached:
        return Text("x" if many else f" {'-':>7}", style="bold red")
    share = sample.rate_bps / most if most else 0.0
    shade = next(row for row in _SHADES if share >= row[0])
    if many:
        return Text(shade[2] if ascii_only else shade[1], style=shade[3])
    number = f"{sample.rate_bps / unit:.3g}{'+' * sample.is_own_limit}"
    return Text(f" {number:>7}", style=shade[3])


def _rows(report: Report, console: Console) -> None:
    """A line for each path and direction."""
    console.print("\nRound trips (idle p50, p99; p99 while the path is full), loss, MTU", style="bold")
    names = [f"{_end(report, sample, True)} > {_end(report, sample, False)}" for sample in report.samples]
    width = min(36, max(len(name) for name in names))
    console.print(f"{'':<{width}} {'p50':>7} {'p99':>7} {'full':>7} {'loss':>7} {'MTU':>5}")
    for name, sample in zip(names, report.samples, strict=True):
        if not sample.is_reached:
            console.print(f"{name[-width:]:<{width}} no answer", style="red")
            continue
        times = [*(sample.rtt_us or [0.0, 0.0]), (sample.loaded_rtt_us or [0.0, 0.0])[1]]
        cells = " ".join(f"{time_text(time).replace(' ', ''):>7}" for time in times)
        loss = f"{sample.loss:.2%}" if sample.lost else "0"
        console.print(f"{name[-width:]:<{width}} {cells} {loss:>7} {sample.mtu:>5}")


def _end(report: Report, sample: Sample, source: bool) -> str:
    way = sample.way
    host, nic = (way.source, way.source_nic) if source else (way.target, way.target_nic)
    name = _short(report.hosts[host].name)
    return f"{name} {nic}" if len(report.hosts[host].nics) > 1 else name


def _short(name: str) -> str:
    """The name without its domain, and of a long one the end."""
    return name.partition(".")[0][-_NAME_MAX:]
