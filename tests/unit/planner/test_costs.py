"""Costs of layers, links and stages, in numbers by hand."""

import pytest

from commlayer.errors import ConfigError
from commlayer.planner.costs import Costs, Layer, Link
from commlayer.scheduler.actions import Reduction
from commlayer.scheduler.pipelines import one_f_one_b
from commlayer.scheduler.simulate import StageCosts

LAYERS = [
    Layer(1, 2, parameter_bytes=100, activation_bytes=50, output_bytes=10),
    Layer(3, 5, parameter_bytes=200, activation_bytes=70, output_bytes=20, update_s=0.5),
]
COSTS = Costs(LAYERS, Link(rate_bps=80))  # 10 bytes a second


def test_a_stage_sums_its_layers() -> None:
    """Sends 20 bytes in 2 s; an all-reduce of 300 bytes between 4 sends 2 * 3/4 * 300 = 450 bytes in 45 s."""
    assert COSTS.stage(0, 2, replicas=4) == StageCosts(4, 7, send_s=2, reduce_s=45, update_s=0.5, activation_bytes=120)
    assert COSTS.stage(0, 1).reduce_s == 0  # one replica


def test_recomputation_repeats_the_forward_and_keeps_outputs() -> None:
    stage = COSTS.stage(0, 2, recompute=True)
    assert (stage.forward_s, stage.backward_s, stage.activation_bytes) == (4, 11, 30)


def test_memory() -> None:
    """4 * 300 of state, 3 * 120 of activations; recomputing 3 * 30 and 70 of the layer at work."""
    assert COSTS.memory_bytes(0, 2, live=3) == 1200 + 360
    assert COSTS.memory_bytes(0, 2, live=3, recompute=True) == 1200 + 90 + 70


def test_outputs_are_as_large_as_activations_unless_given() -> None:
    assert Layer(1, 2, 3, 4).sent_bytes == 4


def test_bad_numbers_are_named() -> None:
    with pytest.raises(ConfigError, match=r"Layer\.forward_s=-1 is not valid; give a finite number >= 0"):
        Layer(-1, 2, 3, 4)
    with pytest.raises(ConfigError, match=r"Layer\.output_bytes=nan"):
        Layer(1, 2, 3, 4, output_bytes=float("nan"))
    with pytest.raises(ConfigError, match=r"Link\.rate_bps=0 is not above 0"):
        Link(0)
    with pytest.raises(ConfigError, match=r"Link\.latency_s=-2"):
        Link(1, -2)
    with pytest.raises(ConfigError, match=r"Costs\.layers is empty"):
        Costs([], Link(1))
    with pytest.raises(ConfigError, match=r"Costs\.state_factor=-1"):
        Costs(LAYERS, Link(1), state_factor=-1)


def test_layers_simulated_as_stages() -> None:
    """One rank, 2 micro-batches of 1 + 2 s and 0.25 s of the interpreter for each action; 100 bytes take 10 s."""
    costs = Costs(LAYERS[:1], Link(rate_bps=80, latency_s=0.5), action_s=0.25)
    result = costs.simulate(one_f_one_b(1, 2), Reduction("serial"), replicas=2)
    assert result.step_s == pytest.approx(2 * (3 + 2 * 0.25) + 10 + 2 * 0.5)
    assert costs.simulate(one_f_one_b(1, 2)).step_s == pytest.approx(7)
