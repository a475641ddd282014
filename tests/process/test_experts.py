"""Tokens that travel to experts and back: exact beside one process that has all experts, and in how many rows."""

import dataclasses
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
from commlayer.frontend.group.backend import CommProcessGroup
from tests import ranks
from tests.drawn import alike
from tests.process.hosts import LOOPBACK, on_hosts

SIZE = 4
HOSTS = ([0, 0, 1, 1], [0, 1, 2, 3], [0, 0, 0, 1], [0, 1, 0, 1], [0, 0, 0, 0])
WIDTH, OUT = 3, 2


@dataclasses.dataclass(frozen=True)
class Program:
    """The routing of all ranks, and what requires gradients."""

    per_rank: int
    ids: list[list[list[int]]]
    """The experts of each token, by rank and token."""
    seed: int
    needs_tokens: bool
    needs_weights: bool


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Skewed routing, tokens twice to one expert or to none, ranks without tokens."""
    per_rank, k = draw(st.sampled_from([1, 2, 3])), draw(st.integers(1, 4))
    count = per_rank * SIZE
    some = draw(st.lists(st.integers(-1, count - 1), min_size=1, max_size=3))
    expert = draw(st.sampled_from([st.integers(0, count - 1), st.integers(-1, count - 1), st.sampled_from(some)]))
    token = st.lists(expert, min_size=k, max_size=k)
    ids = draw(st.lists(st.lists(token, max_size=6), min_size=SIZE, max_size=SIZE))
    ids = [row or [] for row in ids]
    return Program(
        per_rank, [[*row] for row in ids], draw(st.integers(0, 99)), draw(st.booleans()), draw(st.booleans())
    )


class Job:
    """All values of a program, whole numbers in float64: sums are exact in any order."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.experts = program.per_rank * SIZE
        self.k = max((len(token) for of_rank in program.ids for token in of_rank), default=1)
        drawn = torch.Generator().manual_seed(program.seed)

        def whole(*shape: int) -> Tensor:
            return torch.randint(-4, 5, shape, generator=drawn).double()

        self.ids = [torch.tensor(row, dtype=torch.int64).view(-1, self.k) for row in program.ids]
        self.tokens = [whole(len(row), WIDTH).requires_grad_(program.needs_tokens) for row in self.ids]
        self.weights = [whole(len(row), self.k).requires_grad_(program.needs_weights) for row in self.ids]
        self.matrices = [whole(WIDTH, OUT).requires_grad_() for _ in range(self.experts)]
        self.gradients = [whole(len(row), OUT) for row in self.ids]

    def output(self, rank: int) -> Tensor:
        """The reference, of one process."""
        ids, tokens, weights = self.ids[rank], self.tokens[rank], self.weights[rank]
        found = torch.zeros(len(ids), OUT, dtype=torch.float64)
        for expert, matrix in enumerate(self.matrices):
            share = (weights * (ids == expert)).sum(1, keepdim=True)
            found = found + share * (tokens @ matrix)
        return found

    def copies(self, rank: int, hosts: Sequence[int]) -> int:
        """Rows that must leave the host of a rank: for each token the other hosts of its experts."""
        return sum(
            len({hosts[expert // self.program.per_rank] for expert in token if expert >= 0} - {hosts[rank]})
            for token in self.program.ids[rank]
        )


def run_experts(job: Job, rank: int, **options: Any) -> tuple[Tensor, commlayer.experts.Dispatched]:
    sent = commlayer.experts.dispatch(job.tokens[rank], job.ids[rank], job.weights[rank], job.experts, **options)
    first = rank * job.program.per_rank
    rows = sent.rows.split(sent.counts)
    outputs = [row @ matrix for row, matrix in zip(rows, job.matrices[first:], strict=False)]
    return commlayer.experts.combine(torch.cat(outputs), sent), sent


def counted(counts: list[tuple[torch.dtype, int, int]], hosts: Sequence[int], rank: int) -> None:
    """Notes the rows that this rank sends to other hosts, with their type and width."""
    plain = CommProcessGroup.all_to_all_single

    def call(group: Any, output: Tensor, rows: Tensor, received: Any, sent: Any, *args: Any, **kwargs: Any) -> Any:
        remote = sum(count for to, count in enumerate(sent) if hosts[to] != hosts[rank])
        counts.append((rows.dtype, rows.shape[1:].numel(), remote))
        return plain(group, output, rows, received, sent, *args, **kwargs)

    CommProcessGroup.all_to_all_single = call  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@ranks.on(SIZE, environ=LOOPBACK)
def test_random_programs_are_exact_and_send_each_token_once_to_a_host(rank: int, size: int, hosts: Any) -> None:
    counts: list[tuple[torch.dtype, int, int]] = []
    counted(counts, hosts, rank)

    @alike(60)
    @given(programs())
    def trial(program: Program) -> None:
        ours, theirs = Job(program), Job(program)
        counts.clear()
        output, sent = run_experts(ours, rank)
        copies = ours.copies(rank, hosts)
        assert sent.remote_rows == copies
        assert sum(remote for dtype, width, remote in counts if (dtype, width) == (torch.float64, WIDTH)) == copies
        back = torch.tensor([sum(r for d, w, r in counts if (d, w) == (torch.float64, OUT)), copies])
        dist.all_reduce(back)
        assert back[0] == back[1]
        wholes = [theirs.output(member) for member in range(SIZE)]
        assert torch.equal(output, wholes[rank])
        torch.autograd.backward([output], [ours.gradients[rank]])
        torch.autograd.backward(wholes, theirs.gradients)
        first = rank * program.per_rank
        own = range(first, first + program.per_rank)
        pairs = [(ours.tokens[rank], theirs.tokens[rank]), (ours.weights[rank], theirs.weights[rank])]
        pairs += [(ours.matrices[expert], theirs.matrices[expert]) for expert in own]
        for one, other in pairs:
            assert one.requires_grad == (one.grad is not None)
            assert one.grad is None or (other.grad is not None and torch.equal(one.grad, other.grad))

    with on_hosts(rank, size, hosts):
        trial()


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
@ranks.on(SIZE, environ=LOOPBACK)
def test_codecs_round_rows_between_hosts_alone(rank: int, size: int, codec: str) -> None:
    """Random routing in bfloat16; the bound is the codec's, times the weights and the matrices."""
    hosts, policy = (0, 0, 1, 1), Policy(codec=codec)
    with on_hosts(rank, size, hosts):
        drawn = torch.Generator().manual_seed(rank)
        tokens = torch.randn(64, 256, generator=drawn).requires_grad_()
        ids = torch.randint(0, 8, (64, 4), generator=drawn)
        weights = torch.rand(64, 4, generator=drawn)
        exact = commlayer.experts.dispatch(tokens, ids, weights, 8)
        sent = commlayer.experts.dispatch(tokens, ids, weights, 8, policy=policy)
        assert sent.counts == exact.counts
        is_same = (sent.rows == exact.rows).all(1)
        assert 0 < is_same.sum() < len(is_same)  # those of this host, and no others
        errors = [((sent.rows - exact.rows).norm() / exact.rows.norm()).item()]
        one, other = (commlayer.experts.combine(sending.rows * 2, sending, policy=policy) for sending in (sent, exact))
        one.sum().backward()
        assert tokens.grad is not None
        right = (2 * weights.sum(1, keepdim=True)).expand_as(tokens)
        errors.append(((tokens.grad - right).norm() / right.norm()).item())
        errors.append(((one - other).norm() / other.norm()).item())
        limit = {"bf16": 0.004, "int8": 0.015, "int4": 0.2}[codec]
        assert max(errors) < limit, errors


def odd_experts(rank: int) -> None:
    commlayer.experts.dispatch(torch.ones(2, 3), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), 6)


def other_number(rank: int) -> None:
    number = 8 if rank == 1 else 4
    commlayer.experts.dispatch(torch.ones(2, 3), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), number)


def other_width(rank: int) -> None:
    tokens = torch.ones(2, 4 if rank == 1 else 3)
    commlayer.experts.dispatch(tokens, torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), 4)


