"""Fragments have every value of the model once; the rule x += (G' - G) - q keeps steps of the delay and residuals."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from commlayer.compress.fine import Fine
from commlayer.frontend.local.fragment import Fragment, fragments_of
from commlayer.frontend.local.outer import Outer
from commlayer.frontend.local.site import Site


class OneOf(Site):
    """A replica of a larger site, without a process group."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size


SHAPES = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=6)


@given(SHAPES, st.integers(1, 5))
def test_every_value_is_in_one_fragment_and_long_models_are_cut_evenly(shapes: list[list[int]], count: int) -> None:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    fragments = fragments_of(parameters, count, Fine(), Site())
    assert sum(fragment.size for fragment in fragments) == sum(fragment.numel() for fragment in parameters)
    for fragment in fragments:
        fragment.add(torch.ones(fragment.size))
    assert all(bool((parameter == 1).all()) for parameter in parameters)
    coarse = sum(parameter.numel() for parameter in parameters if parameter.dim() > 1)
    if coarse >= 256 * 8 * count:
        lengths = [sum(part.end - part.start for part in fragment.parts if not part.is_fine) for fragment in fragments]
        assert max(lengths) - min(lengths) <= coarse // (8 * count)


def test_values_of_other_memory_formats_keep_their_places() -> None:
    parameter = nn.Parameter(torch.randn(4, 3, 5, 6).to(memory_format=torch.channels_last))
    before = parameter.detach().clone()
    (fragment,) = fragments_of([parameter], 1, Fine(), Site())
    fragment.put(fragment.weights())
    assert torch.equal(parameter, before)


@given(st.integers(1, 5), st.integers(1, 3))
def test_the_shards_of_a_site_are_the_fragment(size: int, count: int) -> None:
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((30, 41), (17,), (50, 11))]
    alone = fragments_of(parameters, count, Fine(), Site())
    shards = [fragments_of(parameters, count, Fine(), OneOf(rank, size)) for rank in range(size)]
    for at, whole in enumerate(alone):
        together = torch.cat([fragments[at].shared for fragments in shards])
        assert torch.equal(together[: whole.size], whole.shared)
        fine = sum(part.end - part.start for fragments in shards for part in fragments[at].parts if part.is_fine)
        coarse = sum(part.end - part.start for part in whole.parts if not part.is_fine)
        assert fine == len(together) - coarse


def apply(fragment: Fragment, counted: torch.Tensor, average: torch.Tensor, outer: Outer) -> None:
    fragment.add(fragment.update(average, outer).sub_(counted))


@given(st.integers(2, 5), st.integers(0, 2**16), st.floats(0.1, 1.5), st.sampled_from([0.0, 0.6, 0.9]))
def test_the_rule_keeps_steps_of_the_delay_and_what_was_not_counted(
    sites: int, seed: int, lr: float, momentum: float
) -> None:
    """After it, x = G' + (d - q) + s on each site, for any outer optimizer; and averaging loses nothing."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> torch.Tensor:
        return torch.randn(300, generator=generator)

    start = draw()
    models = [nn.Parameter(start.clone().view(10, 30)) for _ in range(sites)]
    fragments = [fragments_of([model], 1, Fine(), Site())[0] for model in models]
    for outer in (Outer(lr, momentum), Outer(1.0, 0.0)):
        for model in models:
            model.detach().add_(draw().view(10, 30))
        differences = [fragment.weights() - fragment.shared for fragment in fragments]
        counted = [difference + 0.1 * draw() for difference in differences]
        steps = [draw() for _ in models]
        for model, step in zip(models, steps, strict=True):
            model.detach().add_(step.view(10, 30))
        before = torch.stack([fragment.weights() for fragment in fragments]).double().mean(0)
        for fragment, own in zip(fragments, counted, strict=True):
            apply(fragment, own, torch.stack(counted).mean(0), outer)
        for fragment, d, q, s in zip(fragments, differences, counted, steps, strict=True):
            assert torch.equal(fragment.shared, fragments[0].shared)
            assert torch.allclose(fragment.weights(), fragment.shared + (d - q) + s, atol=1e-4)
        after = torch.stack([fragment.weights() for fragment in fragments]).double().mean(0)
    assert torch.allclose(before, after, atol=1e-5)  # of the last round, which averages
