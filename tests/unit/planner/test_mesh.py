"""Bytes of tensor parallelism in all dimensions, counted while each layout's algorithm runs; and its results."""

from functools import partial

import pytest
import torch

from commlayer.errors import ConfigError
from commlayer.planner.layout import Layout
from commlayer.planner.mesh import Form, Mesh
from commlayer.planner.transformer import Transformer
from tests.meshes import Columns, Cube, Linear, Rows, Square, Virtual, attention, layer


def model_of(mesh: Mesh) -> Transformer:
    """A small layer that the mesh can split."""
    width = 4 * (mesh.side if mesh.form == "1-D" else mesh.side**2)
    return Transformer(1, width, mesh.side, length=3, sequences=2 * mesh.rows, inner=2 * width, value_bytes=8)


def linears_of(mesh: Mesh, ranks: Virtual, weights: list[torch.Tensor], kept: bool) -> list[Linear]:
    if mesh.form == "1-D":
        return [(Rows if place % 2 else Columns)(ranks, mesh.side, a) for place, a in enumerate(weights)]
    if mesh.form == "3-D":
        return [Cube(ranks, mesh.side, a, is_odd=place % 2 == 1, kept=kept) for place, a in enumerate(weights)]
    return [Square(ranks, mesh.side, mesh.depth, a, kept=kept) for a in weights]


def split(mesh: Mesh, x: torch.Tensor) -> list[torch.Tensor]:
    """The input's shards: whole in 1-D, rows (k, i) and columns j on a square, rows (i, l) and columns j on a cube."""
    q = mesh.side
    if mesh.form == "1-D":
        return [x] * q
    if mesh.form == "3-D":
        rows = x.chunk(q * q, 0)
        return [rows[i * q + l].chunk(q, 1)[j] for i in range(q) for j in range(q) for l in range(q)]  # noqa: E741
    rows = x.chunk(q * mesh.depth, 0)
    return [rows[k * q + i].chunk(q, 1)[j] for k in range(mesh.depth) for i in range(q) for j in range(q)]


