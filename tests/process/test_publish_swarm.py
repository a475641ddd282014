"""Readers of `commlayer.publish` that give each other the parts of long versions, and some that fail in it."""

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import commlayer
from commlayer.errors import CommError
from commlayer.weights import swarm
from commlayer.weights.content import Whole
from commlayer.weights.parts import GRACE_MOST_S
from commlayer.weights.publisher import Publisher
from commlayer.weights.server import Server
from commlayer.weights.subscription import Subscription
from tests import ranks
from tests.process.test_metrics import free_port
from tests.process.test_publish import STEPS, follow_program
from tests.process.test_publish_links import SlowLink

PATIENCE_S = ranks.TIMEOUT_S
VALUES = 4_000_000
STATE_BYTES = 4 * VALUES
OVERHEAD = 1.03
"""Heads, tags and the text of the layout."""


def drawn(seed: int) -> Tensor:
    return torch.randn(VALUES, generator=torch.Generator().manual_seed(seed))


def tensor_of(version: Any) -> Tensor:
    found: Tensor = version.tensors()["weight"]
    return found


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def publisher(port: int) -> Iterator[Publisher]:
    made = commlayer.publish({"weight": drawn(0)}, f"127.0.0.1:{port}")
    yield made
    made.close(0.0)


@pytest.fixture
def subscribe(port: int) -> Iterator[Callable[..., Subscription]]:
    """Makes readers, and closes them."""
    with contextlib.ExitStack() as stack:

        def made(to: int = port, **options: Any) -> Subscription:
            return stack.enter_context(commlayer.subscribe(f"127.0.0.1:{to}", timeout_s=PATIENCE_S, **options))

        yield made


def server_of(publisher: Publisher) -> Server:
    assert publisher._server is not None
    return publisher._server


def until(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def gather(publisher: Publisher, readers: Sequence[Subscription], more: int = 0) -> None:
    """All readers ask for the next version, and the publisher knows that. `more`: others that do."""
    for reader in readers:
        assert reader.latest(0.0) is None
    until(lambda: len(server_of(publisher)._waiting) == len(readers) + more)


def all_read(readers: Sequence[Subscription], version: int) -> list[Tensor]:
    """What all of them get up to a version, at once."""

    def read(reader: Subscription) -> Tensor:
        found = None
        while reader.version != version:
            found = reader.latest(PATIENCE_S)
            assert found is not None
        return tensor_of(found)

    with ThreadPoolExecutor(len(readers)) as pool:
        return list(pool.map(read, readers))


def copies_sent(publisher: Publisher, before: int, size: int = STATE_BYTES) -> float:
    return (server_of(publisher).outlet.sent_bytes - before) / size


def test_a_long_version_leaves_the_publisher_once(publisher: Publisher, subscribe: Any) -> None:
    readers = [subscribe() for _ in range(5)]
    source = publisher._state["weight"]  # type: ignore[index]
    bits = source.view(torch.int32)
    for version in range(3):
        gather(publisher, readers)
        before = server_of(publisher).outlet.sent_bytes
        if version:
            bits += torch.randint(-50, 50, bits.shape, dtype=torch.int32)
        publisher.commit(version)
        for found in all_read(readers, version):
            assert torch.equal(found.view(torch.int32), bits)
        last = readers[0]._intake._last
        assert (last is None) == (version == 0)  # a difference is kept for others, beside the version
        size = STATE_BYTES if last is None else last.received_bytes
        assert size > 1 << 20
        assert copies_sent(publisher, before, size) < OVERHEAD
    passed_on = sum(reader._intake._service.outlet.sent_bytes for reader in readers if reader._intake._service.outlet)
    assert passed_on < OVERHEAD * (len(readers) - 1) * (STATE_BYTES + 2 * size)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=st.lists(STEPS, min_size=3, max_size=14))
