"""The fast virtual ranks of bench/jobs/virtual_ranks.py against the plans, which tests/virtual.py runs: equal bits."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from bench.jobs.virtual_ranks import PACKET_BYTES, EncodedAverage, PacketLoss, Part, VirtualHook
from commlayer import Fine, Policy
from commlayer.compress.codec import ENCODED, CodecPair
from commlayer.compress.fine import GAP_LEAST
from commlayer.plans.codec import CODECS
from tests.virtual import virtual_all_reduce

Array = npt.NDArray[np.float32]

KEY = 5 << 32


def contributions(ranks: int, numel: int) -> Array:
    """Magnitudes differ by block; some values are zeros of both signs."""
    random = np.random.default_rng(numel)
    rows = random.normal(size=(ranks, numel)) * np.exp(random.normal(size=numel))
    rows[:, ::7] = 0.0
    rows[:, 3::14] = -0.0
    return rows.astype("f4")


def bits(values: Array) -> bytes:
    return np.ascontiguousarray(values).tobytes()


@pytest.mark.parametrize("numel", [1, 257, 1024, 20_001, 60_000])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("codec", ENCODED)
def test_average_and_errors_have_the_bits_of_the_plans(codec: str, ranks: int, numel: int) -> None:
    pair, rows = ENCODED[codec], contributions(ranks, numel)
    fast = EncodedAverage(ranks, numel, pair)
    for key in (KEY, KEY + 1):
        expected = virtual_all_reduce(list(rows), pair.up, pair.down, key, keep_errors=pair.keeps_errors)
        assert bits(fast.average(rows, key)) == bits(expected.total)
        if pair.keeps_errors:
            assert bits(fast.kept) == bits(np.stack(expected.kept))
        assert fast.kept.any() == (pair.keeps_errors and numel > 1)
    assert bits(rows) == bits(contributions(ranks, numel))


@pytest.mark.parametrize("codec", ENCODED)
def test_lost_contributions_are_left_out_and_kept(codec: str) -> None:
    pair, rows = ENCODED[codec], contributions(2, 20_001)
    fast, lost = EncodedAverage(2, 20_001, pair, partial=True), 0
    for key in range(8):
        expected = virtual_all_reduce(list(rows), pair.up, pair.down, key, keep_errors=pair.keeps_errors, loss=0.4)
        parts = [
            Part(rank, slice(offset // 4, (offset + length) // 4))
            for rank, missing in enumerate(expected.missing)
            for offset, length in missing
        ]
        lost += len(parts)
        assert bits(fast.average(rows, key, parts)) == bits(expected.total)
        if pair.keeps_errors:
            assert bits(fast.kept) == bits(np.stack(expected.kept))
        else:
            kept = np.zeros_like(rows)
            for part in parts:
                kept[part] = rows[part]
            assert bits(fast.kept) == bits(kept)
    assert lost > 0


def test_values_of_several_segments_are_refused() -> None:
    EncodedAverage(4, 1 << 17, CodecPair("bf16", "bf16"))
    with pytest.raises(ValueError, match="131073 values in bf16: a plan has several segments; use a smaller model"):
        EncodedAverage(4, (1 << 17) + 1, CodecPair("bf16", "bf16"))


def losses_of(codec: str, share: float, numel: int = 80_000) -> PacketLoss:
    shards = EncodedAverage(4, numel, CodecPair(codec, "int8")).shards
    return PacketLoss(shards, CODECS[codec], share, [1, 2])


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_packets_are_whole_blocks_of_the_other_ranks_shards(codec: str) -> None:
    numel = 80_000
    shards = EncodedAverage(4, numel, CodecPair(codec, "int8")).shards
    block = CODECS[codec]
    for rank, packets in enumerate(losses_of(codec, 0.01).packets):
        owned = np.zeros(numel, int)
        for packet in packets:
            owned[packet] += 1
            assert block.encoded_bytes(4 * (packet.stop - packet.start)) <= PACKET_BYTES
            assert (packet.start - shards[0].start) % block.block_values == 0
        assert not owned[shards[rank]].any()
        owned[shards[rank]] = 1
        assert (owned == 1).all()


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_the_share_is_lost_and_nothing_twice_in_a_row(codec: str) -> None:
    numel, steps, lost = 80_000, 4000, 0
    losses, before = losses_of(codec, 0.01, numel), np.zeros((4, numel), bool)
    for _ in range(steps):
        now = np.zeros_like(before)
        for part in losses.draw():
            now[part] = True
        assert not (now & before).any()
        lost += int(now.sum())
        before = now
    assert lost / (steps * 3 * numel) == pytest.approx(0.01, rel=0.1)


class Widths(nn.Module):
    """Matrices for the codec, between fine parameters that are short and long."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"first": (70, 300), "bias": (300,), "second": (40, 500), "embed": (GAP_LEAST, 1), "last": (123, 77)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


