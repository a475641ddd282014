"""Encoded gradients between emulated hosts that lose packets: nothing is forgotten, whatever the ranks per host."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlayer
from commlayer.tools.emulate.link import Link
from commlayer.tools.emulate.network import Network
from commlayer.tools.emulate.scenario import Scenario
from tests import ranks
from tests.drift import SHAPES, check_equal, directions, hooked, mean, step_of
from tests.residual import total

STEPS = 5
TIMEOUT_S = 200
pytestmark = [pytest.mark.needs_root, pytest.mark.timeout(240)]

POLICIES = (
    commlayer.Policy(codec="int8", loss_bound=0.05),
    commlayer.Policy(codec="int4", loss_bound=0.05),
    commlayer.Policy(codec="int4"),
    commlayer.Policy(codec="topk:0.05", loss_bound=0.05),
)


def drifts(rank: int, size: int) -> list[dict[str, Any]]:
    """The distance of all results and residuals from all gradients, and the lost bytes, of each policy."""
    found = []
    with ranks.job(rank, size, "gloo"):
        for policy in POLICIES:
            model, state = hooked(policy)
            results, exact = ([torch.zeros(shape, dtype=torch.float64) for shape in SHAPES] for _ in range(2))
            for step in range(STEPS):
                gradients = step_of(model, directions(rank, step))
                check_equal(gradients, size)
                for result, gradient, right, one in zip(results, gradients, exact, mean(size, step), strict=True):
                    result += gradient
                    right += one
            errors = []
            for parameter, result, right in zip(model.parameters(), results, exact, strict=True):
                left = total(state.feedback, parameter).double()
                dist.all_reduce(left)
                errors.append(float((result + left / size - right).abs().max()) if parameter.dim() > 1 else 0.0)
            found.append({"error": max(errors), "lost": state.uncounted_bytes})
            dist.barrier()
    return found


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 1)])
def test_results_and_residuals_add_up_to_all_gradients(hosts: Sequence[int]) -> None:
    with Network(Scenario(hosts=max(hosts) + 1, nics=(Link(loss=0.02),))) as network:
        places = [network.name(host) for host in hosts]
        found = ranks.run(drifts, len(hosts), timeout_s=TIMEOUT_S, environ=network.rendezvous(), places=places)
    for number, policy in enumerate(POLICIES):
        bound = 0.1 if policy.codec == "int8" else 1e-5  # int8 rounds contributions and keeps no errors
        assert max(run[number]["error"] for run in found) < bound, policy
        may_lose = policy.loss_bound > 0 and not policy.codec.startswith("topk")
        assert (sum(run[number]["lost"] for run in found) > 0) == may_lose, policy
