"""Memory that codecs with error feedback keep from step to step, in bytes per parameter."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from tests import ranks

VOCABULARY, WIDTH = 4000, 64


class Net(nn.Module):
    """Most of its parameters are an embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, words: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(words)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden


def kept_bytes(state: commlayer.HookState) -> int:
    """The bytes of the storages that the state holds between two steps."""
    found: dict[int, int] = {}

    def count(value: Any) -> None:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            found[storage._cdata] = storage.nbytes()
        elif isinstance(value, dict):
            count(list(value.values()))
        elif isinstance(value, (list, tuple)):
            for item in value:
                count(item)

    low_rank = state.low_rank._powersgd
    count([state._memory, state.feedback._kept])
    count([] if low_rank is None else [low_rank._errors, low_rank._right])
    return sum(found.values())


@pytest.mark.parametrize(
    ("codec", "residual", "of_coded", "of_all"),
    [
        ("none", "f32", 0, 0),
        ("int8", "f32", 0, 0),
        ("int4", "f32", 8, 0),
        ("int4", "bf16", 6, 0),
        ("sign", "f32", 8, 0),
        ("topk:0.01", "f32", 0, 4),
        ("topk:0.01", "bf16", 0, 2),
        ("powersgd:2", "f32", 0, 4),
    ],
)
@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_bytes_per_parameter(rank: int, size: int, codec: str, residual: Any, of_coded: int, of_all: int) -> None:
    """`of_coded`: per value that the codec encodes, without those in 16 bits. `of_all`: per parameter. The page
    docs/compression.md states both."""
    torch.manual_seed(1)
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.1, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = commlayer.Policy(codec=codec, residual=residual, exact_steps=0)
    state = commlayer.HookState(policy, fine=commlayer.Fine(model), optimizer=optimizer)
    model.register_comm_hook(state, commlayer.allreduce_hook)
    for step in range(4):
        words = torch.randint(VOCABULARY, (64,), generator=torch.Generator().manual_seed(10 * step + rank))
        model(words).square().mean().backward()
        optimizer.step()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    coded = sum(parameter.numel() for layer in model.module.layers for parameter in layer.parameters())
    expected = of_coded * coded + of_all * parameters
    assert 0.9 * expected <= kept_bytes(state) <= 1.1 * expected
