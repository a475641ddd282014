"""Properties of the codecs of the engine, for every codec of the table and on every instruction set of this CPU."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from commlayer.errors import CommError, ConfigError
from commlayer.plans.codec import CODECS, Codec
from commlayer.transport import kernels
from tests.unit.plans.interpreter import Place
from tests.virtual import Kernel

Array = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

LEVELS = kernels.kernel_levels()
GUARD = 64
UNDERFLOW = np.float32(2.0**-100)
"""Blocks whose largest magnitude (sign: mean magnitude) is smaller decode to zeros."""
SAFE = np.float32(2.0**119)
"""Sums of as many values as a block has do not overflow below this magnitude."""

PLACES = st.builds(Place, rank=st.integers(0, 300), block=st.integers(0, 1 << 40))
BLOCKS = [codec for codec in CODECS.values() if codec.block_values > 1]

every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
every_block_codec = pytest.mark.parametrize("codec", BLOCKS, ids=lambda codec: codec.name)


@pytest.fixture(autouse=True)
def best_level() -> Iterator[None]:
    yield
    kernels.select_kernels(LEVELS[0])


def sizes(codec: Codec) -> st.SearchStrategy[int]:
    """0, 1, odd ones, and those next to whole blocks."""
    near = [blocks * codec.block_values + more for blocks in (1, 2, 3) for more in (-1, 0, 1)]
    return st.one_of(st.sampled_from([0, 1, 15, 16, 17, *near]), st.integers(0, 700))


@st.composite
def arrays(draw: st.DrawFn, codec: Codec, limit: float = math.inf, *, finite: bool = True) -> Array:
    """Values of one kind, with a few others among them; all below `limit` in magnitude, or not all finite."""
    count, seed = draw(sizes(codec)), draw(st.integers(0, 1 << 32))
    chance = np.random.default_rng(seed)
    normal = chance.standard_normal(count)
    kinds = {
        "gaussian": normal,
        "heavy-tailed": normal * np.exp(2 * chance.standard_normal(count)),
        "denormal": normal * 2.0**-130,
        "tiny": normal * 2.0**-100,
        "huge": normal * 2.0**116,
        "halves": chance.integers(-9, 9, count) / 2,
        "equal": np.full(count, chance.standard_normal()),
        "zeros": np.zeros(count),
    }
    values: Array = kinds[draw(st.sampled_from(sorted(kinds)))].astype(np.float32)
    others = st.floats(width=32, allow_nan=not finite, allow_infinity=not finite)
    for value in draw(st.lists(others, max_size=4)) if count else ():
        values[chance.integers(count)] = value
    return np.clip(values, -limit, limit, out=values) if math.isfinite(limit) else values


def same(a: npt.NDArray[np.generic], b: npt.NDArray[np.generic]) -> bool:
    return a.tobytes() == b.tobytes()


def encode(codec: Codec, values: Array, place: Place) -> Bytes:
    """The bits that all levels agree on; none beyond the formula's length is written, and each before it is."""
    found = []
    length = codec.encoded_bytes(values.nbytes)
    key = kernels.codec_key(7, place.rank)
    for level in LEVELS:
        kernels.select_kernels(level)
        for filling in (0xEE, 0x11):
            encoded = np.full(length + GUARD, filling, np.uint8)
            kernels.encode(
                codec.number, encoded.ctypes.data, values.ctypes.data, len(values), key=key, block=place.block
            )
            assert (encoded[length:] == filling).all()
            found.append(encoded[:length])
    assert all(same(result, found[0]) for result in found)
    return found[0]


def decode(codec: Codec, encoded: Bytes, count: int, place: Place, sum_with: Array | None = None) -> Array:
    """The values that all levels agree on; or `sum_with` plus them."""
    found = []
    key = kernels.codec_key(7, place.rank)
    for level in LEVELS:
        kernels.select_kernels(level)
        values = np.full(count + GUARD, 3.0, np.float32)
        if sum_with is not None:
            values[:count] = sum_with
        kernels.decode(
            codec.number,
            values.ctypes.data,
            encoded.ctypes.data,
            count,
            key=key,
            block=place.block,
            add=sum_with is not None,
        )
        assert (values[count:] == 3).all()
        found.append(values[:count])
    assert all(same(result, found[0]) for result in found)
    return found[0]


def round_trip(codec: Codec, values: Array, place: Place = Place(1, 2)) -> Array:  # noqa: B008
    return decode(codec, encode(codec, values, place), len(values), place)


