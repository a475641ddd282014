"""Point-to-point messages of the native group between processes."""

from __future__ import annotations

import os
import signal
import time

import torch.distributed as dist

from commlayer.errors import CommError, PeerLostError
from commlayer.transport.base import Group
from tests import ranks
from tests.engine.test_p2p import content, receive, send, spoiled


def native(size: int, rank: int) -> Group:
    ranks.init(rank, size)
    world = dist.group.WORLD
    assert world is not None
    dist.barrier()
    return world._native  # type: ignore[attr-defined,no-any-return]


def exchange(rank: int, size: int) -> list[int]:
    """Each rank sends each other one a large and many small messages, and receives half of them from any source."""
    group = native(size, rank)
    others = [each for each in range(size) if each != rank]
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
    for each in (*receives, *sends):
        each.wait()
    for other in others:
        assert (targets[other] == content(large, other)).all()
    dist.barrier()
    dist.destroy_process_group()
    return list(of.values())


def test_processes_of_one_host() -> None:
    assert ranks.run(exchange, 3) == [[50, 50]] * 3


def test_processes_without_shared_memory() -> None:
    assert ranks.run(exchange, 2, environ={"COMMLAYER_SHM": "0"}) == [[50]] * 2


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
    ended = ranks.outcomes(survive, 3)
    for rank in (0, 2):
        assert ended[rank].error is None, ended[rank].error
        name, took_s = ended[rank].result
        assert name == PeerLostError.__name__
        assert took_s < 2.5  # silence would show after 3 s
