"""All-to-all of rows in a codec, with gradients; what its ranks refuse together."""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import commlayer
from commlayer import Policy
from commlayer.frontend.group.rows import FLOATS
from tests import ranks
from tests.drawn import alike
from tests.process.hosts import LOOPBACK, on_hosts

CODECS = ("none", "f16", "bf16", "int8", "int4")
HOSTS = ([0, 1, 2], [0, 0, 1], [0, 0, 0])
"""The hosts of three ranks."""


def filled(counts: Sequence[int], width: int, dtype: torch.dtype, seed: int) -> Tensor:
    rows = torch.randn(sum(counts), width, generator=torch.Generator().manual_seed(seed))
    return rows.to(dtype)


def exact_of(matrix: Sequence[Sequence[int]], rank: int, width: int, dtype: torch.dtype, seed: int) -> Tensor:
    """The rows that a rank receives; matrix[r][s] rows go from r to s."""
    parts = []
    for source, counts in enumerate(matrix):
        parts.append(filled(counts, width, dtype, seed + source).split(list(counts))[rank])
    return torch.cat(parts)


def check(found: Tensor, exact: Tensor, codec: str, same: Tensor) -> None:
    """`same`: the rows that came from ranks of this host. The bounds are those of native/kernels/codec.h."""
    assert found.dtype == exact.dtype
    assert torch.equal(found[same], exact[same])
    left, right = found[~same].double(), exact[~same].double()
    if codec == "none" or not right.numel():
        assert torch.equal(left, right)
        return
    rounded = {torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(exact.dtype, 0.0) * right.abs()  # to the type
    if codec == "int4":
        assert ((left - right).abs() - rounded).clamp(min=0).square().sum() <= 0.03 * right.square().sum()
        return
    error = {"f16": right.abs() * 2**-11, "bf16": right.abs() * 2**-8, "int8": right.abs().max() / 127 * 0.504}[codec]
    assert ((left - right).abs() <= error + rounded + 1e-7).all()


def from_here(matrix: Sequence[Sequence[int]], rank: int, hosts: Sequence[int]) -> Tensor:
    here = [torch.full((counts[rank],), hosts[source] == hosts[rank]) for source, counts in enumerate(matrix)]
    return torch.cat(here)


SPLITS = st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=3, max_size=3)


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@ranks.on(3, environ=LOOPBACK)
def test_random_splits_with_gradients(rank: int, size: int, hosts: Sequence[int]) -> None:
    """Every codec, type and width; gradients travel back the same way."""

    @alike(25)
    @given(SPLITS, st.sampled_from([1, 3, 64, 97]), st.sampled_from(CODECS), st.sampled_from(FLOATS), st.booleans())
    def trial(matrix: Any, width: int, codec: str, dtype: torch.dtype, is_async: bool) -> None:
        policy = Policy(codec=codec)
        sent, received = matrix[rank], [counts[rank] for counts in matrix]
        rows, exact = filled(sent, width, dtype, rank), exact_of(matrix, rank, width, dtype, 0)
        same = from_here(matrix, rank, hosts)
        output = torch.full_like(exact, 7)
        work = commlayer.all_to_all_single(output, rows, received, sent, async_op=is_async, policy=policy)
        assert (work is not None) == is_async
        if work is not None:
            work.wait()
        check(output, exact, codec, same)
        rows.requires_grad_()
        found = commlayer.all_to_all_single_autograd(rows, received, sent, policy=policy)
        check(found, exact, codec, same)
        back = filled(received, width, dtype, 10 + rank)
        (gradient,) = torch.autograd.grad(found, rows, back)
        transposed = [list(column) for column in zip(*matrix, strict=True)]
        check(gradient, exact_of(transposed, rank, width, dtype, 10), codec, from_here(transposed, rank, hosts))

    with on_hosts(rank, size, hosts):
        trial()


@ranks.on(2, ranks.run_job, environ=ranks.UDP)
def test_rows_travel_in_few_bits(rank: int, size: int) -> None:
    """Of 2 MB for the other host, int8 sends 66 bytes per 64 values."""
    rows, other = torch.randn(1024, 1024), 1 - rank
    taken = {}
    for codec in CODECS:
        output, policy = torch.empty_like(rows), Policy(codec=codec)
        exchange = functools.partial(commlayer.all_to_all_single, output, rows, policy=policy)
        taken[codec] = ranks.payload_sent(exchange)
        half = output.chunk(2)[other]
        theirs = [torch.empty_like(half) for _ in range(size)]
        dist.all_gather(theirs, rows.chunk(2)[other])
        is_same = torch.equal(half, theirs[other])
        assert is_same == (codec == "none"), codec
    for codec, share in {"f16": 1 / 2, "bf16": 1 / 2, "int8": 66 / 256, "int4": 130 / 1024}.items():
        assert taken[codec] == pytest.approx(taken["none"] * share, rel=0.05), taken


