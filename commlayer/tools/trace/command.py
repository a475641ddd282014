"""`commlayer trace`: reads the files, aligns the clocks, writes the trace."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, cast

from ...transport.whole_file import whole_file
from . import analyzer, summary
from .align import Alignment, solve
from .merge import merged
from .operation import Record
from .order import bounds
from .records import MERGED, read_all


def run(
    files: Sequence[Path],
    output: Path,
    say: Callable[[str], None],
    *,
    pickles: bool = False,
    for_analyzer: Path | None = None,
) -> dict[str, Any]:
    """Merges the files into `output` and returns the summary. `say` gets the table and the warnings, line by line.
    `pickles`: reads pickles, too. `for_analyzer`: the folder to make for torch's analyzer.

    Raises ValueError, whose text names the file and the remedy.
    """
    warned: list[str] = []

    def warn(text: str) -> None:
        warned.append(text)
        say(summary.wrapped(f"warning: {text}"))

    records = read_all(files, warn, pickles)
    alignments = solve(bounds(records))
    for line in summary.table(records, alignments):
        say(line)
    for text in summary.warnings(records, alignments):
        warn(text)
    count = write(records, alignments, output)
    found = {"output": str(output), "events": count, "ranks": summary.values(records, alignments), "warnings": warned}
    ranks = len({record.rank for record in records})
    of = f"{ranks} rank{'s' * (ranks > 1)}"
    say(summary.wrapped(f"{output}: {count} events of {of}. Open it at https://ui.perfetto.dev, or with --open"))
    if for_analyzer is not None:
        made = analyzer.write(records, for_analyzer, pickles)
        say(f"{for_analyzer}: {made} flight record{'s' * (made > 1)}. Now: torchfrtrace {for_analyzer}")
    return found


def write(records: Sequence[Record], alignments: Sequence[Alignment], output: Path) -> int:
    """Writes the trace, compressed if its name ends with .gz. Returns the number of its events."""
    events, base_ns = merged(records, alignments)
    head = {
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base_ns,
        "otherData": {"program": MERGED, "clocks": summary.values(records, alignments)},
    }
    try:
        with whole_file(output) as file, _writer(file, output) as to:
            to.write(json.dumps(head)[:-1].encode() + b',\n"traceEvents": [\n')
            for number, event in enumerate(events):
                to.write(b",\n" * (number > 0) + json.dumps(event).encode())
            to.write(b"\n]}\n")
    except OSError as error:
        raise ValueError(f"{output}: {error.strerror}; name a file that can be made with -o") from error
    return len(events)


def _writer(file: IO[bytes], output: Path) -> IO[bytes]:
    """Writes into the file, compressed if its name will end with .gz."""
    return cast("IO[bytes]", gzip.open(file, "wb")) if output.suffix == ".gz" else file
