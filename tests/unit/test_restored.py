"""`Restored` by itself; tests/process/test_hook_state.py has it in jobs."""

from typing import Any

import pytest
from torch import Tensor

import commlayer
from commlayer.frontend.gradients.restored import Restored


class Counting(commlayer.Tolerance):
    """A tolerance with a state."""

    count = 0

    def loss_bound(self, step: int, parameter: Tensor) -> float:  # noqa: ARG002
        return 0.1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_a_state_that_is_saved_before_its_first_step_is_the_restored_one() -> None:
    tolerance = Counting()
    tolerance.count = 7
    state = commlayer.HookState(tolerance=Counting())
    state.load_state_dict(commlayer.HookState(tolerance=tolerance).state_dict() | {"world_size": 3, "weighted": True})
    again = state.state_dict()
    assert (again["tolerance"], again["world_size"], again["weighted"]) == ({"count": 7}, 3, True)


def test_a_tolerance_gets_its_state_once() -> None:
    restored, tolerance = Restored.of({"tolerance": {"count": 7}}), Counting()
    restored.give_to(tolerance)
    tolerance.count = 9
    restored.give_to(tolerance)
    assert tolerance.count == 9
    assert restored.tolerance is None


def test_an_empty_state_of_a_tolerance_is_one() -> None:
    with pytest.raises(commlayer.ConfigError, match="saved with a tolerance"):
        Restored.of({"tolerance": {}}).give_to(None)


def test_a_former_version_told_nothing() -> None:
    assert Restored.of({"steps": 4}) == Restored()


def test_warnings_come_once_and_only_where_they_matter(caplog: pytest.LogCaptureFixture) -> None:
    for warns in (False, True):
        restored = Restored.of({"world_size": 3, "fine": [1, 2]})
        for _ in range(2):
            restored.meet_ranks(2, "rank 0", warns=warns)
            restored.meet_fine([1], "rank 0", warns=warns)
        assert restored.world_size == 2
    assert [record.getMessage().split(";")[0].split(":")[1] for record in caplog.records] == [
        " the restored HookState is of a job with 3 ranks, and this one has 2",
        " Fine selects 1 parameters, and 2 when this HookState was saved",
    ]
