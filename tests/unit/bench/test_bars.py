"""Pictures of measured steps."""

from pathlib import Path

from bench.harness.bars import Bar, draw


def test_a_bar_has_the_interval_of_its_rounds() -> None:
    bar = Bar.of("ours", [1.0, 1.2, 0.9], 0.95, is_ours=True)
    assert bar == Bar("ours", 1.0, 0.9, 1.2, 0.95, None, is_ours=True)


def test_equal_results_give_equal_pictures(tmp_path: Path) -> None:
    cases = {
        "one case": [Bar.of("DDP", [1.1, 1.2]), Bar.of("ours", [1.0, 1.0], 0.9, 0.8, is_ours=True)],
        "another": [Bar.of("none", [0.5])],
    }
    for name in ("one.svg", "two.svg"):
        draw(cases, tmp_path / name)
    first = (tmp_path / "one.svg").read_text()
    assert first == (tmp_path / "two.svg").read_text()
    assert all(f"<!-- {name} -->" in first for name in ("DDP", "ours", "one case", "another", "model"))
