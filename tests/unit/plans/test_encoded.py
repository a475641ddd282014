"""Collectives whose messages are encoded: their results, and that they send what the formula says."""

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.errors import ConfigError
from commlayer.plans import encoded
from commlayer.plans.codec import CODEC_SHIFT, CODECS, Codec
from commlayer.plans.partition import MESSAGE_LIMIT_BYTES
from commlayer.plans.plan import Plan, StepKind
from commlayer.plans.select import Collective, plan_for
from commlayer.plans.settings import Settings
from commlayer.transport.base import Op
from tests.unit.plans import interpreter
from tests.unit.plans.conformance import weights

Array = npt.NDArray[np.float32]
PAIRS = (("f16", "f16"), ("int8", "int8"), ("int4", "int8"), ("int4", "int4"))


class Blocks:
    """A coder in the blocks of a codec, each of a float32 scale's upper half and small integers.

    The integers are combined with the place of the block, so that a wrong place shows.
    """

    def __init__(self, codec: Codec, largest: int) -> None:
        self.codec, self.largest = codec, largest

    def encode(self, values: Array, place: interpreter.Place) -> npt.NDArray[np.uint8]:
        padded = np.zeros(-(-len(values) // self.codec.block_values) * self.codec.block_values, np.float32)
        padded[: len(values)] = values
        blocks = padded.reshape(-1, self.codec.block_values)
        scales = (np.abs(blocks).max(1) / self.largest).astype(np.float32)
        upper = (scales.view(np.uint32) + 0xFFFF) >> 16
        scales = (upper << 16).astype(np.uint32).view(np.float32)
        quantized = np.rint(np.divide(blocks, scales[:, None], where=scales[:, None] > 0, out=np.zeros_like(blocks)))
        encoded = np.zeros((len(blocks), self.codec.block_bytes), np.uint8)
        encoded[:, :2] = upper.astype(np.uint16)[:, None].view(np.uint8)
        if self.largest > 7:
            encoded[:, 2:] = quantized.astype(np.int8).view(np.uint8)
        else:
            nibbles = (quantized + 8).astype(np.uint8)
            encoded[:, 2:] = nibbles[:, ::2] | nibbles[:, 1::2] << 4
        encoded[:, 2:] ^= self.masks(len(blocks), place)
        return encoded.reshape(-1)

    def masks(self, count: int, place: interpreter.Place) -> npt.NDArray[np.uint8]:
        """A byte for each block."""
        numbers = (place.block + np.arange(count)) * 5 + place.rank * 77
        return (numbers % 256).astype(np.uint8)[:, None]

    def decode(self, encoded: npt.NDArray[np.uint8], count: int, place: interpreter.Place) -> Array:
        blocks = encoded.reshape(-1, self.codec.block_bytes).copy()
        blocks[:, 2:] ^= self.masks(len(blocks), place)
        scales = (blocks[:, :2].copy().view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        if self.largest > 7:
            quantized = blocks[:, 2:].view(np.int8).astype(np.float32)
        else:
            pairs = blocks[:, 2:, None] >> np.array([0, 4], np.uint8) & 15
            quantized = pairs.reshape(len(blocks), -1).astype(np.float32) - 8
        decoded: Array = (quantized * scales).reshape(-1)[:count].astype(np.float32)
        return decoded


CODERS: dict[str, interpreter.Coder] = {
    "f16": SimpleNamespace(
        encode=lambda values, _: values.astype(np.float16).view(np.uint8),
        decode=lambda encoded, count, _: encoded.view(np.float16)[:count].astype(np.float32),
    ),
    "int8": Blocks(CODECS["int8"], 127),
    "int4": Blocks(CODECS["int4"], 7),
}


SHAPES = ((1, 1), (1, 1, 1), (1, 1, 1, 1, 1), (2, 2), (1, 2, 3))
"""Ranks by host."""


def hosts_of(shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    ranks = iter(range(sum(shape)))
    return tuple(tuple(itertools.islice(ranks, count)) for count in shape)


def plans_of(shape: Sequence[int], numel: int, pair: tuple[str, str], divisor: int = 1, **fields: Any) -> list[Plan]:
    settings = Settings(segment_bytes=4096, codecs=pair, staging_bytes=1 << 14, **fields)
    return [encoded.all_reduce(rank, hosts_of(shape), numel, 4, divisor, settings) for rank in range(sum(shape))]


def halves_of(
    name: Collective, shape: Sequence[int], numel: int, pair: tuple[str, str], average: bool = False, **fields: Any
) -> list[Plan]:
    """The plans of a reduce-scatter or an all-gather, with enough segments to use scratch memory again."""
    settings = Settings(segment_bytes=512, codecs=pair, staging_bytes=1 << 15, **fields)
    hosts, ranks = hosts_of(shape), range(sum(shape))
    return [
        plan_for(name, rank=rank, hosts=hosts, numel=numel, itemsize=4, average=average, settings=settings)
        for rank in ranks
    ]


STEPS = {"f16": 2**-11, "int8": 0.51 / 127, "int4": 0.51 / 7}
"""Errors of the codecs, as a share of the largest value of a block."""


@given(
    shape=st.sampled_from(SHAPES),
    numel=st.integers(0, 3000),
    codec=st.sampled_from(list(STEPS)),
    in_place=st.booleans(),
    average=st.booleans(),
    deterministic=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_each_shard_of_a_reduce_scatter_is_within_the_errors_of_the_contributions(
    shape: Sequence[int], numel: int, codec: str, in_place: bool, average: bool, deterministic: bool, seed: int
) -> None:
    world, chance = sum(shape), np.random.default_rng(seed)
    inputs = [chance.standard_normal(world * numel).astype(np.float32) for _ in range(world)]
    sources = [array.copy() for array in inputs]
    own = [slice(rank * numel, (rank + 1) * numel) for rank in range(world)]
    outputs = [sources[r][own[r]] if in_place else np.full(numel, np.nan, np.float32) for r in range(world)]
    plans = halves_of("reduce_scatter", shape, numel, (codec, "sign"), average, deterministic=deterministic)
    interpreter.run(plans, sources, outputs, Op.SUM, seed=seed, coders=CODERS)
    divisor = world if average else 1
    exact = np.asarray(np.sum(inputs, axis=0, dtype=np.float64)) / divisor
    largest = max((float(np.abs(array).max(initial=0)) for array in inputs), default=0.0) * world / divisor
    for rank, output in enumerate(outputs):
        assert np.abs(output - exact[own[rank]]).max(initial=0) <= 1.02 * largest * STEPS[codec] + 1e-6


@given(
    shape=st.sampled_from(SHAPES),
    numel=st.integers(0, 3000),
    codec=st.sampled_from(list(STEPS)),
    in_place=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_gathered_shards_are_rounded_once_and_equal_everywhere(
    shape: Sequence[int], numel: int, codec: str, in_place: bool, seed: int
) -> None:
    world, chance = sum(shape), np.random.default_rng(seed)
    exact = chance.standard_normal(world * numel).astype(np.float32)
    own = [slice(rank * numel, (rank + 1) * numel) for rank in range(world)]
    outputs = [np.full(world * numel, np.nan, np.float32) for _ in range(world)]
    for rank, output in enumerate(outputs):
        output[own[rank]] = exact[own[rank]]
    inputs = [outputs[r][own[r]] if in_place else exact[own[r]].copy() for r in range(world)]
    plans = halves_of("all_gather", shape, numel, ("sign", codec))
    interpreter.run(plans, inputs, outputs, Op.SUM, seed=seed, coders=CODERS)
    for output in outputs:
        assert np.array_equal(output, outputs[0])
    assert np.abs(outputs[0] - exact).max(initial=0) <= 1.02 * np.abs(exact).max(initial=0) * STEPS[codec] + 1e-6
    for rank in range(world) if numel > 64 and codec != "f16" else ():
        assert not np.array_equal(outputs[rank][own[rank]], exact[own[rank]])  # the owner has decoded, too


@pytest.mark.parametrize("name", ["reduce_scatter", "all_gather"])
@pytest.mark.parametrize("codec", list(STEPS))
def test_every_rank_sends_its_half_of_the_formula(name: Collective, codec: str) -> None:
    world, numel, kind = 4, 300_007, CODECS[codec]  # which no segment divides
    for plan in halves_of(name, (1,) * world, numel, (codec, codec)):
        sends = plan.steps[plan.steps["kind"] == StepKind.SEND]
        assert set(sends["flags"] >> CODEC_SHIFT) == {kind.number}
        sent = sum(kind.encoded_bytes(int(length)) for length in sends["length"])
        formula = numel * (world - 1) * kind.block_bytes / kind.block_values
        assert formula <= sent <= 1.005 * formula


def test_blocks_for_different_destinations_have_different_numbers() -> None:
    for plan in halves_of("reduce_scatter", (1, 1, 1), 5000, ("int4", "int4")):
        numbers = plan.steps["block"][plan.steps["kind"] == StepKind.ENCODE]
        assert len(set(numbers)) == len(numbers) > 2


def test_staging_too_small_for_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="staging of 1024 bytes per rank is too small for blocks of 1024 bytes"):
        encoded.reduce_scatter(0, ((0, 1), (2, 3)), 100, 4, 1, Settings(codecs=("int4", "int4"), staging_bytes=1024))


@given(
    shape=st.sampled_from(SHAPES),
    numel=st.integers(0, 9000),
    pair=st.sampled_from(PAIRS),
    in_place=st.booleans(),
    average=st.booleans(),
    deterministic=st.booleans(),
    seed=st.integers(0, 1 << 20),
    draw=st.data(),
)
def test_sum_is_within_the_codecs_errors_and_equal_everywhere(
    shape: Sequence[int],
    numel: int,
    pair: tuple[str, str],
    in_place: bool,
    average: bool,
    deterministic: bool,
    seed: int,
    draw: st.DataObject,
) -> None:
    world, chance = sum(shape), np.random.default_rng(seed)
    inputs = [chance.standard_normal(numel).astype(np.float32) for _ in range(world)]
    outputs = [
        array if in_place else np.full(numel, np.nan, np.float32) for array in (array.copy() for array in inputs)
    ]
    exact = np.sum(inputs, axis=0, dtype=np.float64) / (world if average else 1)
    sources = outputs if in_place else [array.copy() for array in inputs]
    shares = draw.draw(weights(len(shape)))
    plans = plans_of(shape, numel, pair, world if average else 1, deterministic=deterministic, weights=shares)
    interpreter.run(plans, sources, outputs, Op.SUM, seed=seed, coders=CODERS)
    if numel:
        largest = max(float(np.abs(array).max()) for array in inputs) * world / (world if average else 1)
        assert np.abs(outputs[0] - exact).max() <= 1.02 * largest * (STEPS[pair[0]] + STEPS[pair[1]]) + 1e-6
    for output in outputs[1:]:
        assert np.array_equal(output, outputs[0])


@given(
    shape=st.sampled_from(SHAPES),
    pair=st.sampled_from(PAIRS),
    average=st.booleans(),
    loss=st.sampled_from((0.0, 0.3)),
    seed=st.integers(0, 1 << 20),
    draw=st.data(),
)
def test_kept_errors_and_the_result_add_up_to_the_exact_sum(
    shape: Sequence[int], pair: tuple[str, str], average: bool, loss: float, seed: int, draw: st.DataObject
) -> None:
    numel, world, chance = 5000, sum(shape), np.random.default_rng(seed)
    inputs = [chance.standard_normal(numel).astype(np.float32) for _ in range(world)]
    divisor = world if average else 1
    outputs, sources = [np.full(numel, np.nan, np.float32) for _ in inputs], [array.copy() for array in inputs]
    shares = draw.draw(weights(len(shape)))
    plans = plans_of(shape, numel, pair, divisor, partial=loss > 0, keep_errors=True, weights=shares)
    interpreter.run(plans, sources, outputs, Op.SUM, seed=seed, loss=loss, coders=CODERS)
    total = outputs[0].astype(np.float64) * divisor
    for plan, source in zip(plans, sources, strict=True):
        for offset, length in plan.kept:
            total[offset // 4 : (offset + length) // 4] += source[offset // 4 : (offset + length) // 4]
    assert np.allclose(total, np.sum(inputs, axis=0, dtype=np.float64), rtol=0, atol=1e-5)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_that_own_nothing_know_the_operation(shape: Sequence[int], partial: bool) -> None:
    for plan in plans_of(shape, 300, ("int8", "int8"), partial=partial):
        assert plan.encodes
        assert plan.partial == partial


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(("world", "partial"), [(2, False), (2, True), (4, False)])
def test_every_rank_sends_what_the_formula_says(pair: tuple[str, str], world: int, partial: bool) -> None:
    numel = 1 << 20
    up, down = (CODECS[name].block_bytes / CODECS[name].block_values for name in pair)
    value = 2 * up if world == 2 and not partial else up + down
    assert encoded.bytes_per_value(pair, world, partial=partial) == value
    for plan in plans_of((1,) * world, numel, pair, partial=partial):
        sends = plan.steps[plan.steps["kind"] == StepKind.SEND]
        codecs = {codec.number: codec for codec in CODECS.values()}
        sent = sum(codecs[int(step["flags"]) >> CODEC_SHIFT].encoded_bytes(int(step["length"])) for step in sends)
        formula = numel * (world - 1) / world * value
        assert formula <= sent <= 1.005 * formula


@pytest.mark.parametrize("shape", [(1, 1), (1, 1, 1, 1), (2, 2, 2)])
@pytest.mark.parametrize("name", ["f16", "int8", "int4"])
def test_messages_are_of_whole_packets(name: str, shape: Sequence[int]) -> None:
    """But for those of the end of a tensor."""
    numel, codec = 10_000_000, CODECS[name]
    settings = Settings(codecs=(name, name), packet_bytes=1432)
    plan = encoded.all_reduce(0, hosts_of(shape), numel, 4, 1, settings)
    lengths = plan.steps["length"][plan.steps["kind"] == StepKind.SEND]
    assert len(lengths) >= 20
    assert (lengths % (1432 // codec.block_bytes * codec.block_length) != 0).sum() <= 2 * len(shape)


@pytest.mark.parametrize("shape", [(1, 1), (1, 1, 1, 1), (2, 2, 2)])
def test_parts_of_whole_packets_are_no_longer_than_a_message(shape: Sequence[int]) -> None:
    """The longest segments, of which each part is rounded up to packets."""
    settings = Settings(codecs=("f16", "f16"), packet_bytes=8928, segment_bytes=1 << 30)
    plan = encoded.all_reduce(0, hosts_of(shape), 1 << 29, 4, 1, settings)
    assert MESSAGE_LIMIT_BYTES // 2 < plan.steps["length"].max() <= MESSAGE_LIMIT_BYTES


@pytest.mark.parametrize("shape", [(1, 1), (1, 1, 1, 1), (2, 2, 2)])
def test_deterministic_plans_are_the_same_for_packets_of_any_size(shape: Sequence[int]) -> None:
    """The bits of a result depend on who owns which values."""
    of = [Settings(codecs=("int8", "int8"), deterministic=True, packet_bytes=packet) for packet in (0, 1432, 8928)]
    plans = [encoded.all_reduce(0, hosts_of(shape), 10_000_000, 4, 1, settings) for settings in of]
    assert all(np.array_equal(plan.steps, plans[0].steps) for plan in plans)


def test_ranks_of_two_hosts_each_send_their_shard() -> None:
    numel, pair = 1 << 20, ("int4", "int8")
    kind = CODECS["int4"]
    for plan in plans_of((2, 2), numel, pair):
        sends = plan.steps[plan.steps["kind"] == StepKind.SEND]
        assert set(sends["flags"] >> CODEC_SHIFT) == {kind.number}
        sent = sum(kind.encoded_bytes(int(length)) for length in sends["length"])
        assert sent == pytest.approx(numel / 2 * kind.block_bytes / kind.block_values, rel=0.005)


@given(seed=st.integers(0, 1 << 20))
def test_lost_contributions_are_reported_where_they_stood_in_the_input(seed: int) -> None:
    world, numel = 3, 20_000
    inputs = [np.full(numel, 127.0 * 2**rank, np.float32) for rank in range(world)]  # each exact in int8
    outputs = [np.full(numel, np.nan, np.float32) for _ in range(world)]
    plans = plans_of((1,) * world, numel, ("int8", "f16"), partial=True)
    missing = interpreter.run(plans, inputs, outputs, Op.SUM, seed=seed, loss=0.3, coders=CODERS)
    expected = np.sum(inputs, axis=0)
    for rank, ranges in enumerate(missing):
        for offset, length in ranges:
            expected[offset // 4 : (offset + length) // 4] -= inputs[rank][offset // 4 : (offset + length) // 4]
    for output in outputs:
        assert np.array_equal(output, expected)


def test_a_coder_that_is_missing_is_named() -> None:
    plans = plans_of((1, 1), 1000, ("int8", "int8"))
    arrays = [np.zeros(1000, np.float32) for _ in range(2)]
    with pytest.raises(ValueError, match="needs a coder"):
        interpreter.run(plans, arrays, arrays, Op.SUM)
