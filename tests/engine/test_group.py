"""The native group against the oracle, over every way to join two ranks; and its errors."""

import logging
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from commlayer.errors import (
    AbortedError,
    ClosedError,
    MismatchError,
    OperationTimeoutError,
)
from commlayer.plans.delivery import deliver
from commlayer.transport import group as group_module
from commlayer.transport.base import DType, Op, Request
from commlayer.transport.group import REQUEST_HEAD, NativeGroup
from commlayer.transport.native_handle import NativeHandle
from commlayer.transport.status import ffi
from tests.engine.cases import LARGE, SMALL, Array, Case, Ended, address, cases, check, make_plan, run
from tests.world import PATIENCE_S, Team, World, flat, until

LOSS = 0.05


def table() -> Iterator[Case]:
    """The cases, and in between deliveries, which use counters in a way of their own."""
    for number, case in enumerate(cases()):
        yield case
        if number % 16 == 0:
            collective = "all_gather_uneven" if number // 16 % 3 == 0 else "all_to_all_uneven"
            yield Case(collective, DType.U8, (1, 100, 70_000, 400_001)[number // 16 % 4])


def conform(world: World) -> None:
    with world, world.open_group() as team:
        numbered = list(enumerate(table()))

        def body(rank: int) -> None:
            for number, case in numbered:
                check(team[rank], case, number)

        world.on_each(body)
        assert team[0].hosts == world.hosts
        assert all(engine.stats()["operations_failed"] == 0 for engine in world.engines)
        if world.size > len(world.hosts) == 1:
            assert all(engine.stats()["packets_sent"] == 0 for engine in world.engines)


WORLDS: dict[str, dict[str, Any]] = {
    **{f"shared memory, {size} ranks": {"hosts": [range(size)], "wire": "none"} for size in (1, 2, 3, 4, 5)},
    **{f"memory wire, {size} ranks": {"hosts": flat(size)} for size in (2, 3, 4, 5)},
    **{f"memory wire with loss, {size} ranks": {"hosts": flat(size), "loss": LOSS} for size in (2, 5)},
    **{f"udp, {size} ranks": {"hosts": flat(size), "wire": "udp"} for size in (2, 3, 4)},
    **{f"hosts {hosts}": {"hosts": hosts, "loss": LOSS} for hosts in (((0, 1), (2,)), ((0, 2), (1, 3)))},
    "hosts of one and four": {"hosts": ((0,), (1, 2, 3, 4)), "loss": LOSS},
}


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_every_collective_is_right(world: dict[str, Any]) -> None:
    conform(World(**world))


@pytest.mark.parametrize("size", [2, 3])
def test_libfabric(libfabric: None, size: int) -> None:
    conform(World(flat(size), "ofi"))


def test_loss_is_repaired() -> None:
    with World(flat(2), loss=LOSS) as world, world.open_group() as team:
        world.on_each(lambda rank: check(team[rank], Case("all_reduce", DType.F32, LARGE), 0))
        stats = [engine.stats() for engine in world.engines]
        assert all(stat["packets_retransmitted"] > 0 for stat in stats)
        assert all(stat["operations_done"] == 1 for stat in stats)


def test_many_in_flight_in_several_groups() -> None:
    case = Case("all_reduce", DType.I32, 1000)
    with World([(0, 1), (2,)], loss=LOSS) as world, world.open_group() as one, world.open_group() as two:

        def body(rank: int) -> None:
            arrays = [np.full(case.numel, number + rank, "i4") for number in range(20)]
            handles = []
            for number, array in enumerate(arrays):
                group = (one, two)[number % 2][rank]
                plan = make_plan(group, case)
                handles.append(
                    group.submit(
                        Request(
                            plan,
                            address(array),
                            address(array),
                            case.dtype,
                            case.op,
                            timeout_s=PATIENCE_S,
                            priority=number % 8,
                        )
                    )
                )
            for number, (handle, array) in enumerate(zip(handles, arrays, strict=True)):
                handle.wait(PATIENCE_S)
                assert (array == 3 * number + 3).all()

        world.on_each(body)


# ---- errors ----

JOINED = [pytest.param([(0, 1)], id="shared memory"), pytest.param([(0,), (1,)], id="network")]
Hosts = list[tuple[int, ...]]


def submit(group: NativeGroup, array: Array, timeout_s: float = PATIENCE_S) -> NativeHandle:
    plan = make_plan(group, SMALL)
    return group.submit(Request(plan, address(array), address(array), SMALL.dtype, SMALL.op, timeout_s=timeout_s))


@pytest.fixture(params=JOINED)
def pair(request: pytest.FixtureRequest) -> Iterator[Team]:
    """Two ranks."""
    with World(request.param) as world, world.open_group() as team:
        yield team


def test_timeout(pair: Team) -> None:
    with pytest.raises(OperationTimeoutError, match=r"rank 0 of group 'group 1': the operation timed out"):
        run(pair[0], timeout_s=0.02)
    with pytest.raises(OperationTimeoutError):
        run(pair[0])
    # Rank 0 has also sent its data: if the abort came with it, late, an operation that begins now might still end well.
    until(lambda: bool(pair[1].status()[0]))
    with pytest.raises(AbortedError, match=r"rank 1 of group 'group 1'.*the group was aborted"):
        run(pair[1])


def test_a_short_wait_changes_nothing(pair: Team) -> None:
    array = np.full(5, 1, "f4")
    handle = submit(pair[0], array)
    assert not handle.done()
    for timeout_s in (0, 0.01):
        with pytest.raises(OperationTimeoutError, match="still in flight after"):
            handle.wait(timeout_s)
    run(pair[1])
    handle.wait()
    assert (array == 3).all()


def test_endless_timeout(pair: Team) -> None:
    late = pair.world.threads.submit(run, pair[0], SMALL, float("inf"))
    run(pair[1], timeout_s=1e30)
    assert (late.result(PATIENCE_S) == 3).all()


def test_an_abort_without_a_reason_is_no_warning(pair: Team, caplog: pytest.LogCaptureFixture) -> None:
    pair[0].abort("")
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_abort(pair: Team, caplog: pytest.LogCaptureFixture) -> None:
    array = np.zeros(5, "f4")
    ended = Ended()
    handle = submit(pair[0], array)
    handle.on_done(ended)
    pair[1].abort("as the test wants it")
    assert "rank 1 of group 'group 1' aborts: as the test wants it" in caplog.text
    with pytest.raises(AbortedError):
        handle.wait()
    assert isinstance(ended.wait(), AbortedError)
    for rank in (0, 1):
        with pytest.raises(AbortedError):
            run(pair[rank])


def test_mismatch() -> None:
    with World(flat(2)) as world, world.open_group() as team:

        def body(rank: int) -> str:
            with pytest.raises(MismatchError, match="same order on all ranks, with the same sizes") as caught:
                run(team[rank], Case("all_reduce", DType.F32, 1000 + rank))
            return str(caught.value)

        assert any("(culprit: rank" in text for text in world.on_each(body))


def test_closed(pair: Team) -> None:
    pair[0].close()
    pair[0].close()
    with pytest.raises(ClosedError, match="rank 0 of group 'group 1': the engine or group is closed"):
        run(pair[0])
    with pytest.raises(ClosedError):
        submit(pair[0], np.zeros(5, "f4"))
    pair[0].abort("too late to matter")


def test_close_while_in_flight(pair: Team) -> None:
    handle = submit(pair[0], np.zeros(5, "f4"))
    ended = Ended()
    handle.on_done(ended)
    pair[0].close()
    with pytest.raises(ClosedError):
        handle.wait()
    with pytest.raises(AbortedError):  # noqa: PT012  # the first may have the result: rank 0 has sent its part
        run(pair[1])
        run(pair[1])
    assert isinstance(ended.wait(), ClosedError)


def test_close_under_a_caller(pair: Team) -> None:
    for rank in (0, 1):
        caller = pair.world.threads.submit(run, pair[rank])
        while not pair[rank]._inside and not caller.done():
            pass
        pair[rank].close()
        with pytest.raises((ClosedError, AbortedError)):
            caller.result(PATIENCE_S)


def test_callbacks(caplog: pytest.LogCaptureFixture) -> None:
    with World([(0,)], "none") as world, world.open_group() as team:
        called = threading.Event()

        def fail(_: BaseException | None) -> None:
            raise ValueError("as the test wants it")

        for callback in (fail, lambda _: called.set()):
            handle = submit(team[0], np.zeros(5, "f4"))
            try:
                handle.on_done(callback)
            except ValueError:  # it had ended already: then it is called here
                caplog.records.append(logging.makeLogRecord({}))
        assert called.wait(PATIENCE_S)
        until(lambda: bool(caplog.records))  # the two may run on threads of their own


def test_a_callback_may_close_everything() -> None:
    with World(flat(2)) as world, world.open_group() as team:
        array = np.zeros(5, "f4")
        handle = submit(team[0], array)
        closed = threading.Event()

        def close(_: BaseException | None) -> None:
            team[0].close()
            world.engines[0].close()
            closed.set()

        handle.on_done(close)
        run(team[1])
        assert closed.wait(PATIENCE_S)
        with pytest.raises(ClosedError):
            _ = world.engines[0].raw


def test_plans_are_loaded_for_as_long_as_they_live() -> None:
    with World([(0,)], "none") as world, world.open_group() as team:
        source, target = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)

        def body(_: int) -> None:
            for length in range(1, 100):
                plan = deliver(0, ((0,),), [length], [length], team[0].staging_bytes)
                handles = [
                    team[0].submit(
                        Request(plan, address(source), address(target), DType.U8, Op.SUM, timeout_s=PATIENCE_S)
                    )
                    for _ in range(2)
                ]
                assert len(team[0]._plans) <= 2
                del plan
                for handle in handles:
                    handle.wait()

        futures = [world.threads.submit(body, 0) for _ in range(2)]
        for future in futures:
            future.result(PATIENCE_S)
        assert (target[:99] == source[:99]).all()
        assert not team[0]._plans


def test_packed_head_of_a_request_fills_the_fields_it_names() -> None:
    request = ffi.new("struct cl_operation_request *")
    REQUEST_HEAD.pack_into(ffi.buffer(request), 0, 1, 2, 3, 4, 5, 6, 7, 2, 600)
    addresses = [int(ffi.cast("uintptr_t", pointer)) for pointer in (request.plan, request.input, request.output)]
    assert [*addresses, request.timeout_us, request.dtype, request.op] == [1, 2, 3, 4, 5, 6]
    assert [request.qos.priority, request.qos.treatment, request.qos.order] == [7, 2, 600]


class Intercepted:
    """The compiled module, with a function of one's own in place of one of its."""

    def __init__(self, name: str, function: Any) -> None:
        self._original: Any = group_module.lib  # type: ignore[attr-defined]
        setattr(self, name, lambda *arguments: function(getattr(self._original, name), *arguments))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def test_threads_that_load_a_plan_at_once_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each loads a copy of its own; one that another thread is about to submit must not be freed."""
    both = threading.Barrier(2)

    def create(original: Any, *arguments: Any) -> Any:
        both.wait(PATIENCE_S)
        return original(*arguments)

    with World([range(1)], "none") as world, world.open_group() as team:
        plan = deliver(0, team[0].hosts, (8,), (8,), team[0].staging_bytes, what=("test",))
        monkeypatch.setattr(group_module, "lib", Intercepted("cl_plan_create", create))
        loading = [world.threads.submit(team[0]._native_plan, plan) for _ in range(2)]
        addresses = {load.result(PATIENCE_S) for load in loading}
        assert addresses == {team[0]._native_plan(plan)}


def test_memory_is_let_go_once_the_engine_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """`abort` of one thread does not free what another one, which closes the group, still needs."""
    is_closing, go_on = threading.Event(), threading.Event()

    def close(original: Any, *arguments: Any) -> None:
        is_closing.set()
        assert go_on.wait(PATIENCE_S)
        original(*arguments)

    with World([range(1)], "none") as world, world.open_group() as team:
        is_left = threading.Event()
        team[0].on_left = is_left.set
        monkeypatch.setattr(group_module, "lib", Intercepted("cl_group_close", close))
        closing = world.threads.submit(team[0].close)
        assert is_closing.wait(PATIENCE_S)
        team[0].abort("a test")
        team[0].close()
        assert not is_left.is_set()
        go_on.set()
        closing.result(PATIENCE_S)
        assert is_left.is_set()
