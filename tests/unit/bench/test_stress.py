import dataclasses
from pathlib import Path

from bench import stress
from bench.stress import CASES, CLAIMS, GLOO_TUNED
from commlayer.tools.bench.spec import BackendSpec
from commlayer.tools.emulate.scenario import Scenario
from tests.unit.bench.stress_runs import BARE, run_of


def test_every_claim_has_its_case_and_every_case_its_scenario() -> None:
    assert {claim.run for claim in CLAIMS} == set(CASES)
    for case in CASES.values():
        Scenario.read(case.scenario)
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


def test_a_run_that_failed_is_in_the_table() -> None:
    assert "failed: no more" in stress.figures_table({"nic-dies": {"failed": "no more"}})


def test_missing_measurements_are_named() -> None:
    text = stress.claims_table({})
    assert text.count("not measured") == len(CLAIMS)
    assert "| yes |" not in text


def test_the_page_has_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "stress.md"
    page.write_text(stress.MATRIX.page.read_text())
    dataclasses.replace(stress.MATRIX, page=page).benchmark.write({"runs": {"loss1": run_of(a=(BARE, 100, 110))}})
    assert f"| {CASES['loss1'].title} | {BARE} | 100 ms | 110 ms |" in page.read_text()
