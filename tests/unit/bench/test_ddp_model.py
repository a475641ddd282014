"""The model of bench/overlap.py: its limits by hand, and what each cost adds."""

import dataclasses

import pytest

from bench.jobs.ddp_model import Compute, Costs, ideal, predict

IDEAL = ideal(8, 1.0)  # 8 forward, 16 backward, 24 on the link


def step_s(kind: str, costs: Costs = IDEAL, layers_per_bucket: int = 1) -> float:
    return predict(kind, 8, layers_per_bucket, costs).step_s


def test_limits_are_those_of_arithmetic() -> None:
    assert step_s("step") == pytest.approx(8 + 2 + 24)
    assert step_s("step", layers_per_bucket=4) == pytest.approx(8 + 8 + 24)
    assert step_s("fifo") == pytest.approx(8 + 2 + 24)  # deferral without priority gains nothing
    assert step_s("class") == pytest.approx(24 + 3)
    # The last reduce-scatter takes 1.5 after the backward pass, the all-gathers 12, the last layer 1.
    assert step_s("dear") == pytest.approx(16 + 1.5 + 12 + 1)


def test_each_cost_counts_where_it_arises() -> None:
    late = dataclasses.replace(IDEAL, latency_s=0.2)
    assert step_s("step", late) == pytest.approx(34.2)
    assert step_s("class", late) == pytest.approx(27)
    assert step_s("class", dataclasses.replace(IDEAL, class_latency_s=0.2)) == pytest.approx(27.2)
    assert step_s("dear", late) == pytest.approx(30.5 + 0.2)  # a half of it in each half
    slow = dataclasses.replace(IDEAL, reduce_s=24.8)
    assert step_s("step", slow) == pytest.approx(34.8)
    assert step_s("class", slow) == pytest.approx(27)
    slow = dataclasses.replace(IDEAL, class_reduce_s=24.8)
    # Bucket 0 takes 3.1; of each other one 1.1 are left, more than the layer before it takes.
    assert step_s("class", slow) == pytest.approx(16 + 3.1 + 7 * 1.1 + 1)
    hooks = dataclasses.replace(IDEAL, deferred=Compute(8.4, 16.8))
    assert step_s("step", hooks) == pytest.approx(34)
    assert step_s("class", hooks) == pytest.approx(25.2 + 3)
    update = dataclasses.replace(IDEAL, plain=Compute(8, 16, 0.5))
    assert step_s("step", update) == pytest.approx(34.5)


def test_costs_survive_the_way_through_json() -> None:
    assert Costs.from_table(dataclasses.asdict(IDEAL)) == IDEAL
