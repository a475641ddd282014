"""Classes of service in shared memory: an urgent operation overtakes bulk of its own group, by order of completion."""

import numpy as np
import pytest

from commlayer.errors import MismatchError
from commlayer.transport.base import DType, Request
from commlayer.transport.group import NativeGroup
from commlayer.transport.native_handle import NativeHandle
from commlayer.transport.status import lib
from tests.engine.cases import Array, Case, address, make_plan
from tests.world import PATIENCE_S, World

BULK = Case("all_reduce", DType.F32, 8 << 20)
URGENT = Case("all_reduce", DType.F32, 16 << 10)

HOSTS = [
    pytest.param([(0, 1)], "none", id="shared memory"),
    pytest.param([(0, 1), (2, 3)], "mem", id="two hosts of two ranks"),
    pytest.param([(0, 2, 3), (1,)], "mem", id="hosts of three and one"),
]


def start(group: NativeGroup, case: Case, array: Array, priority: int) -> NativeHandle:
    at = address(array)
    return group.submit(
        Request(make_plan(group, case), at, at, case.dtype, case.op, timeout_s=PATIENCE_S, priority=priority)
    )


@pytest.mark.parametrize(("hosts", "wire"), HOSTS)
def test_an_urgent_operation_overtakes_bulk_of_its_group(hosts: list[tuple[int, ...]], wire: str) -> None:
    with World(hosts, wire) as world, world.open_group() as team:

        def body(rank: int) -> list[str]:
            what = {"bulk": (BULK, 7), "more": (BULK, 7), "urgent": (URGENT, 0)}
            arrays = {name: np.ones(case.numel, "f4") for name, (case, _) in what.items()}
            handles = {name: start(team[rank], case, arrays[name], of) for name, (case, of) in what.items()}
            ended = []
            for name, handle in handles.items():
                handle.wait(PATIENCE_S)
                assert (arrays[name] == world.size).all()
                times = handle.times()
                assert times is not None
                ended.append((times.ended_s, name))
            return [name for _, name in sorted(ended)]

        assert world.on_each(body) == [["urgent", "bulk", "more"]] * world.size


@pytest.mark.parametrize(("hosts", "wire"), HOSTS)
def test_operations_that_yield_end_with_the_right_result(hosts: list[tuple[int, ...]], wire: str) -> None:
    """They run beside bulk of class 7, with which they share a queue within a host."""
    with World(hosts, wire) as world, world.open_group() as team:

        def body(rank: int) -> bool:
            arrays = [np.ones(BULK.numel, "f4") for _ in range(4)]
            handles = [start(team[rank], BULK, array, 7 + i % 2) for i, array in enumerate(arrays)]
            for handle in handles:
                handle.wait(PATIENCE_S)
            at = address(alone := np.ones(URGENT.numel, "f4"))
            plan = make_plan(team[rank], URGENT)
            team[rank].run(Request(plan, at, at, URGENT.dtype, URGENT.op, timeout_s=PATIENCE_S, priority=8))
            return all((array == world.size).all() for array in [*arrays, alone])

        assert world.on_each(body) == [True] * world.size


def test_a_synchronous_operation_overtakes_bulk() -> None:
    with World([(0, 1)], "none") as world, world.open_group() as team:

        def body(rank: int) -> bool:
            group = team[rank]
            bulk, urgent = np.ones(BULK.numel, "f4"), np.ones(URGENT.numel, "f4")
            handles = [start(group, BULK, bulk, 7) for _ in range(4)]
            at = address(urgent)
            plan = make_plan(group, URGENT)
            group.run(Request(plan, at, at, URGENT.dtype, URGENT.op, timeout_s=PATIENCE_S, priority=1))
            overtook = not handles[-1].done()
            for handle in handles:
                handle.wait(PATIENCE_S)
            assert (urgent == world.size).all()
            return overtook

        assert world.on_each(body) == [True, True]


def test_ranks_of_a_host_that_differ_in_the_class_get_a_mismatch() -> None:
    with World([(0, 1)], "none") as world, world.open_group() as team:

        def body(rank: int) -> str:
            array = np.ones(URGENT.numel, "f4")
            handle = start(team[rank], URGENT, array, 2 + rank)
            with pytest.raises(MismatchError, match="priorities") as caught:
                handle.wait(PATIENCE_S)
            team[rank].close()
            assert str(team[rank].error(lib.CL_EMISMATCH)) == str(caught.value)  # known after its end, too
            return str(caught.value)

        for rank, text in enumerate(world.on_each(body)):
            assert f"rank {rank} of group" in text
            assert f"priority {2 + rank} on rank {rank}, {3 - rank} on rank {1 - rank}" in text


@pytest.mark.parametrize(("hosts", "wire"), [*HOSTS, pytest.param([(0,), (1,)], "mem", id="network")])
def test_times_are_in_order(hosts: list[tuple[int, ...]], wire: str) -> None:
    with World(hosts, wire) as world, world.open_group() as team:

        def body(rank: int) -> None:
            array = np.ones(URGENT.numel, "f4")
            handle = start(team[rank], URGENT, array, 4)
            handle.wait(PATIENCE_S)
            times = handle.times()
            assert times is not None
            assert times.first_byte_s is not None
            assert times.submitted_s <= times.first_byte_s <= times.ended_s

        world.on_each(body)
