from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import first_light
from bench.first_light import BEGIN, BUSBW, CLAIMS, END, RUNS, Claim, row_of, table
from commlayer.tools.bench.matrix import LINK_SHARE, P50, P99, Metric


def run(**figures: dict[str, float]) -> dict[str, Any]:
    results = [
        {"backend": backend.replace("_", "/"), "size_bytes": 4096, "wrong": 0, "spread": 0.0, **values}
        for backend, values in figures.items()
    ]
    machine = {"cores": 2, "cpu": "a cpu", "kernel": "Linux 6", "torch": "2.13"}
    return {"results": results, "machine": machine, "link": None}


def claim(metric: Metric, min_ratio: float | None = None, bound: float | None = None) -> Claim:
    return Claim("case", "one", "4K", metric, min_ratio, bound)


def reached(claim: Claim, runs: dict[str, Any]) -> bool:
    row = row_of(claim, runs)
    assert row is not None
    return row.reached


def test_every_claim_has_its_run_and_size() -> None:
    for each in CLAIMS:
        words = RUNS[each.run].split()
        assert each.size in words[words.index("--sizes") + 1].split(",")
        assert {"gloo", "commlayer"} == set(words[words.index("--backends") + 1].split(","))


def test_less_time_is_a_higher_ratio() -> None:
    runs = {"one": run(gloo={"p50_us": 500.0}, commlayer={"p50_us": 100.0})}
    row = row_of(claim(P50, 5), runs)
    assert row is not None
    assert row.ratio == 5.0
    assert row.reached
    assert not reached(claim(P50, 5.1), runs)


def test_the_better_gloo_counts() -> None:
    slow, fast = {"busbw_gb_s": 1.0}, {"busbw_gb_s": 2.0}
    row = row_of(claim(BUSBW, 1.8), {"one": run(gloo_cubic=slow, gloo_bbr=fast, commlayer={"busbw_gb_s": 3.0})})
    assert row is not None
    assert (row.gloo_name, row.gloo, row.ratio, row.reached) == ("gloo/bbr", 2.0, 1.5, False)


@pytest.mark.parametrize(("share", "good"), [(0.949, False), (0.951, True)])
def test_bound_of_a_figure_where_more_is_better(share: float, good: bool) -> None:
    runs = {"one": run(gloo={"link_share": 0.9}, commlayer={"link_share": share})}
    assert reached(claim(LINK_SHARE, bound=0.95), runs) is good


@pytest.mark.parametrize(("p99_us", "good"), [(24_999.0, True), (25_001.0, False)])
def test_bound_of_a_figure_where_less_is_better(p99_us: float, good: bool) -> None:
    runs = {"one": run(gloo={"p99_us": 200_000.0}, commlayer={"p99_us": p99_us})}
    assert reached(claim(P99, bound=25_000), runs) is good


def test_wrong_results_reach_nothing() -> None:
    runs = {"one": run(gloo={"p50_us": 500.0}, commlayer={"p50_us": 1.0, "wrong": 1})}
    assert not reached(claim(P50, 2), runs)


def test_what_was_not_measured_is_said() -> None:
    assert row_of(claim(P50, 2), {}) is None
    text = table({})
    assert text.count("not measured") == len(CLAIMS)
    assert "| yes |" not in text


def test_page_changes_between_the_markers_only(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert first_light.write_page({}, page)
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    assert first_light.write_page({}, page)
    assert page.read_text() == text


def test_page_without_markers_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    page.write_text("text\n")
    assert not first_light.write_page({}, page)
    assert page.read_text() == "text\n"
