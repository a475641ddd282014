"""Bounded loss through the engine: threads as ranks, over memory that loses packets and over UDP on loopback."""

import math
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from commlayer.errors import ConfigError
from commlayer.plans import direct, hierarchical
from commlayer.plans.plan import Plan
from commlayer.plans.settings import Settings
from commlayer.transport.base import DType, Op, Qos, Request, Treatment
from commlayer.transport.group import NativeGroup
from tests.world import PATIENCE_S, Team, World

Array = npt.NDArray[np.float32]
Result = tuple[Array, Array, npt.NDArray[np.bool_]]

NUMEL = 500_003  # 2 MB: several hundred packets for each owner


def plan(group: NativeGroup, divisor: int = 1, partial_results: bool = False) -> Plan:
    settings = Settings(partial=True, partial_results=partial_results, partial_message_bytes=200 * group.packet_bytes)
    return direct.partial_all_reduce(group.rank, group.size, NUMEL, 4, divisor, settings)


def all_reduce(group: NativeGroup, step: int, qos: Qos, divisor: int = 1, *, in_place: bool = False) -> Result:
    """Input, output, and a mask of the lost elements of the input."""
    source = np.random.default_rng(100 * step + group.rank).normal(size=NUMEL).astype("f4")
    target = source.copy() if in_place else np.full(NUMEL, np.nan, "f4")
    start = target.ctypes.data if in_place else source.ctypes.data
    handle = group.submit(
        Request(plan(group, divisor), start, target.ctypes.data, DType.F32, Op.SUM, timeout_s=PATIENCE_S, qos=qos)
    )
    handle.wait()
    mask = np.zeros(NUMEL, bool)
    for offset, length in handle.missing():
        mask[offset // 4 : (offset + length) // 4] = True
    return source, target, mask


def step_of(team: Team, how: dict[str, Any], rank: int) -> Result:
    return all_reduce(team[rank], **how)


def check(results: list[Result], treatment: Treatment, divisor: int) -> float:
    """Checks that the result is the sum of the contributions that the ranks report; returns the missing share."""
    size = len(results)
    counted = np.stack([np.where(mask, 0, source) for source, _, mask in results]).astype("f8")
    arrived = np.stack([~mask for _, _, mask in results]).sum(0)
    exact = counted.sum(0) / divisor
    if treatment == Treatment.RESCALE:
        exact *= size / arrived
    np.testing.assert_allclose(results[0][1], exact, rtol=1e-5, atol=1e-5)
    for _, target, _ in results[1:]:
        assert target.tobytes() == results[0][1].tobytes()
    return float(np.stack([mask for _, _, mask in results]).mean())


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("treatment", Treatment)
@pytest.mark.parametrize("divisor", [1, 3])
def test_the_result_is_the_sum_of_the_counted_contributions(size: int, treatment: Treatment, divisor: int) -> None:
    qos = Qos(0.03, treatment)
    divisor = 1 if divisor == 1 else size
    with World([(rank,) for rank in range(size)], loss=0.02) as world, world.open_group() as team:
        missing = 0.0
        for step in range(3):
            how = {"step": step, "qos": qos, "divisor": divisor, "in_place": step == 2}
            results = world.on_each(partial(step_of, team, how))
            missing += check(results, treatment, divisor) / 3
        assert 0 < missing <= 0.03
        stats = [engine.stats() for engine in world.engines]
        assert sum(stat["packets_given_up"] for stat in stats) > 0
        assert sum(stat["messages_stopped"] for stat in stats) > 0


def test_ends_with_packets_of_different_sizes_agree_on_the_losses() -> None:
    qos = Qos(0.03)
    with World([(0,), (1,), (2,)], loss=0.02, mtus=[1500, 1000, 1200]) as world, world.open_group() as team:
        results = world.on_each(partial(step_of, team, {"step": 0, "qos": qos}))
        assert 0 < check(results, Treatment.FEEDBACK, 1) <= 0.03


def plan_of_hosts(group: NativeGroup) -> Plan:
    settings = Settings(partial=True, partial_message_bytes=100 * group.packet_bytes, staging_bytes=group.staging_bytes)
    return hierarchical.partial_all_reduce(group.rank, group.hosts, NUMEL, 4, group.size, settings)


def of_hosts(group: NativeGroup, step: int, qos: Qos) -> tuple[Array, Array, Array]:
    """Input, output, and the residual that this rank keeps for its whole host."""
    exact = np.random.default_rng(100 * step + group.rank).normal(size=NUMEL).astype("f4")
    source, target = exact.copy(), np.full(NUMEL, np.nan, "f4")
    memory = source.ctypes.data, target.ctypes.data
    handle = group.submit(Request(plan_of_hosts(group), *memory, DType.F32, Op.SUM, timeout_s=PATIENCE_S, qos=qos))
    handle.wait()
    left = np.zeros(NUMEL, "f4")
    for offset, length in handle.missing():
        left[offset // 4 : (offset + length) // 4] = source[offset // 4 : (offset + length) // 4]
    return exact, target, left


@pytest.mark.parametrize("hosts", [((0, 1), (2, 3)), ((0, 2), (1,), (3, 4))])
def test_sums_of_hosts_and_their_residuals_add_up_to_all_inputs(hosts: tuple[tuple[int, ...], ...]) -> None:
    with World(hosts, loss=0.02) as world, world.open_group() as team:
        size = sum(map(len, hosts))
        for step in range(3):
            results = world.on_each(lambda rank, step=step: of_hosts(team[rank], step, Qos(0.05)))  # type: ignore[misc]
            everything = np.stack([exact for exact, _, _ in results]).astype("f8").sum(0)
            left = np.stack([left for _, _, left in results]).astype("f8").sum(0)
            np.testing.assert_allclose(size * results[0][1] + left, everything, rtol=1e-4, atol=1e-4)
            for _, target, _ in results:
                assert target.tobytes() == results[0][1].tobytes()
            assert left.any()


@pytest.mark.parametrize("treatment", [Treatment.RESCALE, Treatment.ZERO])
def test_rescaling_makes_up_for_a_whole_missing_host(treatment: Treatment) -> None:
    with World([(0, 1), (2, 3)], loss=0.02) as world, world.open_group() as team:

        def body(rank: int) -> Array:
            group = team[rank]
            ones = np.ones(NUMEL, "f4")
            memory = ones.ctypes.data
            qos = Qos(0.05, treatment)
            group.submit(
                Request(plan_of_hosts(group), memory, memory, DType.F32, Op.SUM, timeout_s=PATIENCE_S, qos=qos)
            ).wait()
            return ones

        values = set(np.concatenate(world.on_each(body)).tolist())
        assert values == ({1.0} if treatment == Treatment.RESCALE else {1.0, 0.5})


@pytest.mark.parametrize("wire", ["mem", "udp"])
def test_nothing_is_missing_where_nothing_is_lost(wire: str) -> None:
    with World([(0,), (1,), (2,)], wire) as world, world.open_group() as team:
        qos = Qos(0.3, deadline_us=0)
        results = world.on_each(lambda rank: all_reduce(team[rank], 0, qos))
        lost = sum(engine.stats()["packets_lost"] for engine in world.engines)
        share = check(results, Treatment.FEEDBACK, 1)
        assert share == 0 or lost > 0  # a busy machine may overflow a socket


def test_many_losses_within_a_wide_bound() -> None:
    with World([(0,), (1,)], loss=0.2) as world, world.open_group() as team:
        share = check(world.on_each(lambda rank: all_reduce(team[rank], 0, Qos(0.5))), Treatment.FEEDBACK, 1)
        assert 0.05 < share < 0.5


def test_protected_blocks_arrive() -> None:
    with World([(0,), (1,)], loss=0.1) as world, world.open_group() as team:
        bits = np.random.default_rng(1).random(-(-NUMEL * 4 // 1024 // 64) * 64) < 0.1
        words = np.packbits(bits, bitorder="little").view(np.uint64)
        qos = Qos(0.3, protect=words.ctypes.data, protect_bytes=1024)
        results = world.on_each(lambda rank: all_reduce(team[rank], 0, qos))
        assert check(results, Treatment.FEEDBACK, 1) > 0
        protected = np.repeat(bits, 256)[:NUMEL]
        for _, _, mask in results:
            assert not (mask & protected).any()


def test_a_lost_result_leaves_the_former_value() -> None:
    with World([(0,), (1,)], loss=0.05) as world, world.open_group() as team:

        def body(rank: int) -> Array:
            source = np.ones(NUMEL, "f4")
            target = np.full(NUMEL, 7, "f4")
            handle = team[rank].submit(
                Request(
                    plan(team[rank], partial_results=True),
                    source.ctypes.data,
                    target.ctypes.data,
                    DType.F32,
                    Op.SUM,
                    timeout_s=PATIENCE_S,
                    qos=Qos(0.1, Treatment.RESCALE),
                )
            )
            handle.wait()
            return target

        for target in world.on_each(body):
            assert 0 < (target == 7).mean() < 0.1
            assert np.isin(target, (7, 2)).all()


@pytest.mark.parametrize(
    ("qos", "dtype", "op", "says"),
    [
        (Qos(0.500001), DType.F32, Op.SUM, "loss_bound=0.500001: use 0 to 0.5"),
        (Qos(-0.1), DType.F32, Op.SUM, "loss_bound=-0.1: use"),
        (Qos(0.001), DType.I32, Op.SUM, "SUM of I32: use it for sums of floating-point"),
        (Qos(0.001), DType.F32, Op.MAX, "MAX of F32: use it for sums"),
        (Qos(0.001, 7), DType.F32, Op.SUM, "treatment=7: use one of FEEDBACK"),  # type: ignore[arg-type]
        (Qos(0.001, protect=8), DType.F32, Op.SUM, "protect_bytes=0: use"),
    ],
)
def test_invalid_operations_are_refused(qos: Qos, dtype: DType, op: Op, says: str) -> None:
    with World([(0,), (1,)]) as world, world.open_group() as team:
        with pytest.raises(ConfigError, match=rf"rank 0 of group .*partial operation with {says}"):
            team[0].submit(Request(plan(team[0]), 0, 0, dtype, op, timeout_s=1, qos=qos))
        assert math.isclose(world.engines[0].stats()["operations_failed"], 0)


def test_a_bound_of_nothing_is_reliable() -> None:
    with World([(0,), (1,)], loss=0.05) as world, world.open_group() as team:
        assert check(world.on_each(lambda rank: all_reduce(team[rank], 0, Qos(0.0))), Treatment.FEEDBACK, 1) == 0
