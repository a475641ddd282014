"""`commlayer check`: shows that the ranks of a job reach each other, how fast, and which compute slowly.

    torchrun --nnodes=2 --nproc-per-node=4 ... -m commlayer check

Each rank prints the time of an all-reduce and its paths, and rank 0 compares how fast the ranks compute. `commlayer
probe` compares the links.
"""

from __future__ import annotations

import ipaddress
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..transport.stats import paths, stats

SLOW = 0.5
"""A rank with less than this share of the median speed is named."""
PATHS_SHOWN = 8
"""Working paths that a rank prints."""
LIVELINESS_PACKETS = 10
COMPUTE_SIZE = 384
COMPUTE_ROUNDS = 5


def check(nbytes: int, rounds: int) -> None:
    """Runs in each process of a job. Raises SystemExit for a wrong sum."""
    dist.init_process_group("commlayer")
    rank, size = dist.get_rank(), dist.get_world_size()
    seconds = [_all_reduce_s(nbytes // 4, rank, size) for _ in range(rounds)]
    print(_reduced(rank, size, nbytes, seconds), flush=True)
    for line in path_lines(rank, paths()):
        print(line, flush=True)
    found: list[Any] = [None] * size
    dist.all_gather_object(found, (socket.gethostname(), _compute_s()))
    if rank == 0:
        print("\n".join(summary(found)), flush=True)
    dist.barrier()  # rank 0 prints last
    dist.destroy_process_group()


def _all_reduce_s(numel: int, rank: int, size: int) -> float:
    tensor = torch.full((numel,), float(rank))
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(tensor)
    passed_s = time.perf_counter() - start
    if not tensor[0] == tensor[-1] == size * (size - 1) / 2:
        raise SystemExit(f"rank {rank}: a wrong sum, {tensor[0]} and {tensor[-1]}")
    return passed_s


def _reduced(rank: int, size: int, nbytes: int, seconds: Sequence[float]) -> str:
    counters = stats()
    return (
        f"rank {rank} of {size} on {socket.gethostname()}: all_reduce of {nbytes / (1 << 20):g} MiB in "
        f"{min(seconds) * 1e3:.1f} to {max(seconds) * 1e3:.1f} ms; {counters['packets_lost']} of "
        f"{counters['packets_sent']} packets lost"
    )


def path_lines(rank: int, found: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each path that was used, of those that work for a few."""
    working: list[str] = []
    broken: list[str] = []
    for path in found:
        if path["packets_sent"] < LIVELINESS_PACKETS and ipaddress.ip_address(path["address"]).is_loopback:
            continue  # ranks of one host share memory, and ask each other for a sign of life at most
        works = path["is_answered"] and not path["is_dead"]
        if path["packets_sent"]:
            (working if works else broken).append(
                f"rank {rank} to rank {path['rank']}: {path['interface']} {path['address']}:{path['port']} to "
                f"{path['remote']} {'works' if works else 'DOES NOT WORK'}, {path['packets_sent']} packets sent, "
                f"{path['packets_lost']} lost, round trip {path['round_trip_us'] / 1e3:.2f} ms"
            )
    more = [f"rank {rank}: {len(working) - PATHS_SHOWN} more paths work"] if len(working) > PATHS_SHOWN else []
    return [*broken, *working[:PATHS_SHOWN], *more]


def _compute_s() -> float:
    """The shortest time of a product of two matrices."""
    matrix = torch.ones(COMPUTE_SIZE, COMPUTE_SIZE)
    times = []
    for _ in range(COMPUTE_ROUNDS):
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        times.append(time.perf_counter() - start)
    return min(times)


def summary(computes: Sequence[tuple[str, float]]) -> list[str]:
    """The comparison of the ranks: host and seconds of each."""
    usual_s = statistics.median_low([seconds for _, seconds in computes])
    slow = [
        f"SLOW: rank {rank} on {host} computes {seconds / usual_s:.1f} times as long as usual"
        for rank, (host, seconds) in enumerate(computes)
        if seconds * SLOW > usual_s
    ]
    return slow or ["no rank computes much slower than the others"]
