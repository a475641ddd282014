"""`Commit`: residuals of all buckets of a step change, or none."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.futures import Future

from commlayer.frontend.gradients.commit import Commit, Settled


class Buckets:
    """The buckets of one step: notes their changes."""

    def __init__(self, *values: float, changing: set[int]) -> None:
        self.commit, self.changed = Commit(), list[int]()
        self.futures: list[Future[Tensor]] = [Future() for _ in values]
        self.values, self.changing = values, changing

    def settle(self, i: int) -> None:
        average = torch.tensor([1.0, self.values[i]])
        change = (lambda: self.changed.append(i)) if i in self.changing else None
        self.commit.settle(Settled([average], change, lambda: average, self.futures[i]))

    def done(self) -> list[int]:
        return [i for i, future in enumerate(self.futures) if future.done()]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("overflowing", [None, 0, 1, 2])
def test_an_overflow_in_any_bucket_keeps_all_residuals(order: tuple[int, ...], overflowing: int | None) -> None:
    step = Buckets(*(torch.inf if i == overflowing else 2.0 for i in range(3)), changing={0, 2})
    for i in range(3):
        step.commit.enter(is_last=i == 2)
    for place, i in enumerate(order):
        step.settle(i)
        assert step.done() == ([1] * (1 in order[: place + 1]) if place < 2 else [0, 1, 2])
    assert sorted(step.changed) == ([] if overflowing is not None else [0, 2])
    assert [float(future.value()[1]) for future in step.futures] == list(step.values)


def test_a_step_lasts_until_its_last_bucket() -> None:
    step = Buckets(1.0, torch.nan, changing={0})
    step.commit.enter(is_last=False)
    step.settle(0)
    assert step.done() == []
    step.commit.enter(is_last=True)
    step.settle(1)
    assert step.done() == [0, 1]
    assert step.changed == []
    again = Buckets(1.0, changing={0})  # the next step
    again.commit = step.commit
    again.commit.enter(is_last=True)
    again.settle(0)
    assert again.changed == [0]


def test_a_bucket_alone_waits_for_none() -> None:
    step = Buckets(1.0, torch.inf, 1.0, changing={0, 1, 2})
    step.commit = Commit(alone=True)
    for i in range(3):
        step.commit.enter(is_last=False)
        step.settle(i)
        assert step.done() == list(range(i + 1))
    assert step.changed == [0, 2]


def test_a_failure_keeps_the_residuals() -> None:
    step = Buckets(1.0, 1.0, changing={0})
    for is_last in (False, True):
        step.commit.enter(is_last=is_last)
    step.settle(0)
    step.commit.fail()
    assert step.changed == []
    assert step.done() == [0]


def test_a_change_that_fails_fails_its_future() -> None:
    step = Buckets(1.0, changing=set())
    step.commit.enter(is_last=True)

    def change() -> None:
        raise ValueError("no room")

    step.commit.settle(Settled([torch.ones(1)], change, lambda: torch.ones(1), step.futures[0]))
    with pytest.raises(ValueError, match="no room"):
        step.futures[0].wait()


def test_buckets_of_a_step_that_was_given_up_fail() -> None:
    step = Buckets(1.0, 1.0, changing={0, 1})
    step.commit.enter(is_last=False)
    step.settle(0)
    step.commit.abandon("rank 3")
    with pytest.raises(Exception, match="rank 3: this step ended before the hook of its last bucket"):
        step.futures[0].wait()
    assert step.changed == []


@pytest.mark.parametrize("agreed", [False, True])
def test_a_held_step_follows_what_the_ranks_agree_on(agreed: bool) -> None:
    step = Buckets(2.0, 2.0, changing={0})
    step.commit = Commit(held=True)
    for i in range(2):
        step.commit.enter(is_last=i == 1)
    for i in range(2):
        step.settle(i)
    assert step.done() == [1]
    told: list[tuple[bool, bool]] = []
    step.commit.conclude(lambda failed, finite: told.append((failed, finite)) or agreed)  # type: ignore[func-returns-value]
    assert (told, step.done(), step.changed) == ([(False, True)], [0, 1], [0] * agreed)


def test_a_held_step_tells_of_failures_and_of_infinite_averages() -> None:
    step = Buckets(2.0, torch.inf, 2.0, changing={0})
    step.commit = Commit(held=True)
    for i in range(3):
        step.commit.enter(is_last=i == 2)
    step.settle(0)
    step.settle(1)
    step.commit.fail()
    told: list[tuple[bool, bool]] = []

    def refuse(failed: bool, finite: bool) -> bool:
        told.append((failed, finite))
        raise ValueError("one of us")

    with pytest.raises(ValueError, match="one of us"):
        step.commit.conclude(refuse)
    assert told == [(True, False)]
    assert step.changed == []
    with pytest.raises(ValueError, match="one of us"):
        step.futures[0].wait()
