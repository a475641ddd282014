"""`Content` and `load_of`: the bytes of a bucket by codec."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commlayer.compress.content import Candidate, Content, content_of, load_of
from commlayer.compress.fine import Fine
from examples.train_gpt import Gpt
from tests.unit.compress.powersgd_ranks import draw, team

FINE_BYTES = 4.0


def of_model(model: torch.nn.Module, fine: Fine, rank: int) -> Content:
    parameters = list(model.parameters())
    starts = [0, *itertools.accumulate(parameter.numel() for parameter in parameters)]
    return content_of(parameters, starts[:-1], starts[-1], fine, rank)


@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple), max_size=6), st.integers(1, 4))
def test_the_bytes_are_those_that_powersgd_sends(shapes: list[tuple[int, ...]], rank: int) -> None:
    ((*parameters,),) = draw(1, shapes, seed=1)
    starts = [0, *itertools.accumulate(parameter.numel() for parameter in parameters)]
    content = content_of(parameters, starts[:-1], starts[-1], Fine(), rank)
    (own,) = team(1, rank)
    compression = own.compress(range(len(parameters)), parameters)
    assert (content.exact, content.left) == (compression.exact.numel(), compression.left.numel())
    assert content.right == compression.project(compression.left).numel()


def test_the_gpt_of_the_documentation() -> None:
    """docs/compression.md, PowerSGD: bytes of a step on each of 4 hosts."""
    model = Gpt(64, 128, 5, 4)
    payload = {}
    for rank in (4, 8, 16):
        content = of_model(model, Fine(model), rank)
        assert (content.values, content.fine) == (1_065_600, 82_560)
        load = load_of(Candidate(f"powersgd:{rank}", FINE_BYTES, 1e-9), content, FINE_BYTES)
        payload[rank] = 0.75 * (load.bytes + load.late_bytes)
    assert payload == {4: 160_896, 8: 295_296, 16: 564_096}
    kept = of_model(model, Fine(model, ["embed*", "head.1.weight"]), 4)
    assert 3 * (kept.exact + kept.left + kept.right) == 370_560


def test_loads_of_other_codecs() -> None:
    content = Content(100, 90, 20)
    assert load_of(Candidate("none", 8.0, 0.0), content, FINE_BYTES) == (800, 0, 0, 0)
    bytes_, coding_s, *late = load_of(Candidate("int8", 2.0, 0.5), content, FINE_BYTES)
    assert (bytes_, coding_s, late) == (90 * 2 + 20 * 4, 50, [0, 0])


@pytest.mark.parametrize("given_by_user", [True, False])
def test_only_patterns_of_the_user_keep_matrices_out_of_powersgd(given_by_user: bool) -> None:
    model = Gpt(64, 128, 1, 4)
    fine = Fine(model, ["embed*"]) if given_by_user else Fine(model)
    assert fine.is_given(model.embed_byte.weight) == given_by_user
    assert model.embed_byte.weight in fine
    assert not fine.is_given(list(model.head.parameters())[2])