MESHES: list[tuple[Form, int, int]] = [
    *(("1-D", 4, 1), ("1-D", 8, 1), ("1-D", 16, 1)),
    *(("2-D", 4, 1), ("2-D", 16, 1), ("2.5-D", 8, 2), ("2.5-D", 16, 4), ("3-D", 8, 1), ("3-D", 27, 1)),
]
MANY = 16
"""So many virtual ranks take seconds."""


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize(
    ("form", "count", "depth"),
    [pytest.param(*mesh, marks=pytest.mark.slow if mesh[1] >= MANY else ()) for mesh in MESHES],
)
def test_results_equal_one_process_and_bytes_the_formula(form: Form, count: int, depth: int, kept: bool) -> None:
    mesh, ranks = Mesh.of(form, count, depth), Virtual()
    model = model_of(mesh)
    draw = torch.Generator().manual_seed(1)
    random = partial(torch.randn, generator=draw, dtype=torch.float64)
    weights = [random(a, b) / a**0.5 for a, b in model.linears]
    x, dy = (random(model.sequences * model.length, model.width) for _ in range(2))
    local = partial(attention, length=model.length, head_width=model.width // model.heads)
    alone = [Columns(Virtual(), 1, a) for a in weights]
    (y,), (dx,) = layer(alone, [x], [dy], local)
    own = linears_of(mesh, ranks, weights, kept)
    found_y, found_dx = layer(own, split(mesh, x), split(mesh, dy), local)
    for mine, whole in ((found_y, y), (found_dx, dx)):
        for shard, right in zip(mine, split(mesh, whole), strict=True):
            torch.testing.assert_close(shard, right, rtol=1e-11, atol=1e-11)
    for linear, one in zip(own, alone, strict=True):
        squares = torch.stack([shard.square().sum() for shard in linear.gradient]).sum() / mesh.depth
        torch.testing.assert_close(squares, one.gradient[0].square().sum())

    layout = Layout(mesh, batch=model.sequences, kept=kept)
    assert layout.refusal(model) == ""
    for rank in range(count):
        by_group: dict[tuple[int, tuple[int, ...]], int] = {}
        messages = dict(by_group)
        for exchange in layout.exchanges(model):
            key = (rank, exchange.axis.group(rank))
            by_group[key] = by_group.get(key, 0) + exchange.received_bytes
            messages[key] = messages.get(key, 0) + exchange.messages
        assert by_group == {key: value for key, value in ranks.bytes.items() if key[0] == rank}
        assert messages == {key: value for key, value in ranks.messages.items() if key[0] == rank}


def received_values(mesh: Mesh, *, kept: bool = True) -> tuple[float, float]:
    """Values received per rank and layer: per value of S = tokens x h, and per h^2."""
    width, values = 5184, []
    for sequences in (5184, 2 * 5184):
        model = Transformer(1, width, heads=5184, length=1, sequences=sequences, value_bytes=1)
        layout = Layout(mesh, batch=sequences, kept=kept)
        assert layout.refusal(model) == ""
        values.append(layout.received_bytes(model))
    per_s = (values[1] - values[0]) / width**2
    return per_s, values[0] / width**2 - per_s


def test_bytes_in_units_of_tokens_and_parameters() -> None:
    """1-D 8 (P - 1) / P S; 3-D 2 (q - 1) / q^3 (16 S + 12 h^2); squares 2 (q - 1) / q^2 (7 S / d + 12 h^2)."""
    assert received_values(Mesh.of("1-D", 8)) == (7, 0)
    assert received_values(Mesh.of("3-D", 8)) == (4, 3)
    assert received_values(Mesh.of("3-D", 64)) == (1.5, 1.125)
    assert received_values(Mesh.of("2-D", 4)) == (3.5, 6)
    assert received_values(Mesh.of("2-D", 4), kept=False) == (5.25, 9)
    assert received_values(Mesh.of("2-D", 16)) == (2.625, 4.5)
    assert received_values(Mesh.of("2.5-D", 8, 2)) == (1.75, 6 + 3)  # and an all-reduce of 3 h^2 between two


def test_meshes_that_do_not_exist_are_named() -> None:
    with pytest.raises(ConfigError, match="ranks=8 is no square, which 2-D needs; give 4 or 9"):
        Mesh.of("2-D", 8)
    with pytest.raises(ConfigError, match="ranks=16 is no cube, which 3-D needs; give 27 or 64"):
        Mesh.of("3-D", 16)
    with pytest.raises(ConfigError, match=r"ranks=16 is no square times 2, which 2\.5-D needs; give 8 or 18"):
        Mesh.of("2.5-D", 16, 2)
    with pytest.raises(ConfigError, match=r"depth=1 does not fit 2\.5-D"):
        Mesh.of("2.5-D", 4)
    with pytest.raises(ConfigError, match="depth=2 does not fit 2-D"):
        Mesh.of("2-D", 8, 2)
    with pytest.raises(ConfigError, match=r"ranks=2\.5, depth=1 do not make a 1-D mesh"):
        Mesh.of("1-D", 2.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="form='4-D' is unknown"):
        Mesh.of("4-D", 16)  # type: ignore[arg-type]


def test_models_that_a_mesh_cannot_split_are_named() -> None:
    model = Transformer(1, width=30, heads=6, length=3, sequences=4, inner=44)
    assert Mesh.of("1-D", 4).refusal(model, 4) == "heads=6 is no multiple of 4"
    assert Mesh.of("2-D", 4).refusal(model, 3) == "3 sequences of a micro-batch are no multiple of 2"
    assert Mesh.of("3-D", 8).refusal(model, 4) == "width=30 is no multiple of 4"
    assert Mesh.of("2-D", 4).refusal(model, 2) == ""
