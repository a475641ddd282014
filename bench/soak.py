"""Soak: random collectives for a given time, every result verified, and no leaks.

    python -m bench.soak --minutes 60 [--ranks 4] [--seed N] [--udp]
    python -m bench.soak --lifetimes

In each round of some seconds the ranks join a job, make subgroups, run random collectives of random sizes and types on
them, synchronously and asynchronously, and leave the job. Half of the ranks use shared memory, the others UDP, or all
of them with `--udp`. Each process compares its memory, descriptors, threads and mappings after the first rounds with
those at the end. All choices follow from the seed, which is printed, and from the number of operations done in time.

`--lifetimes`: instead, 10,000 steps, 200 groups and 20 aborts of two ranks, and the resources of rank 0 in between.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import commlayer  # noqa: F401  # registers the backend
from bench.harness.leaks import Resources
from bench.harness.lifetimes import lifetimes, table
from bench.harness.options import options
from commlayer.plans.select import PLANS
from commlayer.tools.bench.collectives import all_gather_single, reduce_scatter_single

ROUND_S = 8.0
WARM_ROUNDS = 2
"""Rounds in which torch and the allocator reach their usual memory."""
HEAP_MIB = 16.0
"""Allowed growth of the heap: torch keeps a little memory of every group it has made."""
MAPPINGS = 96
"""Allowed growth in mappings, by malloc's arenas: it varied by 22 in a minute, and by 9 in five. `shared_files` counts
the engine's own memory exactly."""
SIZES = 24
DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bfloat16, torch.float16)
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX)


