"""Hosts whose links have unequal rates own unequal shares, as the ranks measure them; level hosts own equal ones.

Ranks that lack processors measure rates with errors, or exchange them late: then the shares come 20 calls later.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from commlayer.tools.emulate.network import Network
from commlayer.tools.emulate.scenario import Scenario
from tests import ranks

NUMEL, CALLS, CALLS_MAX = 2 << 20, 4, 46
pytestmark = [pytest.mark.needs_root, pytest.mark.timeout(300)]


def weights(rank: int, size: int, calls: int) -> tuple[int, ...]:
    with ranks.job(rank, size):
        group: Any = dist.group.WORLD
        found: tuple[int, ...] = ()
        for call in range(calls):
            tensor = torch.arange(NUMEL, dtype=torch.float32).remainder_(1000).add_(rank + call)
            dist.all_reduce(tensor)
            exact = torch.arange(NUMEL, dtype=torch.float32).remainder_(1000).add_(call).mul_(size).add_(6)
            assert torch.equal(tensor, exact)
            found = group._submitter._shares._present.weights  # all ranks change them at the same call
            if found and call >= CALLS:
                break
        return found


@pytest.mark.parametrize("scenario", ["clean200", "slow_host"])
def test_all_ranks_agree_and_the_slow_host_owns_less(scenario: str) -> None:
    """Beside other tests, ranks wait for processors, and level hosts may measure other rates, too."""
    with Network(Scenario.read(scenario)) as network:
        places = [network.name(host) for host in range(4)]
        calls = CALLS if scenario == "clean200" else CALLS_MAX
        found = ranks.run(weights, 4, calls, timeout_s=90, environ=network.rendezvous(), places=places)
    assert len(set(found)) == 1
    if scenario == "slow_host":
        assert found[0][1] < max(found[0])
