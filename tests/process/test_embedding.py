"""`commlayer.embedding.Remote`: the values of a table without a cache, bit by bit, wherever its rows are."""

import itertools
from operator import itemgetter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import commlayer
from commlayer.frontend.embedding.rule import Optimizer
from tests import ranks

WIDTH = 8
Batches = list[Tensor]


def first(rows: Tensor) -> Tensor:
    """The first values of rows, wherever they live."""
    return torch.sin(rows.double()[:, None] * 3 + torch.arange(WIDTH)).float()


def drawn(rank: int, seed: int, rows: int, steps: int) -> Batches:
    """Batches of a rank: a few popular rows, and rows of its own; some are empty."""
    random = np.random.default_rng([seed, rank])
    shared = np.random.default_rng(seed)
    popular, own = shared.integers(0, rows, 5), random.integers(0, rows, 12)
    batches = []
    for _ in range(steps):
        count = int(random.integers(0, 12))
        chosen = np.where(
            random.random(count) < random.random(), random.choice(popular, count), random.choice(own, count)
        )
        batches.append(torch.from_numpy(chosen.astype(np.int64)))
    return batches


def train(table: Any, batches: Batches, factor: float = 1.0) -> list[Tensor]:
    """What the batches see of the table. Each makes a step, but some."""
    seen = []
    for number, ids in enumerate(table.ahead(batches, ids=lambda batch: batch)):
        values = table(ids)
        seen.append(values.detach().clone())
        ((values * factor).sin() * (number + 1)).sum().backward()
        if number % 7 != 6:
            table.step()
    return seen


class Reference:
    """The table of one process: every rank's batches, one step after another."""

    def __init__(self, rows: int, lr: float, optimizer: Optimizer) -> None:
        self.weights = first(torch.arange(rows))
        self.state = torch.zeros(rows)
        self.lr, self.optimizer = lr, optimizer

    def step(self, used: list[tuple[Tensor, Tensor]]) -> None:
        total = torch.zeros_like(self.weights)
        for ids, gradient in used:
            total.index_add_(0, ids, gradient)
        rows = torch.unique(torch.cat([ids for ids, _ in used]))
        if self.optimizer == "sgd":
            self.weights[rows] -= self.lr * total[rows]
            return
        self.state[rows] += total[rows].square().mean(1)
        self.weights[rows] -= self.lr * total[rows] / (self.state[rows].sqrt() + 1e-8).unsqueeze(1)


