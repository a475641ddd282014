from collections.abc import Sequence

import numpy as np
import pytest

from commlayer.plans.plan import Buffer, PlanBuilder
from commlayer.transport.base import Op
from tests.unit.plans import interpreter

INPUT, OUTPUT, SCRATCH, STAGING = Buffer


def run(
    builders: Sequence[PlanBuilder], values: Sequence[Sequence[float]], op: Op = Op.SUM, seed: int = 0
) -> list[list[float]]:
    """Runs plans in place on float64 arrays, one per rank; returns the results."""
    arrays = [np.array(value, "f8") for value in values]
    interpreter.run([b.build() for b in builders], arrays, arrays, op, seed=seed)
    return [array.tolist() for array in arrays]


def pair() -> tuple[PlanBuilder, PlanBuilder]:
    return PlanBuilder(0, 2), PlanBuilder(1, 2)


def test_send_and_receive() -> None:
    a, b = pair()
    a.send(1, INPUT, 8, 16)
    b.recv_copy(0, OUTPUT, 0, 16)
    a.send(1, INPUT, 0, 8)
    b.recv_reduce(0, OUTPUT, 16, 8)
    assert run((a, b), ([1, 2, 3], [10, 20, 30]))[1] == [2, 3, 31]


@pytest.mark.parametrize(("op", "expected"), [(Op.SUM, 5), (Op.PRODUCT, 6), (Op.MIN, 2), (Op.MAX, 3)])
def test_operations(op: Op, expected: float) -> None:
    a = PlanBuilder(0, 1)
    a.reduce(INPUT, 0, OUTPUT, 8, 8)
    assert run((a,), ([2, 3],), op) == [[2, expected]]


def test_scale_truncates_integers_toward_zero() -> None:
    a = PlanBuilder(0, 1)
    a.scale(OUTPUT, 0, 8, 2)
    values = np.array([-3, 3], "i4")
    interpreter.run([a.build()], [values], [values], Op.SUM)
    assert values.tolist() == [-1, 1]


def test_host_counters_and_staging() -> None:
    a, b = pair()
    with a.chain():
        a.copy(INPUT, 0, STAGING, 0, 8)
        a.post()
    with b.chain():
        b.await_(0, 1)
        b.copy(STAGING, 0, OUTPUT, 0, 8, staging_of=0)
        b.post()
    a.await_(1, 1)
    assert run((a, b), ([1], [2])) == [[1], [1]]


def test_an_await_without_a_post_is_a_deadlock() -> None:
    a, b = pair()
    a.await_(1, 1)
    with pytest.raises(RuntimeError, match=r"1 steps never ended; the first \(rank, step\) is \(0, 0\)"):
        run((a, b), ([1], [2]))


def test_a_receive_without_a_send_is_a_deadlock() -> None:
    a, b = pair()
    a.recv_copy(1, OUTPUT, 0, 8)
    with pytest.raises(RuntimeError, match="never ended"):
        run((a, b), ([1], [2]))


def test_a_missing_dependency_shows_in_some_order() -> None:
    results = set()
    for seed in range(20):
        a = PlanBuilder(0, 1)
        a.scale(OUTPUT, 0, 8, 2)
        a.copy(OUTPUT, 0, OUTPUT, 8, 8)
        results.add(run((a,), ([4, 0],), seed=seed)[0][1])
    assert results == {4, 2}


def test_transfers_happen_in_parts() -> None:
    """Another step may come between the halves of a copy, as another process may read a half-written range."""
    results = set()
    for seed in range(20):
        a = PlanBuilder(0, 1)
        a.copy(OUTPUT, 0, OUTPUT, 16, 16)
        a.scale(OUTPUT, 16, 16, 2)
        results.add(tuple(run((a,), ([4, 4, 8, 8],), seed=seed)[0][2:]))
    assert (2, 4) in results
    assert (4, 2) in results


@pytest.mark.parametrize(("target", "offset"), [(OUTPUT, 8), (SCRATCH, 0), (OUTPUT, 1)])
def test_ranges_outside_of_a_buffer_are_errors(target: Buffer, offset: int) -> None:
    a = PlanBuilder(0, 1)
    a.copy(INPUT, 0, target, offset, 8)
    with pytest.raises(IndexError, match="rank 0: bytes"):
        run((a,), ([1],))
