"""Pictures of results."""

from pathlib import Path

import pytest
from PIL import Image

from bench.harness.picture import picture


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_equal_results_give_equal_files(tmp_path: Path, suffix: str) -> None:
    for name in ("one", "two"):
        with picture((tmp_path / name).with_suffix(suffix), 1, 2, (4, 2)) as axes:
            axes[0, 1].plot([1, 2], [3, 4])
    drawn = (tmp_path / "one").with_suffix(suffix).read_bytes()
    assert drawn == (tmp_path / "two").with_suffix(suffix).read_bytes()


def test_a_line_among_many_keeps_its_colour(tmp_path: Path) -> None:
    with picture(tmp_path / "a.png", 1, 1, (8, 4)) as axes:
        for number in range(64):
            axes[0, 0].plot([0, 9], [number, 2 * number], color=(number / 64, number / 64, 1))
        axes[0, 0].plot([9, 9.1], [0, 0], color=(1, 0, 0))
    with Image.open(tmp_path / "a.png") as drawn:
        colours = {colour for _, colour in drawn.convert("RGB").getcolors(1 << 20) or ()}
    assert any(red > 240 and green < 20 and blue < 20 for red, green, blue in colours)


def test_results_that_cannot_be_drawn_leave_no_file(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no runs"), picture(tmp_path / "a.png", 1, 1, (2, 2)):
        raise RuntimeError("no runs")
    assert list(tmp_path.iterdir()) == []
