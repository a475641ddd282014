"""What would change results is refused by name, and a peer that dies has its error in the next forward pass."""

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from tests import ranks
from tests.fake_transport import on_fake


def refused(text: str, model: Any, optimizer: Any = None, **options: Any) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(commlayer.ConfigError, match=text):
        commlayer.overlap(model, optimizer, **options)


@ranks.on(1, on_fake)
def test_refusals(rank: int, size: int) -> None:
    def ddp(net: nn.Module | None = None, **flags: Any) -> DistributedDataParallel:
        return DistributedDataParallel(net or nn.Linear(2, 2), **({"gradient_as_bucket_view": True} | flags))

    refused(r"^overlap\(Linear\): give a DistributedDataParallel .* model after fully_shard", nn.Linear(2, 2))
    refused("gradient_as_bucket_view=False: .* set it to True", ddp(gradient_as_bucket_view=False))
    refused("find_unused_parameters=True: .* set it to False", ddp(find_unused_parameters=True))
    hooked = ddp()
    hooked.register_comm_hook(commlayer.HookState(), commlayer.allreduce_hook)
    refused("has a communication hook already", hooked)
    compiled = nn.Linear(2, 2)
    compiled.compile()
    refused("compiled, .* compile it after overlap", ddp(nn.Sequential(compiled)))
    refused("TorchScript, .* leave torch.jit out", ddp(nn.Sequential(torch.jit.script(nn.Linear(2, 2)))))
    refused("overlap with LBFGS", ddp(), torch.optim.LBFGS(nn.Linear(2, 2).parameters()))
    refused("has no parameter of the model", ddp(), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    for staleness in (2, -1, True, 0.5):
        refused(rf"staleness={staleness!r}\): use 0 \(exact\) or 1", ddp(), staleness=staleness)
    for policy in ("int4", "auto", "sign", "powersgd:4"):
        refused("staleness=1.* with Policy.*use staleness=0", ddp(), policy=commlayer.Policy(codec=policy), staleness=1)
    refused("loss_bound=0.1.*use staleness=0", ddp(), policy=commlayer.Policy(loss_bound=0.1), staleness=1)
    tolerant = commlayer.HookState(tolerance=commlayer.BySteps({0: 0.1}))
    refused("with a tolerance: .*use staleness=0", ddp(), state=tolerant, staleness=1)
    refused("give one of both", ddp(), policy=commlayer.Policy(), state=commlayer.HookState())
    adam = ddp()
    refused(
        r"codec='sign'\) with Adam", adam, torch.optim.Adam(adam.parameters()), policy=commlayer.Policy(codec="sign")
    )


def _lose_a_peer(rank: int, size: int) -> str:
    ranks.init(rank, size)
    model = DistributedDataParallel(nn.Linear(50, 50), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = commlayer.overlap(model, optimizer)
    for step in range(4):
        loss = model(torch.ones(2, 50)).sum()
        if step == 3 and rank == 1:
            os._exit(1)
        loss.backward()
        optimizer.step()
    with pytest.raises(commlayer.PeerLostError) as lost:
        model(torch.ones(2, 50))
    with pytest.raises(commlayer.PeerLostError):
        handle.remove()
    return str(lost.value)


def test_a_peer_that_dies_is_named_in_the_next_forward_pass() -> None:
    environ = {"COMMLAYER_SHM": "0", "COMMLAYER_PEER_TIMEOUT_S": "1"}
    first, second = ranks.outcomes(_lose_a_peer, 2, environ=environ)
    assert first.error is None
    assert "rank 1" in first.result
    assert second.exit_code == 1
