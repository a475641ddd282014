"""`Home` without ranks: which rows it lends, for how long, and to whom."""

import numpy as np
import pytest
import torch

from bench.embedding import belady
from commlayer.frontend.embedding.home import COPY, GRADIENT, KEEP, LENT, RETURN, Home, Orders, Rows
from commlayer.frontend.embedding.rule import Rule

RULE = Rule("sgd", 1, 0.5)


def rows(*numbers: int) -> Rows:
    return np.array(numbers, np.int64)


def end(home: Home, orders: list[Orders], gradient: float = 1.0) -> None:
    """Ends a step whose ranks return zeros, and send this gradient for each row."""
    returned = [torch.zeros(int((order.marks == RETURN).sum()) + len(order.leaving), 1) for order in orders]
    summed = [torch.full((int((order.marks == GRADIENT).sum()), 1), gradient) for order in orders]
    home.end(orders, returned, summed)


def test_a_row_goes_where_it_is_used_next() -> None:
    home = Home(6, 2, 6, RULE)
    home.records[:, 0] = torch.arange(6.0)
    for asked in ([rows(0, 1), rows(2)], [rows(0, 3), rows(1, 3)], [rows(0), rows()], [rows(), rows(0)]):
        home.learn(asked)
    late = home.late([np.zeros(2, np.uint8), np.zeros(1, np.uint8)])
    assert [part[:, 0].tolist() for part in late] == [[0, 1], [2]]
    orders = home.orders()
    assert [order.marks.tolist() for order in orders] == [[KEEP, RETURN], [KEEP]]  # rank 1 needs row 1 next
    assert [order.early.tolist() for order in orders] == [[0, COPY], [0, COPY]]  # this step has used 0 and 1
    assert [part[:, 0].tolist() for part in home.early(orders)] == [[3], [3]]
    end(home, orders)
    late = home.late([order.early for order in orders])
    assert [part[:, 0].tolist() for part in late] == [[], [0]]  # row 1, as it has returned
    orders = home.orders()
    assert [order.marks.tolist() for order in orders] == [[KEEP, GRADIENT], [KEEP, GRADIENT]]
    end(home, orders)
    assert home.records[3, 0] == 3 - 0.5 * 2  # both gradients
    home.learn([rows(2), rows()])  # rank 1 has row 2, and rank 0 will use it
    home.late([order.early for order in orders])
    orders = home.orders()
    assert orders[1].leaving.tolist() == [2]
    assert orders[0].marks.tolist() == [RETURN]
    end(home, orders)
    assert home.holder[[0, 2]].tolist() == [-1, -1]


def test_an_unused_row_comes_before_its_step() -> None:
    home = Home(4, 2, 4, RULE)
    home.learn([rows(0), rows(1)])
    home.learn([rows(2), rows(3)])
    home.late([np.zeros(1, np.uint8)] * 2)
    orders = home.orders()
    assert [order.early.tolist() for order in orders] == [[LENT], [LENT]]
    end(home, orders)
    assert [len(part) for part in home.late([order.early for order in orders])] == [0, 0]


@pytest.mark.parametrize("seed", range(5))
def test_the_cache_is_beladys_when_all_steps_are_known(seed: int) -> None:
    random = np.random.default_rng(seed)
    count, room, steps = 60, int(random.integers(1, 30)), 80
    used = [np.unique((count * random.random(9) ** 2).astype(np.int64)) for _ in range(steps)]
    home = Home(count, 1, room, RULE)
    for batch in used:
        home.learn([batch])
    hits, before, orders = 0, home.held(0), [Orders(np.zeros(0, np.uint8), np.zeros(len(used[0]), np.uint8), rows())]
    for batch in used:
        hits += int(np.isin(batch, before).sum())
        home.late([orders[0].early])
        orders = home.orders()
        announced = home.held(0)
        end(home, orders)
        after = home.held(0)
        assert set(after) <= set(announced)
        before = after[~np.isin(after, home.asked(home._step, 0)[orders[0].early == LENT])]
        assert len(before) <= room
    assert hits / sum(map(len, used)) == belady(used, count, room, 0)
