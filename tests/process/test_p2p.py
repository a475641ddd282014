"""Point-to-point messages of the native group between processes."""

import os
import random
import signal
import threading
import time
from collections import deque

import pytest
import torch
import torch.distributed as dist

from commlayer.errors import CommError, PeerLostError
from commlayer.transport.base import Group, Handle, MessageRequest
from tests import ranks
from tests.engine.test_p2p import Bytes, content, receive, send, spoiled

PATIENT = {"COMMLAYER_PEER_TIMEOUT_S": "25"}


def native(size: int, rank: int) -> Group:
    ranks.init(rank, size)
    world = dist.group.WORLD
    assert world is not None
    dist.barrier()
    return world._native  # type: ignore[attr-defined,no-any-return]


def exchange(rank: int, size: int) -> list[int]:
    """Each rank sends each other one a large and many small messages, and receives half of them from any source."""
    group = native(size, rank)
    others = [other for other in range(size) if other != rank]
    large = 20 << 20
    mine = content(large, rank)
    sends = [send(group, mine, other, 1) for other in others]
    small = [content(100, rank + i) for i in range(50)]
    sends += [send(group, message, other, 2) for message in small for other in others]
    targets = {other: spoiled(large) for other in others}
    receives = [receive(group, targets[other], other, 1) for other in others]
    of = dict.fromkeys(others, 0)
    for _ in range(len(small) * len(others)):
        target = spoiled(100)
        handle = receive(group, target, None, 2)
        handle.wait()
        assert (target == content(100, handle.source + of[handle.source])).all()
        of[handle.source] += 1
    for work in (*receives, *sends):
        work.wait()
    for other in others:
        assert (targets[other] == content(large, other)).all()
    dist.barrier()
    dist.destroy_process_group()
    return list(of.values())


def test_processes_of_one_host() -> None:
    assert ranks.run(exchange, 3) == [[50, 50]] * 3


def test_processes_without_shared_memory() -> None:
    assert ranks.run(exchange, 2, environ=ranks.NETWORK) == [[50]] * 2


def survive(rank: int, size: int) -> tuple[str, float]:
    """Rank 1 dies; the others wait for a message from it, and from one that is alive but silent."""
    group = native(size, rank)
    if rank == 1:
        send(group, content(10, 1), 0, 1).wait()
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    if rank == 0:
        target = spoiled(10)
        receive(group, target, 1, 1).wait()  # its message is still there
        assert (target == content(10, 1)).all()
    try:
        receive(group, spoiled(10), 1 if rank == 0 else 0, 2).wait()
    except CommError as error:
        return type(error).__name__, time.monotonic() - start
    raise AssertionError("received a message from the dead")


def test_death_of_a_process_is_known_at_once() -> None:
    ended = ranks.outcomes(survive, 3, environ=PATIENT)
    for rank in (0, 2):
        assert ended[rank].error is None, ended[rank].error
        name, took_s = ended[rank].result
        assert name == PeerLostError.__name__
        assert took_s < 20  # silence would show after 25 s


def pour(rank: int, size: int, after_s: float) -> tuple[str, float, int]:
    """Rank 1 sends small and large messages without end and is killed `after_s` seconds after the first large one has
    come, however busy the machine is; rank 0 checks all that comes."""
    group = native(size, rank)
    lengths = [100, 60_000, 3_000_000]
    if rank == 1:
        data = [content(length, number) for number, length in enumerate(lengths)]
        for tensor in data:
            send(group, tensor, 0, 1).wait()
        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        pending = deque[Handle]()
        while True:
            for tensor in data:
                pending.append(send(group, tensor, 0, 1))
            while len(pending) > 12:
                pending.popleft().wait()
    received = 0
    start = time.monotonic()
    try:
        if rank == 2:
            receive(group, spoiled(10), 0, 2).wait()
        while True:
            number = received % len(lengths)
            target = spoiled(lengths[number])
            start = time.monotonic()
            group.receive(MessageRequest(target.ctypes.data, target.nbytes, 1, 1, timeout_s=30)).wait()
            assert (target == content(lengths[number], number)).all()
            received += 1
    except CommError as error:
        return type(error).__name__, time.monotonic() - start, received