@ranks.on(2, ranks.run_job, environ=ranks.UDP)
def test_a_value_that_is_not_finite_stays_in_its_block(rank: int, size: int) -> None:
    for bad in (float("nan"), float("inf")):
        rows = torch.ones(8, 64)
        rows[5 - 4 * rank, 3] = bad  # in the part for the other rank
        output = torch.empty_like(rows)
        commlayer.all_to_all_single(output, rows)
        row = 5 if rank == 1 else 1
        assert output[4 * (1 - rank) + row % 4].isnan().all()
        assert output.isnan().sum() == 64
        commlayer.all_to_all_single(output, rows, policy=Policy(codec="bf16"))
        assert (~output.isfinite()).sum() == 1


@ranks.on(2, ranks.run_job, environ=ranks.UDP)
def test_other_shapes_and_types(rank: int, size: int) -> None:
    rows = torch.arange(24, dtype=torch.int64).view(4, 3, 2) + 100 * rank
    output = torch.empty_like(rows)
    commlayer.all_to_all_single(output, rows, policy=Policy())
    assert torch.equal(output, torch.cat([torch.arange(24).view(4, 3, 2).chunk(2)[rank] + 100 * r for r in range(2)]))
    splits = [2, 3] if rank else [3, 2]
    flat, taken = torch.full((5,), float(rank)), torch.empty(5)
    commlayer.all_to_all_single(taken, flat, splits, splits)
    assert taken.tolist() == pytest.approx([0, 0, 1, 1, 1] if rank else [0, 0, 0, 1, 1], abs=0.005)
    wide = torch.full((4, 10), -1.0)
    commlayer.all_to_all_single(wide[:, ::2], torch.full((10, 4), float(rank)).t()[:, :5], policy=Policy(codec="int4"))
    assert torch.equal(wide[:2, ::2], torch.zeros(2, 5))
    assert (wide[2:, ::2] - 1).abs().max() < (0.5 if rank == 0 else 1e-9)
    assert torch.equal(wide[:, 1::2], torch.full((4, 5), -1.0))
    with torch.no_grad():
        found = commlayer.all_to_all_single_autograd(torch.ones(2, 3, requires_grad=True))
    assert not found.requires_grad
    nothing = torch.ones(0, 3, requires_grad=True)
    commlayer.all_to_all_single_autograd(nothing).sum().backward()
    assert nothing.grad is not None


def odd_split(rank: int) -> None:
    sent, received = ([1, 1, 1], [1, 1, 1]) if rank != 1 else ([1, 1, 2], [1, 1, 1])
    commlayer.all_to_all_single(torch.empty(3, 2), torch.ones(sum(sent), 2), received, sent)


def expects_none(rank: int) -> None:
    """The rows of one rank are expected by no other."""
    sent, received = ([1, 1, 1], [1, 1, 1]) if rank else ([1, 1, 1], [1, 0, 1])
    commlayer.all_to_all_single_autograd(torch.ones(3, 2), received, sent)


def another_codec(rank: int) -> None:
    commlayer.all_to_all_single(torch.empty(3, 2), torch.ones(3, 2), policy=Policy(codec=("int8", "bf16")[rank == 1]))


def another_width(rank: int) -> None:
    rows = torch.ones(3, 3 if rank == 1 else 2)
    commlayer.all_to_all_single(torch.empty_like(rows), rows)


def gradients_on_one(rank: int) -> None:
    commlayer.all_to_all_single_autograd(torch.ones(3, 2, requires_grad=rank == 1))


def too_many(rank: int) -> None:
    commlayer.all_to_all_single(torch.empty(3, 2), torch.ones(3, 2), [1, 1, 1], [1, 1, 2] if rank == 1 else [1, 1, 1])


def negative(rank: int) -> None:
    commlayer.all_to_all_single(torch.empty(3, 2), torch.ones(3, 2), [1, 1, 1], [2, 2, -1] if rank == 1 else [1, 1, 1])


def of_two_ranks(rank: int) -> None:
    commlayer.all_to_all_single(torch.empty(3, 2), torch.ones(3, 2), None, [1, 2] if rank == 1 else None)


def indivisible(rank: int) -> None:
    commlayer.all_to_all_single(torch.empty(3, 2), torch.ones(4 if rank == 1 else 3, 2))


def integers(rank: int) -> None:
    rows = torch.ones(3, 2, dtype=torch.int32 if rank == 1 else torch.float32)
    commlayer.all_to_all_single(torch.empty_like(rows), rows)


def sign(rank: int) -> None:
    commlayer.all_to_all_single(
        torch.empty(3, 2), torch.ones(3, 2), policy=Policy(codec="sign" if rank == 1 else "f16")
    )


