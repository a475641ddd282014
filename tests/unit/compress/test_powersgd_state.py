"""The saved state of PowerSGD: a restored one goes on with the same bits, and one of another model is refused."""

import io
from collections.abc import Sequence

import pytest
import torch

from commlayer.compress.powersgd import PowerSgd
from commlayer.errors import ConfigError
from tests.unit.compress.powersgd_ranks import COMPRESSED, SHAPES, draw, error, mean, reduce, same_bits, snapshot, team


def test_a_restored_state_goes_on_with_the_same_bits() -> None:
    ranks = team(3)
    for step in range(3):
        reduce(ranks, draw(3, SHAPES, seed=step))
    saved = [rank.state_dict() for rank in ranks]
    file = io.BytesIO()
    torch.save(saved, file)
    reduce(ranks, draw(3, SHAPES, seed=9))  # leaves a saved state as it is
    restored = team(3, seed=9)
    states = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    for old, new, kept, loaded in zip(ranks, restored, saved, states, strict=True):
        old.load_state_dict(kept)
        new.load_state_dict(loaded)
    for step in range(3, 6):
        gradients = draw(3, SHAPES, seed=step)
        wanted, found = reduce(ranks, gradients), reduce(restored, gradients)
        assert all(torch.equal(a, b) for a, b in zip(found[2], wanted[2], strict=True))
    assert same_bits(snapshot(restored), snapshot(ranks))
    restored[0].check_met()


def test_other_buckets_change_rounding_only() -> None:
    whole, parts = team(2), team(2)
    orders: list[list[Sequence[int]]] = [[range(9)], [[8, 0, 3], [2, 1], [7, 6, 5, 4]], [[4, 3, 2, 1, 0], [5, 6, 7, 8]]]
    for step, order in enumerate(orders):
        gradients = draw(2, SHAPES, seed=step)
        wanted = reduce(whole, gradients)[0]
        for numbers in order:
            found = reduce(parts, [[own[i] for i in numbers] for own in gradients], numbers)[0]
            for i, tensor in zip(numbers, found, strict=True):
                torch.testing.assert_close(tensor, wanted[i], rtol=1e-4, atol=1e-4)


def test_the_state_goes_on_with_another_number_of_ranks() -> None:
    old = team(4)
    total, wanted = torch.zeros(12, 40), torch.zeros(12, 40)

    def step(ranks: list[PowerSgd], seed: int) -> None:
        gradients = draw(len(ranks), SHAPES, seed)
        total.add_(reduce(ranks, gradients)[0][0])
        wanted.add_(mean([own[0] for own in gradients]))

    for seed in range(3):
        step(old, seed)
    states = [rank.state_dict() for rank in old]
    merged = [[0, 1], [2, 3], []]  # the last rank is new and has no errors
    new = team(3)
    for rank, group in zip(new, merged, strict=True):
        errors = {i: sum(states[j]["errors"][i] for j in group) * len(new) / len(old) for i in COMPRESSED if group}
        rank.load_state_dict({**states[0], "errors": errors})
    for seed in range(3, 6):
        step(new, seed)
    torch.testing.assert_close(total + mean([error(rank, 0, (12, 40)) for rank in new]), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rank", [2, 5])  # with 5, all factors save too little
def test_errors_of_matrices_that_become_exact_are_added_once(rank: int) -> None:
    old, gradients = team(2), draw(2, SHAPES, seed=1)
    total = [tensor.clone() for tensor in reduce(old, gradients)[0]]
    new = team(2, rank)
    for before, after in zip(old, new, strict=True):
        state = before.state_dict()
        after.load_state_dict(state if rank == 2 else {**state, "rank": rank, "right": {}})
    kept, exact = new[0].state_dict()["errors"], COMPRESSED if rank == 5 else (2, 3)
    assert all(kept[i].any() for i in exact)
    unused = [[torch.zeros_like(tensor) for tensor in own] for own in gradients]
    infinite = [[tensor * torch.inf for tensor in own] for own in gradients]
    for skipped in (unused, infinite):
        reduce(new, skipped, excluded=(2, 3), loss_scale=8.0)
        assert all(torch.equal(new[0].state_dict()["errors"][i], kept[i]) for i in exact)  # they wait
    scaled = [[8.0 * tensor for tensor in own] for own in gradients]
    for i, result in enumerate(reduce(new, scaled, excluded=(2, 3), loss_scale=8.0)[0]):
        total[i] += result / 8.0
    for i in exact:
        assert not any(i in factors.state_dict()["errors"] for factors in new)
        torch.testing.assert_close(total[i], 2 * mean([own[i] for own in gradients]), rtol=1e-4, atol=1e-4)


def test_the_state_of_another_model_is_refused() -> None:
    rank = PowerSgd(2)
    rank.compress([5], [torch.randn(20, 30)])
    state = rank.state_dict()
    for gradient in (torch.randn(20, 31), torch.randn(600)):
        restored = PowerSgd(2)
        restored.load_state_dict(state)
        with pytest.raises(ConfigError, match=r"shape \(2, 30\) for parameter 5 from the end, whose gradient has the"):
            restored.compress([5], [gradient])
    state["errors"] = {5: torch.zeros(21, 30)}
    restored.load_state_dict(state)
    with pytest.raises(ConfigError, match=r"a matrix of the shape \(21, 30\) for parameter 5.*restore the state"):
        restored.compress([5], [torch.randn(20, 30)])
    restored.compress([4], [torch.randn(20, 30)])
    with pytest.raises(ConfigError, match="values for parameter 5 from the end, which this model lacks"):
        restored.check_met()


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (PowerSgd(4), "has rank=4, but this one has 2: use the same"),
        (PowerSgd(2, min_compression=1.5), "has min_compression=1.5, but this one has 2.0"),
    ],
)
def test_the_state_of_other_settings_is_refused(other: PowerSgd, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        PowerSgd(2).load_state_dict(other.state_dict())
    with pytest.raises(ConfigError, match="has rank=None"):
        PowerSgd(2).load_state_dict({})