def blocks_of(codec: Codec, values: Array) -> Array:
    """One row for each block, the last padded with zeros."""
    padded = np.zeros(-(-len(values) // codec.block_values) * codec.block_values, np.float32)
    padded[: len(values)] = values
    return padded.reshape(-1, codec.block_values)


def scales_of(codec: Codec, encoded: Bytes) -> Array:
    """The bf16 at the start of each block."""
    halves = encoded.reshape(-1, codec.block_bytes)[:, :2].copy().view(np.uint16)[:, 0]
    scales: Array = (halves.astype(np.uint32) << 16).view(np.float32)
    return scales


@every_codec
@given(st.data())
def test_all_levels_give_the_same_bits_and_stay_within_their_memory(codec: Codec, data: st.DataObject) -> None:
    values, place = data.draw(arrays(codec, finite=False)), data.draw(PLACES)
    encoded = encode(codec, values, place)
    decoded = decode(codec, encoded, len(values), place)
    assert decoded.shape == values.shape


@every_codec
@given(st.data())
def test_decode_add_is_decode_and_add(codec: Codec, data: st.DataObject) -> None:
    values, place = data.draw(arrays(codec)), data.draw(PLACES)
    before = np.random.default_rng(len(values)).standard_normal(len(values)).astype(np.float32)
    encoded = encode(codec, values, place)
    with np.errstate(over="ignore"):
        expected = before + decode(codec, encoded, len(values), place)
    np.testing.assert_array_equal(decode(codec, encoded, len(values), place, before), expected)


@every_codec
@given(st.data())
def test_a_block_alone_has_the_bits_that_it_has_among_others(codec: Codec, data: st.DataObject) -> None:
    values, place = data.draw(arrays(codec, finite=False)), data.draw(PLACES)
    first = data.draw(st.integers(0, len(values) // codec.block_values))
    rest = values[first * codec.block_values :]
    alone = encode(codec, rest, Place(place.rank, place.block + first))
    assert same(alone, encode(codec, values, place)[first * codec.block_bytes :])


@every_block_codec
@given(st.data())
def test_a_value_that_is_not_finite_spoils_its_whole_block_and_no_other(codec: Codec, data: st.DataObject) -> None:
    values = data.draw(arrays(codec, SAFE, finite=True))
    assume(len(values) > 0)
    expected = round_trip(codec, values)
    at = data.draw(st.integers(0, len(values) - 1))
    values[at] = data.draw(st.sampled_from([np.nan, -np.nan, np.inf, -np.inf]))
    decoded = round_trip(codec, values)
    spoilt = np.arange(len(values)) // codec.block_values == at // codec.block_values
    assert np.isnan(decoded[spoilt]).all()
    assert same(decoded[~spoilt], expected[~spoilt])


@every_codec
@given(st.data())
def test_finite_values_decode_to_finite_ones(codec: Codec, data: st.DataObject) -> None:
    limit = float(np.finfo(np.float16).max) if codec.name == "f16" else SAFE
    values = data.draw(arrays(codec, limit))
    decoded = round_trip(codec, values)
    assert np.isfinite(decoded).all()
    if codec.block_values > 1:
        tiny = np.repeat(np.abs(blocks_of(codec, values)).max(1) < UNDERFLOW, codec.block_values)[: len(values)]
        assert (decoded[tiny] == 0).all()


@given(st.data())
def test_16_bit_values_are_those_of_numpy_and_torch(data: st.DataObject) -> None:
    """They round to the nearest, ties to even: at most half a unit in the last place. f16 overflows to infinity."""
    values, place = data.draw(arrays(CODECS["f16"], finite=False)), Place(0, 0)
    with np.errstate(over="ignore"):
        f16 = values.astype(np.float16)
    bf16 = torch.from_numpy(values).to(torch.bfloat16)
    expected = {
        "f16": (f16.view(np.uint16), f16.astype(np.float32)),
        "bf16": (bf16.view(torch.uint16).numpy(), bf16.float().numpy()),
    }
    is_nan = np.isnan(values)
    for name, (halves, numbers) in expected.items():
        encoded = encode(CODECS[name], values, place)
        decoded = decode(CODECS[name], encoded, len(values), place)
        assert same(encoded.view(np.uint16)[~is_nan], halves[~is_nan])
        assert same(decoded[~is_nan], numbers[~is_nan])
        assert np.isnan(decoded[is_nan]).all()


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_nans_are_the_same_at_all_levels(name: str) -> None:
    bits = [sign | 0x7F800000 | mantissa for sign in (0, 1 << 31) for mantissa in (1, 1 << 13, 0x3FFFFF, 0x7FFFFF)]
    values = np.array(bits * 5, np.uint32).view(np.float32)
    assert np.isnan(decode(CODECS[name], encode(CODECS[name], values, Place(0, 0)), len(values), Place(0, 0))).all()


@given(st.data())
def test_int8_is_within_half_a_step(data: st.DataObject) -> None:
    codec = CODECS["int8"]
    values = data.draw(arrays(codec, SAFE))
    encoded = encode(codec, values, Place(0, 0))
    largest = np.abs(blocks_of(codec, values)).max(1, initial=0)
    quotient = np.where(largest < UNDERFLOW, 0, largest / np.float32(127)).astype(np.float32)
    steps = ((quotient.view(np.uint32) + np.uint32(0xFFFF)) >> 16 << 16).view(np.float32)
    assert same(scales_of(codec, encoded), steps)
    errors = np.abs(blocks_of(codec, decode(codec, encoded, len(values), Place(0, 0))) - blocks_of(codec, values))
    # the product of a value and the reciprocal of the step is off by 2^-23 of at most 127 steps
    assert (errors <= np.where(largest < UNDERFLOW, largest, steps * (0.5 + 127 * 2.0**-22))[:, None]).all()


@given(st.data())
def test_int4_is_within_half_a_step_of_the_rotated_values(data: st.DataObject) -> None:
    """The rotation keeps lengths: the error of a block is at most that of 256 values that are off by half a step."""
    codec = CODECS["int4"]
    values = data.draw(arrays(codec, SAFE))
    encoded = encode(codec, values, Place(0, 0))
    decoded = decode(codec, encoded, len(values), Place(0, 0))
    errors = np.square(blocks_of(codec, decoded).astype("f8") - blocks_of(codec, values)).sum(1)
    if len(values) % codec.block_values == 0:  # the padding has errors, too
        steps = 16 * scales_of(codec, encoded).astype("f8")
        assert (errors[steps > 0] <= 256 * np.square(steps[steps > 0] / 2) * (1 + 1e-4)).all()


NMSE = {"f16": 5e-8, "bf16": 3.2e-6, "int8": 4.5e-5, "int4": 0.0135, "sign": 0.365}
"""Limits of the mean squared error as a share of the mean square, for Gaussian values."""


def nmse(values: npt.NDArray[np.floating[Any]], exact: Array) -> float:
    return float(np.square(values.astype("f8") - exact).sum() / np.square(exact, dtype="f8").sum())


@pytest.mark.parametrize("name", NMSE)
def test_mean_squared_error_of_gaussian_values(name: str) -> None:
    values = np.random.default_rng(1).standard_normal(1 << 18).astype(np.float32)
    assert NMSE[name] / 2 <= nmse(round_trip(CODECS[name], values), values) <= NMSE[name]


@given(st.data())
def test_mean_squared_error_of_int4_is_bounded_for_all_values(data: st.DataObject) -> None:
    """Rotated values have the mean square s of the block, and are sums with random signs, so by Hoeffding's inequality
    the expected square of the largest of 256 is at most 2 (ln 512 + 1) s. No error is larger than half a step, which is
    the largest value / 7.99, rounded up by 1/128 at most: 0.058 s in the mean over keys."""
    codec = CODECS["int4"]
    values = data.draw(arrays(codec, SAFE))[: codec.block_values]
    assume(len(values) == codec.block_values and np.abs(values).max() > 2.0**-90)
    errors = [nmse(round_trip(codec, values, Place(rank, 0)), values) for rank in range(32)]
    assert np.mean(errors) < 0.058


def test_mean_squared_error_of_int4_is_largest_for_eight_equal_values() -> None:
    """Rotated, they are multiples of a fourth of the largest, which lie between two levels."""
    values = np.zeros(256, np.float32)
    values[np.random.default_rng(8).permutation(256)[:8]] = 1
    errors = [nmse(round_trip(CODECS["int4"], values, Place(rank, 0)), values) for rank in range(64)]
    assert 0.028 < np.mean(errors) < 0.032


@pytest.mark.parametrize("name", ["f16", "bf16"])
@given(st.data())
def test_encoding_again_changes_nothing(name: str, data: st.DataObject) -> None:
    codec = CODECS[name]
    decoded = round_trip(codec, data.draw(arrays(codec)))
    assert same(round_trip(codec, decoded), decoded)


@given(st.data())
def test_encoding_int8_again_changes_nothing_where_a_value_has_the_largest_step(data: st.DataObject) -> None:
    """The scale is rounded up, so the largest value may be 126 steps; then the scale is another one the next time.
    int4 has no such case: its largest level is 7.5 steps, and the scale is made for 7.99."""
    codec, place = CODECS["int8"], Place(0, 0)
    values = data.draw(arrays(codec, SAFE))
    encoded = encode(codec, values, place)
    decoded = decode(codec, encoded, len(values), place)
    again = encode(codec, decoded, place).reshape(-1, codec.block_bytes)
    quantized = encoded.reshape(-1, codec.block_bytes)[:, 2:].view(np.int8)
    largest = np.abs(quantized.astype(int)).max(1, initial=0)
    assert ((largest == 0) | (largest >= 126)).all()
    assert same(again[largest != 126], encoded.reshape(-1, codec.block_bytes)[largest != 126])


@every_codec
def test_errors_of_different_values_are_uncorrelated(codec: Codec) -> None:
    """A codec that draws one random number for many values would fail here: its errors would not average out.

    Each correlation has a standard deviation of 1 / sqrt(count). Of 14, one beyond 4.5 has a probability of 1e-4.
    """
    count = 1 << 17
    values = np.random.default_rng(5).standard_normal(count).astype(np.float32)
    errors = round_trip(codec, values).astype("f8") - values
    errors -= errors.mean()
    lags = [1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 64, 128, 255, 256]
    correlations = [float(errors[lag:] @ errors[:-lag] / (errors @ errors)) for lag in lags]
    assert max(map(abs, correlations)) < 4.5 / math.sqrt(count), dict(zip(lags, correlations, strict=True))


@every_codec
def test_errors_have_no_mean(codec: Codec) -> None:
    count = 1 << 17
    values = np.random.default_rng(6).standard_normal(count).astype(np.float32)
    errors = round_trip(codec, values).astype("f8") - values
    assert abs(errors.mean()) < 4.5 * errors.std() / math.sqrt(count)


def mean_over_keys(values: Array, keys: int) -> npt.NDArray[np.float64]:
    """The mean of int4's results, each with its own rotation."""
    kernel, mean = Kernel(CODECS["int4"]), np.zeros(len(values))
    for rank in range(keys):
        mean += kernel.decode(kernel.encode(values, Place(rank, 0)), len(values), Place(rank, 0))
    return mean / keys


def share_of(result: npt.NDArray[np.float64], values: Array) -> float:
    """The part of a result along the values."""
    exact = values.astype("f8")
    return float(result @ exact / (exact @ exact))


def test_int4_is_unbiased_over_keys_but_for_a_shrinkage() -> None:
    """A key is a step and a rank. Rounding to the nearest level shrinks dense blocks by 0.2 %; the rest of the error
    averages out: over K keys its mean square falls as 1 / K."""
    keys = 4096
    for power in (1, 3):  # Gaussian values, and their cubes, with heavy tails
        values = (np.random.default_rng(7).standard_normal(1024) ** power).astype(np.float32)
        mean = mean_over_keys(values, keys)
        share = share_of(mean, values)
        assert 0.997 < share < 0.9985
        one = nmse(round_trip(CODECS["int4"], values), values)
        assert one / keys / 1.5 < nmse((mean - share * values + values).astype("f8"), values) < 1.5 * one / keys


def test_int4_shrinks_a_value_alone_in_its_block_by_a_level_at_most() -> None:
    """Its rotated values are equal in magnitude, and the largest level is 7.5 of the 7.99 steps of the scale, which is
    rounded up by 1/128 at most: the one case in which the bias is larger than the error of Gaussian values."""
    values = np.zeros(256, np.float32)
    for magnitude in np.geomspace(1, 2, 9):
        values[77] = magnitude
        assert 7.5 / 7.99 / (1 + 1 / 128) < share_of(mean_over_keys(values, 4), values) < 1


@every_codec
def test_ranks_and_blocks_are_rotated_differently_or_not_at_all(codec: Codec) -> None:
    values = np.random.default_rng(8).standard_normal(codec.block_values).astype(np.float32)
    encodings = {encode(codec, values, Place(rank, block)).tobytes() for rank in range(8) for block in range(8)}
    assert len(encodings) == (64 if codec.name == "int4" else 1)


def test_what_this_cpu_and_the_table_lack_is_refused() -> None:
    values = np.zeros(4, np.float32)
    for number in (0, max(codec.number for codec in CODECS.values()) + 1):
        with pytest.raises(CommError, match=f"codec {number}"):
            kernels.encode(number, values.ctypes.data, values.ctypes.data, 1)
        with pytest.raises(CommError, match=f"codec {number}"):
            kernels.decode(number, values.ctypes.data, values.ctypes.data, 1)
    with pytest.raises(ConfigError, match=r"'sse9'.*scalar"):
        kernels.select_kernels("sse9")
    assert LEVELS[-1] == "scalar"
