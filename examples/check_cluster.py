"""Shows that the ranks of a job reach each other, and how fast.

    torchrun --nnodes=2 --nproc-per-node=4 ... examples/check_cluster.py

Prints a line per rank with the time of an all-reduce, and one per path to another rank. Ranks of one host use shared
memory: their paths carry a few packets at most, which ask for a sign of life.
"""

from __future__ import annotations

import argparse
import socket
import time

import torch
import torch.distributed as dist

import commlayer  # registers the backend "commlayer"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=16, help="size of the tensor")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    dist.init_process_group("commlayer")
    rank, size = dist.get_rank(), dist.get_world_size()
    numel = (options.mib << 20) // 4
    seconds = []
    for _ in range(options.rounds):
        tensor = torch.full((numel,), float(rank))
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        seconds.append(time.perf_counter() - start)
        if not tensor[0] == tensor[-1] == size * (size - 1) / 2:
            raise SystemExit(f"rank {rank}: a wrong sum, {tensor[0]} and {tensor[-1]}")

    counters = commlayer.stats()
    best, worst = min(seconds) * 1e3, max(seconds) * 1e3
    print(
        f"rank {rank} of {size} on {socket.gethostname()}: all_reduce of {options.mib} MiB in {best:.1f} to "
        f"{worst:.1f} ms; {counters['packets_lost']} of {counters['packets_sent']} packets lost",
        flush=True,
    )
    for other in range(size):
        for number, path in enumerate(commlayer.paths(other) if other != rank else ()):
            if path["packets_sent"]:
                state = "works" if path["is_answered"] and not path["is_dead"] else "DOES NOT WORK"
                print(
                    f"rank {rank} to rank {other}, path {number}: {state}, {path['packets_sent']} packets sent, "
                    f"{path['packets_lost']} lost, round trip {path['round_trip_us'] / 1e3:.2f} ms",
                    flush=True,
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
