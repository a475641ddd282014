"""Plans that may lose a part of their messages: the losses are known, and the replicas agree all the same."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from commlayer.plans import direct, hierarchical
from commlayer.plans.hierarchical import Hosts
from commlayer.plans.plan import StepKind
from commlayer.plans.select import plan_for
from commlayer.plans.settings import Settings
from commlayer.transport.base import Op
from tests.unit.plans import interpreter
from tests.unit.plans.conformance import check_structure, data

PARTIAL = Settings(segment_bytes=64, partial=True)


def lossy(n: int, numel: int, seed: int, settings: Settings, **how: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Runs a partial all-reduce; returns inputs, outputs, and by rank a mask of the elements that were not counted."""
    plans = [direct.partial_all_reduce(rank, n, numel, 8, 1, settings) for rank in range(n)]
    inputs = data(n, numel, Op.SUM, "f8", seed)
    outputs = [np.full(numel, np.nan) for _ in range(n)]
    if settings.partial_results:
        outputs = [np.zeros(numel) for _ in range(n)]
    before = [array.copy() for array in inputs]
    missing = interpreter.run(plans, inputs, outputs, Op.SUM, seed=seed, **how)
    masks = []
    for rank in range(n):
        np.testing.assert_array_equal(inputs[rank], before[rank])  # lost contributions are still there
        masks.append(np.zeros(numel, bool))
        for offset, length in missing[rank]:
            masks[rank][offset // 8 : (offset + length) // 8] = True
    return inputs, outputs, masks


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("numel", [1, 3, 100, 101])
@pytest.mark.parametrize("loss", [0.0, 0.3, 1.0])
def test_sums_and_losses_of_a_partial_all_reduce_add_up_to_all_inputs(n: int, numel: int, loss: float) -> None:
    for seed in range(5):
        shares = tuple((rank + seed) % n for rank in range(n)) if seed else ()
        settings = dataclasses.replace(PARTIAL, weights=shares)
        inputs, outputs, masks = lossy(n, numel, seed, settings, loss=loss)
        counted = sum(np.where(mask, 0, array) for array, mask in zip(inputs, masks, strict=True))
        np.testing.assert_allclose(outputs[0], counted, rtol=1e-12, atol=1e-12)
        for output in outputs[1:]:
            assert output.tobytes() == outputs[0].tobytes()
        if loss in (0, 1) or numel > 9:
            assert (sum(mask.sum() for mask in masks) > 0) == (loss > 0)


@pytest.mark.parametrize("divisor", [1, 3])
def test_rescaling_gives_the_mean_of_the_arrived_contributions(divisor: int) -> None:
    n, numel = 3, 100
    plans = [direct.partial_all_reduce(rank, n, numel, 8, divisor, PARTIAL) for rank in range(n)]
    inputs, outputs = data(n, numel, Op.SUM, "f8", 1), [np.zeros(numel) for _ in range(n)]
    missing = interpreter.run(plans, inputs, outputs, Op.SUM, seed=1, loss=0.3, rescale=True)
    arrived = np.ones((n, numel), bool)
    for rank in range(n):
        for offset, length in missing[rank]:
            arrived[rank, offset // 8 : (offset + length) // 8] = False
    mean = (np.stack(inputs) * arrived).sum(0) / arrived.sum(0)
    np.testing.assert_allclose(outputs[0], mean * n / divisor)
    assert not arrived.all()


def test_partial_results_keep_the_former_value() -> None:
    _, outputs, _ = lossy(3, 300, 2, Settings(segment_bytes=64, partial=True, partial_results=True), loss=0.2)
    results = np.stack(outputs)
    best = results[np.abs(results).argmax(0), np.arange(300)]
    assert ((results == best) | (results == 0)).all()
    assert (results == 0).any()


def test_a_partial_reduce_scatter() -> None:
    n, numel = 3, 50
    plans = [direct.reduce_scatter(rank, n, numel, 8, n, PARTIAL) for rank in range(n)]
    inputs, outputs = data(n, n * numel, Op.SUM, "f8", 4), [np.zeros(numel) for _ in range(n)]
    missing = interpreter.run(plans, inputs, outputs, Op.SUM, seed=4, loss=0.3)
    for rank, ranges in enumerate(missing):
        for offset, length in ranges:
            inputs[rank][offset // 8 : (offset + length) // 8] = 0
    assert any(missing)
    np.testing.assert_allclose(np.concatenate(outputs), sum(inputs) / n)


HOSTS = (((0, 1), (2,)), ((0, 2), (1, 3)), ((0, 1, 2), (3, 4, 5)), ((0,), (1, 2), (3, 4)), ((0, 5), (1, 4), (2, 3)))
TIGHT = Settings(segment_bytes=64, staging_bytes=512, partial=True, partial_message_bytes=100)
"""Several rounds for each segment."""


def hierarchy(
    hosts: Hosts, numel: int, seed: int, settings: Settings, *, divisor: int = 1, in_place: bool = False, **how: Any
) -> tuple[list[Any], list[Any], list[Any]]:
    """Runs a partial all-reduce of hosts; returns inputs, outputs, and the residual of each rank."""
    n = sum(map(len, hosts))
    plans = [hierarchical.partial_all_reduce(rank, hosts, numel, 8, divisor, settings) for rank in range(n)]
    inputs = data(n, numel, Op.SUM, "f8", seed)
    memory = [array.copy() for array in inputs]
    outputs = memory if in_place else [np.full(numel, np.nan) for _ in range(n)]
    check_structure(plans, memory, outputs)
    missing = interpreter.run(plans, memory, outputs, Op.SUM, seed=seed, **how)
    left = [np.zeros(numel) for _ in range(n)]
    for rank, ranges in enumerate(missing):
        for offset, length in ranges:
            at = slice(offset // 8, (offset + length) // 8)
            left[rank][at] = memory[rank][at]
    return inputs, outputs, left


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("numel", [1, 5, 100, 333])
@pytest.mark.parametrize("loss", [0.0, 0.3, 1.0])
def test_sums_and_residuals_of_hosts_add_up_to_all_inputs(hosts: Hosts, numel: int, loss: float) -> None:
    for seed in range(4):
        inputs, outputs, left = hierarchy(hosts, numel, seed, TIGHT, loss=loss)
        np.testing.assert_allclose(outputs[0] + sum(left), sum(inputs), rtol=1e-12, atol=1e-12)
        for output in outputs[1:]:
            assert output.tobytes() == outputs[0].tobytes()
        if loss in (0, 1) and numel > 9:
            assert any(array.any() for array in left) == (loss > 0)


@pytest.mark.parametrize("lag", [0, 1])
def test_staging_is_not_written_too_early(monkeypatch: pytest.MonkeyPatch, lag: int) -> None:
    monkeypatch.setattr(hierarchical, "NETWORK_LAG", lag)
    for seed in range(8):
        for in_place in (False, True):
            inputs, outputs, _ = hierarchy(((0, 1, 2), (3, 4)), 400, seed, TIGHT, divisor=5, in_place=in_place)
            np.testing.assert_allclose(outputs[0], sum(inputs) / 5)


@pytest.mark.parametrize("divisor", [1, 6])
def test_rescaling_weighs_a_host_by_its_ranks(divisor: int) -> None:
    """Where a host's ranks all contribute the same, the mean of the hosts that arrived is that of the ranks."""
    hosts, numel = ((0, 1), (2, 3), (4, 5)), 300
    n = 6
    plans = [hierarchical.partial_all_reduce(rank, hosts, numel, 8, divisor, TIGHT) for rank in range(n)]
    memory = [np.ones(numel) for _ in range(n)]
    missing = interpreter.run(plans, memory, memory, Op.SUM, seed=3, loss=0.3, rescale=True)
    assert any(missing)
    for output in memory:
        np.testing.assert_allclose(output, n / divisor)


def test_messages_are_long_enough_to_lose_packets_of() -> None:
    settings = Settings(segment_bytes=1 << 10, partial=True, partial_message_bytes=1 << 16)
    steps = direct.partial_all_reduce(0, 4, 1 << 17, 8, 1, settings).steps
    sends = steps[(steps["kind"] == StepKind.SEND) & (steps["flags"] == 1)]
    assert sends["length"].min() >= 1 << 16
    assert plan_for("all_reduce", rank=0, hosts=((0,), (1,)), numel=1 << 20, itemsize=4, settings=settings).partial
    assert not plan_for("all_reduce", rank=0, hosts=((0, 1),), numel=1 << 20, itemsize=4, settings=settings).partial
    hosts = ((0, 1), (2, 3))
    plan = plan_for("all_reduce", rank=3, hosts=hosts, numel=1 << 17, itemsize=8, settings=settings)
    sends = plan.steps[(plan.steps["kind"] == StepKind.SEND) & (plan.steps["flags"] == 1)]
    assert sends["length"].min() >= 1 << 16
    assert not plan_for("all_reduce", rank=0, hosts=hosts, numel=1 << 10, itemsize=4, settings=settings).partial
