import dataclasses
from pathlib import Path
from typing import Any

import pytest

from bench.first_light import BUSBW, CLAIMS, MATRIX, RUNS, claim, table
from bench.harness.matrix import LINK_SHARE, P50, P99, Claim, Figures, Metric


def run(**figures: dict[str, float]) -> dict[str, Any]:
    results = [
        {"backend": backend.replace("_", "/"), "size_bytes": 4096, "wrong": 0, "spread": 0.0, **values}
        for backend, values in figures.items()
    ]
    machine = {"cores": 2, "cpu": "a cpu", "kernel": "Linux 6", "torch": "2.13"}
    return {"results": results, "machine": machine, "link": None}


def of(metric: Metric, ratio: float | None = None, figure: float | None = None) -> Claim:
    return claim("case", "one", "4K", metric, ratio=ratio, figure=figure)


def figures(claim: Claim, runs: dict[str, Any]) -> Figures:
    found = claim.evaluate(runs)
    assert found is not None
    return found


def test_every_claim_has_its_run_and_size() -> None:
    for stated in CLAIMS:
        words = RUNS[stated.run].split()
        assert stated.variant.removesuffix("iB") in words[words.index("--sizes") + 1].split(",")
        assert {"gloo", "commlayer"} == set(words[words.index("--backends") + 1].split(","))


def test_less_time_is_a_higher_ratio() -> None:
    runs = {"one": run(gloo={"p50_us": 500.0}, commlayer={"p50_us": 100.0})}
    assert figures(of(P50, 5), runs) == Figures("100 µs", "500 µs (gloo)", 5.0, True)
    assert not figures(of(P50, 5.1), runs).reached
    assert of(P50, 5.1).row(runs) == "| case | 4KiB | p50 | 100 µs | 500 µs (gloo) | 5.00x | ≥ 5.1x | **no** |"


def test_the_better_gloo_counts() -> None:
    slow, fast = {"busbw_gb_s": 1.0}, {"busbw_gb_s": 2.0}
    found = figures(of(BUSBW, 1.8), {"one": run(gloo_cubic=slow, gloo_bbr=fast, commlayer={"busbw_gb_s": 3.0})})
    assert (found.other, found.ratio, found.reached) == ("2 GB/s (gloo/bbr)", 1.5, False)


@pytest.mark.parametrize(("share", "good"), [(0.949, False), (0.951, True)])
def test_target_of_a_figure_where_more_is_better(share: float, good: bool) -> None:
    runs = {"one": run(gloo={"link_share": 0.9}, commlayer={"link_share": share})}
    assert figures(of(LINK_SHARE, figure=0.95), runs).reached is good


@pytest.mark.parametrize(("p99_us", "good"), [(24_999.0, True), (25_001.0, False)])
def test_target_of_a_figure_where_less_is_better(p99_us: float, good: bool) -> None:
    runs = {"one": run(gloo={"p99_us": 200_000.0}, commlayer={"p99_us": p99_us})}
    assert figures(of(P99, figure=25_000), runs).reached is good


def test_wrong_results_reach_nothing() -> None:
    runs = {"one": run(gloo={"p50_us": 500.0}, commlayer={"p50_us": 1.0, "wrong": 1})}
    assert not figures(of(P50, 2), runs).reached


def test_claims_that_were_not_measured_say_so() -> None:
    assert of(P50, 2).evaluate({}) is None
    for runs in ({}, {name: {"failed": "no root"} for name in RUNS}):
        text = table(runs)
        assert text.count("not measured") == len(CLAIMS)
        assert "| yes |" not in text


def test_the_page_has_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    page.write_text(MATRIX.page.read_text())
    dataclasses.replace(MATRIX, page=page).benchmark.write({"runs": {}})
    assert "not measured" in page.read_text()
