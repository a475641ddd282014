from pathlib import Path
from typing import Any

import pytest

from bench.convergence import (
    AGAIN,
    EXACT,
    LOSS,
    SEEDS,
    T95,
    TREATMENTS,
    compare,
    jobs,
    plot,
    pooled_deviation,
    t95,
    table,
)
from commlayer.tools.bench import machine


def log(system: str, seed: int, loss: float, loss_bound: float = 0.0, share: float = 0.0) -> dict[str, Any]:
    policy = {"loss_bound": loss_bound, "treatment": system} if loss_bound else {}
    job = {"system": system, "seed": seed, "policy": policy, "batch": 4, "context": 64, "steps": 10}
    return {
        "job": job,
        "loss_bound": loss_bound or 0.1,
        "validations": [[5, 1.0, loss + 1], [10, 2.0, loss]],
        "uncounted_share": share,
        "replicas_identical": True,
        "ranks": 4,
        "parameters": 1000,
    }


def content(shift: float) -> dict[str, Any]:
    """Seeds far apart, exact again within 0.001 of exact, feedback at 3 % the same but for a shift."""
    logs = []
    for seed, base in ((1, 2.0), (2, 2.5), (3, 3.0)):
        wobble = 0.001 * (seed - 2)
        logs += [log(EXACT, seed, base), log(AGAIN, seed, base + wobble)]
        logs += [log("feedback", seed, base + shift - wobble, 0.03, 0.029)]
    return {
        "logs": logs,
        "machine": machine.facts(),
        "measured": "x",
    }


def test_all_compared_variants_are_run() -> None:
    todo = [job for loss_bound in LOSS for job in jobs(loss_bound, SEEDS, {})]
    assert len(todo) == len(SEEDS) * (len(LOSS) * len(TREATMENTS) + 2)
    assert {job.system for job in todo} == {EXACT, AGAIN, *TREATMENTS}
    assert {job.policy["loss_bound"] for job in todo if job.policy} == set(LOSS)
    assert all(loss >= loss_bound for loss_bound, loss in LOSS.items())


def test_differences_are_paired_by_seed() -> None:
    again, feedback = compare(content(0.0))
    assert (again.treatment, feedback.treatment, feedback.loss_bound) == (AGAIN, "feedback", 0.03)
    assert again.differences == pytest.approx((-0.001, 0, 0.001))
    assert feedback.mean == pytest.approx(0)
    assert not feedback.distinguishable  # though the seeds are 0.5 apart


def test_the_interval_is_students() -> None:
    deviation, degrees = pooled_deviation([[1.0, 2.0, 3.0], [5.0, 5.0, 5.0]])
    assert deviation == pytest.approx(0.5**0.5)
    assert degrees == 4
    # deviates by 0.001, with 2 degrees of freedom
    assert compare(content(0.0))[1].half_width == pytest.approx(4.303 * 0.001 / 3**0.5)


def test_treatments_of_a_bound_are_pooled_and_bounds_are_not() -> None:
    more = content(0.0)
    more["logs"] += [log("zero", seed, base, 0.03) for seed, base in ((1, 2.0), (2, 2.5), (3, 3.0))]
    more["logs"] += [log("zero", seed, base + seed, 0.1) for seed, base in ((1, 2.0), (2, 2.5), (3, 3.0))]
    again, feedback, zero, wild = compare(more)
    assert feedback.half_width == zero.half_width == pytest.approx(2.776 * 0.001 / 2**0.5 / 3**0.5)
    assert again.half_width == pytest.approx(4.303 * 0.001 / 3**0.5)
    assert wild.half_width == pytest.approx(4.303 / 3**0.5)


@pytest.mark.parametrize(("shift", "distinguishable"), [(0.0024, False), (0.0026, True), (-0.0026, True)])
def test_a_difference_outside_the_interval_is_distinguishable(shift: float, distinguishable: bool) -> None:
    assert compare(content(shift))[1].distinguishable is distinguishable
    line = next(line for line in table(content(shift)).splitlines() if "| feedback |" in line)
    assert line.endswith("yes |" if distinguishable else "no |")
    assert ("**no**" in table(content(shift))) is distinguishable


def test_a_condition_without_all_seeds_is_left_out() -> None:
    part = content(0.0)
    part["logs"] = [
        entry for entry in part["logs"] if entry["job"]["seed"] != 3 or entry["job"]["system"] != "feedback"
    ]
    assert [pair.treatment for pair in compare(part)] == [AGAIN]
    assert "Nothing has been measured" in table({"logs": []})


def test_quantiles_err_towards_the_wider_interval() -> None:
    assert t95(2) == 4.303
    assert t95(14) == T95[12]
    assert t95(1000) == T95[120]


def test_the_plot_is_the_same_file_for_the_same_results(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        plot(content(0.0), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
