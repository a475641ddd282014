"""Maps of the protected blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from commlayer.loss.protect import as_words, blocks_of, largest_blocks


def marked(words: Tensor) -> set[int]:
    return {64 * at + bit for at, word in enumerate(words.tolist()) for bit in range(64) if word >> bit & 1}


@pytest.mark.parametrize("numel", [1000, 1024, 129 * 256])
def test_the_largest_blocks_are_chosen(numel: int) -> None:
    values = torch.zeros(numel)
    values[-1], values[300], values[0] = -9.0, 5.0, 1.0
    words = as_words(largest_blocks(values, 2 / -(-numel // 256), 1024))
    assert marked(words) == {1, -(-numel // 256) - 1}


def test_blocks_with_any_part_of_a_range_are_chosen() -> None:
    values = torch.zeros(70 * 256 + 3)
    ranges = [(0, 1), (255, 257), (5 * 256, 6 * 256), (7, 7), (70 * 256, 70 * 256 + 3)]
    assert marked(as_words(blocks_of(ranges, values, 1024))) == {0, 1, 5, 70}
    assert marked(as_words(blocks_of([], values, 1024))) == set()
