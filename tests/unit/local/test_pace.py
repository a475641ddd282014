"""H follows the times of syncs: the turns of virtual sites become as long as their syncs."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.frontend.local import pace
from commlayer.frontend.local.pace import ROOM, USED, WAITED, WINDOW, Pace, following_every
from commlayer.frontend.local.site import Site
from commlayer.frontend.local.sync import Head
from commlayer.frontend.local.turns import Turns


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True, scope="module")
def clock() -> Iterator[Clock]:
    with pytest.MonkeyPatch.context() as patch:
        found = Clock()
        patch.setattr(pace, "time", found)
        yield found


class Loop:
    """The loop of a site, with steps of `step_s` seconds."""

    def __init__(self, every: int, clock: Clock, step_s: float = 1.0, *, follows: bool = True) -> None:
        clock.now_s = 0.0
        self.pace, self.clock, self.step_s = Pace(Turns.of(every, 4, None), follows=follows), clock, step_s
        self.steps, self.now_s = 0, 0.0

    def step(self) -> None:
        self.steps += 1
        self.now_s += self.step_s

    def begin(self, turn: int) -> Head:
        """Begins the sync of a turn, after the steps before it."""
        while self.steps < self.pace.turns.steps(turn):
            self.step()
        assert self.pace.turns.begins(self.steps)
        self.clock.now_s = self.now_s
        return self.pace.tell(Head(turn, 1, True, False, 1, 1.0), Site())

    def end(self, turn: int, end_s: float) -> None:
        """Makes the steps of the sync's turn, and waits for its end."""
        for age in range(1, self.pace.turns.length(turn + 1) + 1):
            self.step()
            if self.now_s >= end_s:
                self.pace.see(turn, age)
        self.clock.now_s = self.now_s
        with self.pace.waiting(turn):
            self.now_s = self.clock.now_s = max(self.now_s, end_s)


def train(loops: Sequence[Loop], turns: range, sync_s: Sequence[float]) -> set[int]:
    """Makes syncs, which take these times in turn from the moment when the last site has begun. Returns the values
    that H had."""
    found = set()
    for turn in turns:
        heads = [loop.begin(turn) for loop in loops]
        begin_s = max(loop.now_s for loop in loops)
        for loop in loops:
            loop.end(turn, begin_s + sync_s[turn % len(sync_s)])
            loop.pace.end(heads, logs=False)
        assert len({(loop.pace.turns, loop.steps) for loop in loops}) == 1
        found.add(loops[0].pace.turns.every)
    return found


@given(every=st.integers(4, 400), sync_s=st.floats(0.1, 100.0))
def test_turns_become_as_long_as_syncs_and_stay(clock: Clock, every: int, sync_s: float) -> None:
    loops = [Loop(every, clock) for _ in range(3)]
    train(loops, range(12 * WINDOW), [sync_s])
    found = train(loops, range(12 * WINDOW, 16 * WINDOW), [sync_s])
    assert len(found) == 1
    turn_s = found.pop() / 4
    assert turn_s >= sync_s * (1 - WAITED) - 1  # a site waits for the rest of a step at most
    assert turn_s <= 2 or int(turn_s) <= math.ceil(sync_s) / USED  # a step sees the end
    turns = loops[0].pace.turns
    assert turns.since_turn == -1 or str(loops[0].pace).endswith(f"{turns.every} from sync {turns.since_turn} on")


def test_losses_that_make_some_syncs_longer_do_not_let_h_follow_each_of_them(clock: Clock) -> None:
    """One sync in 30 takes twice as long: H is that of the others."""
    times = [20.0 if turn % 30 == 29 else 10.0 for turn in range(90)]
    found = train([Loop(40, clock)], range(20 * WINDOW), times)
    assert found == {40}


def test_losses_that_make_most_syncs_longer_let_h_grow(clock: Clock) -> None:
    draw = random.Random(1)
    times = [10.0 * draw.choice([1, 2, 3]) for _ in range(101)]
    loop = Loop(40, clock)
    train([loop], range(20 * WINDOW), times)
    assert 80 <= loop.pace.turns.every <= 120


def test_a_slow_site_does_not_change_h(clock: Clock) -> None:
    """The others wait for it in each sync, and the network has nothing to do with that."""
    assert train([Loop(40, clock), Loop(40, clock, step_s=1.5)], range(8 * WINDOW), [9.0]) == {40}


def test_a_given_number_stays(clock: Clock) -> None:
    assert train([Loop(40, clock, follows=False)], range(8 * WINDOW), [60.0]) == {40}


def test_a_site_that_joins_learns_the_turns_and_does_not_count_in_its_first_window(clock: Clock) -> None:
    old = Loop(40, clock)
    train([old], range(5 * WINDOW + 3), [20.0])
    assert old.pace.turns.every != 40
    new = Loop(40, clock)
    listening = Head(5 * WINDOW + 3, 0, True, False, 0, 0.0, is_listening=True)
    heads = [old.begin(5 * WINDOW + 3), new.pace.tell(listening, Site())]
    for loop in (old, new):
        loop.pace.end(heads, logs=False)
    assert new.pace.turns == old.pace.turns
    new.steps, new.now_s = old.steps, old.now_s
    turns = range(5 * WINDOW + 4, 8 * WINDOW)
    decision = next(turn for turn in turns if not (turn - old.pace.turns.since_turn) % WINDOW)
    train([old, new], range(turns.start, decision), [90.0])
    assert old.begin(decision).waited > WAITED
    assert new.begin(decision).waited == 0.0


@given(st.integers(4, 10**6), st.floats(0, 1), st.floats(0, 2))
def test_h_at_most_doubles_or_halves_and_all_turns_are_alike(every: int, waited: float, used: float) -> None:
    following = following_every(every, 4, waited, used)
    assert max(every // 2, 4) <= following <= min(2 * every + 3, 10**6)
    assert (following > every) == (waited > WAITED and every < 10**6) or following == every + -every % 4
    assert following == every or following % 4 == 0


def test_a_shorter_turn_has_room_for_its_sync() -> None:
    assert following_every(64, 4, 0.0, 0.5) == 64 * 0.5 * ROOM
    assert following_every(40, 4, 0.0, USED + 0.01) == 40
    assert following_every(4, 4, 0.0, 0.1) == 4
    assert following_every(2, 1, 0.0, 0.1) == 2
