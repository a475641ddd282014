"""The schedule of fragments, and the arithmetic of the least number of local steps."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.errors import ConfigError
from commlayer.frontend.local.turns import Turns, least_every


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 60))
def test_every_fragment_has_one_turn_in_every_steps_and_turns_do_not_overlap(
    every: int, fragments: int, delay: int
) -> None:
    if every < fragments or delay > -(-every // fragments):
        with pytest.raises(ConfigError):
            Turns(every, fragments, delay)
        return
    turns = Turns(every, fragments, delay)
    begun = [step for step in range(1, 3 * every + 1) if turns.begins(step)]
    assert len(begun) == 3 * fragments
    lengths = [later - earlier for earlier, later in itertools.pairwise(begun)]
    assert min(lengths) >= max(delay - 1, 1)
    assert max(lengths) >= delay
    applied = [min(delay, length) for length in lengths[:fragments]]
    assert turns.mean_delay == pytest.approx(sum(applied) / fragments)
    assert [turns.length(turn) for turn in range(3 * fragments)] == [begun[0], *lengths]
    for turn, step in enumerate(begun[fragments:]):
        assert step - begun[turn] == every
        assert turns.fragment(turn) == turns.fragment(turn + fragments)


@given(
    every=st.lists(st.integers(3, 40), min_size=2, max_size=4),
    fragments=st.integers(1, 3),
    made=st.lists(st.integers(0, 60), min_size=3, max_size=3),
)
def test_a_training_goes_on_with_another_h(every: list[int], fragments: int, made: list[int]) -> None:
    """Each turn begins after the step that its number tells, also after several restarts, some without a turn."""
    turns, first, begun = Turns.of(every[0], fragments, None), 1, list[int]()
    for following, more in zip([*every[1:], every[-1]], made, strict=False):
        for step in range(first, first + more):
            if turns.begins(step):
                assert turns.steps(len(begun)) == step
                begun.append(step)
        first += more
        due = turns.steps(len(begun))
        turns = Turns.of(following, fragments, None).resumed(turns, len(begun))
        assert turns.steps(len(begun)) == due
        assert turns.steps(len(begun) + fragments) == due + following


def test_a_sync_takes_a_whole_turn_unless_every_step_has_one() -> None:
    assert Turns.of(12, 4, None) == Turns(12, 4, 3)
    assert Turns.of(10, 1, None) == Turns(10, 1, 10)
    assert Turns.of(7, 4, None) == Turns(7, 4, 2)  # 7 / 4 in the mean: a delay of 1 would hide 4 steps of 7
    assert Turns.of(7, 4, None).mean_delay == 7 / 4
    assert Turns.of(1, 1, None) == Turns(1, 1, 0)
    assert Turns.of(12, 4, 1) == Turns(12, 4, 1)


@pytest.mark.parametrize("given", [(0, 1, 0), (1.5, 1, 0), (True, 1, 0), (4, 0, None), (4, 2, -1), (None, 1, None)])
def test_values_out_of_range_are_refused(given: tuple[int, int, int | None]) -> None:
    with pytest.raises(ConfigError, match="LocalSteps"):
        Turns.of(*given)


def test_fewer_steps_than_fragments_are_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"every=3, fragments=4.*use fragments=3 or fewer"):
        Turns.of(3, 4, None)


def test_least_every_is_the_time_of_the_bytes_in_steps() -> None:
    assert least_every(1.2, 0.0, 0.1, 4) == 12
    assert least_every(1.2, 0.0, 0.1001, 4) == 12
    assert least_every(1.2, 0.0, 0.0999, 4) == 16  # turns of 3 steps would be too short
    assert least_every(0.003, 0.0, 0.1, 4) == 1
    assert least_every(0.0, 0.5, 0.1, 4) == 0


def test_every_fragment_waits_for_the_latency_once() -> None:
    assert least_every(1.2, 0.1, 0.1, 4) == 16
    assert least_every(1.2, 0.1, 0.1, 1) == 13
    assert least_every(0.05, 0.05, 0.1, 4) == 1
    assert least_every(0.15, 0.05, 0.1, 4) == 3  # three fragments, one in each step


@given(bytes_s=st.floats(1e-3, 10), latency_s=st.floats(0, 2), step_s=st.floats(1e-2, 1), fragments=st.integers(1, 8))
def test_a_sync_fits_into_its_turn_and_one_step_less_is_too_few(
    bytes_s: float, latency_s: float, step_s: float, fragments: int
) -> None:
    def share(every: int) -> float:
        """Of the shortest turn that a sync takes."""
        parts = min(every, fragments)
        return (latency_s + bytes_s / parts) / (every // parts * step_s)

    least = least_every(bytes_s, latency_s, step_s, fragments)
    assert share(least) <= 1 + 1e-9
    assert all(share(every) > 1 - 1e-9 for every in range(1, least))
