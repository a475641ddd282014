"""`Fine` and `cut`: which gradients travel in 16 bits, and where they lie in a buffer."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from commlayer.compress.fine import GAP_LEAST, Fine, cut


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 10)
        self.embed = nn.Embedding(10, 4)
        self.out.weight = self.embed.weight  # tied
        self.attention = nn.ModuleDict({"heads": nn.Linear(4, 4), "multihead_attn": nn.Linear(4, 4)})
        self.head = nn.Linear(4, 4)
        self.norm = nn.LayerNorm([2, 2])


def test_embeddings_norms_and_the_head_are_fine_by_name() -> None:
    model = Model()
    fine = Fine(model)
    assert model.out.weight in fine  # it has two names
    assert model.head.weight in fine
    assert model.norm.weight in fine
    assert model.out.bias in fine
    assert not any(weight in fine for weight in model.attention.parameters() if weight.dim() > 1)
    assert model.head.weight not in Fine()
    assert model.head.bias in Fine()


@given(
    sizes=st.lists(st.sampled_from((1, 7, 300, GAP_LEAST - 1, GAP_LEAST, 3 * GAP_LEAST)), max_size=9), data=st.data()
)
def test_every_value_is_in_one_part(sizes: list[int], data: st.DataObject) -> None:
    flat = [data.draw(st.booleans()) for _ in sizes]
    parameters = [torch.zeros(size if one else (1, size)) for size, one in zip(sizes, flat, strict=True)]
    starts = [0, *itertools.accumulate(sizes)][:-1]
    size = sum(sizes)
    coarse, fine = cut(parameters, starts, size, Fine())
    is_fine, is_coarse = torch.zeros(size, dtype=torch.bool), torch.zeros(size, dtype=torch.bool)
    for ranges, where in ((coarse, is_coarse), (fine, is_fine)):
        for (_, end), (start, _) in itertools.pairwise(ranges):
            assert end <= start
        for start, end in ranges:
            assert start < end
            where[start:end] = True
    for start, length, one in zip(starts, sizes, flat, strict=True):
        assert is_fine[start : start + length].all() == one or length == 0
        assert one or is_coarse[start : start + length].all()
        assert not (one and length >= GAP_LEAST and is_coarse[start : start + length].any())
