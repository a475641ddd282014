from collections.abc import Sequence
from typing import Any

import pytest

from bench import stress
from bench.harness.matrix import P50, P99, Claim, Runs
from bench.stress import BESIDE, URGENT, WIRES
from tests.unit.bench.stress_runs import BARE, HOOK, run_of

FLOAT32, SHORT = WIRES


def reached(claim: Claim, runs: Runs) -> bool:
    found = claim.evaluate(runs)
    assert found is not None
    return found.reached


def test_the_best_gloo_of_the_same_wire_against_the_worse_treatment() -> None:
    runs = {
        "loss1": run_of(
            bare=(BARE, 100, 110),
            hook=(HOOK, 200, 220),
            papers=("commlayer:loss_bound=0.01:treatment=zero:partial_results=True", 900, 900),
            cubic=("gloo/cubic", 500, 9000),
            bbr=("gloo/bbr", 600, 700),
            cast=("gloo/bbr:cast=float16", 1, 1),
        )
    }
    found = stress.over_gloo("loss1", FLOAT32, P50, 2.5).outcome(runs)
    assert (found.ours, found.other, found.ratio, found.reached) == ("200 ms", "500 ms (gloo/cubic)", 2.5, True)
    assert not reached(stress.over_gloo("loss1", FLOAT32, P50, 2.6), runs)
    tail = stress.over_gloo("loss1", FLOAT32, P99, 3).outcome(runs)
    assert tail.other == "700 ms (gloo/bbr)"
    assert stress.over_gloo("loss1", SHORT, P50, 2).evaluate(runs) is None  # nothing of ours is cast


@pytest.mark.parametrize(("p50", "good"), [(107.0, True), (109.0, False)])
def test_time_against_reliable_mode_without_loss(p50: float, good: bool) -> None:
    runs = {"clean": run_of(a=("commlayer", 100, 100)), "loss1": run_of(a=(BARE, 90, 90), b=(HOOK, p50, 200))}
    assert reached(stress.over_reliable("loss1", FLOAT32, 1.08), runs) is good


def test_tail_is_that_of_the_worse_treatment() -> None:
    runs = {"loss1": run_of(a=(BARE, 100, 130), b=(HOOK, 200, 210))}
    assert reached(stress.tail("loss1", FLOAT32, 1.3), runs)
    assert not reached(stress.tail("loss1", FLOAT32, 1.15), runs)


def test_an_urgent_operation_against_itself_on_an_idle_network() -> None:
    runs = {"priority": run_of(idle=(URGENT, 4, 9), busy=(URGENT + BESIDE, 5, 8))}
    assert not reached(stress.beside("priority", URGENT, 1.5), runs)
    assert reached(stress.beside("priority", URGENT, 2), runs)
    assert reached(stress.beside("priority", URGENT, None), runs)


@pytest.mark.parametrize(("share", "good"), [(0.949, False), (0.951, True)])
def test_share_of_all_nics(share: float, good: bool) -> None:
    runs = {"nics-4x50": run_of(a=("commlayer", share, 1), b=("gloo/bbr:chunks=8", 0.5, 1))}
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
    assert claim.evaluate(dying([100] * 10, died_s=5)) is None  # after the measurement


def test_a_run_that_failed() -> None:
    runs = {"nic-dies": {"failed": "no more"}, "nic-dies-gloo": {"failed": "no more"}}
    assert not reached(stress.death("nic-dies", 200), runs)
    assert reached(stress.death("nic-dies-gloo", None), runs)


def test_wrong_results_reach_nothing() -> None:
    runs: Any = {"loss1": run_of(a=(BARE, 100, 100), b=(HOOK, 100, 100), c=("gloo/bbr", 900, 900))}
    assert reached(stress.over_gloo("loss1", FLOAT32, P50, 2), runs)
    runs["loss1"]["results"][0]["wrong"] = 1
    assert not reached(stress.over_gloo("loss1", FLOAT32, P50, 2), runs)
    assert not reached(stress.tail("loss1", FLOAT32, 2), runs)