@pytest.mark.parametrize("seed", range(4))
@ranks.on(3, ranks.run_job)
def test_random_programs_have_the_bits_of_no_cache(rank: int, size: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    rows, steps = int(random.integers(20, 60)), 25
    optimizer: Optimizer = "adagrad" if seed % 2 else "sgd"
    batches = drawn(rank, seed, rows, steps)
    results = []
    for cache, lookahead in ((0.0, 1), (0.0, 5), (0.3, 1), (0.3, 4), (1.0, 50)):
        table = commlayer.embedding.Remote(
            "drawn", rows, WIDTH, lr=0.05, optimizer=optimizer, cache=cache, lookahead=lookahead, init=first
        )
        seen = train(table, batches)
        results.append((seen, table.state_dict()["records"]))
        del table
    for seen, records in results[1:]:
        assert torch.equal(records, results[0][1])
        assert all(map(torch.equal, seen, results[0][0]))


@ranks.on(3, ranks.run_job)
def test_values_are_those_of_one_process(rank: int, size: int) -> None:
    for optimizer in ("sgd", "adagrad"):
        rows, every = 40, [drawn(rank, 7, 40, 12) for rank in range(size)]
        table = commlayer.embedding.Remote("one", rows, WIDTH, lr=0.05, optimizer=optimizer, cache=0.5, init=first)
        seen = train(table, every[rank])
        reference = Reference(rows, 0.05, optimizer)
        for number in range(12):
            used = []
            for each in range(size):
                ids = every[each][number]
                values = reference.weights[ids].clone().requires_grad_()
                if each == rank:
                    torch.testing.assert_close(seen[number], values.detach(), rtol=1e-4, atol=1e-5)
                (values.sin() * (number + 1)).sum().backward()
                assert values.grad is not None
                used.append((ids, values.grad))
            if number % 7 != 6:
                reference.step(used)
        torch.testing.assert_close(
            table.state_dict()["records"][:, :WIDTH], reference.weights[rank::size], rtol=1e-4, atol=1e-5
        )
        del table


@ranks.on(2, ranks.run_job)
def test_a_row_of_one_rank_stays_in_its_cache(rank: int, size: int) -> None:
    table = commlayer.embedding.Remote("own", 1000, WIDTH, lr=0.1, cache=0.1, lookahead=4, init=first)
    own = torch.arange(20) + 500 * rank
    train(table, [own] * 10)
    assert (table.counts.used, table.counts.hits) == (200, 180)
    before = table.counts.sent_bytes
    train(table, [own[:1]] * 3)
    assert table.counts.sent_bytes > before


@ranks.on(2, ranks.run_job)
def test_the_loop_may_be_left_and_begun_again(rank: int, size: int) -> None:
    batches = drawn(rank, 3, 50, 20)
    results = []
    for cut in (0, 7):
        table = commlayer.embedding.Remote("left", 50, WIDTH, lr=0.05, cache=0.5, lookahead=3, init=first)
        for part, count in ((batches, cut), (batches[cut:], 20 - cut)):
            loop = table.ahead(part, ids=lambda batch: batch)
            for ids in itertools.islice(loop, count):
                table(ids).sum().backward()
                table.step()
            table.flush()
        results.append(table.state_dict()["records"])
        del table, loop  # the name is free again
    assert torch.equal(results[0], results[1])


@ranks.on(2, ranks.run_job)
def test_the_rank_with_the_fewest_batches_ends_the_loop(rank: int, size: int) -> None:
    table = commlayer.embedding.Remote("few", 10, WIDTH, lr=0.1, lookahead=2, init=first)
    assert len(train(table, [torch.tensor([1, 2])] * (3 + rank))) == 3


def test_no_tables_are_refused() -> None:
    with pytest.raises(commlayer.ConfigError, match="no tables"):
        next(commlayer.embedding.ahead([1], {}))


@ranks.on(2, ranks.run_job)
def test_the_state_is_saved_and_loaded(rank: int, size: int) -> None:
    table = commlayer.embedding.Remote("saved", 30, WIDTH, lr=0.1, optimizer="adagrad", cache=0.5, init=first)
    train(table, drawn(rank, 1, 30, 8))
    other = commlayer.embedding.Remote("loaded", 30, WIDTH, lr=0.1, optimizer="adagrad")
    other.load_state_dict(table.state_dict())
    table.lr = other.lr = 0.01
    again = drawn(rank, 2, 30, 8)
    assert all(map(torch.equal, train(table, again), train(other, again)))
    with pytest.raises(commlayer.ConfigError, match="the state is of"):
        other.load_state_dict({**table.state_dict(), "rank": 5})


@ranks.on(2, ranks.run_job)
def test_an_embedding_in_a_model(rank: int, size: int) -> None:
    table = commlayer.embedding.Remote("model", 100, WIDTH, lr=0.5, cache=0.2, init=first)
    torch.manual_seed(rank)
    head = nn.Linear(WIDTH, 1)
    batches = [torch.randint(0, 100, (16, 3)) for _ in range(60)]
    losses = []
    for ids in table.ahead(batches, ids=lambda batch: batch):
        pooled = table(ids).mean(1)
        assert pooled.shape == (16, WIDTH)
        loss = (head(pooled).squeeze(1) - (ids % 2).float().mean(1)).square().mean()
        loss.backward()
        table.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])


