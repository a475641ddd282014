"""Tolerances in a job: the loss bounds that each bucket gets."""

from collections.abc import Callable
from functools import partialmethod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer import ByLayer, BySteps, GradientNorm, Tolerance
from commlayer.frontend.group.backend import CommProcessGroup
from tests import ranks


class Net(nn.Module):
    """Two layers with a bucket each, and something small in the second one's."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.back = nn.Linear(300, 400, bias=False), nn.Linear(400, 300)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.back(self.front(inputs))  # type: ignore[no-any-return]


def run(tolerance: Callable[[nn.Module], Tolerance], steps: int, **policy: Any) -> list[tuple[int, float, bool]]:
    """Trains with one; returns the elements, bound and whether something is protected of every bucket."""
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net, bucket_cap_mb=0.4)
    made = commlayer.HookState(commlayer.Policy(**policy), tolerance=tolerance(net))
    model.register_comm_hook(made, commlayer.allreduce_hook)
    seen = []
    calls = {name: getattr(CommProcessGroup, name) for name in ("allreduce", "allreduce_from")}

    def spy(self: Any, name: str, tensors: Any, *args: Any, **how: Any) -> Any:
        first = tensors[0] if isinstance(tensors, list) else tensors
        if "policy" in how:
            protect = args[2] if len(args) > 2 else None
            seen.append((first.numel(), how["policy"].loss_bound, bool(protect is not None and protect.any())))
        return calls[name](self, tensors, *args, **how)

    for name in calls:
        setattr(CommProcessGroup, name, partialmethod(spy, name))
    for _ in range(steps):
        model.zero_grad()
        model(torch.ones(4, 300)).square().mean().backward()
    return seen


BACK, FRONT = 300 * 400 + 300, 300 * 400


@pytest.mark.parametrize("treatment", ["feedback", "rescale"])
@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_every_bucket_has_its_bound(rank: int, size: int, treatment: str) -> None:
    bounds: dict[str, float | Tolerance] = {"*.bias": 0.0, "back.*": BySteps({0: 0.02, 2: 0.0}), "front.*": 0.1}
    seen = run(lambda net: ByLayer(net, bounds, 0.3), 3, treatment=treatment)
    assert seen[0] == (BACK + FRONT, 0.02, True)  # DDP begins with one bucket
    assert seen[1:3] == [(BACK, 0.02, True), (FRONT, 0.1, False)]
    assert seen[3:] == [(BACK, 0.0, False), (FRONT, 0.1, False)]


@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_ranks_come_to_the_same_adaptive_bound(rank: int, size: int) -> None:
    seen = run(lambda _: GradientNorm(0.01, 0.2, every_steps=2), 6, treatment="rescale")
    assert [bound for _, bound, _ in seen] == [0.01] * 7 + [0.2] * 4  # buckets: 1 in the first step, then 2


@ranks.on(2, environ=ranks.NETWORK)
def test_ranks_that_disagree_learn_it(rank: int, size: int) -> None:
    with ranks.job(rank, size), pytest.raises(RuntimeError, match="same operations"):
        run(lambda _: BySteps({0: 0.01 * (rank + 1)}), 1)


class Generous(Tolerance):
    """A rule of a user, wrong from its second step on."""

    def loss_bound(self, step: int, parameter: Tensor) -> float:  # noqa: ARG002
        return 0.1 if step == 0 else 0.9


@ranks.on(2, environ=ranks.NETWORK)
def test_a_bound_out_of_range_names_its_rank_and_rule(rank: int, size: int) -> None:
    says = (
        rf"rank {rank} of group '0' \(default_pg\): Generous.loss_bound for step 1 and a parameter of shape \(.*\) "
        r"returned 0.9: use a number, 0 .*"
    )
    with ranks.job(rank, size), pytest.raises(RuntimeError, match=says):
        run(lambda _: Generous(), 2)
