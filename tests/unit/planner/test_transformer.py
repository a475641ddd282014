"""Parameters and operations of a layer, in numbers by hand."""

import pytest

from commlayer.errors import ConfigError
from commlayer.planner.transformer import Transformer


def test_a_dense_layer() -> None:
    model = Transformer(1, width=8, heads=2, length=6, sequences=1)
    assert (model.dense_values, model.expert_values, model.hidden) == (12 * 64, 0, 32)
    assert sum(inputs * outputs for inputs, outputs in model.linears) == model.dense_values
    assert model.forward_flop(10) == 10 * (2 * 12 * 64 + 4 * 8 * 3)  # a token sees half the sequence
    assert model.forward_flop(10, before=6) == 10 * (2 * 12 * 64 + 4 * 8 * 6)
    assert model.whole_values + model.split_values == 16 * 8


def test_experts_have_parameters_each_and_a_token_passes_some() -> None:
    model = Transformer(1, width=8, heads=2, length=6, sequences=1, inner=16, experts=4, top_k=2)
    assert (model.dense_values, model.expert_values) == (4 * 64, 4 * 2 * 8 * 16)
    assert model.forward_flop(10, before=0) == 10 * 2 * (4 * 64 + 2 * 2 * 8 * 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers=0 is not valid"),
        ({"sequences": 2.5}, r"sequences=2\.5 is not valid"),
        ({"heads": 3}, "heads=3 do not divide width=8"),
        ({"inner": 0}, "inner=0 is not valid"),
        ({"experts": 2, "top_k": 3}, "top_k=3 is above experts=2"),
        ({"launch_s": float("nan")}, "launch_s=nan is not valid"),
    ],
)
def test_bad_numbers_are_named(change: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Transformer(**({"layers": 1, "width": 8, "heads": 2, "length": 6, "sequences": 1} | change))  # type: ignore[arg-type]
