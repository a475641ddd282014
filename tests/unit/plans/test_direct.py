from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer.plans import direct
from commlayer.plans.plan import StepKind
from commlayer.plans.settings import Settings
from tests.unit.plans.conformance import TENSORS, barrier_holds, conform, conform_all, outcomes, weights

WORLDS = (2, 3, 4, 9)


@settings(max_examples=120)
@given(
    n=st.integers(2, 9),
    numel=st.integers(0, 300),
    segment_bytes=st.integers(1, 900),
    packet_bytes=st.sampled_from((0, 8, 16)),
    ordered=st.booleans(),
    chance=st.data(),
    **TENSORS,
)
def test_any_shape(
    n: int, numel: int, segment_bytes: int, packet_bytes: int, ordered: bool, chance: st.DataObject, **tensors: Any
) -> None:
    numel = min(numel, segment_bytes)  # many segments, but not hundreds
    shares = chance.draw(weights(n))
    s = Settings(segment_bytes=segment_bytes, packet_bytes=packet_bytes, deterministic=ordered, weights=shares)
    conform_all(direct, n, numel, s, **tensors)


@pytest.mark.parametrize("shares", [(), (3, 1, 2, 2)])
@pytest.mark.parametrize("packet_bytes", [1432, 8928])
def test_messages_are_of_whole_packets(packet_bytes: int, shares: tuple[int, ...]) -> None:
    """But for those of the end of a tensor."""
    s = Settings(packet_bytes=packet_bytes, weights=shares, segment_bytes=1 << 20)
    numel = 10_000_000
    plans = [direct.all_reduce(0, 4, numel, 4, 1, s)]
    if not shares:
        plans += [direct.reduce_scatter(0, 4, numel, 4, 1, s), direct.all_gather(0, 4, numel, 4, s)]
    for plan in plans:
        lengths = plan.steps["length"][plan.steps["kind"] == StepKind.SEND].astype(np.int64)
        assert len(lengths) > 100
        assert (lengths % packet_bytes != 0).sum() <= 6
        if not shares:
            assert abs(lengths[:-6] - (256 << 10)).max() < 32 << 10


@pytest.mark.parametrize("n", WORLDS)
def test_barrier(n: int) -> None:
    barrier_holds(lambda r: direct.barrier(r, n), n)


def test_deterministic_results_do_not_depend_on_timing() -> None:
    s = Settings(segment_bytes=300)
    assert outcomes(lambda r: direct.all_reduce(r, 5, 100, 4, 1, s), 5, 100) > 1
    s = Settings(segment_bytes=300, deterministic=True)
    assert outcomes(lambda r: direct.all_reduce(r, 5, 100, 4, 1, s), 5, 100) == 1
    assert outcomes(lambda r: direct.exchange(r, 5, 100, 4, 1), 5, 100) == 1
    s = Settings(segment_bytes=1 << 20, deterministic=True)
    assert outcomes(lambda r: direct.reduce(r, 5, 5000, 4, 1, 0, s), 5, 5000) == 1


@pytest.mark.parametrize("n", WORLDS)
def test_long_broadcasts_are_scattered(n: int) -> None:
    """The root sends about one copy of the data altogether, not one for each peer."""
    numel = 5000
    s = Settings(segment_bytes=20_000)
    conform("broadcast", lambda r: direct.broadcast(r, n, numel, 8, 1, s), n, numel, root=1)
    steps = direct.broadcast(1, n, numel, 8, 1, s).steps
    assert steps["length"][steps["kind"] == StepKind.SEND].sum() == numel * 8


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("n", WORLDS)
def test_long_reductions_are_shared(n: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root receives about one copy of the data altogether, not one from each peer."""
    monkeypatch.setattr(direct, "ORDERED_SEGMENTS", 2)
    numel = 9000
    s = Settings(segment_bytes=20_000, deterministic=deterministic)
    for seed in range(3):
        conform("reduce", lambda r: direct.reduce(r, n, numel, 8, 1, 1, s), n, numel, root=1, seed=seed)
    steps = direct.reduce(1, n, numel, 8, 1, 1, s).steps
    kinds = (StepKind.RECV_COPY, StepKind.RECV_REDUCE)
    assert sum(step["length"] for step in steps if step["kind"] in kinds) == numel * 8


def test_all_reduce_sends_the_least_possible() -> None:
    n, length = 4, 1 << 20
    steps = direct.all_reduce(0, n, length, 1, 1, Settings()).steps
    assert steps["length"][steps["kind"] == StepKind.SEND].sum() == 2 * (n - 1) * length // n


@pytest.mark.parametrize("shares", [(3, 0, 3, 3), (1, 2, 3, 4), (0, 0, 0, 1)])
def test_a_host_carries_what_its_share_says(shares: tuple[int, ...]) -> None:
    """Each direction of host i carries S (1 + (n-2) w[i]) bytes: see plans/weights.py."""
    n, length = 4, 8 << 20
    for rank in range(n):
        steps = direct.all_reduce(rank, n, length // 4, 4, 1, Settings(weights=shares)).steps
        expected = length * (1 + (n - 2) * shares[rank] / sum(shares))
        for kinds in ((StepKind.SEND,), (StepKind.RECV_COPY, StepKind.RECV_REDUCE)):
            carried = int(steps["length"][np.isin(steps["kind"], kinds)].sum())
            assert abs(carried - expected) < 0.001 * length


def test_messages_of_large_worlds_fill_packets() -> None:
    """1,000 ranks: at 1,432 bytes a packet, 25 MiB take 36,600 packets a rank at least, and each rank as many."""
    n, length = 1000, 25 << 20
    sent = []
    for rank in (0, 1, 500, n - 1):
        steps = direct.all_reduce(rank, n, length // 4, 4, 1, Settings()).steps
        assert len(steps) < 20_000
        lengths = steps["length"][steps["kind"] == StepKind.SEND]
        assert int(((lengths + 1431) // 1432).sum()) < 1.15 * 36_600
        sent.append(int(lengths.sum()))
    assert max(sent) < 1.01 * min(sent)


def test_ordered_reductions_of_large_worlds_need_little_scratch() -> None:
    plan = direct.all_reduce(0, 1000, 100 << 18, 4, 1, Settings(deterministic=True))
    assert plan.scratch_bytes <= 40 << 20


def test_no_segment_waits_for_another() -> None:
    """A contribution depends on nothing: the gather half cannot hold back the reduce half."""
    s = Settings(segment_bytes=1 << 10)
    steps = direct.all_reduce(1, 4, 1 << 14, 1, 1, s).steps
    sends = steps[steps["kind"] == StepKind.SEND]
    assert (sends["dependencies"] == 0).sum() == 3 * 16
    assert (steps[steps["kind"] == StepKind.RECV_REDUCE]["dependencies"] == 0).all()
