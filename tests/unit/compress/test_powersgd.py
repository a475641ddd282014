"""PowerSGD: the paper's result, the same bits on all ranks, and no gradient is forgotten."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from commlayer.compress.powersgd import PowerSgd
from commlayer.errors import ConfigError
from tests.unit.compress.powersgd_ranks import COMPRESSED, SHAPES, draw, error, mean, reduce, same_bits, snapshot, team


def mean_in_16_bits(tensors: list[Tensor]) -> Tensor:
    """The mean as a codec averages: every contribution is rounded, and so is their mean."""
    return mean([tensor.bfloat16().float() for tensor in tensors]).bfloat16().float()


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
    for factors in ranks:
        state = {**factors.state_dict(), "right": {0: q.T.float().contiguous()}}
        factors.load_state_dict(state)
    errors = [torch.zeros(rows, columns, dtype=torch.float64) for _ in ranks]
    for step in range(3):
        gradients = draw(size, [(rows, columns)], seed + step)
        results = reduce(ranks, gradients)
        inputs = [own[0].double() + kept for own, kept in zip(gradients, errors, strict=True)]
        p = gram_schmidt(mean([matrix @ q for matrix in inputs]))
        q = mean([matrix.T @ p for matrix in inputs])
        errors = [matrix - p @ q.T for matrix in inputs]
        torch.testing.assert_close(results[0][0].double(), p @ q.T, rtol=1e-3, atol=1e-3)
        for factors, kept in zip(ranks, errors, strict=True):
            torch.testing.assert_close(error(factors, 0, (rows, columns)).double(), kept, rtol=1e-3, atol=1e-3)


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
        left_over = mean([error(factors, numbers[i], shape) for factors in ranks])
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
    assert (sum(sent) == 7 + 6 + 1 + 2 * (4 * 52 + 38)) == (not excluded)


def test_results_are_the_same_bits_on_all_ranks() -> None:
    ranks = team(4, rank=3)
    for step in range(3):
        first, *others = reduce(ranks, draw(4, SHAPES, seed=step), average=mean_in_16_bits)
        for own in others:
            assert all(torch.equal(a, b) for a, b in zip(own, first, strict=True))
    state, *states = (rank.state_dict() for rank in ranks)
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
        weights -= 0.02 * reduce(ranks, [[weights - target] for target in targets], average=mean_in_16_bits)[0][0]
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
        assert all(bool(result.isfinite().all()) for result in results)
    factors = ranks[0].state_dict()["right"]
    for factor in factors.values():
        torch.testing.assert_close(factor @ factor.T, torch.eye(3))


def test_zeros_do_not_take_the_right_factor_away() -> None:
    ranks, zeros = team(2), [[torch.zeros(20, 30)]] * 2
    reduce(ranks, draw(2, [(20, 30)], seed=1))
    before = ranks[0].state_dict()
    for rank in ranks:
        rank.load_state_dict({**before, "errors": {}})
    reduce(ranks, zeros)
    after = ranks[0].state_dict()["right"][0]
    torch.testing.assert_close(after @ before["right"][0].T, torch.eye(2))


def test_the_error_of_an_unused_parameter_waits() -> None:
    ranks, gradients = team(2), draw(2, [(20, 30), (20, 30)], seed=1)
    reduce(ranks, gradients)
    before = [rank.state_dict()["errors"] for rank in ranks]
    unused = [[torch.zeros(20, 30), own[1]] for own in gradients]
    results = reduce(ranks, unused)
    assert not results[0][0].any()
    for factors, errors in zip(ranks, before, strict=True):
        assert torch.equal(error(factors, 0, (20, 30)), errors[0])
        assert not torch.equal(error(factors, 1, (20, 30)), errors[1])
    half = [unused[0], gradients[1]]  # the second rank has used it
    results = reduce(ranks, half)
    left_over = mean([error(rank, 0, (20, 30)) for rank in ranks])
    wanted = mean([half[0][0] + before[0][0], half[1][0] + before[1][0]])
    torch.testing.assert_close(results[0][0] + left_over, wanted)


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
    broken = [[tensor.clone() for tensor in own] for own in gradients]
    broken[1][i].view(-1)[element % broken[1][i].numel()] = bad
    for own in reduce(ranks, broken):
        assert all(bool(tensor.isnan().all()) for tensor in own)
    assert same_bits(snapshot(ranks), before)
    assert all(bool(tensor.isfinite().all()) for tensor in reduce(ranks, gradients)[0])


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
        assert all(bool(tensor.isnan().all()) for tensor in own)
    assert same_bits(snapshot(ranks), before)


@pytest.mark.parametrize("value", [3e37, 3e38, torch.finfo(torch.float32).max])
def test_the_largest_finite_gradients_stay_finite(value: float) -> None:
    """Although factors add up the values of a row or column, and sums of what ranks send are twice as large."""
    ranks, shapes = team(2), ((20, 30), (300, 400))
    generator = torch.Generator().manual_seed(1)
    signs = [torch.randn(shape, generator=generator).sign() for shape in shapes]
    one_sign, any_sign = (
        [value * tensor for tensor in kind] for kind in ([torch.ones(shape) for shape in shapes], signs)
    )
    exact = reduce(ranks, [one_sign, one_sign])
    for own in exact:
        for result, wanted in zip(own, one_sign, strict=True):
            torch.testing.assert_close(result / value, wanted / value)
    random = reduce(team(2), [any_sign, any_sign])
    assert all(bool(tensor.isfinite().all()) for own in random for tensor in own)
    assert all(torch.equal(a, b) for a, b in zip(*random, strict=True))


@pytest.mark.parametrize("scale", [1024.0, 3.0])
def test_errors_do_not_depend_on_the_loss_scale(scale: float) -> None:
    plain, scaled = team(2), team(2)
    for step in range(4):
        gradients, factor = draw(2, SHAPES, seed=step), scale if step % 2 else 1.0
        wanted = reduce(plain, gradients)[0]
        found = reduce(scaled, [[tensor * factor for tensor in own] for own in gradients], loss_scale=factor)[0]
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a / factor, b, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(error(scaled[1], 0, (12, 40)), error(plain[1], 0, (12, 40)), rtol=1e-4, atol=1e-4)


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
