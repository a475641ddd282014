from commlayer.plans.plan import PlanBuilder
from commlayer.plans.window import Window


def test_a_slot_comes_back_with_the_dependencies_of_its_last_user() -> None:
    b = PlanBuilder(0, 2)
    window = Window(b, 100, 2)
    first, after = window.take()
    assert list(after) == []
    window.release([7])
    second, after = window.take()
    assert list(after) == []
    assert abs(second - first) >= 100
    window.release([8, 9])
    assert window.take() == (first, [7])
    window.release([])
    assert window.take() == (second, [8, 9])


def test_the_scratch_is_reserved_in_the_plan() -> None:
    b = PlanBuilder(0, 2)
    Window(b, 100, 3)
    assert b.build().scratch_bytes >= 300
