"""Point-to-point messages of the native group, between threads over every kind of wire."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from commlayer.errors import (
    AbortedError,
    ClosedError,
    ConfigError,
    MismatchError,
    OperationTimeoutError,
)
from commlayer.plans.select import Settings, plan_for
from commlayer.transport.base import DType, Group, Handle, MessageRequest, Op, ReceiveHandle, Request
from commlayer.transport.call import Call
from commlayer.transport.group import TAG_MAX
from tests.world import PATIENCE_S, Team, World, until

Bytes = npt.NDArray[np.uint8]

LOSS = 0.05

_in_flight: list[Bytes] = []
"""The engine uses memory until its handle is done; here simply until the test is over."""


@pytest.fixture(autouse=True)
def _forget_memory() -> Iterator[None]:
    yield
    _in_flight.clear()


def content(length: int, seed: int) -> Bytes:
    return (np.arange(length, dtype=np.uint32) * 31 + seed).astype(np.uint8)


def send(group: Group, data: Bytes, to: int, tag: int = 0, timeout_s: float = PATIENCE_S) -> Handle:
    _in_flight.append(data)
    return group.send(MessageRequest(data.ctypes.data, data.nbytes, to, tag, timeout_s))


def receive(
    group: Group, target: Bytes, source: int | None, tag: int = 0, timeout_s: float = PATIENCE_S
) -> ReceiveHandle:
    _in_flight.append(target)
    return group.receive(MessageRequest(target.ctypes.data, target.nbytes, source, tag, timeout_s))


def spoiled(length: int) -> Bytes:
    return np.full(length, 255, np.uint8)


@pytest.fixture(params=["memory with loss", "udp", "shared memory and udp"])
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    hosts = ((0, 1, 2),) if request.param.startswith("shared") else ((0,), (1,), (2,))
    lossy = request.param.startswith("memory")
    with World(hosts, "mem" if lossy else "udp", LOSS if lossy else 0) as world, world.open_group() as team:
        yield team


@pytest.mark.parametrize("length", [0, 1, 4096, 3_000_007])
def test_times_are_in_order(team: Team, length: int) -> None:
    data, target = content(length, 1), spoiled(length)
    handles: list[Handle] = [receive(team[1], target, 0), send(team[0], data, 1)]
    for handle in handles:
        handle.wait()
        times = handle.times()
        assert times is not None
        assert times.first_byte_s is not None
        assert times.submitted_s <= times.first_byte_s <= times.ended_s


def test_an_operation_goes_without_the_garbage_collector() -> None:
    """Its call has its handle, and the handle knows the call for errors: once it has ended well, no more."""
    with World(((0,), (1,)), "udp") as world, world.open_group() as team:
        data, target = content(100, 1), spoiled(100)
        ends: list[str] = []

        class Noted(Call):
            """A call that can be watched: `Call` has slots."""

        def start(how: Any, peer: int, memory: Bytes) -> Handle:
            call = Noted("send")
            weakref.finalize(call, ends.append, "gone")
            handle: Handle = how(MessageRequest(memory.ctypes.data, memory.nbytes, peer, 0, PATIENCE_S), call)
            call.handle = handle
            return handle

        gc.disable()
        try:
            received, sent = start(team[1].receive, 0, target), start(team[0].send, 1, data)
            received.wait()
            until(sent.done)
            del received, sent
            assert len(ends) == 2
        finally:
            gc.enable()


@pytest.mark.parametrize("length", [0, 1, 4096, 300_007])
def test_ring(team: Team, length: int) -> None:
    targets = [spoiled(length) for _ in range(3)]

    def body(rank: int) -> int:
        handle = receive(team[rank], targets[rank], (rank - 1) % 3, 7)
        send(team[rank], content(length, rank), (rank + 1) % 3, 7).wait()
        handle.wait()
        return handle.source

    assert team.world.on_each(body) == [2, 0, 1]
    for rank in range(3):
        assert (targets[rank] == content(length, (rank - 1) % 3)).all()


def test_tags_are_apart_and_each_in_order(team: Team) -> None:
    messages = [content(50 + i, i) for i in range(12)]
    sent = [send(team[0], message, 1, tag=i % 3) for i, message in enumerate(messages)]
    for tag in (2, 0, 1):
        for i in range(tag, 12, 3):
            target = spoiled(50 + i)
            receive(team[1], target, 0, tag).wait()
            assert (target == messages[i]).all()
    for handle in sent:
        handle.wait()


def test_any_source(team: Team) -> None:
    targets = [spoiled(8) for _ in range(8)]
    handles = [receive(team[0], target, None, 3) for target in targets[:4]]
    for i in range(4):
        for rank in (1, 2):
            send(team[rank], content(8, 10 * rank + i), 0, 3).wait()
    handles += [receive(team[0], target, None, 3) for target in targets[4:]]
    of = {1: 0, 2: 0}
    for handle, target in zip(handles, targets, strict=True):
        handle.wait()
        assert (target == content(8, 10 * handle.source + of[handle.source])).all()
        of[handle.source] += 1
    assert of == {1: 4, 2: 4}


def test_beside_collectives(team: Team) -> None:
    """A message does not wait for a collective that others have not called yet, nor the other way round."""

    def all_reduce(rank: int, values: npt.NDArray[np.float32]) -> Handle:
        group = team[rank]
        settings = Settings()
        plan = plan_for("all_reduce", rank=rank, hosts=group.hosts, numel=10, itemsize=4, settings=settings)
        address = values.ctypes.data
        return group.submit(Request(plan, address, address, DType.F32, Op.SUM, timeout_s=PATIENCE_S))

    values = [np.ones(10, np.float32) for _ in range(3)]
    first = all_reduce(0, values[0])
    target = spoiled(5)
    pending = receive(team[0], target, 1, 1)
    send(team[1], content(5, 5), 0, 1).wait()
    pending.wait()
    assert not first.done()
    others = [all_reduce(rank, values[rank]) for rank in (1, 2)]
    for handle in (first, *others):
        handle.wait()
    assert all((value == 3).all() for value in values)


def test_completion_is_announced(team: Team) -> None:
    errors: list[BaseException | None] = []
    handle = receive(team[0], spoiled(4), 1)
    handle.on_done(errors.append)
    with pytest.raises(RuntimeError, match="still in flight"):
        _ = handle.source
    send(team[1], content(4, 1), 0).wait()
    handle.wait()
    until(lambda: errors == [None])
    assert handle.source == 1


def test_an_invalid_message_is_refused(team: Team) -> None:
    group, data = team[0], spoiled(4)
    for other, tag, words in [
        (0, 0, "itself"),
        (3, 0, "the group has no rank 3"),
        (-1, 0, "the group has no rank -1"),
        (1, -1, "tag -1"),
        (1, TAG_MAX + 1, f"tag {TAG_MAX + 1}"),
    ]:
        with pytest.raises(ConfigError, match=words):
            send(group, data, other, tag)
        with pytest.raises(ConfigError, match=words):
            receive(group, data, other, tag)
    send(group, data, 1, TAG_MAX).wait()  # the group is none the worse for it


def test_no_network_and_no_other_rank() -> None:
    with World(((0, 1),), "none") as world, world.open_group() as team:
        for source in (1, None):
            with pytest.raises(ConfigError, match="no network path"):
                receive(team[0], spoiled(4), source)
    with World(((0,),), "mem") as world, world.open_group() as team, pytest.raises(ConfigError, match="no other rank"):
        receive(team[0], spoiled(4), None)


def test_mismatch(team: Team) -> None:
    bystander = receive(team[2], spoiled(4), 0)
    handle = receive(team[0], spoiled(5000), 1)
    send(team[1], spoiled(6000), 0)
    for pending in (handle, bystander):
        with pytest.raises(MismatchError):
            pending.wait()
    with pytest.raises(MismatchError):
        _ = handle.source


def test_timeout_names_the_rank_and_ends_the_group(team: Team) -> None:
    elsewhere = receive(team[2], spoiled(4), 0)
    with pytest.raises(OperationTimeoutError, match=r"rank 0 .*\(culprit: rank 1 on "):
        receive(team[0], spoiled(4), 1, timeout_s=0.05).wait()
    with pytest.raises(AbortedError):
        elsewhere.wait()


def test_a_callback_leaves_the_text_of_the_error(team: Team) -> None:
    target, errors = spoiled(4), list[BaseException | None]()
    call = Call("receive", None, (), [(4,)], rank=1, tag=7)
    call.handle = handle = team[0].receive(MessageRequest(target.ctypes.data, 4, 1, 7, 0.05), call)
    handle.on_done(errors.append)
    until(lambda: errors != [])
    with pytest.raises(OperationTimeoutError) as by_wait:
        handle.wait()
    with pytest.raises(OperationTimeoutError) as by_source:
        _ = handle.source
    first = errors[0]
    assert isinstance(first, OperationTimeoutError)
    for error in (first, by_wait.value, by_source.value):
        assert call.title() in str(error)
        assert error.operation == first.operation is not None


def test_abort_and_close(team: Team) -> None:
    pending = receive(team[1], spoiled(4), None)
    own = receive(team[0], spoiled(4), 1)
    team[0].abort("test")
    for handle in (pending, own):
        with pytest.raises(AbortedError):
            handle.wait()
    team[0].close()
    with pytest.raises(ClosedError):
        send(team[0], spoiled(4), 1)
