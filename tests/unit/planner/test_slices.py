"""Token slices against every possible split."""

import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer.errors import ConfigError
from commlayer.planner.slices import SliceTime, slices
from commlayer.scheduler.actions import Action
from commlayer.scheduler.simulate import StageCosts, simulate


def compositions(total: int) -> Iterator[tuple[int, ...]]:
    """All ordered ways to write `total` as a sum of positive numbers."""
    if total == 0:
        yield ()
    for first in range(1, total + 1):
        for rest in compositions(total - first):
            yield (first, *rest)


def partitions(total: int, largest: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `total` as a sum without order."""
    if total == 0:
        yield ()
    for first in range(min(total, largest), 0, -1):
        for rest in partitions(total - first, first):
            yield (first, *rest)


def slice_times(time: SliceTime, sequences: int, lengths: tuple[int, ...]) -> list[float]:
    return [time(sequences, length, sum(lengths[:i])) for i, length in enumerate(lengths)]


def exhaustive(length: int, stages: int, time: SliceTime, batch: int) -> float:
    """The least T of all splits of the batch and of each part's sequences, independently."""
    best = math.inf

    def extend(parts: tuple[int, ...], times: list[float]) -> None:
        nonlocal best
        if not parts:
            best = min(best, sum(times) + (stages - 1) * max(times))
            return
        for lengths in compositions(length):
            extend(parts[1:], times + slice_times(time, parts[0], lengths))

    for parts in partitions(batch, batch):
        extend(parts, [])
    return best


def table_time(table: list[int]) -> SliceTime:
    """Arbitrary times: no rule that dynamic programming could rely on."""
    return lambda batch, length, context: float(table[(31 * batch + 7 * length + context) % len(table)])


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 7), st.integers(1, 6), st.integers(1, 2), st.lists(st.integers(0, 30), min_size=1, max_size=40))
def test_slices_are_the_best_of_all(length: int, stages: int, batch: int, table: list[int]) -> None:
    length = min(length, 5) if batch > 1 else length
    time = table_time(table)
    found = slices(length, stages, time, batch=batch)
    assert found.time_s == pytest.approx(exhaustive(length, stages, time, batch))
    assert sum(sequences for sequences, _ in found.parts) == batch
    assert all(sum(lengths) == length for _, lengths in found.parts)
    times = [time_s for sequences, lengths in found.parts for time_s in slice_times(time, sequences, lengths)]
    assert found.time_s == pytest.approx(sum(times) + (stages - 1) * max(times))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 10),
    st.integers(1, 8),
    st.sampled_from([0.5, 2.0, 7.0]),
    st.lists(st.integers(0, 30), min_size=1, max_size=40),
)
def test_skipped_caps_cost_no_more_than_said(length: int, stages: int, skip_s: float, table: list[int]) -> None:
    best = slices(length, stages, table_time(table)).time_s
    assert best <= slices(length, stages, table_time(table), skip_s=skip_s).time_s <= best + (stages - 1) * skip_s


def attention_time(batch: int, length: int, context: int) -> float:
    """0.2 s of launch, and work that grows with the context."""
    return 0.2 + batch * length * (1 + (context + length / 2) / 8) / 16


def test_later_slices_are_shorter_and_one_stage_needs_none() -> None:
    (part,) = slices(32, 8, attention_time, step=2).parts
    assert len(part[1]) > 3
    assert part[1][0] > part[1][-1]
    assert slices(32, 1, attention_time, step=2).parts == ((1, (32,)),)


def test_the_formula_is_the_simulated_forward() -> None:
    """T = sum t_i + (K - 1) max t_i bounds a forward-only pipeline, and equals it for equal slices."""
    found = slices(8, 3, lambda _batch, length, _context: 1.0 + length, step=2)
    count, time = len(found.parts[0][1]), 1.0 + found.parts[0][1][0]
    assert len(set(found.parts[0][1])) == 1
    order = [[Action("F", stage, place) for place in range(count)] for stage in range(3)]
    spans = simulate(order, [StageCosts(time, 0)] * 3).spans
    ends = [span.end_s for span in spans if span.name == f"F stage 2 mb {count - 1}"]
    assert ends[0] == pytest.approx(found.time_s)


def test_bad_input_is_named() -> None:
    with pytest.raises(ConfigError, match="length=7 is no multiple of step=2"):
        slices(7, 2, attention_time, step=2)
    with pytest.raises(ConfigError, match="stages=0 is not valid"):
        slices(8, 0, attention_time)
    with pytest.raises(ConfigError, match="skip_s=-1 is negative"):
        slices(8, 2, attention_time, skip_s=-1)
    with pytest.raises(ConfigError, match=r"time\(1, 1, 0\)=-1.0 is no duration"):
        slices(4, 2, lambda *_: -1.0)
