"""The gate of the codecs: errors on gradients of a real training run, see tests/data/README.md."""

import itertools
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from bench import capture_gradients
from bench.capture_gradients import RANKS, SAMPLE, STEPS, Gradients, aggregate_cosine, worst_nmse

Mask = npt.NDArray[np.bool_]

NMSE = {"f16": 2.0**-22, "bf16": 2.0**-18, "int8": 1e-4, "int4": 0.014}
"""Limits of the mean squared error, as a share of the mean square. f16 and bf16: half a unit in the last place."""
COSINE = {("int8", "int8"): 0.9999, ("int4", "int8"): 0.993}
"""Least cosines between the encoded and the exact mean of the ranks."""

KINDS = ("all", "attention", "feed-forward")
"""Classes of layers. `Fine(model)` leaves the others in 16 bits: int8 has errors of up to 2e-4 on biases."""


@pytest.fixture(scope="module")
def gradients() -> Gradients:
    return Gradients.load(SAMPLE)


def values_of(gradients: Gradients, kind: str) -> Mask:
    """A mask of the values of one class of layers, or of "all"."""
    return np.ones(gradients.steps[STEPS[0]].shape[1], bool) if kind == "all" else gradients.values_of(kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", NMSE)
def test_error_of_each_rank(gradients: Gradients, name: str, step: int, kind: str) -> None:
    error = worst_nmse(gradients, step, name, values_of(gradients, kind))
    assert error <= NMSE[name]
    assert error >= NMSE[name] / 10  # it was encoded


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("pair", COSINE)
def test_cosine_of_the_mean(gradients: Gradients, pair: tuple[str, str], step: int, kind: str) -> None:
    cosine = aggregate_cosine(gradients, step, *pair, values_of(gradients, kind))
    assert COSINE[pair] <= cosine < 1 - 1e-6


def test_the_sample_has_all_steps_ranks_and_classes(gradients: Gradients) -> None:
    assert tuple(gradients.steps) == STEPS
    assert set(gradients.classes) == {"embedding", "attention", "feed-forward", "head", "norm", "bias"}
    for rows in gradients.steps.values():
        assert len(rows) == RANKS
        assert np.isfinite(rows).all()
        assert all(not np.array_equal(a, b) for a, b in itertools.combinations(rows, 2))
        for kind in gradients.classes:
            assert np.abs(rows[:, gradients.values_of(kind)]).max() > 0
    assert SAMPLE.stat().st_size < 1.5e6


def test_the_sample_is_drawn_by_its_rule() -> None:
    matrix = {"parameter": "m", "class": "attention", "start": 0, "length": 2048 + 77, "vector": False}
    vector = {"parameter": "v", "class": "bias", "start": 0, "length": 3, "vector": True}
    values = np.arange(2048 + 77 + 3, dtype=np.float32)
    sample = Gradients({1: np.stack([values] * 2)}, [matrix, vector]).sample()
    starts = [256, 768, 1280, 1792]  # 1/8, 3/8, ... of the length, whole blocks
    expected = np.concatenate(
        [*(np.arange(start, start + 256) for start in (256, 768, 1280, 1792)), [2125, 2126, 2127]]
    )
    np.testing.assert_array_equal(sample.steps[1][1], expected)
    assert [piece["start"] for piece in sample.pieces] == [*starts, 0]
    assert sample.values_of("bias").sum() == 3


def test_a_sample_of_gradients_that_are_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench.capture_gradients", "--sample"])
    monkeypatch.setattr(capture_gradients, "WHOLE", tmp_path / "gradients.npz")
    with pytest.raises(SystemExit, match="2"):
        capture_gradients.main()
    assert f"--sample: {tmp_path / 'gradients.npz'} is absent; run without --sample first" in capsys.readouterr().err
