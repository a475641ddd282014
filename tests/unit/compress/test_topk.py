"""Top-k: the payload holds the largest values, and no part of a gradient is forgotten."""

import math
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from commlayer.compress.codec import codec_of
from commlayer.compress.topk import BLOCK, COUNT_BYTES, VALUE_BYTES, add_to, selected, take_out
from commlayer.transport import kernels

BF16_LARGEST = torch.finfo(torch.bfloat16).max
SHARES = st.sampled_from(["1e-9", "0.001", "0.01", "0.1", "0.3", "0.5"]).map(Fraction)


@st.composite
def buffers(draw: st.DrawFn, *, finite: bool = True) -> Tensor:
    """Values of one kind, with a few others among them; all are finite, or not."""
    near = [blocks * BLOCK + more for blocks in (1, 2) for more in (-1, 0, 1)]
    count = draw(st.one_of(st.sampled_from([0, 1, 2, *near]), st.integers(0, 300)))
    chance = torch.Generator().manual_seed(draw(st.integers(0, 2**30)))
    normal = torch.randn(count, generator=chance)
    kinds = {
        "gaussian": normal,
        "heavy-tailed": normal * torch.exp(2 * torch.randn(count, generator=chance)),
        "denormal": (normal.double() * 2.0**-137).float(),
        "huge": normal * 2.0**120,
        "ties": torch.randint(-2, 3, (count,), generator=chance).float(),
        "rarely not zero": normal * (torch.rand(count, generator=chance) < 0.003),
        "zeros": torch.zeros(count),
    }
    values = kinds[draw(st.sampled_from(sorted(kinds)))]
    others = draw(st.lists(st.floats(width=32, allow_nan=not finite, allow_infinity=not finite), max_size=4))
    for value in others if count else ():
        values[int(torch.randint(count, (1,), generator=chance))] = value
    return values.nan_to_num() if finite else values


def send(values: Tensor, k: int) -> Tensor:
    """The payload of the `k` largest values, which are taken out of `values`."""
    indices, chosen = torch.empty(k, dtype=torch.uint32), torch.empty(k)
    kernels.select_largest(values.data_ptr(), len(values), k, indices.data_ptr(), chosen.data_ptr())
    return take_out(values, indices, chosen)


def received(payload: Tensor, count: int) -> Tensor:
    values = torch.zeros(count)
    add_to(values, payload)
    return values


@settings(max_examples=150, deadline=None)
@given(buffers(), SHARES)
def test_the_largest_values_travel_and_the_rest_stays(values: Tensor, share: Fraction) -> None:
    k, left = selected(share, len(values)), values.clone()
    payload = send(left, k)
    assert len(payload) == VALUE_BYTES * k + COUNT_BYTES * math.ceil(len(values) / BLOCK)
    sent = received(payload, len(values))
    assert torch.equal(sent + left, values)
    assert torch.equal(sent.double() + left.double(), values.double())
    # Of equal magnitudes those at lower indices come first.
    largest = torch.sort(values.abs(), descending=True, stable=True).indices[:k]
    wanted = torch.zeros_like(values)
    wanted[largest] = values[largest].clamp(-BF16_LARGEST, BF16_LARGEST).bfloat16().float()
    assert torch.equal(sent, wanted)
    rounding = left[largest].abs()
    assert torch.all(rounding <= values[largest].abs() * 2**-8 + 2**-134)


@settings(max_examples=60, deadline=None)
@given(buffers(finite=False), st.sampled_from([math.inf, -math.inf, math.nan]), st.integers(0), SHARES)
def test_a_value_that_is_not_finite_is_sent(values: Tensor, bad: float, place: int, share: Fraction) -> None:
    if len(values) == 0:
        return
    values[place % len(values)] = bad
    assert not received(send(values.clone(), selected(share, len(values))), len(values)).isfinite().all()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 500), st.integers(1, 6), SHARES, st.integers(0, 2**30))
def test_sums_and_residuals_add_up_to_all_gradients(
    ranks: int, count: int, steps: int, share: Fraction, seed: int
) -> None:
    chance = torch.Generator().manual_seed(seed)
    left, total, exact = torch.zeros(ranks, count), torch.zeros(count), torch.zeros(count)
    for _ in range(steps):
        gradients = torch.randint(-5000, 5000, (ranks, count), generator=chance).float()  # no sum is rounded
        exact += gradients.sum(0)
        left += gradients
        for own in left:
            add_to(total, send(own, selected(share, count)))
    assert torch.equal(total + left.sum(0), exact)


def test_every_value_is_sent_in_the_end() -> None:
    gradient = torch.linspace(0.1, 1.0, 1000)
    left, total = torch.zeros(1000), torch.zeros(1000)
    for _ in range(600):
        left += gradient
        add_to(total, send(left, selected(Fraction("0.01"), 1000)))
    # A value waits until as much has gathered as in the others: some 100 steps' mean.
    assert total.min() > 0
    assert left.max() < 100


def test_the_layout_of_a_payload() -> None:
    values = torch.zeros(2 * BLOCK + 9)
    values[BLOCK - 1], values[2 * BLOCK + 8], values[2 * BLOCK] = 1.5, -2.0, 1 + 2**-10
    payload = send(values, 3)
    wanted = struct.pack("<3I3H3H", 1, 0, 2, BLOCK - 1, 0, 8, 0x3FC0, 0x3F80, 0xC000)
    assert bytes(payload.tolist()) == wanted
    assert values.nonzero().tolist() == [[2 * BLOCK]]
    assert values[2 * BLOCK] == 2**-10


@pytest.mark.parametrize(
    ("codec", "values", "k"),
    [
        ("topk:0.01", 0, 0),
        ("topk:0.01", 1, 1),
        ("topk:0.07", 100, 7),  # in floating point 0.07 * 100 is above 7
        ("topk:.5", 3, 2),
        ("topk:1e-3", 1001, 2),
        ("topk:0.01", 10**9, 10**7),
    ],
)
def test_the_share_is_rounded_up(codec: str, values: int, k: int) -> None:
    assert selected(codec_of(codec).share, values) == k


def test_a_selection_of_more_values_than_there_are_is_refused() -> None:
    values = torch.ones(3)
    with pytest.raises(RuntimeError, match="selecting 4 of 3 values"):
        send(values, 4)
