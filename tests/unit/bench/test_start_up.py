"""The figures of many ranks are computed from a few, and the table has them."""

import pytest

from bench.start_up import COUNTS, FAR, Figures, computed, table

SIZES = (16, 32, 64)


@pytest.mark.parametrize(
    "law", [lambda n: 7 + 3 * n, lambda n: 50 + 20 * n + 8 * n * n, lambda _: 12], ids=["line", "parabola", "constant"]
)
def test_a_law_is_found_again(law: object) -> None:
    assert callable(law)
    assert computed(SIZES, [law(n) for n in SIZES]) == pytest.approx(law(FAR))


def test_noise_on_a_line_makes_no_parabola() -> None:
    values = [1000 + 100 * n + noise for n, noise in zip(SIZES, (3, -5, 4), strict=True)]
    assert computed(SIZES, values) == pytest.approx(101_000, rel=0.01)


def test_the_table_has_a_line_per_run_and_the_computed_one() -> None:
    def figures(size: int) -> dict[str, Figures]:
        counts = dict.fromkeys(COUNTS, 1000.0 * size)
        seconds = {"first_s": 1.25, "init_s": 0.5, "group_s": 0.25}
        return {"seconds": seconds, "rank 0": {**counts, "requests": 5.0}, "others": counts}

    lines = table({"gloo": {str(size): figures(size) for size in SIZES}}).splitlines()
    assert len(lines) == 2 + 4
    assert lines[2] == "| gloo | 16 | 1.25 | 0.50 | 0.25 | 16,000 | 16,000 (rank 0: 5) | 16.0 | 16.0 |"
    assert lines[5].startswith("| gloo | 1,000, computed | | | | 1,000,000 | 1,000,000 (rank 0: 5) |")
    assert len({line.count("|") for line in lines}) == 1