@pytest.mark.parametrize("after_s", [0.3, 0.512, 0.733])
def test_death_in_the_middle_of_a_message(after_s: float) -> None:
    ended = ranks.outcomes(pour, 3, after_s, environ=PATIENT)
    for rank in (0, 2):
        assert ended[rank].error is None, ended[rank].error
        name, took_s, _ = ended[rank].result
        assert name == PeerLostError.__name__
        assert took_s < 20
    assert ended[0].result[2] > 0


def one_f_one_b(rank: int, size: int) -> int:
    """1F1B: activations forward, gradients back, each with the number of its microbatch; sizes around every limit."""
    ranks.init(rank, size)
    last, checked = size - 1, 0
    for length in (0, 1, 16 << 10, (16 << 10) + 1, 300_000):  # of 4 bytes
        ahead = size - 1 - rank
        forward = backward = 0
        works: list[dist.Work] = []
        while backward < 8:
            if forward < 8 and forward - backward <= ahead:
                value = torch.full((length,), float(forward))
                if rank > 0:
                    dist.recv(value, rank - 1)
                    assert (value == 100 * (rank - 1) + forward).all()
                    checked += 1
                if rank < last:
                    works += _isend(torch.full((length,), 100.0 * rank + forward), rank + 1)
                forward += 1
            else:
                value = torch.full((length,), -1.0)
                if rank < last:
                    dist.recv(value, rank + 1)
                    assert (value == 1000 * (rank + 1) + backward).all()
                    checked += 1
                if rank > 0:
                    works += _isend(torch.full((length,), 1000.0 * rank + backward), rank - 1)
                backward += 1
        for work in works:
            work.wait()
    dist.destroy_process_group()
    return checked


def _isend(tensor: torch.Tensor, to: int) -> list[dist.Work]:
    work = dist.isend(tensor, to)
    assert work is not None
    return [work]


def test_pipeline() -> None:
    assert ranks.run(one_f_one_b, 3) == [5 * 8, 2 * 5 * 8, 5 * 8]


def both_send_first(rank: int, size: int) -> None:
    """Neither rank receives before its send is done, as far as the receivers keep messages."""
    ranks.init(rank, size)
    for length in (1000, 16 << 10, 1 << 18, 2 << 20):
        mine, theirs = torch.full((length,), float(rank)), torch.empty(length)
        dist.send(mine, 1 - rank)
        dist.recv(theirs, 1 - rank)
        assert (theirs == 1 - rank).all()
    if rank == 0:  # to a rank that is busy elsewhere until the send is done
        dist.send(torch.ones(1 << 20), 1)
        dist.barrier()
    else:
        dist.barrier()
        dist.recv(torch.empty(1 << 20), 0)
    dist.destroy_process_group()


def test_both_send_first() -> None:
    ranks.run(both_send_first, 2)


def random_schedule(rank: int, size: int, seed: int) -> int:
    """Every rank draws the same messages; the oracle: the n-th receive of a tag from a rank gets its n-th message."""
    group = native(size, rank)
    draw = random.Random(seed)
    messages = []
    for number in range(400):
        source = draw.randrange(size)
        to = (source + draw.randrange(1, size)) % size
        length = int(2 ** draw.uniform(0, 20)) - 1
        messages.append((number, source, to, draw.randrange(3), length))
    own = random.Random(seed * 100 + rank)
    todo = {
        "send": deque(message for message in messages if message[1] == rank),
        "receive": deque(message for message in messages if message[2] == rank),
    }
    sends: list[Handle] = []
    receives: deque[tuple[Handle, Bytes, int]] = deque()
    while todo["send"] or todo["receive"]:
        what = own.choice([name for name, left in todo.items() if left])
        number, source, to, tag, length = todo[what].popleft()
        if what == "send":
            sends.append(send(group, content(length, number), to, tag))
        else:
            target = spoiled(length)
            receives.append((receive(group, target, source, tag), target, number))
        if own.random() < 0.05:
            time.sleep(own.random() * 0.01)
    for handle, target, number in receives:
        handle.wait()
        assert (target == content(len(target), number)).all(), number
    for handle in sends:
        handle.wait()
    dist.barrier()
    dist.destroy_process_group()
    return len(receives)


@pytest.mark.parametrize("seed", range(3))
def test_random_schedule(seed: int) -> None:
    assert sum(ranks.run(random_schedule, 3, seed)) == 400
