"""Orders of computations: counts, live activations, and that every order can run."""

from collections.abc import Callable

import pytest

from commlayer.errors import ConfigError
from commlayer.scheduler.actions import Action, Order, peak_activations
from commlayer.scheduler.pipelines import breadth_first, interleaved, one_f_one_b, sliced
from commlayer.scheduler.simulate import StageCosts, simulate


def text(order: Order, rank: int) -> str:
    return " ".join(f"{action.stage}{action.kind}{action.microbatch}" for action in order[rank])


def test_1f1b() -> None:
    order = one_f_one_b(2, 3)
    assert text(order, 0) == "0F0 0F1 0B0 0F2 0B1 0B2"
    assert text(order, 1) == "1F0 1B0 1F1 1B1 1F2 1B2"


def test_interleaved_in_groups() -> None:
    order = interleaved(2, 4, 2)  # rank 1 starts with (v - 1) g = 2 forwards
    assert text(order, 1) == "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"


def test_breadth_first() -> None:
    assert text(breadth_first(2, 2, 2), 0) == "0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0"


@pytest.mark.parametrize(("ranks", "microbatches", "chunks"), [(1, 1, 1), (1, 3, 2), (3, 2, 1), (4, 8, 3), (4, 7, 1)])
def test_every_stage_runs_every_micro_batch_once_each_way(ranks: int, microbatches: int, chunks: int) -> None:
    orders = [breadth_first(ranks, microbatches, chunks), interleaved(ranks, microbatches, chunks)]
    for order in orders[: 1 if chunks > 1 and microbatches % ranks else 2]:
        for rank, actions in enumerate(order):
            assert sorted((action.kind, action.stage, action.microbatch) for action in actions) == [
                (kind, rank + chunk * ranks, microbatch)
                for kind in "BF"
                for chunk in range(chunks)
                for microbatch in range(microbatches)
            ]
        assert simulate(order, [StageCosts(1, 2)] * ranks * chunks).step_s >= 3 * microbatches * chunks


@pytest.mark.parametrize(
    ("ranks", "microbatches", "chunks", "group", "full_stages"),
    [(4, 16, 4, 16, 13.75), (4, 32, 2, 32, 19.5), (4, 16, 4, 4, 4.75), (8, 16, 4, 8, 9.75)],
)
def test_live_activations_of_interleaved_orders(
    ranks: int, microbatches: int, chunks: int, group: int, full_stages: float
) -> None:
    """Rank 0: ((v - 1) g + 2 (p - 1) + 1) / v. p = 4, v = 4, g = 16: (48 + 6 + 1) / 4 = 13.75."""
    order = interleaved(ranks, microbatches, chunks, group)
    assert peak_activations(order[0]) / chunks == full_stages


def test_slices_in_order_and_back() -> None:
    order = [sliced(actions, 2) for actions in one_f_one_b(2, 3)]
    assert text(order, 0) == "0F0 0F1 0F2 0F3 0B1 0B0 0F4 0F5 0B3 0B2 0B5 0B4"
    assert text(order, 1) == "1F0 1F1 1B1 1B0 1F2 1F3 1B3 1B2 1F4 1F5 1B5 1B4"
    assert sliced([Action("F", 0), Action("REDUCE", 0), Action("W", 0)], 1) == [Action("F", 0)]


@pytest.mark.parametrize("make", [lambda p, m: breadth_first(p, m, 1), one_f_one_b])
@pytest.mark.parametrize(("ranks", "microbatches", "slices"), [(4, 4, 1), (4, 4, 4), (2, 3, 5), (3, 1, 2), (4, 8, 2)])
def test_the_bubble_of_slices(make: Callable[[int, int], Order], ranks: int, microbatches: int, slices: int) -> None:
    """p = 4, M = 4: 3/7 of the step with whole sequences, 3/19 with 4 slices."""
    order = [sliced(actions, slices) for actions in make(ranks, microbatches)]
    step_s = simulate(order, [StageCosts(1, 2)] * ranks).step_s
    assert step_s == pytest.approx(3 * (microbatches * slices + ranks - 1))


def test_live_activations_of_other_orders() -> None:
    assert [peak_activations(actions) for actions in one_f_one_b(4, 16)] == [4, 3, 2, 1]
    assert [peak_activations(actions) for actions in breadth_first(4, 16, 4)] == [64] * 4


@pytest.mark.parametrize("group", [1, 2, 4, 8, 12, 16])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bubble_of_interleaved_orders(ranks: int, group: int) -> None:
    """(p - 1)(F + B) / v, whatever the group."""
    if group < ranks:
        with pytest.raises(ConfigError, match=f"group={group} does not fit {ranks} ranks and 16 micro-batches"):
            interleaved(ranks, 16, 4, group)
        return
    step_s = simulate(interleaved(ranks, 16, 4, group), [StageCosts(0.25, 0.5)] * ranks * 4).step_s
    assert step_s == pytest.approx(48 + (ranks - 1) * 3 / 4)


@pytest.mark.parametrize(("microbatches", "group"), [(16, 15), (9, None), (4, 8)])
def test_groups_that_would_wait_in_a_circle_are_refused(microbatches: int, group: int | None) -> None:
    with pytest.raises(ConfigError, match="with no remainder below 4"):
        interleaved(4, microbatches, 2, group)


def test_numbers_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="ranks=0 is not valid"):
        one_f_one_b(0, 4)
    with pytest.raises(ConfigError, match="microbatches=-1 is not valid"):
        breadth_first(2, -1, 2)
    with pytest.raises(ConfigError, match="chunks=0 is not valid"):
        interleaved(2, 4, 0)
