from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.errors import ConfigError
from commlayer.plans import delivery
from commlayer.plans.delivery import Hosts, Pair, deliver
from commlayer.plans.partition import Range
from commlayer.plans.plan import POSTS_LIMIT, Plan, StepKind
from commlayer.transport.base import Op
from tests import oracle
from tests.unit.plans import interpreter
from tests.unit.plans.conformance import check_structure


def check(
    hosts: Hosts,
    lengths: Sequence[Sequence[int]],
    *,
    staging_bytes: int = 640,
    same: bool = False,
    seed: int = 0,
) -> list[Plan]:
    """lengths[a][b] bytes go from a to b: builds each plan from its rank's lengths, runs them, checks every byte."""
    rng, n = np.random.default_rng(seed), len(lengths)
    received = [[lengths[other][rank] for other in range(n)] for rank in range(n)]
    plans = [deliver(rank, hosts, lengths[rank], received[rank], staging_bytes, same=same) for rank in range(n)]
    inputs = [rng.integers(0, 255, max(row) if same else sum(row), np.uint8) for row in lengths]
    outputs = [np.zeros(sum(row), np.uint8) for row in received]
    originals = [array.copy() for array in inputs]
    check_structure(plans, inputs, outputs)
    interpreter.run(plans, inputs, outputs, Op.SUM, seed=seed)
    for rank, output in enumerate(outputs):
        means = oracle.delivery(rank, lengths, same=same)
        np.testing.assert_array_equal(output, oracle.output_of(means, originals[rank], originals))
        np.testing.assert_array_equal(inputs[rank], originals[rank])
    return plans


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Hosts, list[list[int]]]:
    """Ranks dealt to hosts, and the length that each sends to each: often 0, sometimes large."""
    n = draw(st.integers(1, 6))
    places = draw(st.lists(st.integers(0, n - 1), min_size=n, max_size=n))
    by_host = [tuple(rank for rank in range(n) if places[rank] == host) for host in range(n)]
    lengths = st.one_of(st.just(0), st.integers(1, 70), st.integers(1, 1500))
    return tuple(sorted(filter(None, by_host))), draw(
        st.lists(st.lists(lengths, min_size=n, max_size=n), min_size=n, max_size=n)
    )


@given(job=jobs(), staging_bytes=st.integers(256, 900), seed=st.integers(0, 1 << 30))
def test_any_lengths(job: tuple[Hosts, list[list[int]]], staging_bytes: int, seed: int) -> None:
    hosts, lengths = job
    check(hosts, lengths, staging_bytes=staging_bytes, seed=seed)


@given(job=jobs(), staging_bytes=st.integers(256, 900), data=st.data(), seed=st.integers(0, 1 << 30))
def test_the_same_to_some_or_all(
    job: tuple[Hosts, list[list[int]]],
    staging_bytes: int,
    data: st.DataObject,
    seed: int,
) -> None:
    hosts, lengths = job
    lengths = [[max(row) * data.draw(st.integers(0, 1)) for _ in row] for row in lengths]
    check(hosts, lengths, staging_bytes=staging_bytes, same=True, seed=seed)


def test_one_slot_would_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "SLOTS", 1)

    def run(same: bool) -> None:
        for seed in range(20):
            check(((0, 1, 2),), [[3000] * 3] * 3, same=same, seed=seed)

    for same in (False, True):
        with pytest.raises(AssertionError, match=r"(?i)not equal"):
            run(same)


def test_a_rank_with_nothing_to_do_keeps_step_with_its_host() -> None:
    """Its counter ends where the others' do, though it knows nothing of them."""
    idle = deliver(0, ((0, 1),), [0, 0], [0, 0], 640)
    busy = deliver(1, ((0, 1),), [0, 9], [0, 9], 640)
    assert idle.posts == busy.posts == POSTS_LIMIT
    assert deliver(2, ((0, 1), (2,)), [0] * 3, [0] * 3, 640).posts == POSTS_LIMIT
    assert deliver(0, ((0, 1),), [None, None], [None, None], 640).posts == POSTS_LIMIT
    assert deliver(0, ((0,), (1,)), [5, 5], [5, 5], 640).posts == 0


def test_a_rank_does_not_wait_for_one_that_sends_nothing_in_any_case() -> None:
    for peers in ((0, 1), (0,)):  # within a host, and between two
        hosts = (peers,) if len(peers) > 1 else ((0,), (1,))
        steps = deliver(1, hosts, [9, None], [None, None], 640).steps  # of a gather to rank 0
        assert not set(steps["kind"]) & {StepKind.AWAIT, StepKind.CHECK, StepKind.RECV_COPY}
        root = deliver(0, hosts, [None, None], [None, 9], 640).steps
        assert not set(root["kind"]) & {StepKind.TELL, StepKind.SEND}


