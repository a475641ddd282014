"""The table of messages between hosts."""

import dataclasses
from pathlib import Path
from typing import Any

from bench.p2p import BEFORE, CLAIMS, MATRIX, RUNS, table


def run(sizes: list[int], gloo_us: float, ours_us: float) -> dict[str, Any]:
    times = {"gloo/cubic": 2 * gloo_us, "gloo/bbr": gloo_us, "commlayer": ours_us}
    results = [
        {"backend": backend, "size_bytes": size, "wrong": 0, "p50_us": us}
        for size in sizes
        for backend, us in times.items()
    ]
    machine = {"cores": 2, "cpu": "a cpu", "kernel": "Linux 6", "torch": "2.13", "git_commit": "abc"}
    return {"results": results, "machine": machine, "link": None}


def test_every_claim_has_its_run_and_size() -> None:
    for (kind, size, rate), claim in CLAIMS.items():
        words = RUNS[claim.run].split()
        assert words[0] == ("pingpong" if kind in BEFORE else kind)
        assert BEFORE.get(kind, "") in RUNS[claim.run]
        assert words[words.index("--rate") + 1] == rate
        assert size in words[words.index("--sizes") + 1].split(",")
    assert {claim.run for claim in CLAIMS.values()} == set(RUNS)


def test_a_cell_has_both_times_and_says_which_is_slower() -> None:
    runs = {
        "pingpong-200M-small": run([4096], 300.0, 200.0),
        "pingpong-1G-small": run([4096], 300.0, 309.0),
        "pingpong-50M-small": run([4096], 300.0, 320.0),
    }
    row = next(line for line in table(runs).splitlines() if "4KiB" in line)
    assert "| 320 µs / 300 µs (gloo/bbr): 0.94x (**slower**) |" in row
    assert "| 200 µs / 300 µs (gloo/bbr): 1.50x |" in row
    assert "| 309 µs / 300 µs (gloo/bbr): 0.97x |" in row
    assert "commits abc" in table(runs)


def test_the_page_has_its_marker(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    page.write_text(MATRIX.page.read_text())
    dataclasses.replace(MATRIX, page=page).benchmark.write({"runs": {}})
    _, _, part = page.read_text().partition("<!-- p2p:begin -->")
    assert part.count("not measured") == len(CLAIMS)
