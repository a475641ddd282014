"""The start of large jobs: time, descriptors, and requests and bytes through the Store, per rank.

    python -m bench.start_up                      8, 16, 32 and 64 processes on this machine; keeps the results
    python -m bench.start_up --ranks 8 --backend gloo

Each process makes WORLD and one more group, as a job with a communication hook's group does. All are forked from one
that has imported torch. The figures of 1,000 ranks are computed from the two largest runs: those of rank 0, which
publishes the descriptions, grow linearly, and so do the bytes that every other rank reads.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench/results/start_up.json"
FAR = 1000
"""The number of ranks for which the figures are computed."""

FIGURES = ("seconds", "descriptors", "requests", "read_bytes", "written_bytes")


class Counting(dist.Store):
    """A Store that counts what one rank asks of it."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self.counts: collections.Counter[str] = collections.Counter()

    def _count(self, requests: int, read: int = 0, written: int = 0) -> None:
        self.counts.update(requests=requests, read_bytes=read, written_bytes=written)

    def set(self, key: str, value: Any) -> None:
        self._count(1, written=len(value))
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value = self._store.get(key)
        self._count(1, read=len(value))
        return value

    def add(self, key: str, amount: int) -> int:
        self._count(1, read=8)
        return self._store.add(key, amount)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        value = self._store.compare_set(key, expected, desired)
        self._count(1, read=len(value), written=len(desired))
        return value

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._count(1, written=sum(map(len, keys)))
        self._store.wait(keys, *timeout)

    def check(self, keys: list[str]) -> bool:
        self._count(1, written=sum(map(len, keys)))
        return self._store.check(keys)

    def delete_key(self, key: str) -> bool:
        self._count(1)
        return self._store.delete_key(key)

    deleteKey = delete_key  # noqa: N815  # the name by which C++ calls it

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self._store.multi_get(keys)
        self._count(1, read=sum(map(len, values)), written=sum(map(len, keys)))
        return values

    def multi_set(self, keys: list[str], values: Any) -> None:
        self._count(1, written=sum(map(len, values)))
        self._store.multi_set(keys, values)  # type: ignore[attr-defined]  # the stub lacks it

    def append(self, key: str, value: Any) -> None:
        self._count(1, written=len(value))
        self._store.append(key, value)  # type: ignore[attr-defined]  # the stub lacks it

    def has_extended_api(self) -> bool:
        return True


def descriptors() -> int:
    """Open file descriptors of this process."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def rank_of(rank: int, size: int, port: int, backend: str) -> dict[str, float]:
    """The figures of one rank."""
    import torch

    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=200))
    store.add("come", 1)
    while store.add("come", 0) < size:
        time.sleep(0.05)
    counting, before = Counting(store), descriptors()
    start = time.monotonic()
    dist.init_process_group(backend, store=counting, rank=rank, world_size=size, timeout=timedelta(seconds=200))
    group = dist.new_group()
    seconds = time.monotonic() - start
    found = {"seconds": seconds, "descriptors": descriptors() - before, **counting.counts}
    tensor = torch.ones(100)
    dist.all_reduce(tensor, group=group)
    if tensor[0].item() != size:
        raise ValueError(f"rank {rank} of {size}: the sum is {tensor[0].item()}")
    return found


def run(size: int, backend: str) -> list[dict[str, float]]:
    """The figures of all ranks of a job. Raises RuntimeError if one fails."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                found = rank_of(rank, size, store.port, backend)
                own = dist.TCPStore("127.0.0.1", store.port, None, False, timedelta(seconds=60))
                own.set(f"found {rank}", json.dumps(found))
                own.add("done", 1)
                while own.add("done", 0) < size:
                    time.sleep(0.05)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    if any(statuses):
        raise RuntimeError(f"a rank of {size} failed")
    return [json.loads(store.get(f"found {rank}")) for rank in range(size)]


def summary(found: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Rank 0's figures, and the largest of the others'."""
    return {
        "rank 0": {name: found[0][name] for name in FIGURES},
        "others": {name: max(each[name] for each in found[1:]) for name in FIGURES},
    }


def computed(sizes: tuple[int, int], values: tuple[float, float], far: int = FAR) -> float:
    """The value at `far` ranks, on the line through two."""
    slope = (values[1] - values[0]) / (sizes[1] - sizes[0])
    return values[1] + slope * (far - sizes[1])


def table(runs: dict[int, dict[str, dict[str, float]]]) -> str:
    """All runs, and the computed one, as Markdown."""
    lines = ["| ranks | | s | descriptors | requests | KB read | KB written |", "|---|---|---|---|---|---|---|"]
    sizes = sorted(runs)
    for size in sizes:
        for who, figures in runs[size].items():
            lines.append(f"| {size} | {who} | " + cells(figures))
    if len(sizes) > 1:
        last = sizes[-2], sizes[-1]
        for who in ("rank 0", "others"):
            pairs = {name: (runs[last[0]][who][name], runs[last[1]][who][name]) for name in FIGURES}
            far = {name: computed(last, pair) for name, pair in pairs.items()}
            lines.append(f"| {FAR}, computed | {who} | " + cells({**far, "seconds": float("nan")}))
    return "\n".join(lines)


def cells(figures: dict[str, float]) -> str:
    """One line's figures."""
    seconds = "" if figures["seconds"] != figures["seconds"] else f"{figures['seconds']:.1f}"
    kilobytes = (f"{figures[name] / 1000:.1f}" for name in ("read_bytes", "written_bytes"))
    return " | ".join([seconds, *(f"{figures[name]:.0f}" for name in ("descriptors", "requests")), *kilobytes]) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--backend", default="commlayer")
    arguments = parser.parse_args()
    import commlayer  # noqa: F401  # registers the backend

    runs = {size: summary(run(size, arguments.backend)) for size in arguments.ranks}
    print(table(runs))
    if arguments.backend == "commlayer":
        RESULTS.write_text(json.dumps({"schema": 1, "runs": runs}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