def lossy(rank: int) -> None:
    policy = Policy(codec="int8", loss_bound=0.1 if rank == 1 else 0)
    commlayer.all_to_all_single(torch.empty(3, 2), torch.ones(3, 2), policy=policy)


def other_output(rank: int) -> None:
    commlayer.all_to_all_single(torch.empty(3, 2, dtype=(torch.float32, torch.float16)[rank == 1]), torch.ones(3, 2))


def fractions(rank: int) -> None:
    splits = [0.5, 1.0, 1.5] if rank == 1 else None
    commlayer.all_to_all_single(torch.empty(3, 2), torch.ones(3, 2), None, splits)


def no_list(rank: int) -> None:
    commlayer.all_to_all_single(torch.empty(3, 2), torch.ones(3, 2), 3 if rank == 1 else None)  # type: ignore[arg-type]


def huge(rank: int) -> None:
    commlayer.all_to_all_single_autograd(torch.ones(3, 2), [1, 1, 10**20] if rank == 1 else [1, 1, 1])


def no_rows(rank: int) -> None:
    commlayer.all_to_all_single(torch.empty(()) if rank == 1 else torch.empty(3, 2), torch.ones(3, 2))


DIFFERENT: dict[Callable[[int], None], tuple[int, str]] = {
    odd_split: (1, "rank 1 of the group sends 2 rows to rank 2, which expects 1"),
    expects_none: (1, "rank 1 of the group sends 1 rows to rank 0, which expects 0"),
    another_codec: (1, "the call of rank 1 of the group is of another kind than that of rank 0"),
    another_width: (1, "the call of rank 1 of the group is of another kind"),
    gradients_on_one: (1, "codecs and the need of gradients equal"),
}
REFUSED: dict[Callable[[int], None], str] = {
    too_many: "are 4 rows, and the input has 3",
    negative: "use 0 or more rows",
    fractions: "input_split_sizes=[0.5, 1.0, 1.5]: use 0 or more rows, whole numbers",
    no_list: "output_split_sizes of type int: 'int' object is not iterable; pass whole numbers, as a list",
    huge: "use 0 or more rows",
    no_rows: "an output without dimensions",
    of_two_ranks: "pass one number for each of 3 ranks",
    indivisible: "4 input rows do not divide among 3 ranks; pass input_split_sizes",
    integers: "use Policy(), without a codec",
    sign: "use one of none, f16, bf16, int8, int4",
    lossy: "use loss_bound=0",
    other_output: "use one type",
}


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@ranks.on(3, environ=LOOPBACK)
def test_all_ranks_refuse_together_and_go_on(rank: int, size: int, hosts: Sequence[int]) -> None:
    with on_hosts(rank, size, hosts):
        for case, (culprit, text) in DIFFERENT.items():
            with pytest.raises(commlayer.MismatchError) as caught:
                case(rank)
            assert text in str(caught.value), case
            assert (caught.value.rank, caught.value.culprit) == (rank, culprit)
        for case, text in REFUSED.items():
            kind = commlayer.ConfigError if rank == 1 else commlayer.MismatchError
            with pytest.raises(kind) as refused:
                case(rank)
            assert (text if rank == 1 else "rank 1 of the group has refused its arguments") in str(refused.value), case
        output = torch.empty(3, 2)
        commlayer.all_to_all_single(output, torch.full((3, 2), float(rank)), policy=Policy(codec="f16"))
        assert output[:, 0].tolist() == [0, 1, 2]


@ranks.on(2, ranks.run_gloo)
def test_another_backend_is_refused_by_name(rank: int, size: int) -> None:
    with pytest.raises(commlayer.ConfigError, match=r"is not commlayer's; call init_process_group\('commlayer'\)"):
        commlayer.all_to_all_single(torch.empty(2, 2), torch.ones(2, 2))


@ranks.on(2, ranks.run_job, environ={"COMMLAYER_DISABLE": "1"})
def test_without_the_engine_rows_travel_as_they_are(rank: int, size: int) -> None:
    rows = torch.randn(4, 3, requires_grad=True)
    found = commlayer.all_to_all_single_autograd(rows)
    found.sum().backward()
    assert rows.grad is not None
    assert torch.equal(rows.grad, torch.ones(4, 3))


def lose(rank: int, size: int) -> str:
    """The type of the error that a rank sees after the death of rank 1."""
    ranks.init(rank, size)
    if rank == 1:
        os._exit(1)
    try:
        commlayer.all_to_all_single(torch.empty(3, 2), torch.ones(3, 2))
    except commlayer.CommError as error:
        return type(error).__name__
    return "none"


def test_a_dead_rank_is_an_error_on_every_other() -> None:
    ended = ranks.outcomes(lose, 3, environ={**ranks.UDP, "COMMLAYER_PEER_TIMEOUT_S": "1"})
    assert [ended[rank].result for rank in (0, 2)] == ["PeerLostError"] * 2
