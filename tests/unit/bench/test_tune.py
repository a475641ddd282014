"""The script behind docs/tune.md: its targets and its table."""

from typing import Any

import pytest

from bench import tune
from commlayer.tools.tune.space import Space

ROW: dict[str, Any] = {
    "case": "clean, slow",
    "arms": 121,
    "tune_s": 90.0,
    "search_s": 1000.0,
    "default_s": 1.0,
    "best": "codec int4",
    "best_s": 0.5,
    "chosen": "codec int8",
    "chosen_s": 0.52,
}


@pytest.mark.parametrize(
    ("changes", "met"),
    [
        ({}, True),
        ({"chosen_s": 0.53}, False),
        ({"tune_s": 101.0}, False),
        ({"default_s": 0.51}, False),
        ({"default_s": 0.51, "chosen": "the job as it is", "chosen_s": 0.51}, True),
    ],
)
def test_all_three_targets_must_be_met(changes: dict[str, Any], met: bool) -> None:
    assert tune.is_met({**ROW, **changes}) == met


def test_little_to_win_is_met_by_the_job_as_it_is() -> None:
    row = {"case": "fast", "tune_s": 30.0, "chosen": "the job as it is"}
    assert tune.is_met(row)
    assert tune.table([row]).splitlines()[-1] == "| fast | little to win | | | the job as it is | | | 30 s | yes |"


def test_the_table_has_steps_ratio_and_time() -> None:
    assert tune.table([ROW]).splitlines()[-1] == (
        "| clean, slow | 1000 ms | codec int4 | 500 ms | codec int8 | 520 ms | +4.0% | 90 of 1000 s (9%) | yes |"
    )


def test_the_space_has_enough_arms_for_a_tenth_of_the_time() -> None:
    space = Space.of(tune.ALLOWED, 2 << 20, on_gloo=True, has_network=True, takes_hook=True)
    assert len(tune.narrowed(space, short=False).arms()) == 121
    assert len(tune.narrowed(space, short=True).arms()) == 5
