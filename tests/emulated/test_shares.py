"""Hosts whose links have unequal rates own unequal shares, as the ranks measure them; level hosts own equal ones."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from commlayer.tools.emulate.network import Network
from commlayer.tools.emulate.scenario import Scenario
from tests import ranks

NUMEL, CALLS = 2 << 20, 4
pytestmark = [pytest.mark.needs_root, pytest.mark.timeout(120)]


def weights(rank: int, size: int) -> tuple[int, ...]:
    with ranks.job(rank, size):
        group: Any = dist.group.WORLD
        for call in range(CALLS):
            tensor = torch.arange(NUMEL, dtype=torch.float32).remainder_(1000).add_(rank + call)
            dist.all_reduce(tensor)
            exact = torch.arange(NUMEL, dtype=torch.float32).remainder_(1000).add_(call).mul_(size).add_(6)
            assert torch.equal(tensor, exact)
        found: tuple[int, ...] = group._submitter._shares._present.weights
        return found


@pytest.mark.parametrize("scenario", ["clean200", "slow_host"])
def test_the_slow_host_owns_nothing(scenario: str) -> None:
    with Network(Scenario.read(scenario)) as network:
        places = [network.name(host) for host in range(4)]
        found = ranks.run(weights, 4, timeout_s=90, environ=network.rendezvous(), places=places)
    assert len(set(found)) == 1
    if scenario == "clean200":
        assert found[0] == ()
    else:
        assert found[0][1] == 0
        assert min(found[0][0], *found[0][2:]) > 64
