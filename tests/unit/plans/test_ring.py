from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer.plans import ring
from commlayer.plans.plan import StepKind
from commlayer.plans.settings import Settings
from tests.unit.plans.conformance import TENSORS, conform_all, outcomes


@settings(max_examples=120)
@given(n=st.integers(2, 9), numel=st.integers(0, 250), segment_bytes=st.integers(30, 500), **TENSORS)
def test_any_shape(n: int, numel: int, segment_bytes: int, **tensors: Any) -> None:
    conform_all(ring, n, numel, Settings(segment_bytes=segment_bytes), **tensors)


def test_results_do_not_depend_on_timing() -> None:
    assert outcomes(lambda r: ring.all_reduce(r, 5, 100, 4, 1, Settings(segment_bytes=40)), 5, 100) == 1


def test_all_data_goes_to_the_next_rank_in_two_segments_or_more() -> None:
    n, length = 4, 1 << 20
    steps = ring.all_reduce(3, n, length, 1, 1, Settings(segment_bytes=length)).steps
    sends = steps[steps["kind"] == StepKind.SEND]
    assert set(sends["peer"]) == {0}
    assert sends["length"].sum() == 2 * (n - 1) * length // n
    assert len(sends) == 2 * (n - 1) * 2


def test_reduce_scatter_needs_two_chunks_of_scratch_at_most() -> None:
    assert ring.reduce_scatter(0, 2, 1000, 4, 1, Settings()).scratch_bytes == 0
    assert ring.reduce_scatter(0, 9, 1000, 4, 1, Settings()).scratch_bytes <= 2 * 4032
