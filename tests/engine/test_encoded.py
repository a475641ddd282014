"""Encoded collectives through the engine: threads as ranks, over memory that loses packets and over UDP on loopback."""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from commlayer.errors import CommError, ConfigError
from commlayer.plans import encoded
from commlayer.plans.codec import CODECS
from commlayer.plans.select import Collective, plan_for
from commlayer.plans.settings import Settings
from commlayer.transport.base import DType, Op, Qos, Request, Treatment
from commlayer.transport.group import NativeGroup
from tests.virtual import virtual_all_reduce
from tests.world import PATIENCE_S, Team, World, flat

Array = npt.NDArray[np.float32]

NUMEL = 500_003

PAIRS = (("f16", "f16"), ("bf16", "bf16"), ("int8", "int8"), ("int4", "int8"), ("int4", "int4"), ("sign", "sign"))

NMSE = {"f16": 5e-8, "bf16": 3.2e-6, "int8": 5e-5, "int4": 0.0135, "sign": 0.365}
"""Mean squared error of a codec, as a share of the mean square, on Gaussian values."""


class Result(NamedTuple):
    source: Array
    target: Array
    kept: Array
    """The parts of `source` that hold errors in the end; 0 elsewhere."""


def inputs(rank: int, numel: int = NUMEL) -> Array:
    return np.random.default_rng(rank).normal(size=numel).astype("f4")


