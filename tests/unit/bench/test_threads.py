"""The table of two threads beside one, and its target."""

from __future__ import annotations

from typing import Any

import pytest

from bench import threads
from bench.harness.driver import BenchError

MACHINE = {"cpu": "CPU", "cores": 2, "load_average": 0.1, "kernel": "Linux", "torch": "2.13", "git_commit": "0"}


def content(one_s: float, two_s: float) -> dict[str, Any]:
    figures = {
        number: {size: {"seconds": seconds, "cpu_s": cpu_s} for size in threads.SIZES}
        for number, seconds, cpu_s in (("1", one_s, 1.0), ("2", two_s, 1.1))
    }
    return {"cases": {"cores": {"rounds": [figures], "machine": MACHINE, "measured": "2026-12-01"}}}


def test_the_table_has_ratios_of_the_same_round() -> None:
    rows = threads.table(content(0.018, 0.009)).splitlines()
    assert rows[2] == ("| four, of 40% each | 1 MiB | 18.00 | 9.00 | 2.00 (2.00 to 2.00) | 1.10 (1.10 to 1.10) |")
    assert len([row for row in rows if row.startswith("| four")]) == len(threads.SIZES)


@pytest.mark.parametrize(("two_s", "reached"), [(0.0099, True), (0.0101, False)])
def test_the_target_is_for_the_longest_operation(two_s: float, *, reached: bool) -> None:
    assert threads.reaches(content(0.018, two_s)) == reached


def test_a_failed_rank_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "false")
    with pytest.raises(BenchError, match=r"COMMLAYER_THREADS=2 ended with \[1, 1\]"):
        threads.measure(2, 0.0)