def test_readers_that_serve_each_other_have_the_bits_of_the_writer(program: list[tuple[str, int, float]]) -> None:
    """The same as of readers that get all from the publisher: here short versions are shared, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(swarm, "SHARED_LEAST_BYTES", 1)
        follow_program(program)


def test_a_reader_that_got_a_difference_alone_gives_it(publisher: Publisher, subscribe: Any) -> None:
    first, second = readers = [subscribe() for _ in range(2)]
    gather(publisher, readers)
    publisher.commit(1)
    all_read(readers, 1)
    source = publisher._state["weight"]  # type: ignore[index]
    source.view(torch.int32).add_(torch.randint(-50, 50, source.shape, dtype=torch.int32))
    publisher.commit(2)
    all_read([first], 2)
    before, last = server_of(publisher).outlet.sent_bytes, first._intake._last
    assert last is not None
    (found,) = all_read([second], 2)
    assert torch.equal(found.view(torch.int32), source.view(torch.int32))
    assert copies_sent(publisher, before, last.received_bytes) < 0.1
    publisher.commit(3)
    all_read(readers, 3)


def test_readers_that_do_not_serve_get_all_from_the_publisher(publisher: Publisher, subscribe: Any) -> None:
    readers = [subscribe(serves=False) for _ in range(3)]
    gather(publisher, readers)
    publisher.commit(1)
    all_read(readers, 1)
    assert 3 < copies_sent(publisher, 0) < 3 * OVERHEAD
    assert not any(reader._intake._service.outlet for reader in readers)


def test_a_busy_reader_passes_parts_on(publisher: Publisher, subscribe: Any) -> None:
    readers = [subscribe() for _ in range(3)]
    gather(publisher, readers)
    publisher.commit(1)
    all_read(readers[1:], 1)  # the thread of the first one does other work
    assert copies_sent(publisher, 0) < OVERHEAD
    all_read(readers[:1], 1)


def test_a_late_reader_is_served_by_readers(publisher: Publisher, subscribe: Any) -> None:
    readers = [subscribe() for _ in range(3)]
    gather(publisher, readers)
    publisher.commit(1)
    all_read(readers, 1)
    source = publisher._state["weight"]  # type: ignore[index]
    source[::1000] += 1
    publisher.commit(2)
    all_read(readers, 2)
    known = server_of(publisher)._readers
    until(lambda: all(reader.states for reader in known.values()))
    before = server_of(publisher).outlet.sent_bytes
    for _ in range(2):
        (found,) = all_read([subscribe()], 2)
        assert torch.equal(found, source)
    assert copies_sent(publisher, before) < 0.01


def test_a_reader_that_comes_within_a_version_is_served_by_readers(
    publisher: Publisher, port: int, subscribe: Any
) -> None:
    links = [SlowLink(port) for _ in range(3)]
    try:
        readers = [subscribe(link.port) for link in links]
        gather(publisher, readers)
        publisher.commit(1)
        until(lambda: all(reader._intake._is_shelved for reader in readers))
        readers.append(subscribe())
        for found in all_read(readers, 1):
            assert torch.equal(found, drawn(0))
        assert copies_sent(publisher, 0) < OVERHEAD
    finally:
        for link in links:
            link.close()


def follow(port: int, line: Connection) -> None:
    """A reader in a process of its own, which tells when parts come to it, and of each version."""
    with commlayer.subscribe(f"127.0.0.1:{port}", timeout_s=PATIENCE_S) as reader:

        def watch() -> None:
            until(lambda: reader._intake._arrival and reader._intake._arrival.book)
            time.sleep(0.2)
            line.send("begun")

        threading.Thread(target=watch, daemon=True).start()
        for version in reader:
            line.send((version.number, torch.equal(tensor_of(version), drawn(0))))


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "frozen"])
def test_a_reader_that_fails_within_a_version_costs_the_others_none(
    publisher: Publisher, port: int, subscribe: Any, is_killed: bool
) -> None:
    context = multiprocessing.get_context("forkserver")
    line, theirs = context.Pipe()
    links = [SlowLink(port) for _ in range(4)]
    process = context.Process(target=follow, args=(links[3].port, theirs))
    process.start()
    assert process.pid is not None
    try:
        readers = [subscribe(link.port) for link in links[:3]]
        gather(publisher, readers, more=1)
        publisher.commit(1)
        assert line.poll(PATIENCE_S)
        assert line.recv() == "begun"
        assert all(reader.version is None for reader in readers)
        os.kill(process.pid, signal.SIGKILL if is_killed else signal.SIGSTOP)
        assert any(reader._intake._arrival for reader in readers)  # it was within the version
        for found in all_read(readers, 1):
            assert torch.equal(found, drawn(0))
        assert 1 < copies_sent(publisher, 0) < 2
        if not is_killed:
            os.kill(process.pid, signal.SIGCONT)
            assert line.poll(PATIENCE_S)
            assert line.recv() == (1, True)
    finally:
        process.kill()
        process.join(PATIENCE_S)
        for link in links:
            link.close()


def test_a_reader_that_is_stuck_does_not_stop_the_other_one(publisher: Publisher, subscribe: Any) -> None:
    readers = [subscribe() for _ in range(2)]
    gather(publisher, readers)
    publisher.commit(0)
    all_read(readers, 0)  # they have connections to each other
    gather(publisher, readers)
    bits = publisher._state["weight"].view(torch.int32)  # type: ignore[index]
    bits += torch.randint(-50, 50, bits.shape, dtype=torch.int32)
    again = threading.Event()

    def stick() -> None:
        again.wait(PATIENCE_S)  # libzmq's threads go on: the connections stay

    readers[1]._intake._order(stick)
    begin_s = time.monotonic()
    publisher.commit(1)
    try:
        for reader in readers:
            (found,) = all_read([reader], 1)
            assert torch.equal(found.view(torch.int32), bits)
            again.set()
    finally:
        again.set()
    assert time.monotonic() - begin_s < GRACE_MOST_S / 2


def test_a_reader_with_a_slow_link_gets_fewer_parts_to_pass_on(publisher: Publisher, port: int, subscribe: Any) -> None:
    link = SlowLink(port)
    link.rate = 200_000
    try:
        readers = [subscribe() for _ in range(3)]
        readers.append(subscribe(link.port))
        gather(publisher, readers)
        begin_s = time.monotonic()
        publisher.commit(1)
        for found in all_read(readers[:3], 1):
            assert torch.equal(found, drawn(0))
        assert time.monotonic() - begin_s < STATE_BYTES / 4 / link.rate / 2  # half of the time of an equal share
        assert copies_sent(publisher, 0) < OVERHEAD
    finally:
        link.close()


def test_a_reader_that_sends_other_bytes_is_named_and_left_out(
    publisher: Publisher, subscribe: Any, caplog: pytest.LogCaptureFixture
) -> None:
    readers = [subscribe() for _ in range(4)]
    gather(publisher, readers)
    shelf = readers[2]._intake._shelf
    put = shelf.put

    def spoil(name: str, content: Any, book: Any = None) -> None:
        other = Whole(torch.zeros_like(content.memory))
        put(name, other, book)

    shelf.put = spoil
    source = publisher._state["weight"]  # type: ignore[index]
    with caplog.at_level(logging.WARNING, "commlayer"):
        publisher.commit(1)
        for found in all_read(readers, 1):
            assert torch.equal(found, source)
    address = readers[2]._intake._service.address
    assert sum(f"the reader at {address} failed: part" in text for text in caplog.messages) == 3
    assert not any(f"at {other} failed" in text for other in _addresses(readers, 2) for text in caplog.messages)
    assert copies_sent(publisher, 0) < 1 + 3 / 4 * OVERHEAD
    until(lambda: all(_known(publisher, reader).states for reader in readers))
    gather(publisher, readers)
    before = server_of(publisher).outlet.sent_bytes
    source.normal_()
    publisher.commit(2)
    for found in all_read(readers, 2):
        assert torch.equal(found, source)
    assert copies_sent(publisher, before) < OVERHEAD


def _addresses(readers: Sequence[Subscription], without: int) -> list[str]:
    return [reader._intake._service.address for number, reader in enumerate(readers) if number != without]


def _known(publisher: Publisher, reader: Subscription) -> Any:
    known = server_of(publisher)._readers.values()
    return next(its for its in known if its.address == reader._intake._service.address)


@pytest.mark.parametrize("is_silent", [True, False], ids=["silent", "refused"])
def test_a_reader_that_is_not_reached_costs_the_others_none(
    publisher: Publisher, subscribe: Any, is_silent: bool
) -> None:
    readers = [subscribe() for _ in range(4)]
    until(lambda: all(reader._intake._service.outlet for reader in readers))
    with socket.create_server(("127.0.0.1", 0)) as wall:
        wall_port = wall.getsockname()[1] if is_silent else free_port()
        readers[1]._intake._service.address = f"127.0.0.1:{wall_port}"
        gather(publisher, readers)
        publisher.commit(1)
        for found in all_read(readers, 1):
            assert torch.equal(found, drawn(0))
        assert copies_sent(publisher, 0) < 1 + 3 / 4 * OVERHEAD
        assert not _known(publisher, readers[1]).serves(time.monotonic())
        assert all(_known(publisher, reader).serves(time.monotonic()) for reader in readers[2:])


def test_a_reader_that_reaches_nobody_gets_all_from_the_publisher(publisher: Publisher, subscribe: Any) -> None:
    readers = [subscribe() for _ in range(4)]
    gather(publisher, readers)
    intake = readers[3]._intake
    intake._peers.want = lambda address, _: intake._orders.append(
        lambda: intake._arrival and intake._blame(intake._arrival, address, "it was not reached")
    )
    publisher.commit(1)
    all_read(readers, 1)
    assert copies_sent(publisher, 0) < 1 + 3 / 4 * OVERHEAD
    odd = _known(publisher, readers[3])
    assert not odd.shares(time.monotonic())
    assert all(_known(publisher, reader).serves(time.monotonic()) for reader in readers[:3])


def test_a_reader_ends_its_thread_and_its_port(subscribe: Any, publisher: Publisher) -> None:
    reader = subscribe()
    until(lambda: reader._intake._service.outlet)
    host, _, port = reader._intake._service.address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=5).close()
    reader.close()
    assert not reader._intake._thread.is_alive()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5)


def test_readers_that_leave_are_forgotten_by_those_that_serve(publisher: Publisher, subscribe: Any) -> None:
    first = subscribe()
    gather(publisher, [first])
    publisher.commit(1)
    all_read([first], 1)
    shelf = first._intake._shelf
    with commlayer.subscribe(f"127.0.0.1:{server_of(publisher).outlet.port}") as late:
        until(lambda: _known(publisher, first).states)
        all_read([late], 1)
        assert shelf._lendings
    until(lambda: not shelf._lendings)
    assert not first._intake._service._askers


def test_a_failed_thread_is_an_error_of_the_reader(
    publisher: Publisher, subscribe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = subscribe()
    monkeypatch.setattr(reader._intake, "_look", lambda: 1 / 0)
    publisher.commit(1)
    for _ in range(2):
        with pytest.raises(CommError, match="division by zero"):
            next(reader)


def test_a_forgotten_reader_ends_its_thread(publisher: Publisher, port: int) -> None:
    reader = commlayer.subscribe(f"127.0.0.1:{port}")
    thread = reader._intake._thread
    del reader
    until(lambda: not thread.is_alive())
