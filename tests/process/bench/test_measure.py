from __future__ import annotations

from typing import Any

import torch.distributed as dist

from commlayer.tools.bench.backends import open_backend
from commlayer.tools.bench.collectives import AllReduce
from commlayer.tools.bench.measure import Bench, Measurement
from commlayer.tools.bench.spec import COLLECTIVE_NAMES, BackendSpec, Spec
from tests import ranks

FAST, SLOW = BackendSpec("gloo"), BackendSpec("corrupting")


def control(rank: int, size: int) -> Any:
    dist.init_process_group("gloo", store=ranks.store(), rank=rank, world_size=size)
    return dist.group.WORLD


def measure_every_collective(rank: int, size: int) -> dict[str, tuple[int, list[int], int]]:
    group = control(rank, size)
    backend = open_backend(FAST, group, 30.0)
    found = {}
    for name in COLLECTIVE_NAMES:
        spec = Spec((FAST,), (5000,), collective=name, iters=5, rounds=2)
        result = Bench(spec, [backend], group, local_leader=rank == 0).run(lambda _: None)[0]
        found[name] = (result.wrong, [len(times) for times in result.rounds], result.summary.samples)
    dist.destroy_process_group()
    return found


def test_every_collective_is_measured_and_right() -> None:
    for found in ranks.run(measure_every_collective, 3):
        assert found == dict.fromkeys(COLLECTIVE_NAMES, (0, [5, 5], 10))


def order_of_rounds(rank: int, size: int) -> tuple[list[str], list[list[float]]]:
    import tests.process.bench.corrupting  # noqa: F401  # registers the backend

    group = control(rank, size)
    backends = [open_backend(spec, group, 30.0) for spec in (FAST, SLOW)]
    order: list[str] = []

    class Recording(Bench):
        def measure_round(self, measurement: Measurement) -> None:
            order.append(str(measurement.backend.spec))
            super().measure_round(measurement)

    spec = Spec((FAST, SLOW), (64,), iters=3, rounds=3)
    results = Recording(spec, backends, group, local_leader=True).run(lambda _: None)
    dist.destroy_process_group()
    return order, results[0].rounds


def test_backends_take_turns_and_ranks_agree_on_the_times() -> None:
    (order, times), (_, other_times) = ranks.run(order_of_rounds, 2)
    assert order == ["gloo", "corrupting", "corrupting", "gloo", "gloo", "corrupting"]
    assert times == other_times  # the slowest rank's


def long_sums(rank: int, size: int) -> tuple[int, int]:
    group = control(rank, size)
    backend = open_backend(FAST, group, 30.0)
    spec = Spec((FAST,), (256,), dtype="bfloat16", iters=20, rounds=1)
    chain = AllReduce(256, dtype_of(spec), "sum", rank, size).chain()
    result = Bench(spec, [backend], group, local_leader=True).run(lambda _: None)[0]
    dist.destroy_process_group()
    return chain, result.wrong


def dtype_of(spec: Spec) -> Any:
    import torch

    return getattr(torch, spec.dtype)


def test_more_iterations_than_a_sum_can_grow_are_still_exact() -> None:
    for chain, wrong in ranks.run(long_sums, 3):
        assert chain < 20  # otherwise this tests nothing
        assert wrong == 0