def all_reduce(
    group: NativeGroup, pair: tuple[str, str], qos: Qos | None = None, key: int = 7, numel: int = NUMEL, **fields: bool
) -> Result:
    divisor, least = group.size, 50 * group.packet_bytes if qos else 0
    settings = Settings(codecs=pair, partial=qos is not None, partial_message_bytes=least, **fields)  # type: ignore[arg-type]
    plan = encoded.all_reduce(group.rank, group.hosts, numel, 4, divisor, settings)
    plan = dataclasses.replace(plan, signature=1)
    source, target = inputs(group.rank, numel), np.full(numel, np.nan, "f4")
    handle = group.submit(
        Request(
            plan,
            source.ctypes.data,
            target.ctypes.data,
            DType.F32,
            Op.SUM,
            timeout_s=PATIENCE_S,
            qos=qos,
            codec_key=key,
        )
    )
    handle.wait()
    kept = np.zeros(numel, "f4")
    for offset, length in plan.kept:
        kept[offset // 4 : (offset + length) // 4] = source[offset // 4 : (offset + length) // 4]
    return Result(source, target, kept)


def nmse(results: list[Result]) -> float:
    """The error of the result, which must be the same on all ranks."""
    exact = np.mean([inputs(rank) for rank in range(len(results))], axis=0, dtype="f8")
    for result in results:
        assert result.target.tobytes() == results[0].target.tobytes()
    return float(np.square(results[0].target - exact).mean() / np.square(exact).mean())


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("hosts", [[(0,), (1,), (2,)], [(0, 1), (2, 3)]])
def test_ranks_agree_on_a_sum_within_the_errors_of_the_codecs(
    pair: tuple[str, str], hosts: list[tuple[int, ...]]
) -> None:
    with World(hosts, loss=0.01) as world, world.open_group() as team:
        error = nmse(world.on_each(lambda rank: all_reduce(team[rank], pair)))
    assert error <= 1.1 * (NMSE[pair[0]] + NMSE[pair[1]])
    assert error >= 0.5 * NMSE[pair[1]]  # it was encoded


def halve(group: NativeGroup, name: Collective, pair: tuple[str, str], source: Array, target: Array, key: int) -> Array:
    """The target of a reduce-scatter or an all-gather."""
    numel = min(len(source), len(target))
    settings = Settings(codecs=pair, deterministic=True)
    plan = plan_for(name, rank=group.rank, hosts=group.hosts, numel=numel, itemsize=4, settings=settings)
    memory = (source.ctypes.data, target.ctypes.data)
    group.submit(Request(plan, *memory, DType.F32, Op.SUM, timeout_s=PATIENCE_S, codec_key=key)).wait()
    return target


HALVES_NUMEL = 100_003


@pytest.mark.parametrize("codec", NMSE)
@pytest.mark.parametrize("hosts", [[(0,), (1,), (2,)], [(0, 1), (2, 3)], [(0,), (1, 2)]])
def test_a_shard_of_a_reduce_scatter_is_within_the_errors_of_its_contributions(
    codec: str, hosts: list[tuple[int, ...]]
) -> None:
    def run(team: Team, world: World, key: int) -> list[Array]:
        total = world.size * HALVES_NUMEL
        return world.on_each(
            lambda r: halve(
                team[r], "reduce_scatter", (codec, "f16"), inputs(r, total), np.empty(HALVES_NUMEL, "f4"), key
            )
        )

    with World(hosts, loss=0.01) as world, world.open_group() as team:
        shards, again, others = run(team, world, 7), run(team, world, 7), run(team, world, 8)
        assert [shard.tobytes() for shard in again] == [shard.tobytes() for shard in shards]
        rotates = codec == "int4"
        assert rotates == any((a != b).any() for a, b in zip(shards, others, strict=True))
        exact = np.sum([inputs(rank, world.size * HALVES_NUMEL) for rank in range(world.size)], axis=0, dtype="f8")
    for rank, shard in enumerate(shards):
        right = exact[rank * HALVES_NUMEL : (rank + 1) * HALVES_NUMEL]
        error = np.square(shard - right).mean() / np.square(right).mean()
        assert 0.2 * NMSE[codec] <= error <= 1.1 * NMSE[codec]  # one host's part is not encoded


@pytest.mark.parametrize("codec", NMSE)
@pytest.mark.parametrize("hosts", [[(0,), (1,), (2,)], [(0, 1), (2, 3)], [(0,), (1, 2)]])
def test_gathered_shards_are_equal_on_all_ranks_and_within_the_errors_of_the_codec(
    codec: str, hosts: list[tuple[int, ...]]
) -> None:
    with World(hosts, loss=0.01) as world, world.open_group() as team:
        whole = [np.empty(world.size * HALVES_NUMEL, "f4") for _ in range(world.size)]
        world.on_each(lambda r: halve(team[r], "all_gather", ("f16", codec), inputs(r, HALVES_NUMEL), whole[r], 7))
    assert all(output.tobytes() == whole[0].tobytes() for output in whole)
    for rank, shard in enumerate(np.split(whole[0], len(whole))):
        right = inputs(rank, HALVES_NUMEL)
        error = np.square(shard - right).mean() / np.square(right).mean()
        assert 0.5 * NMSE[codec] <= error <= 1.1 * NMSE[codec]


def test_packets_of_different_sizes_hold_whole_blocks() -> None:
    with World(flat(3), mtus=[1500, 1000, 1200]) as world, world.open_group() as team:
        assert nmse(world.on_each(lambda rank: all_reduce(team[rank], ("int4", "int8")))) < 0.015


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("hosts", [[(0,), (1,), (2,)], [(0, 1), (2, 3)]])
@pytest.mark.parametrize("qos", [None, Qos(0.05)])
def test_result_and_kept_errors_add_up_to_all_inputs(
    pair: tuple[str, str], hosts: list[tuple[int, ...]], qos: Qos | None
) -> None:
    with World(hosts, loss=0.02) as world, world.open_group() as team:
        results = world.on_each(lambda rank: all_reduce(team[rank], pair, qos, keep_errors=True))
        given_up = sum(engine.stats()["packets_given_up"] for engine in world.engines)
    nmse(results)
    total = len(results) * results[0].target.astype("f8") + np.sum([result.kept for result in results], axis=0)
    exact = np.sum([inputs(rank) for rank in range(len(results))], axis=0, dtype="f8")
    np.testing.assert_allclose(total, exact, rtol=0, atol=2e-5)
    is_partial = qos is not None and pair[0] != "sign"  # which makes fewer packets than a partial message has
    assert (given_up > 0) == is_partial


def test_lost_contributions_are_not_kept_where_the_others_make_up_for_them() -> None:
    with World(flat(3), loss=0.02) as world, world.open_group() as team:
        qos = Qos(0.05, Treatment.RESCALE)
        results = world.on_each(lambda rank: all_reduce(team[rank], ("int8", "int8"), qos, keep_errors=True))
        assert sum(engine.stats()["packets_given_up"] for engine in world.engines) > 0
    for result in results:
        assert np.abs(result.kept).max() < 0.2  # rounding errors only


def test_fixed_order_gives_the_same_bits_in_every_run() -> None:
    def run(team: Team, world: World) -> bytes:
        results = world.on_each(lambda rank: all_reduce(team[rank], ("int4", "int8"), deterministic=True))
        nmse(results)
        return results[0].target.tobytes()

    with World(flat(4), loss=0.02) as world, world.open_group() as team:
        assert len({run(team, world) for _ in range(4)}) == 1


@pytest.mark.parametrize("pair", [*((name, name) for name in CODECS), ("int4", "int8")])
@pytest.mark.parametrize("hosts", [flat(2), flat(4), [(0, 1), (2, 3), (4, 5)], [(0,), (1, 2)]])
def test_virtual_ranks_give_the_bits_of_the_network(pair: tuple[str, str], hosts: list[tuple[int, ...]]) -> None:
    with World(hosts, loss=0.02) as world, world.open_group() as team:
        for numel in (1, 257, 20_001, NUMEL):
            for keeps in (False, True):
                run = functools.partial(all_reduce, pair=pair, numel=numel, deterministic=True, keep_errors=keeps)
                results = world.on_each(lambda rank: run(team[rank]))  # noqa: B023
                contributions = [inputs(rank, numel) for rank in range(world.size)]
                virtual = virtual_all_reduce(contributions, *pair, key=7, keep_errors=keeps, hosts=hosts)
                for rank, result in enumerate(results):
                    assert result.target.tobytes() == virtual.total.tobytes()
                    assert not keeps or result.kept.tobytes() == virtual.kept[rank].tobytes()
                assert keeps == any(kept.any() for kept in virtual.kept)


def test_ranks_with_different_keys_are_told() -> None:
    with World(flat(2)) as world, world.open_group() as team, pytest.raises(CommError):
        world.on_each(lambda rank: all_reduce(team[rank], ("int4", "int4"), key=rank))


def test_only_sums_of_float32_are_encoded() -> None:
    plan = encoded.all_reduce(0, ((0,), (1,)), NUMEL, 4, 1, Settings(codecs=("int8", "int8")))
    array = np.zeros(NUMEL, "f4")
    with World(flat(2)) as world, world.open_group() as team:
        for dtype, op in ((DType.I32, Op.SUM), (DType.F32, Op.MAX)):
            with pytest.raises(ConfigError, match="codecs are for sums of float32"):
                team[0].submit(Request(plan, array.ctypes.data, array.ctypes.data, dtype, op, timeout_s=1))
    hosts, settings = ((0,), (1,)), Settings(codecs=("int8", "int8"))
    names: list[Collective] = ["all_reduce", "reduce_scatter", "all_gather"]
    for name in names:
        with pytest.raises(ConfigError, match=f"{name.replace('_', '-')} of elements of 8 bytes.*use float32"):
            plan_for(name, rank=0, hosts=hosts, numel=NUMEL, itemsize=8, settings=settings)
