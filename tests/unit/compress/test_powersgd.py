"""PowerSGD: the paper's result, the same bits on all ranks, and no gradient is forgotten."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from commlayer.compress.powersgd import Compression, PowerSgd
from commlayer.errors import ConfigError

Shapes = Sequence[tuple[int, ...]]
SHAPES: Shapes = ((12, 40), (7,), (40, 12), (12, 40), (8, 3, 5, 2), (2, 3), (1,), (0, 4), (12, 40))
COMPRESSED = (0, 2, 3, 4, 8)  # of SHAPES, with rank 1 or 2


def mean(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).mean(0)


def mean_in_16_bits(tensors: list[Tensor]) -> Tensor:
    """As a codec averages: every contribution is rounded, and so is their mean."""
    return mean([each.bfloat16().float() for each in tensors]).bfloat16().float()


def team(size: int, rank: int = 2, **options: Any) -> list[PowerSgd]:
    return [PowerSgd(rank, **options) for _ in range(size)]


def draw(size: int, shapes: Shapes, seed: int) -> list[list[Tensor]]:
    """Random gradients of every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(size)]


def reduce(
    ranks: list[PowerSgd],
    gradients: list[list[Tensor]],
    numbers: Sequence[int] | None = None,
    average: Callable[[list[Tensor]], Tensor] = mean,
    **options: Any,
) -> list[list[Tensor]]:
    """One step of one bucket on all ranks; `average` is that of the factors. Returns each rank's averaged gradients."""
    results = [[each.clone() for each in own] for own in gradients]
    begun: list[Compression] = []
    for rank, result in zip(ranks, results, strict=True):
        begun.append(rank.compress(numbers or range(len(result)), result, **options))
    exact = shifted(mean([each.exact for each in begun]), len(ranks))
    left = shifted(average([each.left for each in begun]), len(ranks))
    projected = [each.project(averaged) for each, averaged in zip(begun, left, strict=True)]
    right = shifted(average(projected), len(ranks))
    for i, compression in enumerate(begun):
        compression.finish(exact[i], right[i])
        compression.keep()
    return results


def shifted(averaged: Tensor, size: int) -> list[Tensor]:
    """The same values for each rank, in memory of other alignments."""
    return [torch.cat([torch.ones(i), averaged])[i:] for i in range(size)]


def error(rank: PowerSgd, number: int, shape: tuple[int, ...]) -> Tensor:
    """The part of a parameter's gradients that the rank keeps."""
    return torch.as_tensor(rank.state_dict()["errors"].get(number, torch.zeros(shape))).view(shape)


