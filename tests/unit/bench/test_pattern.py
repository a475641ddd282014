from collections.abc import Callable

import pytest
import torch

from commlayer.tools.bench import pattern

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
]
COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


def inputs(count: int, world: int, dtype: torch.dtype, op: str) -> list[torch.Tensor]:
    parts = [torch.empty(count, dtype=dtype) for _ in range(world)]
    for rank, part in enumerate(parts):
        pattern.fill(part, rank, world, op)
    return parts


@pytest.mark.parametrize("op", COMBINE)
@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reduction_in_the_type_itself_is_exact_in_any_order(dtype: torch.dtype, world: int, op: str) -> None:
    parts = inputs(1000, world, dtype, op)
    expected = torch.empty(1000, dtype=dtype)
    pattern.fill_reduced(expected, world, op)
    for order in (parts, parts[::-1]):
        total = order[0]
        for part in order[1:]:
            total = COMBINE[op](total, part)
        assert torch.equal(total, expected)


@pytest.mark.parametrize("world", [2, 3, 4, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_chained_sums_stay_exact_as_long_as_promised_and_no_longer(dtype: torch.dtype, world: int) -> None:
    reduced = torch.empty(1000, dtype=dtype)
    pattern.fill_reduced(reduced, world, "sum")
    exact = [int(value) for value in reduced.tolist()]
    length = pattern.exact_chain(world, dtype, "sum")
    for _ in range(1, length):
        reduced = sum((reduced for _ in range(world - 1)), reduced)
        exact = [value * world for value in exact]
    assert [int(value) for value in reduced.tolist()] == exact
    # the largest possible sum would not survive one more
    limit = torch.finfo(dtype).max if world in (2, 4) else pattern.EXACT_INTEGER_LIMIT[dtype]
    largest = max(1, min(63, pattern.EXACT_INTEGER_LIMIT[dtype] // world))
    assert largest * world ** (length + 1) > limit or length == 1


def test_results_that_do_not_grow_may_be_chained_for_ever() -> None:
    assert pattern.exact_chain(4, torch.int32, "sum") > 1e6
    assert pattern.exact_chain(4, torch.float32, "max") > 1e6
    assert pattern.exact_chain(1, torch.float32, "sum") > 1e6


def test_ranks_and_places_differ() -> None:
    first, second = inputs(4096, 2, torch.float32, "sum")
    assert (first == second).float().mean() < 0.1
    for shift in (1, 16, 256, 1024):  # elements, pages, packets mixed up
        assert (first == first.roll(shift)).float().mean() < 0.1


def test_data_is_reproducible() -> None:
    assert torch.equal(inputs(100, 2, torch.int32, "sum")[1], inputs(100, 2, torch.int32, "sum")[1])


def test_a_part_of_the_reduction_is_that_part_of_the_whole() -> None:
    whole, part = torch.empty(3000), torch.empty(1000)
    pattern.fill_reduced(whole, 3, "sum")
    pattern.fill_reduced(part, 3, "sum", first=1500)
    assert torch.equal(part, whole[1500:2500])


def test_generation_in_blocks_has_no_seams(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, blocks = torch.empty(1000), torch.empty(1000)
    pattern.fill(whole, 1, 2, "sum")
    monkeypatch.setattr(pattern, "_BLOCK", 64)
    pattern.fill(blocks, 1, 2, "sum")
    assert torch.equal(whole, blocks)
