from typing import Any

import torch.distributed as dist

from commlayer.tools.bench.backends import open_backend
from commlayer.tools.bench.beside import Beside
from commlayer.tools.bench.measure import Bench
from commlayer.tools.bench.spec import BackendSpec, Spec
from tests import ranks


@ranks.on(2, ranks.run_gloo)
def test_ranks_end_with_the_same_operations(rank: int, size: int) -> None:
    """Ranks that see different numbers of operations end."""
    control: Any = dist.group.WORLD
    beside = Beside(dist.new_group(backend="gloo"), control, 4096)
    with beside:
        for _ in range(rank * 5):
            beside.top_up()
    assert beside.wrong == 0


@ranks.on(2, ranks.run_gloo)
def test_wrong_results_of_the_traffic_beside_are_found(rank: int, size: int) -> None:
    import tests.process.bench.corrupting  # noqa: F401  # registers the backend

    control: Any = dist.group.WORLD
    for name in ("gloo:beside=4K", "corrupting:beside=4K"):
        spec = Spec((BackendSpec.parse(name),), (64,), iters=20, rounds=1)
        backend = open_backend(spec.backends[0], control, 30.0)
        backends = [backend]
        if name.startswith("corrupting"):
            # the measured traffic is right, only the traffic beside it is wrong
            backends = [type(backend)(backend.spec, control, (), backend.beside)]
        wrong = Bench(spec, backends, control, local_leader=True).run(lambda _: None)[0].wrong
        assert (wrong > 0) is name.startswith("corrupting")
