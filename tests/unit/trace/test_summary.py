"""The table of clocks, the warnings, and the same as values."""

from pathlib import Path

from commlayer.tools.trace import summary
from commlayer.tools.trace.align import Alignment
from commlayer.tools.trace.operation import Record


def record(rank: int, name: str = "", host: str = "") -> Record:
    return Record(Path(f"/runs/{name or f'flight_{rank}'}"), "flight", rank, host or f"host{rank}", 1, 0, [])


REFERENCE = Alignment(0.0, 0.0, 0)


def test_the_table_has_80_columns() -> None:
    records = [record(0), record(1, "a-very-long-name-of-a-file-of-a-job-that-ran-on-many-hosts.json", "h" * 40)]
    lines = list(summary.table(records, [REFERENCE, Alignment(-3_000_012_345.0, 41_000.0, 0)]))
    assert lines == [
        "rank  host               clock moved by   uncertainty  file",
        "   0  host0                   reference                flight_0",
        "   1  hhhhhhhhhhhh..       -3000.012 ms     ±0.041 ms  a-very-long-name-of-a-f..",
    ]
    assert max(map(len, lines)) <= 80


def test_nothing_to_warn_of() -> None:
    assert list(summary.warnings([record(0), record(1)], [REFERENCE, Alignment(500.0, 10.0, 0)])) == []


def test_a_clock_that_drifts_is_named() -> None:
    (text,) = summary.warnings([record(0), record(1)], [REFERENCE, Alignment(5e6, 5e6, 0, drift_ns=1e7)])
    assert text.startswith("rank 1 (flight_1): its bounds contradict those of other ranks by 10.000 ms: its clock")


def test_clocks_without_bounds_are_named() -> None:
    alignments = [Alignment(0.0, None, number) for number in range(10)]
    (text,) = summary.warnings([record(number) for number in range(10)], alignments)
    assert text.startswith("rank 0 (flight_0), rank 1 (flight_1)")
    assert "rank 7 (flight_7) and 2 more: no operation" in text
    assert summary.values([record(0)], [Alignment(0.0, None, 0)])[0]["uncertainty_s"] is None
    assert list(summary.table([record(1)], [Alignment(0.0, None, 0)]))[1].split()[2:5] == ["+0.000", "ms", "unknown"]


def test_one_rank_alone_needs_no_warning() -> None:
    assert list(summary.warnings([record(0)], [REFERENCE])) == []


def test_ranks_apart_from_the_first_are_named() -> None:
    records = [record(number) for number in range(4)]
    alignments = [REFERENCE, Alignment(0.0, 0.0, 1), Alignment(7.0, 1.0, 0), Alignment(7.0, 1.0, 1)]
    (text,) = summary.warnings(records, alignments)
    assert text.startswith("ranks 1, 3: aligned with rank 1, whose clock is its own: they have no collective in common")


def test_files_that_seem_of_two_runs_are_named() -> None:
    (text,) = summary.warnings([record(0), record(1)], [REFERENCE, Alignment(-3.6e12, 1.0, 0)])
    assert text == (
        "rank 1 (flight_1): its clock differs by 3600 s from that of rank 0; check that the files are of one run"
    )


def test_values_by_rank() -> None:
    records = [record(0), record(0, "trace_0.json"), record(1)]
    alignments = [REFERENCE, Alignment(1000.0, 500.0, 0), Alignment(-2e9, 1e6, 0, 3e6)]
    first, second = summary.values(records, alignments)
    assert [file["path"] for file in first["files"]] == ["/runs/flight_0", "/runs/trace_0.json"]
    assert (first["files"][1]["offset_s"], first["offset_s"]) == (1e-6, 0)
    assert (second["offset_s"], second["uncertainty_s"], second["contradiction_s"]) == (-2, 0.001, 0.003)


def test_warnings_are_wrapped() -> None:
    lines = summary.wrapped(f"warning: {'word ' * 40}/a/path/{'x' * 90}").splitlines()
    assert max(len(line) for line in lines[:-1]) <= 80
    assert lines[-1].strip() == f"/a/path/{'x' * 90}"
