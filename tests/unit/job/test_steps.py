"""The steps of a rank: the time of each with an operation in flight."""

from pathlib import Path

import pytest

from commlayer.tools.job.spec import Spec
from commlayer.tools.job.steps import Watch
from commlayer.transport.call import Call


def test_operations_in_flight_count_in_each_step(tmp_path: Path) -> None:
    """An operation that a step leaves in flight also counts in the next one, as far as it goes on there."""
    Spec(1, ("real",), 60.0).write(tmp_path)
    watch = Watch(tmp_path, Spec)  # any object that can be referred to
    watch._began_s = 100.0
    long, short = Call("all_reduce", submitted_s=100.5), Call("all_reduce", submitted_s=100.1, ended_s=100.2)
    assert watch._in_flight_s([long, short], 101.0) == pytest.approx(0.6)
    watch._began_s, long.ended_s = 101.1, 101.4
    assert watch._in_flight_s([], 102.0) == pytest.approx(0.3)
    assert watch._in_flight_s([], 103.0) == 0
