"""Classes of buckets: by their number, and by the next use of their parameters."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from commlayer.scheduler.order import FirstUse, NextUse, bucket_class


def learn(model: nn.Module, *inputs: Tensor) -> NextUse:
    """What one forward pass shows."""
    order = NextUse(model)
    order.begin()
    with FirstUse(order.parameters, order.use):
        model(*inputs)
    order.end()
    return order


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(count)))


def classes(count: int, priority: int = 4) -> list[int]:
    """The classes of the layers of a model, each a bucket."""
    model = layers(count)
    order = learn(model, torch.ones(2, 4))
    return [order.class_of([parameter], priority) for parameter in model.parameters()]


def test_the_bucket_needed_first_is_the_most_urgent() -> None:
    assert classes(7) == [1, 2, 3, 4, 5, 6, 7]
    assert classes(8) == [1, 2, 3, 4, 5, 6, 7, 7]
    assert classes(2) == [1, 7]
    many = classes(40)
    assert many == sorted(many)
    assert set(many) == {1, 2, 3, 4, 5, 6, 7}
    assert max(map(many.count, many)) <= 7


def test_classes_stay_in_range() -> None:
    assert classes(7, priority=0) == sorted(classes(7, priority=0))
    assert set(classes(9, priority=0)) == {0, 1, 2, 3}
    assert set(classes(9, priority=7)) == {4, 5, 6, 7}


def test_a_single_bucket_has_the_class_of_the_policy() -> None:
    model = layers(3)
    assert learn(model, torch.ones(2, 4)).class_of(list(model.parameters()), 4) == 4


def test_before_a_forward_pass_all_have_the_class_of_the_policy() -> None:
    model = layers(3)
    assert [NextUse(model).class_of([parameter], 5) for parameter in model.parameters()] == [5, 5, 5]


def test_within_a_class_the_bucket_needed_first_has_the_first_place() -> None:
    model = layers(20)
    order = learn(model, torch.ones(2, 4))
    weights = list(model.parameters())
    assert [order.place_of([weight]) for weight in weights] == list(range(1, 21))
    assert order.place_of(weights[5:2:-1]) == 4
    assert NextUse(model).place_of(weights) == 0


def test_a_forward_pass_that_failed_teaches_nothing() -> None:
    model = layers(3)
    weights = list(model.parameters())
    order = NextUse(model)
    order.begin()
    order.use(weights[2])
    order.begin()
    for weight in weights:
        order.use(weight)
    order.end()
    assert order.places() == [0, 1, 2]


class Odd(nn.Module):
    """Uses a tied and a borrowed parameter, and one of its own after another module; leaves one out."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 9, bias=False)
        self.unused = nn.Linear(4, 4)
        self.embedding = nn.Embedding(9, 4)
        self.head.weight = self.embedding.weight
        self.lender = nn.Linear(4, 4, bias=False)
        self.inner = nn.Linear(4, 4, bias=False)
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, words: Tensor) -> Tensor:
        assert self.lender.weight.dtype == torch.float32  # reads no values
        hidden = self.inner(self.embedding(words)) * self.gain
        return self.head(functional.linear(hidden, weight=self.lender.weight))  # type: ignore[no-any-return]


def test_borrowed_and_tied_parameters() -> None:
    model = Odd()
    order = learn(model, torch.tensor([1, 2]))
    named = dict(model.named_parameters())
    places = dict(zip(order.parameters, order.places(), strict=True))
    used = sorted(named, key=lambda name: places[named[name]])
    assert used == ["head.weight", "inner.weight", "gain", "lender.weight", "unused.weight", "unused.bias"]


def test_ranks_take_over_the_order_of_one() -> None:
    model = layers(3)
    order = learn(model, torch.ones(1, 4))
    order.adopt([2, 0, 1])
    assert order.places() == [2, 0, 1]
    assert order.class_of(list(model[1].parameters()), 4) == 1


def test_operations_on_lists_of_parameters_are_seen() -> None:
    model = nn.LSTM(3, 3)
    seen: list[Tensor] = []
    with FirstUse(list(model.parameters()), seen.append):
        model(torch.ones(2, 1, 3))
    assert {id(parameter) for parameter in seen} == {id(parameter) for parameter in model.parameters()}


def test_a_class_by_number() -> None:
    assert [bucket_class(4, index, 3) for index in range(3)] == [6, 4, 2]
