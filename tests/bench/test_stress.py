from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import stress
from bench.stress import BESIDE, CASES, CLAIMS, GLOO_TUNED, URGENT, WIRES, Claim, Runs
from commlayer.bench.matrix import P50, P99
from commlayer.bench.spec import BackendSpec
from commlayer.emulate.scenario import Scenario

BARE, HOOK = "commlayer:loss_bound=0.01:treatment=rescale", "commlayer:loss_bound=0.01"
FLOAT32, SHORT = WIRES


def run(**figures: tuple[str, float, float]) -> dict[str, Any]:
    """Each figure: a backend, its p50 and its p99 in ms."""
    results = [
        {
            "backend": backend,
            "p50_us": p50 * 1e3,
            "p99_us": p99 * 1e3,
            "wrong": 0,
            "link_share": p50,
            "not_counted": 0.0,
        }
        | {"samples": 2, "spread": 0.0, "packets": {}}
        for backend, p50, p99 in figures.values()
    ]
    return {"results": results}


def reached(claim: Claim, runs: Runs) -> bool:
    found = stress.evaluate(claim, runs)
    assert found is not None
    return found.reached


def test_every_claim_has_its_case_and_every_case_its_scenario() -> None:
    assert {claim.run for claim in CLAIMS} == set(CASES)
    for case in CASES.values():
        Scenario.read(stress.ROOT / f"bench/scenarios/{case.scenario}.toml")
        for name in (*case.backends, *GLOO_TUNED):
            assert str(BackendSpec.parse(name))


def test_gloo_is_tuned_for_each_congestion_control_and_wire() -> None:
    assert len(GLOO_TUNED) == 2 * 3 * 2
    results = [{"backend": name, "p50_us": 100.0 + index} for index, name in enumerate(GLOO_TUNED)]
    results[GLOO_TUNED.index("gloo/bbr:cast=bfloat16:chunks=4")]["p50_us"] = 1.0
    assert stress.tuned(results) == [
        *("gloo/cubic", "gloo/bbr"),
        *("gloo/cubic:cast=float16", "gloo/bbr:cast=bfloat16:chunks=4"),
    ]


def test_the_best_gloo_of_the_same_wire_against_the_worse_treatment() -> None:
    runs = {
        "loss1": run(
            bare=(BARE, 100, 110),
            hook=(HOOK, 200, 220),
            papers=("commlayer:loss_bound=0.01:treatment=zero:consistency=relaxed", 900, 900),
            cubic=("gloo/cubic", 500, 9000),
            bbr=("gloo/bbr", 600, 700),
            cast=("gloo/bbr:cast=float16", 1, 1),
        )
    }
    found = stress.over_gloo("loss1", FLOAT32, P50, 2.5).evaluate(runs)
    assert (found.ours, found.other, found.ratio, found.reached) == ("200 ms", "500 ms (gloo/cubic)", 2.5, True)
    assert not reached(stress.over_gloo("loss1", FLOAT32, P50, 2.6), runs)
    tail = stress.over_gloo("loss1", FLOAT32, P99, 3).evaluate(runs)
    assert tail.other == "700 ms (gloo/bbr)"
    assert stress.evaluate(stress.over_gloo("loss1", SHORT, P50, 2), runs) is None  # nothing of ours is cast


@pytest.mark.parametrize(("p50", "good"), [(107.0, True), (109.0, False)])
def test_time_against_reliable_mode_without_loss(p50: float, good: bool) -> None:
    runs = {"clean": run(a=("commlayer", 100, 100)), "loss1": run(a=(BARE, 90, 90), b=(HOOK, p50, 200))}
    assert reached(stress.over_reliable("loss1", FLOAT32, 1.08), runs) is good


def test_tail_is_that_of_the_worse_treatment() -> None:
    runs = {"loss1": run(a=(BARE, 100, 130), b=(HOOK, 200, 210))}
    assert reached(stress.tail("loss1", FLOAT32, 1.3), runs)
    assert not reached(stress.tail("loss1", FLOAT32, 1.15), runs)


def test_an_urgent_operation_against_itself_on_an_idle_network() -> None:
    runs = {"priority": run(idle=(URGENT, 4, 9), busy=(URGENT + BESIDE, 5, 8))}
    assert not reached(stress.beside("priority", URGENT, 1.5), runs)
    assert reached(stress.beside("priority", URGENT, 2), runs)
    assert reached(stress.beside("priority", URGENT, None), runs)


@pytest.mark.parametrize(("share", "good"), [(0.949, False), (0.951, True)])
def test_share_of_all_nics(share: float, good: bool) -> None:
    runs = {"nics-4x50": run(a=("commlayer", share, 1), b=("gloo/bbr:chunks=8", 0.5, 1))}
    assert reached(stress.link_share("nics-4x50", 0.95), runs) is good


def dying(times_ms: Sequence[float], died_s: float) -> Runs:
    began_s = [sum(times_ms[:index]) / 1e3 for index in range(len(times_ms))]
    result = {
        "backend": "commlayer",
        "wrong": 0,
        "began_s": [began_s],
        "iterations_us": [[ms * 1e3 for ms in times_ms]],
    }
    return {"nic-dies": {"results": [result], "events": [{"at_s": died_s, "event": "5.00 s: link_down at host 2"}]}}


def test_the_longest_operation_that_meets_a_dying_nic() -> None:
    claim = stress.death("nic-dies", 200)
    assert reached(claim, dying([100] * 10 + [290] + [150] * 20, died_s=1.05))
    assert not reached(claim, dying([100] * 10 + [310] + [150] * 20, died_s=1.05))
    assert not reached(claim, dying([100] * 10 + [150, 150, 310] + [150] * 20, died_s=1.05))  # a moment later
    assert reached(claim, dying([100] * 10 + [150] * 30 + [310], died_s=1.05))  # something else
    assert stress.evaluate(claim, dying([100] * 10, died_s=5)) is None  # after the measurement


def test_a_run_that_failed() -> None:
    runs = {"nic-dies": {"failed": "no more"}, "nic-dies-gloo": {"failed": "no more"}}
    assert not reached(stress.death("nic-dies", 200), runs)
    assert reached(stress.death("nic-dies-gloo", None), runs)
    assert "failed: no more" in stress.figures_table(runs)


def test_wrong_results_reach_nothing() -> None:
    runs: Any = {"loss1": run(a=(BARE, 100, 100), b=(HOOK, 100, 100), c=("gloo/bbr", 900, 900))}
    assert reached(stress.over_gloo("loss1", FLOAT32, P50, 2), runs)
    runs["loss1"]["results"][0]["wrong"] = 1
    assert not reached(stress.over_gloo("loss1", FLOAT32, P50, 2), runs)
    assert not reached(stress.tail("loss1", FLOAT32, 2), runs)


def test_what_was_not_measured_is_said() -> None:
    text = stress.claims_table({})
    assert text.count("not measured") == len(CLAIMS)
    assert "| yes |" not in text


def test_the_page_has_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "stress.md"
    page.write_text(stress.PAGE.read_text())
    assert stress.write_page({"loss1": run(a=(BARE, 100, 110))}, page)
    assert f"| {CASES['loss1'].title} | {BARE} | 100 ms | 110 ms |" in page.read_text()
    page.write_text("text\n")
    assert not stress.write_page({}, page)
    assert page.read_text() == "text\n"