@ranks.on(2, ranks.run_job)
def test_two_tables_read_the_same_batches(rank: int, size: int) -> None:
    pairs = list(zip(drawn(rank, 5, 40, 15), drawn(rank, 6, 30, 15), strict=True))
    results = []
    for together in (True, False):
        left = commlayer.embedding.Remote("left", 40, WIDTH, lr=0.05, cache=0.3, lookahead=3, init=first)
        right = commlayer.embedding.Remote("right", 30, WIDTH, lr=0.05, cache=0.3, lookahead=7, init=first)
        if together:
            for one, other in commlayer.embedding.ahead(pairs, {left: itemgetter(0), right: itemgetter(1)}):
                (left(one).sin().sum() + right(other).sin().sum()).backward()
                left.step()
                right.step()
        else:
            for table, place in ((left, 0), (right, 1)):
                for pair in table.ahead(pairs, ids=itemgetter(place)):
                    table(pair[place]).sin().sum().backward()
                    table.step()
        results.append([table.state_dict()["records"] for table in (left, right)])
        del left, right
    assert all(map(torch.equal, *results))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "rows": ({"rows": 0}, "rows=0: use a whole number"),
    "width": ({"width": -1}, "width=-1"),
    "lookahead": ({"lookahead": 0}, "lookahead=0"),
    "cache": ({"cache": 1.5}, "cache=1.5: use the share"),
    "optimizer": ({"optimizer": "adam"}, "optimizer='adam': use one of sgd, adagrad"),
    "lr": ({"lr": float("nan")}, "lr=nan"),
    "init": ({"init": lambda rows: rows}, "init gives"),
}


@ranks.on(2, ranks.run_job)
def test_bad_arguments_are_told(rank: int, size: int) -> None:
    for changes, told in BAD.values():
        with pytest.raises(commlayer.ConfigError, match=told):
            commlayer.embedding.Remote(**{"name": "bad", "rows": 10, "width": 4, "lr": 0.1, **changes})
    table = commlayer.embedding.Remote("good", 10, 4, lr=0.1)
    with pytest.raises(commlayer.ConfigError, match="lr=-1: use a finite"):
        table.lr = -1
    expected: Any = (commlayer.ConfigError, "rows=0") if rank == 0 else (commlayer.MismatchError, "rank 0 of the group")
    with pytest.raises(expected[0], match=expected[1]):
        commlayer.embedding.Remote("half", 10 * rank, 4, lr=0.1)
    commlayer.embedding.Remote("one row", 1, 4, lr=0.1)
    with pytest.raises(commlayer.ConfigError, match="has a table of this name"):
        commlayer.embedding.Remote("good", 10, 4, lr=0.1)
    with pytest.raises(commlayer.ConfigError, match="there is no batch"):
        table(torch.tensor([1]))
    with pytest.raises(commlayer.MismatchError, match="of another kind"):
        commlayer.embedding.Remote("other", 10 + rank, 4, lr=0.1)
    table.lr = 0.1 * (rank + 1)
    with pytest.raises(commlayer.MismatchError, match="of another kind"):
        next(table.ahead([torch.tensor([1])], ids=lambda batch: batch))


@ranks.on(2, ranks.run_job)
def test_ids_that_make_no_sense_are_told_on_every_rank(rank: int, size: int) -> None:
    wrong: list[tuple[Tensor, str]] = [
        (torch.tensor([3, 10]), "row 10 is outside of the table: use 0 to 9"),
        (torch.tensor([-1]), "row -1 is outside"),
        (torch.tensor([0.5]), "ids of torch.float32"),
    ]
    for number, (ids, told) in enumerate(wrong):
        table = commlayer.embedding.Remote(f"ids {number}", 10, WIDTH, lr=0.1, init=first)
        expected: Any = (commlayer.ConfigError, told) if rank == 0 else (commlayer.MismatchError, "rank 0 of the group")
        with pytest.raises(expected[0], match=expected[1]):
            train(table, [ids if rank == 0 else torch.tensor([1])])
    table = commlayer.embedding.Remote("late", 10, WIDTH, lr=0.1, init=first)
    loop = table.ahead([torch.tensor([1, 2])], ids=lambda batch: batch)
    next(loop)
    table.step()
    with pytest.raises(commlayer.ConfigError, match="twice for a batch"):
        table.step()
    with pytest.raises(commlayer.ConfigError, match="row 3 is not one of this batch"):
        table(torch.tensor([3]))
    with pytest.raises(commlayer.ConfigError, match="the loop over `ahead` is not over"):
        table.state_dict()
    table.flush()


@ranks.on(2, ranks.run_job)
def test_rows_differ_where_the_ranks_have_one_seed(rank: int, size: int) -> None:
    torch.manual_seed(0)
    tables = [commlayer.embedding.Remote(name, 6, WIDTH, lr=0.1) for name in ("one", "other")]
    found = [
        table(batch).detach() for table in tables for batch in table.ahead([torch.arange(6)], ids=lambda batch: batch)
    ]
    assert len({tuple(row.tolist()) for row in torch.cat(found)}) == 12