def other_codec(rank: int) -> None:
    policy, ids = Policy(codec="int8" if rank == 1 else "none"), torch.zeros(2, 1, dtype=torch.int64)
    commlayer.experts.dispatch(torch.ones(2, 3), ids, torch.ones(2, 1), 4, policy=policy)


def other_gradients(rank: int) -> None:
    tokens = torch.ones(2, 3, requires_grad=rank == 1)
    commlayer.experts.dispatch(tokens, torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), 4)


def unknown_expert(rank: int) -> None:
    ids = torch.tensor([[0], [4 if rank == 1 else 3]])
    commlayer.experts.dispatch(torch.ones(2, 3), ids, torch.ones(2, 1), 4)


def flat_tokens(rank: int) -> None:
    tokens = torch.tensor(1.0) if rank == 1 else torch.ones(2, 3)
    commlayer.experts.dispatch(tokens, torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), 4)


def few_weights(rank: int) -> None:
    weights = torch.ones(2, 1 + (rank == 1))
    commlayer.experts.dispatch(torch.ones(2, 3), torch.zeros(2, 1, dtype=torch.int64), weights, 4)


def real_ids(rank: int) -> None:
    ids = torch.zeros(2, 1, dtype=torch.float32 if rank == 1 else torch.int64)
    commlayer.experts.dispatch(torch.ones(2, 3), ids, torch.ones(2, 1), 4)


