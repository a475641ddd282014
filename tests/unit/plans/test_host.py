from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer.errors import ConfigError
from commlayer.plans import host
from commlayer.plans.plan import StepKind
from commlayer.plans.settings import Settings
from tests.unit.plans.conformance import TENSORS, barrier_holds, conform, conform_all, outcomes

WORLDS = (2, 3, 4, 9)


@settings(max_examples=120)
@given(
    n=st.integers(2, 9),
    numel=st.integers(0, 400),
    staging_bytes=st.sampled_from((256, 500, 1100, 3000)),
    small_bytes=st.sampled_from((0, 200, 4096)),
    **TENSORS,
)
def test_any_shape(n: int, numel: int, staging_bytes: int, small_bytes: int, **tensors: Any) -> None:
    conform_all(host, n, numel, Settings(staging_bytes=staging_bytes, small_bytes=small_bytes), **tensors)


@pytest.mark.parametrize("n", WORLDS)
def test_barrier(n: int) -> None:
    barrier_holds(lambda r: host.barrier(r, n), n)


@pytest.mark.parametrize("small_bytes", [0, 4096])
def test_results_do_not_depend_on_timing(small_bytes: int) -> None:
    s = Settings(staging_bytes=1024, small_bytes=small_bytes)
    assert outcomes(lambda r: host.all_reduce(r, 5, 200, 4, 1, s), 5, 200) == 1


@pytest.mark.parametrize(
    ("collective", "arguments"),
    [("all_reduce", [1]), ("reduce_scatter", [1]), ("all_gather", []), ("reduce", [1, 0])],
)
def test_one_slot_would_not_do(collective: str, arguments: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The interleavings tried here are rough enough to find a slot that is used again too early."""
    monkeypatch.setattr(host, "SLOTS", 1)
    make = getattr(host, collective)
    s = Settings(staging_bytes=512, small_bytes=0)

    def run() -> None:
        for seed in range(20):
            conform(collective, lambda r: make(r, 3, 500, 8, *arguments, s), 3, 500, seed=seed)

    with pytest.raises(AssertionError, match=r"(?i)not equal"):
        run()


@pytest.mark.parametrize("staging_bytes", [600, 5000])
def test_plans_fit_the_staging_they_were_given(staging_bytes: int) -> None:
    s = Settings(staging_bytes=staging_bytes, small_bytes=0)
    for plan in (
        host.all_reduce(1, 4, 9999, 2, 1, s),
        host.reduce_scatter(1, 4, 9999, 2, 1, s),
        host.all_gather(1, 4, 9999, 2, s),
        host.broadcast(1, 4, 9999, 2, 0, s),
        host.reduce(1, 4, 9999, 2, 1, 0, s),
    ):
        assert 0 < plan.staging_bytes <= staging_bytes


def test_no_network_is_used() -> None:
    kinds = set(host.all_reduce(0, 3, 1 << 20, 4, 3, Settings()).steps["kind"])
    assert kinds == {StepKind.COPY, StepKind.REDUCE, StepKind.SCALE, StepKind.POST, StepKind.AWAIT}


def test_staging_that_cannot_hold_an_element_each_is_refused() -> None:
    with pytest.raises(ConfigError, match="use fewer ranks per host"):
        host.reduce_scatter(0, 9, 100, 8, 1, Settings(staging_bytes=128))
