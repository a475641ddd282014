"""The summary of the clocks: a table, warnings, and values for JSON."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from .align import Alignment
from .merge import host_of
from .operation import Record

WIDTH = 80

STRANGE_NS = 60e9
"""Clocks of hosts that differ by more are worth a warning: the files may be of two runs."""

SHOWN = 8
"""Ranks or files that a warning names."""


def table(records: Sequence[Record], alignments: Sequence[Alignment]) -> Iterator[str]:
    """A line for each file, of at most 80 columns."""
    yield f"{'rank':>4}  {'host':<14} {'clock moved by':>18}  {'uncertainty':>12}  file"
    hosts = _hosts(records)
    for record, alignment in zip(records, alignments, strict=True):
        moved = "reference" if alignment.is_reference else f"{alignment.offset_ns / 1e6:+.3f} ms"
        sure = (
            ""
            if alignment.is_reference
            else "unknown"
            if alignment.uncertainty_ns is None
            else f"±{_ms(alignment.uncertainty_ns)}"
        )
        line = f"{record.rank:>4}  {_cut(hosts[record.rank], 14):<14} {moved:>18}  {sure:>12}  "
        yield line + _cut(record.path.name, max(WIDTH - len(line), 8))


def warnings(records: Sequence[Record], alignments: Sequence[Alignment]) -> Iterator[str]:
    """Problems of the clocks, with their remedies."""
    first = next((number for number, alignment in enumerate(alignments) if alignment.is_reference), None)
    alone, apart = [], defaultdict(list)
    for number, (record, alignment) in enumerate(zip(records, alignments, strict=True)):
        if alignment.drift_ns:
            yield (
                f"rank {record.rank} ({record.path.name}): its bounds contradict those of other ranks by "
                f"{_ms(alignment.drift_ns)}: its clock drifts or was set meanwhile, or the file is of another run; the "
                f"trace has it in the middle"
            )
        if alignment.uncertainty_ns is None:
            alone.append(number)
        elif alignment.reference != first:
            apart[alignment.reference].append(record.rank)
        if abs(alignment.offset_ns) > STRANGE_NS:
            yield (
                f"rank {record.rank} ({record.path.name}): its clock differs by {abs(alignment.offset_ns) / 1e9:.0f} s "
                f"from that of rank {records[alignment.reference].rank}; check that the files are of one run"
            )
    if alone:
        yield (
            f"{_named([records[number] for number in alone])}: no operation that orders its events with those of "
            f"other ranks in both directions: keeps its own clock. Flight records have such operations, and so have "
            f"profiles with record_shapes=True"
        )
    for reference, ranks in apart.items():
        yield (
            f"ranks {_ranks(ranks)}: aligned with rank {records[reference].rank}, whose clock is its own: they have no "
            f"collective in common with rank {records[first or 0].rank}"
        )


def values(records: Sequence[Record], alignments: Sequence[Alignment]) -> list[dict[str, Any]]:
    """The same, for JSON: one object for each rank."""
    hosts, found = _hosts(records), dict[int, dict[str, Any]]()
    for record, alignment in zip(records, alignments, strict=True):
        moved = {
            "offset_s": alignment.offset_ns / 1e9,
            "uncertainty_s": None if alignment.uncertainty_ns is None else alignment.uncertainty_ns / 1e9,
            "contradiction_s": alignment.drift_ns / 1e9,
            "reference_rank": records[alignment.reference].rank,
        }
        own = found.setdefault(record.rank, {"rank": record.rank, "host": hosts[record.rank], **moved, "files": []})
        own["files"].append({"path": str(record.path), "kind": record.kind, **moved})
    return list(found.values())


def _hosts(records: Sequence[Record]) -> dict[int, str]:
    return {record.rank: host_of([other for other in records if other.rank == record.rank]) for record in records}


def _named(records: Sequence[Record]) -> str:
    shown = [f"rank {record.rank} ({record.path.name})" for record in records[:SHOWN]]
    return ", ".join(shown) + (f" and {len(records) - SHOWN} more" if len(records) > SHOWN else "")


def _ranks(ranks: Sequence[int]) -> str:
    named = sorted(set(ranks))
    return ", ".join(map(str, named[:SHOWN])) + (f" and {len(named) - SHOWN} more" if len(named) > SHOWN else "")


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.3f} ms"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 2] + ".."


def wrapped(text: str) -> str:
    """A warning in lines of at most 80 columns, paths whole."""
    return textwrap.fill(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