def test_a_part_for_all_ranks_is_staged_once() -> None:
    steps = deliver(0, ((0, 1, 2, 3),), [1000] * 4, [1000] * 4, 1 << 20, same=True).steps
    assert (steps["kind"] == StepKind.COPY).sum() == 1 + 1 + 3


@given(job=jobs(), data=st.data(), seed=st.integers(0, 1 << 30))
def test_a_pair_that_knows_of_nothing_does_nothing(
    job: tuple[Hosts, list[list[int]]], data: st.DataObject, seed: int
) -> None:
    """None instead of 0 on both ranks, for some of the pairs; others say that they have nothing."""
    hosts, lengths = job
    known = [[0 if length else data.draw(st.sampled_from((0, None))) for length in row] for row in lengths]
    n = len(lengths)

    def lengths_of(rank: int, *, to: bool) -> list[int | None]:
        pairs = [(rank, other) if to else (other, rank) for other in range(n)]
        return [None if known[a][b] is None else lengths[a][b] for a, b in pairs]

    plans = [deliver(rank, hosts, lengths_of(rank, to=True), lengths_of(rank, to=False), 640) for rank in range(n)]
    inputs = [np.random.default_rng(seed).integers(0, 255, sum(row), np.uint8) for row in lengths]
    outputs = [np.zeros(sum(row[rank] for row in lengths), np.uint8) for rank in range(n)]
    check_structure(plans, inputs, outputs)
    interpreter.run(plans, inputs, outputs, Op.SUM, seed=seed)
    for rank, output in enumerate(outputs):
        means = oracle.delivery(rank, lengths, same=False)
        np.testing.assert_array_equal(output, oracle.output_of(means, inputs[rank], inputs))
    for rank in range(n):
        for kind in (StepKind.SEND, StepKind.RECV_COPY):
            steps = plans[rank].steps
            empty = steps["peer"][(steps["kind"] == kind) & (steps["length"] == 0)]
            assert not any(lengths_of(rank, to=kind == StepKind.SEND)[peer] is None for peer in empty)


LENGTHS = st.one_of(st.integers(0, 3), st.integers(0, 5000), st.integers(0, 1 << 40))


@given(st.tuples(LENGTHS, LENGTHS), st.tuples(LENGTHS, LENGTHS))
def test_the_number_of_a_pair_tells_its_lengths(own: tuple[int, int], other: tuple[int, int]) -> None:
    def pair(sent: int, received: int) -> Pair:
        return Pair(Range(0, sent), Range(0, received), tells=True, hears=True)

    agree = own == other[::-1]
    if agree or max(*own, *other) < 1 << 31:
        assert (pair(*own).expected == pair(*other).told) == agree
    assert pair(*own).told < 1 << 63


@given(job=jobs(), data=st.data(), more=st.integers(-1500, 1500).filter(bool), seed=st.integers(0, 1 << 30))
def test_ranks_that_differ_in_a_length_never_end_well(
    job: tuple[Hosts, list[list[int]]], data: st.DataObject, more: int, seed: int
) -> None:
    """Within a host a check fails. Between hosts a message has another length, which the engine refuses."""
    hosts, lengths = job
    n = len(lengths)
    if n < 2:
        return
    target = data.draw(st.integers(1, n - 1))
    expected = [[lengths[other][rank] for other in range(n)] for rank in range(n)]
    expected[target][0] = max(0, expected[target][0] + more)
    if expected[target][0] == lengths[0][target]:
        return
    plans = [deliver(rank, hosts, lengths[rank], expected[rank], 640) for rank in range(n)]
    inputs = [np.zeros(sum(row), np.uint8) for row in lengths]
    outputs = [np.zeros(sum(row), np.uint8) for row in expected]

    def run() -> None:
        check_structure(plans, inputs, outputs)
        interpreter.run(plans, inputs, outputs, Op.SUM, seed=seed)

    with pytest.raises((interpreter.MismatchFoundError, AssertionError)):
        run()


def test_long_messages_are_cut_alike_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "MESSAGE_LIMIT_BYTES", 100)
    for length, cuts in {250: [100, 100, 50], 200: [100, 100, 0], 1: [1], 0: [0]}.items():
        steps = deliver(0, ((0,), (1,)), [0, length], [0, 0], 640).steps
        assert steps["length"][steps["kind"] == StepKind.SEND].tolist() == cuts
        steps = deliver(1, ((0,), (1,)), [0, 0], [length, 0], 64).steps
        assert steps["length"][steps["kind"] == StepKind.RECV_COPY].tolist() == cuts
    steps = deliver(0, ((0,), (1,)), [0, None], [0, None], 640).steps
    assert not len(steps)


def test_too_little_staging_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="use fewer ranks per host"):
        deliver(0, ((0, 1, 2),), [1] * 3, [1] * 3, 4)
    monkeypatch.setattr(delivery, "POSTS_LIMIT", 10)
    with pytest.raises(ConfigError, match="staging of 640 bytes takes 10 rounds"):
        deliver(0, ((0, 1),), [0, 1280], [0, 0], 640)
