"""The plans that bench.planner_steps chooses, their way to the job, and its table."""

import pytest

from bench.jobs.planned import FORWARD, KILOBYTES, UNIT_S, WIDTH, plan_of
from bench.planner_steps import CASES, KINDS, chosen, cluster_of, kind, table, table_of
from commlayer.planner import Costs, Layer, Link, Plan


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    layers = [
        Layer(UNIT_S * weight, 2 * UNIT_S * weight, 1000 * size, 4 * WIDTH, output_bytes=4 * WIDTH)
        for weight, size in zip(FORWARD, KILOBYTES, strict=True)
    ]
    return chosen(Costs(layers, Link(1e9)), cluster_of(CASES["half"], 1e-4))


def test_every_kind_runs_as_it_was_chosen(plans: dict[str, Plan]) -> None:
    assert len(plans) == KINDS
    assert [plan.step_s for plan in plans.values()] == pytest.approx(sorted(plan.step_s for plan in plans.values()))
    for name, plan in plans.items():
        run = plan_of(table_of(plan))
        assert kind(run) == name
        assert run.choice.order() == plan.choice.order()
        assert run.choice.cuts == plan.choice.cuts


def test_the_table_compares_the_choice_with_the_fastest() -> None:
    def logs(name: str, *steps: float) -> list[dict[str, object]]:
        return [{"job": {"system": name}, "step_s": [step], "busy": 0.1, "of_ranks": 0.1} for step in steps]

    about = dict.fromkeys(("cores", "cpu", "kernel", "torch", "load_average", "git_commit"), "")
    content = {
        "case": CASES["half"]._asdict(),
        "predicted_s": {"first": 1.0, "second": 1.2},
        "runs": [*logs("first", 1.1, 1.3, 1.2), *logs("second", 1.0, 1.0, 1.0)],
        "machine": about,
        "measured": "today",
    }
    text = table(content)
    assert "| first | 1000 ms | 1200 ms (1100 to 1300) | 0.833 | 10% |" in text
    assert "Largest error 20.0%" in text
    assert "0 of 2 within 10 %" in text
    assert "took 1.20 times the fastest measured one (second): not reached" in text
