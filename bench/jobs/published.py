"""A publisher and its readers, each on a host of its own, and a DDP job whose first rank publishes: `bench.publish`
runs them with --links.

The changes are drawn: 11 random bits of each value, so that a difference of 12 MB of bf16 values has about 8 MB, and
the processors have little to do beside.
"""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.weights.answer import Arrival
from tests import ranks

PORT = 29600
CHANGE = 1 << 10
"""Changes are drawn from minus to plus so much."""
READY_S = 0.5
"""From the moment at which all readers hold a version to the next one: they have asked by then."""
WIDTH, COMPUTE_S = 512, 0.2
"""Of the model that trains: 1 MB of gradients; a sleep is its computation."""
PATIENCE_S = 120.0


class Came(NamedTuple):
    """A version at a reader."""

    arrived_s: float
    """The time at which all parts had come."""
    at_s: float
    """The time at which it was there: decoded and checked."""
    size: int
    """Bytes of the content that brought it."""
    is_whole: bool


def _drawn(values: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.randint(-(1 << 15), 1 << 15, (values,), dtype=torch.int16)}


def _change(state: dict[str, torch.Tensor]) -> None:
    state["weight"] += torch.randint(-CHANGE, CHANGE, state["weight"].shape, dtype=torch.int16)


def _read(rank: int, address: str, secret: str, serves: bool) -> dict[int, Came]:
    """Follows to the end."""
    came, arrived = {}, {}
    with commlayer.subscribe(address, secret_file=secret, serves=serves, timeout_s=PATIENCE_S) as reader:
        tell = reader._intake._tell

        def noted(event: Arrival | BaseException | None) -> None:
            if isinstance(event, Arrival):
                arrived[event.head.version] = time.time()
            tell(event)

        reader._intake._tell = noted  # type: ignore[method-assign]
        ranks.store().set(f"reader {rank}", "")
        for version in reader:
            came[version.number] = Came(arrived[version.number], time.time(), version.received_bytes, version.is_whole)
            ranks.store().set(f"version {version.number} at {rank}", "")
    return came


def follow(
    rank: int, size: int, values: int, secret: str, serves: bool, versions: int
) -> tuple[dict[int, tuple[float, float]], int] | dict[int, Came]:
    """Rank 0 publishes versions, one after the other. When each was committed, and when it was coded; all bytes that it
    sent; of the other ranks, when each came."""
    address = f"{os.environ['MASTER_ADDR']}:{PORT}"
    if rank:
        return _read(rank, address, secret, serves)
    state, committed = _drawn(values), {}
    with commlayer.publish(state, address, secret_file=secret) as publisher:
        ranks.store().wait([f"reader {reader}" for reader in range(1, size)])
        for version in range(versions):
            time.sleep(READY_S)
            begin_s = time.time()
            publisher.commit(version)
            publisher.settle(PATIENCE_S)
            committed[version] = begin_s, time.time()
            ranks.store().wait([f"version {version} at {reader}" for reader in range(1, size)])
            _change(state)
        server = publisher._server
        return committed, 0 if server is None else server.outlet.sent_bytes


def train(
    rank: int, size: int, values: int, secret: str, serves: bool | None, steps: int, every: int
) -> tuple[list[float], dict[int, float]] | dict[int, Came]:
    """Ranks 0 and 1 train; rank 0 publishes after every so many steps, and the others read. The seconds of each step,
    and when each version was committed; of the other ranks, when each came. `serves` None: nobody publishes."""
    address = f"{os.environ['MASTER_ADDR']}:{PORT}"
    if rank > 1:
        return {} if serves is None else _read(rank, address, secret, serves)
    ranks.init(rank, 2)
    model = DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = torch.ones(1, WIDTH)
    times_s: list[float] = []
    committed: dict[int, float] = {}
    publisher: Any = None
    state = _drawn(values)
    if rank == 0 and serves is not None:
        publisher = commlayer.publish(state, address, secret_file=secret)
        ranks.store().wait([f"reader {reader}" for reader in range(2, size)])
        time.sleep(READY_S)
    for step in range(steps):
        dist.barrier()
        begin_s = time.perf_counter()
        time.sleep(COMPUTE_S)
        optimizer.zero_grad()
        model(rows).sum().backward()
        optimizer.step()
        is_due = publisher is not None and step % every == 0
        if is_due:
            committed[step] = time.time()
            publisher.commit(step)
        times_s.append(time.perf_counter() - begin_s)
        if is_due:  # not within a step: a training changes its weights anyway
            _change(state)
    if publisher is not None:
        publisher.close(PATIENCE_S)
    dist.destroy_process_group()
    return times_s, committed