@dataclasses.dataclass
class Draw:
    """One random operation; the same on all ranks of the group."""

    numel: int
    dtype: torch.dtype
    op: Any
    root: int
    later: bool
    seed: int

    def values(self, rank: int, numel: int) -> Tensor:
        """A rank's contribution: numbers so small that no type rounds or overflows."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + rank)
        return torch.randint(0, 4, (numel,), generator=generator).to(self.dtype)


def _reduced(draw: Draw, size: int, numel: int) -> Tensor:
    everything = torch.stack([draw.values(rank, numel).double() for rank in range(size)])
    if draw.op == dist.ReduceOp.SUM:
        return everything.sum(0).to(draw.dtype)
    return (everything.amin(0) if draw.op == dist.ReduceOp.MIN else everything.amax(0)).to(draw.dtype)


# Each function starts its collective and returns the work, the result and a function for the expected result.
Started = tuple[Any, Tensor, Callable[[], Tensor]]


def _all_reduce(draw: Draw, group: Any, rank: int, size: int) -> Started:
    tensor = draw.values(rank, draw.numel)
    work = dist.all_reduce(tensor, draw.op, group=group, async_op=draw.later)
    return work, tensor, lambda: _reduced(draw, size, draw.numel)


def _reduce_scatter(draw: Draw, group: Any, rank: int, size: int) -> Started:
    output = torch.empty(draw.numel, dtype=draw.dtype)
    whole = draw.numel * size
    work = reduce_scatter_single(output, draw.values(rank, whole), draw.op, group=group, async_op=draw.later)
    return work, output, lambda: _reduced(draw, size, whole)[rank * draw.numel : (rank + 1) * draw.numel]


def _all_gather(draw: Draw, group: Any, rank: int, size: int) -> Started:
    output = torch.empty(draw.numel * size, dtype=draw.dtype)
    work = all_gather_single(output, draw.values(rank, draw.numel), group=group, async_op=draw.later)
    return work, output, lambda: torch.cat([draw.values(sender, draw.numel) for sender in range(size)])


def _broadcast(draw: Draw, group: Any, rank: int, size: int) -> Started:
    root = draw.root % size
    tensor = draw.values(rank, draw.numel)
    work = dist.broadcast(tensor, group=group, group_src=root, async_op=draw.later)
    return work, tensor, lambda: draw.values(root, draw.numel)


def _all_to_all(draw: Draw, group: Any, rank: int, size: int) -> Started:
    output = torch.empty(draw.numel * size, dtype=draw.dtype)
    work = dist.all_to_all_single(output, draw.values(rank, draw.numel * size), group=group, async_op=draw.later)
    part = slice(rank * draw.numel, (rank + 1) * draw.numel)
    return work, output, lambda: torch.cat([draw.values(sender, draw.numel * size)[part] for sender in range(size)])


COLLECTIVES = (_all_reduce, _all_reduce, _reduce_scatter, _all_gather, _broadcast, _all_to_all)


def _round(rank: int, size: int, seed: int, until: float) -> int:
    """One life of the job; returns its number of operations."""
    common = random.Random(seed)
    members = [sorted(common.sample(range(size), common.randint(1, size))) for _ in range(2)]
    groups = [dist.group.WORLD, *(dist.new_group(member) for member in members)]
    lists = [list(range(size)), *members]
    sizes = [int(2 ** common.uniform(0, 19)) for _ in range(SIZES)]
    count = 0
    go_on = torch.ones(1)
    while go_on.item():
        in_flight: list[tuple[str, Draw, Started]] = []
        for _ in range(20):
            start = common.choice(COLLECTIVES)
            draw = Draw(
                common.choice(sizes),
                common.choice(DTYPES),
                common.choice(OPS),
                common.randrange(size),
                common.random() < 0.5,
                common.randrange(1 << 30),
            )
            which = common.randrange(len(groups))
            if rank in lists[which]:
                place = lists[which].index(rank)
                in_flight.append((start.__name__, draw, start(draw, groups[which], place, len(lists[which]))))
        for name, draw, (work, result, expected) in in_flight:
            if work is not None:
                work.wait()
            if not torch.equal(result, expected()):
                raise AssertionError(f"rank {rank}: wrong result of {name} {draw}")
            count += 1
        go_on.fill_(float(rank == 0 and time.monotonic() < until))
        dist.all_reduce(go_on)
    return count


def _hold() -> Resources:
    PLANS.clear()  # random sizes would fill it up to its bound
    return Resources.now()


def _soak(rank: int, size: int, sharing: int, seed: int, minutes: float, port: int, pipe: Any) -> None:
    os.environ["COMMLAYER_SHM"] = str(int(rank < sharing))
    os.environ["COMMLAYER_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))
    end = time.monotonic() + 60 * minutes
    before = Resources.now()
    count = rounds = 0
    go_on = True
    while go_on:
        part = dist.PrefixStore(f"round {rounds}", store)
        dist.init_process_group("commlayer", store=part, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        count += _round(rank, size, seed + rounds, min(time.monotonic() + ROUND_S, end))
        dist.destroy_process_group()
        rounds += 1
        if rounds == WARM_ROUNDS:
            before = _hold()
        if rank == 0:
            store.set(f"after round {rounds}", "on" if time.monotonic() < end or rounds <= WARM_ROUNDS else "end")
        go_on = store.get(f"after round {rounds}") == b"on"
    after = _hold()
    leak = before.grown(after, HEAP_MIB, MAPPINGS)
    with contextlib.suppress(BrokenPipeError):  # the soak was killed, or interrupted: nobody reads it
        pipe.send((count, rounds, dataclasses.asdict(before), dataclasses.asdict(after), leak))


def _live(rank: int, size: int, port: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))
    dist.init_process_group("commlayer", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    found = list(lifetimes(store, rank, size))
    with contextlib.suppress(BrokenPipeError):  # as above
        pipe.send(found)
    dist.destroy_process_group()


def print_lifetimes() -> int:
    """Prints the table of rank 0; 0 if all ranks ended well."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    processes = [
        context.Process(target=_live, args=(rank, len(pipes), store.port, there))
        for rank, (_, there) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for _, there in pipes:
        there.close()
    rows = [here.recv() for here, _ in pipes]
    for process in processes:
        process.join()
    print(table(rows[0]))
    return int(any(process.exitcode for process in processes))


def main(arguments: list[str] | None = None) -> int:
    """Runs the soak; 0 if every result was right and nothing leaked."""
    parser = options(__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 20))
    parser.add_argument("--udp", action="store_true", help="no rank uses shared memory")
    parser.add_argument("--lifetimes", action="store_true")
    chosen = parser.parse_args(arguments)
    if chosen.lifetimes:
        return print_lifetimes()
    print(f"# seed {chosen.seed}", flush=True)
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    sharing = 0 if chosen.udp else (chosen.ranks + 1) // 2
    for rank in range(chosen.ranks):
        here, there = context.Pipe(duplex=False)
        arguments_of = (rank, chosen.ranks, sharing, chosen.seed, chosen.minutes, store.port, there)
        processes.append(context.Process(target=_soak, args=arguments_of))
        processes[-1].start()
        there.close()
        pipes.append(here)
    for process in processes:
        process.join()
    failed = False
    for rank, (process, pipe) in enumerate(zip(processes, pipes, strict=True)):
        if process.exitcode != 0:
            print(f"rank {rank}: FAILED, exit code {process.exitcode}")
            failed = True
            continue
        count, rounds, before, after, leak = pipe.recv()
        print(f"rank {rank}: {count} operations in {rounds} jobs, all right")
        print(f"  after {WARM_ROUNDS} jobs {json.dumps(before)}")
        print(f"  at the end   {json.dumps(after)}")
        if leak:
            print(f"  LEAK: {leak}")
            failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