DIFFERENT = (other_number, other_width, other_codec, other_gradients)
REFUSED: dict[Callable[[int], None], str] = {
    unknown_expert: "expert_ids has 4: use 0 to 3, or -1 for no expert",
    flat_tokens: "give floating-point rows",
    few_weights: "one for each expert of a token",
    real_ids: "give whole numbers of shape",
}


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@ranks.on(SIZE, environ=LOOPBACK)
def test_all_ranks_refuse_together_and_go_on(rank: int, size: int, hosts: Any) -> None:
    with on_hosts(rank, size, hosts):
        with pytest.raises(
            commlayer.ConfigError, match="num_experts=6 do not divide among 4 ranks; use a multiple of 4"
        ):
            odd_experts(rank)
        for case in DIFFERENT:
            with pytest.raises(
                commlayer.MismatchError, match="the call of rank 1 of the group is of another"
            ) as caught:
                case(rank)
            assert caught.value.culprit == 1
        for refused_case, text in REFUSED.items():
            with pytest.raises(commlayer.ConfigError if rank == 1 else commlayer.MismatchError) as refused:
                refused_case(rank)
            assert (text if rank == 1 else "rank 1 of the group has refused its arguments") in str(refused.value)
        sent = commlayer.experts.dispatch(torch.ones(1, 2), torch.tensor([[3]]), torch.ones(1, 1), 4)
        assert sent.counts == [4 * (rank == 3)]
        with pytest.raises(commlayer.ConfigError, match="a row for each of `rows`"):
            commlayer.experts.combine(torch.ones(9, 2), sent)
        with torch.no_grad():
            assert torch.equal(commlayer.experts.combine(sent.rows, sent), torch.ones(1, 2))


@ranks.on(1, ranks.run_job)
def test_one_rank_alone(rank: int, size: int) -> None:
    tokens = torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True)
    sent = commlayer.experts.dispatch(tokens, torch.tensor([[0, 0], [-1, -1], [2, 0]]), torch.ones(3, 2), 3)
    assert (sent.counts, sent.remote_rows) == ([3, 0, 1], 0)
    found = commlayer.experts.combine(sent.rows, sent)
    assert found.view(-1).tolist() == [2, 0, 6]
    found.sum().backward()
    assert tokens.grad is not None
    assert tokens.grad.view(-1).tolist() == [2, 0, 2]


def die(rank: int, size: int) -> str:
    """The type of the error that a rank sees after the death of rank 3, which has an expert of every token."""
    with on_hosts(rank, size, [0, 0, 1, 1]):
        if rank == 3:
            os._exit(1)
        try:
            commlayer.experts.dispatch(torch.ones(2, 3), torch.tensor([[0, 3], [1, 3]]), torch.ones(2, 2), 4)
        except commlayer.CommError as error:
            found = type(error).__name__
    return found


def test_a_dead_rank_is_an_error_on_every_other() -> None:
    ended = ranks.outcomes(die, SIZE, environ={**LOOPBACK, "COMMLAYER_PEER_TIMEOUT_S": "1"})
    assert [outcome.result for outcome in ended[:3]] == ["PeerLostError"] * 3
