"""A job of many steps, groups and aborts, whose memory, descriptors and threads are to end where they began.

`python -m bench.soak --lifetimes` runs it and prints `table`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from bench.harness.leaks import Resources
from bench.harness.page import markdown

STEPS, GROUPS, ABORTS = 10_000, 200, 20
CALLS = 300
"""Calls of a group that is aborted then."""
PARTS = 5
"""Parts of each phase, after which the resources are read: what grows goes on to grow, what fills up ends."""
WIDTH = 64

Row = tuple[str, Resources]


def lifetimes(store: dist.Store, rank: int, size: int) -> Iterator[Row]:
    """The resources of this rank, at the start and after each part. The job exists already."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)))
    model.register_comm_hook(commlayer.HookState(), commlayer.allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.ones(4, WIDTH)
    kind: Any = type(dist.group.WORLD)

    def step(_: int) -> None:
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()

    def group(_: int) -> None:
        made: Any = dist.new_group(list(range(size)))
        dist.all_reduce(torch.ones(100), group=made)
        dist.barrier(made)
        dist.destroy_process_group(made)

    def abort(number: int) -> None:
        here = dist.PrefixStore(f"abort {number}", store)
        made = kind(here, rank, size, timedelta(seconds=30), "torchft", own_job=True)  # as `commlayer.torchft` does
        for _ in range(CALLS):
            made.allreduce([torch.ones(100)]).wait()
        dist.barrier()  # all ranks have the result
        made.abort()
        dist.barrier()

    phases: list[tuple[str, int, Callable[[int], None]]] = [
        ("steps", STEPS, step),
        ("groups", GROUPS, group),
        ("aborts", ABORTS, abort),
    ]
    for _, count, body in phases:
        for number in range(-count // PARTS, 0):
            body(number)
    yield "start", Resources.now()
    for name, count, body in phases:
        for number in range(count):
            body(number)
            if (number + 1) % (count // PARTS) == 0:
                yield f"{number + 1} {name}", Resources.now()


def table(rows: list[Row]) -> str:
    """The rows for a page."""
    cells = [
        [name, f"{usage.heap_mib:.1f}", f"{usage.resident_mib:.1f}", str(usage.descriptors), str(usage.threads)]
        for name, usage in rows
    ]
    return markdown(["after", "heap, MiB", "resident, MiB", "descriptors", "threads"], cells)
