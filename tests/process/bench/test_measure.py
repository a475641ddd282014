import torch
import torch.distributed as dist

from commlayer.tools.bench.backends import open_backend
from commlayer.tools.bench.collectives import AllReduce
from commlayer.tools.bench.measure import Bench, Measurement
from commlayer.tools.bench.spec import COLLECTIVE_NAMES, BackendSpec, Spec
from tests import ranks

FAST, SLOW = BackendSpec("gloo"), BackendSpec("corrupting")


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


@ranks.on(3, ranks.run_gloo)
def test_every_collective_is_measured_and_right(rank: int, size: int) -> None:
    backend = open_backend(FAST, world(), 30.0)
    for name in COLLECTIVE_NAMES:
        spec = Spec((FAST,), (5000,), collective=name, iters=5, rounds=2)
        result = Bench(spec, [backend], world(), local_leader=rank == 0).run(lambda _: None)[0]
        assert (result.wrong, [len(times) for times in result.rounds], result.summary.samples) == (0, [5, 5], 10), name


def order_of_rounds(rank: int, size: int) -> tuple[list[str], list[list[float]]]:
    import tests.process.bench.corrupting  # noqa: F401  # registers the backend

    backends = [open_backend(spec, world(), 30.0) for spec in (FAST, SLOW)]
    order: list[str] = []

    class Recording(Bench):
        def measure_round(self, measurement: Measurement) -> None:
            order.append(str(measurement.backend.spec))
            super().measure_round(measurement)

    spec = Spec((FAST, SLOW), (64,), iters=3, rounds=3)
    results = Recording(spec, backends, world(), local_leader=True).run(lambda _: None)
    return order, results[0].rounds


def test_backends_take_turns_and_ranks_agree_on_the_times() -> None:
    (order, times), (_, other_times) = ranks.run_gloo(order_of_rounds, 2)
    assert order == ["gloo", "corrupting", "corrupting", "gloo", "gloo", "corrupting"]
    assert times == other_times  # the slowest rank's


@ranks.on(3, ranks.run_gloo)
def test_more_iterations_than_a_sum_can_grow_are_still_exact(rank: int, size: int) -> None:
    backend = open_backend(FAST, world(), 30.0)
    spec = Spec((FAST,), (256,), dtype="bfloat16", iters=20, rounds=1)
    assert AllReduce(256, torch.bfloat16, "sum", rank, size).chain() < 20  # otherwise this tests nothing
    assert Bench(spec, [backend], world(), local_leader=True).run(lambda _: None)[0].wrong == 0