def gradients(step: int, ranks: int, numel: int) -> Array:
    return np.random.default_rng(step).normal(size=(ranks, numel)).astype("f4")


def run(codec: str, loss: float, steps: int) -> tuple[VirtualHook, list[Array], list[Array]]:
    """The hook after some steps, the averages, and the exact means."""
    model = Widths()
    hook = VirtualHook(list(model.parameters()), Fine(model), Policy(codec=codec), 4, loss, [3])
    exact = [gradients(step, 4, hook.size) for step in range(steps)]
    return hook, [hook.average(rows.copy(), step) for step, rows in enumerate(exact)], [rows.mean(0) for rows in exact]


def share_of(errors: Sequence[Array], exact: Sequence[Array], values: slice) -> float:
    return float(sum(np.square(e[values]).sum() for e in errors) / sum(np.square(x[values]).sum() for x in exact))


FINE = slice(21_000, 21_300), slice(41_300, 41_300 + GAP_LEAST)
COARSE = slice(0, 21_000), slice(21_300, 41_300), slice(41_300 + GAP_LEAST, None)


@pytest.mark.parametrize("codec", ["int8", "int4-int8", "int4"])
def test_fine_values_have_16_bits_and_the_others_the_codec(codec: str) -> None:
    hook, averages, exact = run(codec, 0.0, 3)
    assert hook.coarse == [(0, 41_300), (41_300 + GAP_LEAST, hook.size)]
    errors = [average - right for average, right in zip(averages, exact, strict=True)]
    assert all(share_of(errors, exact, values) < 1e-5 for values in FINE)
    assert all(share_of(errors, exact, values) > 3e-5 for values in COARSE)
    assert hook.lost_values == 0


@pytest.mark.parametrize(("codec", "loss"), [("int8", 0.05), ("int4-int8", 0.05), ("int4", 0.0), ("int4", 0.05)])
def test_what_was_not_counted_comes_back(codec: str, loss: float) -> None:
    hook, averages, exact = run(codec, loss, 30)
    assert (hook.lost_values / hook.sent_values > 0.02) == (loss > 0)
    left = np.sum(averages, axis=0, dtype="f8") - np.sum(exact, axis=0, dtype="f8")
    last = hook._residual.sum(0) / 4
    errors = [left + last]
    limit = 1e-9 if codec == "int4" else 2e-2 if codec == "int4-int8" else 2e-4  # stateless: rounding errors do not
    scale = [np.sqrt(np.square(exact).sum(0))]
    assert all(share_of(errors, scale, values) < limit for values in COARSE)


def test_without_feedback_rounding_errors_are_dropped() -> None:
    model = Widths()
    hook = VirtualHook(list(model.parameters()), Fine(model), Policy(codec="int4"), 4, 0.0, [3])
    hook.feedback = False
    rows = gradients(1, 4, hook.size)
    first, again, other = (hook.average(rows.copy(), step) for step in (0, 0, 1))
    assert bits(first) == bits(again)
    assert bits(first) != bits(other)