def gram_schmidt(matrix: Tensor) -> Tensor:
    """Orthonormal columns, one after the other, as the paper makes them."""
    matrix = matrix.clone()
    for i in range(matrix.shape[1]):
        for j in range(i):
            matrix[:, i] -= (matrix[:, i] @ matrix[:, j]) * matrix[:, j]
        matrix[:, i] /= matrix[:, i].norm()
    return matrix


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 4), st.integers(2, 4), st.integers(16, 40), st.integers(16, 40), st.integers(0, 2**30)
)  # rank, ranks of the job, rows, columns, seed
def test_the_result_is_the_papers(rank: int, size: int, rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(columns, rank, generator=generator, dtype=torch.float64)
    ranks = team(size, rank, min_compression=1.0)
    for each in ranks:
        state = {**each.state_dict(), "right": {0: q.T.float().contiguous()}}
        each.load_state_dict(state)
    errors = [torch.zeros(rows, columns, dtype=torch.float64) for _ in ranks]
    for step in range(3):
        gradients = draw(size, [(rows, columns)], seed + step)
        results = reduce(ranks, gradients)
        inputs = [own[0].double() + kept for own, kept in zip(gradients, errors, strict=True)]
        p = gram_schmidt(mean([each @ q for each in inputs]))
        q = mean([each.T @ p for each in inputs])
        errors = [each - p @ q.T for each in inputs]
        torch.testing.assert_close(results[0][0].double(), p @ q.T, rtol=1e-3, atol=1e-3)
        for each, kept in zip(ranks, errors, strict=True):
            torch.testing.assert_close(error(each, 0, (rows, columns)).double(), kept, rtol=1e-3, atol=1e-3)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 14), max_size=4).map(tuple), max_size=6),
    st.integers(1, 3),
    st.integers(2, 4),
    st.integers(0, 2**30),
    st.booleans(),
)  # shapes, rank, ranks of the job, seed, whether factors are rounded and lose a tenth of their elements
def test_results_and_errors_add_up_to_the_mean(
    shapes: list[tuple[int, ...]], rank: int, size: int, seed: int, disturbed: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def average(tensors: list[Tensor]) -> Tensor:
        averaged = mean_in_16_bits(tensors)
        return averaged * (torch.rand(averaged.shape, generator=generator) > 0.1)

    ranks, numbers = team(size, rank), [3 * i + 1 for i in range(len(shapes))]
    total, wanted = [torch.zeros(shape) for shape in shapes], [torch.zeros(shape) for shape in shapes]
    for step in range(3):
        gradients = draw(size, shapes, seed + step)
        results = reduce(ranks, gradients, numbers, average if disturbed else mean)
        for i, own in enumerate(zip(*gradients, strict=True)):
            total[i] += results[0][i]
            wanted[i] += mean(list(own))
    for i, shape in enumerate(shapes):
        left_over = mean([error(each, numbers[i], shape) for each in ranks])
        torch.testing.assert_close(total[i] + left_over, wanted[i], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("excluded", "compressed"), [((), COMPRESSED), ((2, 3), (0, 4, 8))])
def test_all_but_large_matrices_stay_exact(excluded: tuple[int, ...], compressed: tuple[int, ...]) -> None:
    ranks, gradients = team(2), draw(2, SHAPES, seed=1)
    sent = []

    def average(factors: list[Tensor]) -> Tensor:
        sent.append(factors[0].numel())
        return mean(factors)

    results = reduce(ranks, gradients, average=average, excluded=excluded)[0]
    for i, result in enumerate(results):
        assert (i in compressed) != torch.equal(result, mean([own[i] for own in gradients]))
    sent += [result.numel() for i, result in enumerate(results) if i not in compressed]
    assert ranks[0].bytes_per_step(gradients[0], excluded) == 2 * sum(sent)
    assert (sum(sent) == 7 + 6 + 1 + 2 * (4 * 52 + 38)) == (not excluded)
    assert team(1, rank=5)[0].bytes_per_step(gradients[0]) == 2 * sum(each.numel() for each in results)


def test_results_are_the_same_bits_on_all_ranks() -> None:
    ranks = team(4, rank=3)
    for step in range(3):
        first, *others = reduce(ranks, draw(4, SHAPES, seed=step), average=mean_in_16_bits)
        for own in others:
            assert all(torch.equal(a, b) for a, b in zip(own, first, strict=True))
    state, *states = (each.state_dict() for each in ranks)
    for other in states:
        assert all(torch.equal(other["right"][i], state["right"][i]) for i in COMPRESSED)
        assert not any(torch.equal(other["errors"][i], state["errors"][i]) for i in COMPRESSED)


@pytest.mark.parametrize("rank", [1, 4])
def test_the_results_of_a_fixed_gradient_add_up_to_it(rank: int) -> None:
    ranks, gradients = team(2, rank), draw(2, [(32, 24)], seed=5)
    exact, total, steps = mean([own[0] for own in gradients]), torch.zeros(32, 24), 400
    distances = []
    for step in range(1, steps + 1):
        total += reduce(ranks, gradients, average=mean_in_16_bits)[0][0]
        if step in (1, steps // 4, steps):
            distances.append(float((total / step - exact).norm() / exact.norm()))
    assert distances[0] > 0.5
    assert distances[1] < 0.3
    assert distances[2] < distances[1] / 3


def test_a_quadratic_problem_converges() -> None:
    ranks, size = team(3, rank=1), 3
    targets = [own[0] for own in draw(size, [(20, 30)], seed=3)]
    weights = torch.zeros(20, 30)
    for _ in range(600):
        weights -= 0.02 * reduce(ranks, [[weights - each] for each in targets], average=mean_in_16_bits)[0][0]
    assert (weights - mean(targets)).norm() < 0.02 * mean(targets).norm()


def test_the_first_factors_are_the_same_on_all_ranks_and_differ_by_parameter_and_seed() -> None:
    def first(seed: int, number: int) -> Tensor:
        rank = PowerSgd(2, seed=seed)
        rank.compress([number], [torch.randn(20, 30)])
        return torch.as_tensor(rank.state_dict()["right"][number])

    assert torch.equal(first(0, 1), first(0, 1))
    assert not torch.equal(first(0, 1), first(0, 2))
    assert not torch.equal(first(0, 1), first(1, 1))
    torch.testing.assert_close(first(0, 1) @ first(0, 1).T, torch.eye(2))


def test_matrices_of_zeros_and_of_lower_rank_stay_finite() -> None:
    ranks = team(2, rank=3)
    thin = torch.outer(torch.arange(20.0), torch.arange(30.0))
    half = torch.zeros(20, 30)
    half[:3] = torch.randn(3, 30)
    gradients = [torch.zeros(20, 30), thin, half, torch.full((20, 30), 1e-42), thin * 1e30]
    for _ in range(4):
        results = reduce(ranks, [gradients, gradients])[0]
        for result, gradient in zip(results[:3], gradients, strict=False):
            torch.testing.assert_close(result, gradient, rtol=1e-4, atol=1e-4)
        assert all(bool(each.isfinite().all()) for each in results)
    factors = ranks[0].state_dict()["right"]
    for factor in factors.values():
        torch.testing.assert_close(factor @ factor.T, torch.eye(3))


def test_zeros_do_not_take_the_right_factor_away() -> None:
    ranks, zeros = team(2), [[torch.zeros(20, 30)]] * 2
    reduce(ranks, draw(2, [(20, 30)], seed=1))
    before = ranks[0].state_dict()
    for each in ranks:
        each.load_state_dict({**before, "errors": {}})
    reduce(ranks, zeros)
    after = ranks[0].state_dict()["right"][0]
    torch.testing.assert_close(after @ before["right"][0].T, torch.eye(2))


def test_the_error_of_an_unused_parameter_waits() -> None:
    ranks, gradients = team(2), draw(2, [(20, 30), (20, 30)], seed=1)
    reduce(ranks, gradients)
    before = [each.state_dict()["errors"] for each in ranks]
    unused = [[torch.zeros(20, 30), own[1]] for own in gradients]
    results = reduce(ranks, unused)
    assert not results[0][0].any()
    for each, errors in zip(ranks, before, strict=True):
        assert torch.equal(error(each, 0, (20, 30)), errors[0])
        assert not torch.equal(error(each, 1, (20, 30)), errors[1])
    half = [unused[0], gradients[1]]  # the second rank has used it
    results = reduce(ranks, half)
    left_over = mean([error(each, 0, (20, 30)) for each in ranks])
    wanted = mean([half[0][0] + before[0][0], half[1][0] + before[1][0]])
    torch.testing.assert_close(results[0][0] + left_over, wanted)


def snapshot(ranks: list[PowerSgd]) -> dict[tuple[int, str, int], Tensor]:
    """Copies of the states: by rank, "errors" or "right", and parameter."""
    states = [each.state_dict() for each in ranks]
    parts = [(rank, part) for rank in range(len(ranks)) for part in ("errors", "right")]
    return {(rank, part, i): value.clone() for rank, part in parts for i, value in states[rank][part].items()}


def same_bits(first: dict[tuple[int, str, int], Tensor], second: dict[tuple[int, str, int], Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[i], second[i]) for i in first)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([torch.nan, torch.inf, -torch.inf]),
    st.sampled_from([i for i, shape in enumerate(SHAPES) if 0 not in shape]),
    st.integers(0, 10**6),
    st.integers(1, 2),
)
def test_an_overflow_reaches_all_ranks_and_leaves_the_state(bad: float, i: int, element: int, rank: int) -> None:
    ranks, gradients = team(3, rank), draw(3, SHAPES, seed=element)
    for own in gradients:
        own[0][:, 20:] = 0
    reduce(ranks, gradients)
    before = snapshot(ranks)
    assert not before[0, "right", 0][:, 20:].any()  # where a product could pass over NaN
    broken = [[each.clone() for each in own] for own in gradients]
    broken[1][i].view(-1)[element % broken[1][i].numel()] = bad
    for own in reduce(ranks, broken):
        assert all(bool(each.isnan().all()) for each in own)
    assert same_bits(snapshot(ranks), before)
    assert all(bool(each.isfinite().all()) for each in reduce(ranks, gradients)[0])


@pytest.mark.parametrize("factor", ["left", "right"])
def test_a_factor_that_overflows_on_the_way_counts_as_an_overflow(factor: str) -> None:
    factors = iter(["left", "right"])

    def average(tensors: list[Tensor]) -> Tensor:
        averaged, name = mean(tensors), next(factors)
        if name == factor:
            averaged[-1] = torch.inf
        assert bool(averaged.isnan().all()) == (name != factor == "left")
        return averaged

    ranks, gradients = team(2), draw(2, SHAPES, seed=1)
    reduce(ranks, gradients)
    before = snapshot(ranks)
    for own in reduce(ranks, gradients, average=average):
        assert all(bool(each.isnan().all()) for each in own)
    assert same_bits(snapshot(ranks), before)


def test_large_finite_factors_whose_product_overflows_count_as_an_overflow() -> None:
    ranks, gradients = team(2), [[torch.full((20, 30), 3e37)]] * 2
    results = reduce(ranks, gradients)
    assert all(bool(own[0].isnan().all()) for own in results)
    assert ranks[0].state_dict()["errors"] == {}


@pytest.mark.parametrize("scale", [1024.0, 3.0])
def test_errors_do_not_depend_on_the_loss_scale(scale: float) -> None:
    plain, scaled = team(2), team(2)
    for step in range(4):
        gradients, factor = draw(2, SHAPES, seed=step), scale if step % 2 else 1.0
        wanted = reduce(plain, gradients)[0]
        found = reduce(scaled, [[each * factor for each in own] for own in gradients], loss_scale=factor)[0]
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a / factor, b, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(error(scaled[1], 0, (12, 40)), error(plain[1], 0, (12, 40)), rtol=1e-4, atol=1e-4)


def test_a_restored_state_goes_on_with_the_same_bits() -> None:
    ranks = team(3)
    for step in range(3):
        reduce(ranks, draw(3, SHAPES, seed=step))
    saved = [each.state_dict() for each in ranks]
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
            for i, each in zip(numbers, found, strict=True):
                torch.testing.assert_close(each, wanted[i], rtol=1e-4, atol=1e-4)


def test_the_state_goes_on_with_another_number_of_ranks() -> None:
    old = team(4)
    total, wanted = torch.zeros(12, 40), torch.zeros(12, 40)

    def step(ranks: list[PowerSgd], seed: int) -> None:
        gradients = draw(len(ranks), SHAPES, seed)
        total.add_(reduce(ranks, gradients)[0][0])
        wanted.add_(mean([own[0] for own in gradients]))

    for seed in range(3):
        step(old, seed)
    states = [each.state_dict() for each in old]
    merged = [[0, 1], [2, 3], []]  # the last rank is new and has no errors
    new = team(3)
    for rank, group in zip(new, merged, strict=True):
        errors = {i: sum(states[j]["errors"][i] for j in group) * len(new) / len(old) for i in COMPRESSED if group}
        rank.load_state_dict({**states[0], "errors": errors})
    for seed in range(3, 6):
        step(new, seed)
    torch.testing.assert_close(total + mean([error(each, 0, (12, 40)) for each in new]), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rank", [2, 5])  # with 5, all factors save too little
def test_errors_of_matrices_that_become_exact_are_added_once(rank: int) -> None:
    old, gradients = team(2), draw(2, SHAPES, seed=1)
    total = [each.clone() for each in reduce(old, gradients)[0]]
    new = team(2, rank)
    for before, after in zip(old, new, strict=True):
        state = before.state_dict()
        after.load_state_dict(state if rank == 2 else {**state, "rank": rank, "right": {}})
    kept, exact = new[0].state_dict()["errors"], COMPRESSED if rank == 5 else (2, 3)
    assert all(kept[i].any() for i in exact)
    unused = [[torch.zeros_like(each) for each in own] for own in gradients]
    infinite = [[each * torch.inf for each in own] for own in gradients]
    for skipped in (unused, infinite):
        reduce(new, skipped, excluded=(2, 3), loss_scale=8.0)
        assert all(torch.equal(new[0].state_dict()["errors"][i], kept[i]) for i in exact)  # they wait
    scaled = [[8.0 * each for each in own] for own in gradients]
    for i, result in enumerate(reduce(new, scaled, excluded=(2, 3), loss_scale=8.0)[0]):
        total[i] += result / 8.0
    for i in exact:
        assert not any(i in each.state_dict()["errors"] for each in new)
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


@pytest.mark.parametrize("rank", [0, -3, 1.5, True, "4", None])
def test_a_bad_rank_is_refused(rank: Any) -> None:
    with pytest.raises(ConfigError, match=f"powersgd:{rank}: use a rank from 1, as powersgd:4, a whole number"):
        PowerSgd(rank)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", -1),
        ("seed", 0.5),
        ("min_compression", 0.9),
        ("min_compression", torch.inf),
        ("min_compression", "2"),
    ],
)
def test_bad_options_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"PowerSgd\({name}={value!r}\): use a"):
        PowerSgd(1, **{name: value})


def test_gradients_of_another_type_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"float32 gradients, but parameter 7 from the end has torch\.float16"):
        PowerSgd(1).compress([7], [torch.zeros(4, dtype=torch.float16)])
