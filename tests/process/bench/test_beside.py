from __future__ import annotations

from typing import Any

import torch.distributed as dist

from commlayer.tools.bench.backends import open_backend
from commlayer.tools.bench.beside import Beside
from commlayer.tools.bench.measure import Bench
from commlayer.tools.bench.spec import BackendSpec, Spec
from tests import ranks


def uneven(rank: int, size: int) -> int:
    """Ranks that see different numbers of operations end."""
    dist.init_process_group("gloo", store=ranks.store(), rank=rank, world_size=size)
    control: Any = dist.group.WORLD
    beside = Beside(dist.new_group(backend="gloo"), control, 4096)
    with beside:
        for _ in range(rank * 5):
            beside.top_up()
    wrong = beside.wrong
    dist.destroy_process_group()
    return wrong


def test_ranks_end_with_the_same_operations() -> None:
    assert ranks.run(uneven, 2) == [0, 0]


def corrupted(rank: int, size: int) -> tuple[int, int]:
    import tests.process.bench.corrupting  # noqa: F401  # registers the backend

    dist.init_process_group("gloo", store=ranks.store(), rank=rank, world_size=size)
    control: Any = dist.group.WORLD
    found = []
    for name in ("gloo:beside=4K", "corrupting:beside=4K"):
        spec = Spec((BackendSpec.parse(name),), (64,), iters=20, rounds=1)
        backend = open_backend(spec.backends[0], control, 30.0)
        backends = [backend]
        if name.startswith("corrupting"):
            # the measured traffic is right, only the traffic beside it is wrong
            backends = [type(backend)(backend.spec, control, (), backend.beside)]
        found.append(Bench(spec, backends, control, local_leader=True).run(lambda _: None)[0].wrong)
    dist.destroy_process_group()
    return found[0], found[1]


def test_wrong_results_of_the_traffic_beside_are_found() -> None:
    for good, bad in ranks.run(corrupted, 2):
        assert good == 0
        assert bad > 0
