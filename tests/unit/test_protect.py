"""Maps of the protected blocks."""

import torch
from torch import Tensor

from commlayer.loss.protect import as_words, blocks_of


def marked(words: Tensor) -> set[int]:
    return {64 * at + bit for at, word in enumerate(words.tolist()) for bit in range(64) if word >> bit & 1}


def test_blocks_with_any_part_of_a_range_are_chosen() -> None:
    values = torch.zeros(70 * 256 + 3)
    ranges = [(0, 1), (255, 257), (5 * 256, 6 * 256), (7, 7), (70 * 256, 70 * 256 + 3)]
    assert marked(as_words(blocks_of(ranges, values, 1024))) == {0, 1, 5, 70}
    assert marked(as_words(blocks_of([], values, 1024))) == set()
