"""The script behind docs/fabric.md: its tables repeat the output of the program."""

import dataclasses
from pathlib import Path
from typing import Any

from bench import fabric


def result(message_us: float, missing: float = 0.0) -> dict[str, Any]:
    times = {"count": 1, "mean_us": message_us, "p99_us": 10 * message_us}
    return {
        "messages": times,
        "collectives": times,
        "background_short": times,
        "urgent": times,
        "round_us": 2 * message_us,
        "missing": missing,
        "packets": 1000,
        "marked": 5,
        "selected": 6,
        "overflowed": 7,
        "dlcp": {"again": 8},
        "dctcp": {"again": 9, "timeouts": 2},
    }


RING = fabric.CASES["ring"]


def test_rows_are_means_over_seeds_beside_the_first_transport() -> None:
    first, second = fabric.rows(RING, {"dctcp": [result(90), result(110)], "reliable": [result(50, 0.01)]})
    assert first.startswith("| ring, 12 MiB | DCTCP | 2 | 100 |  | 1000 |")
    assert second.startswith("| ring, 12 MiB | DLCP, reliable | 1 | 50 | -50.0 % | 500 | -50.0 % |")
    assert second.endswith("| 1.00 % |")


def test_runs_that_are_missing_or_did_not_end_are_named() -> None:
    first, second = fabric.rows(RING, {"dctcp": [result(90), {"unfinished": "not over after 1 s"}]})
    assert "not over after 1 s" in first
    assert "not run" in second
    assert first.count("|") == second.count("|") == fabric.HEAD.splitlines()[0].count("|")


def test_counters_are_sums() -> None:
    text = fabric.counters({"ring": {"dctcp": [result(1), result(3)]}})
    assert text.splitlines()[-1] == "| ring, 12 MiB | DCTCP | 2000 | 10 | 12 | 14 | 34 | 4 | 20 |"


def test_runs_without_background_have_no_time_of_its_flows() -> None:
    quiet = result(1) | {"background_short": {"count": 0}}
    assert fabric.counters({"alone": {"dctcp": [quiet]}}).splitlines()[-1].endswith("| 2 |  |")


def test_steps_tell_the_urgent_bucket_and_the_whole() -> None:
    dctcp, dlcp = fabric.urgent({"step": {"dctcp": [result(100)], "bounded": [result(80)]}}).splitlines()[2:]
    assert dctcp == "| three buckets at once, 21 MiB | DCTCP | 1 | 100 |  | 200 |  |"
    assert dlcp.endswith("| 1 | 80 | -20.0 % | 160 | -20.0 % |")
    assert "ring" not in fabric.urgent({"ring": {"dctcp": [result(1)]}})


def test_options_reach_the_program() -> None:
    words = fabric.command(fabric.CASES["shallow"], "bounded", 3, quick=True)
    options = dict(zip(words[1::2], words[2::2], strict=True))
    assert options["--port_kib"] == "256"
    assert options["--loss_bound"] == "0.1"
    assert options["--seed"] == "3"
    assert options["--leaves"] == "3"


def test_only_the_text_between_the_markers_changes(tmp_path: Path) -> None:
    page = tmp_path / "fabric.md"
    page.write_text("before\n<!-- fabric:begin -->\nold\n<!-- fabric:end -->\nafter\n")
    dataclasses.replace(fabric.BENCHMARK, page=page).write({"ring": {"dctcp": [result(1)]}})
    text = page.read_text()
    assert text.startswith("before\n<!-- fabric:begin -->\n| workload")
    assert text.endswith("\n<!-- fabric:end -->\nafter\n")
    assert "old" not in text
