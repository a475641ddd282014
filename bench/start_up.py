"""The start of large jobs: time, descriptors, and requests and bytes through the Store, per rank.

    python -m bench.start_up                      gloo and commlayer, 16, 32 and 64 processes; keeps the results
    python -m bench.start_up --ranks 8 --backend commlayer-udp --rounds 1
    python -m bench.start_up --keep before        keeps them as another state of the code, as of an older worktree
    python -m bench.start_up --table              writes docs/start_up.md
    commlayer emulate clean200 -- python -m bench.start_up --reach

Each process makes WORLD, reduces once, and makes one more group, as a job with a communication hook's group does. All
are forked from one that has imported torch. The figures of 1,000 ranks are computed from the three largest runs: they
lie on a line, or on a parabola where each rank reads a value from all others whose length grows with the ranks.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.harness.driver import BenchError, Benchmark, Content
from bench.harness.options import options

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench/results/start_up.json"
PAGE = ROOT / "docs/start_up.md"
FAR = 1000
"""The number of ranks for which the figures are computed."""
BENT = 0.02
"""The least share of a figure that a parabola must explain; below it, the figure lies on a line."""
TIMEOUT = timedelta(seconds=200)
REACH_ROUNDS = 15

BACKENDS: dict[str, tuple[str, dict[str, str]]] = {
    "gloo": ("gloo", {}),
    "commlayer": ("commlayer", {"COMMLAYER_SHM": "1"}),
    "commlayer-udp": ("commlayer", {"COMMLAYER_SHM": "0", "COMMLAYER_IFNAME": "lo"}),
}
"""The backend of torch and the environment of each."""

COUNTS = ("descriptors", "requests", "read_bytes", "written_bytes")
BENDING = ("read_bytes",)
"""A rank may read, from each other one, a value whose length grows with the ranks."""
Figures = dict[str, float]


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


def rank_of(rank: int, size: int, port: int, backend: str, counts: bool) -> Figures:
    """The figures of one rank. The counts are of WORLD and one more group."""
    store: dist.Store = dist.TCPStore("127.0.0.1", port, None, False, TIMEOUT)
    if store.add("come", 1) == size:
        store.set("all", "")
    store.wait(["all"], TIMEOUT)
    store, before = Counting(store) if counts else store, descriptors()
    tensor = torch.ones(100)
    start = time.monotonic()
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    made = time.monotonic()
    dist.all_reduce(tensor)
    reduced = time.monotonic()
    group = dist.new_group()
    grouped = time.monotonic()
    found: Figures = {"init_s": made - start, "reduced_at": reduced, "group_s": grouped - reduced}
    if isinstance(store, Counting):
        found |= {"descriptors": descriptors() - before, **store.counts}
    dist.all_reduce(tensor, group=group)
    if tensor[0].item() != size**2:
        raise ValueError(f"rank {rank} of {size}: the sum is {tensor[0].item()}, not {size**2}")
    return found


@contextlib.contextmanager
def served() -> Iterator[int]:
    """A process that serves a Store; gives its port. This process gets no thread, which a child could find holding a
    lock."""
    end, other = os.pipe()
    child = os.fork()
    if child == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        os.write(other, str(store.port).encode())
        signal.pause()
    try:
        yield int(os.read(end, 16))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(end)
        os.close(other)


def run(size: int, name: str, *, counts: bool) -> list[Figures]:
    """The figures of all ranks of a job. Raises BenchError if one fails."""
    with served() as port:
        return run_at(port, size, name, counts)


def run_at(port: int, size: int, name: str, counts: bool) -> list[Figures]:
    """The figures of all ranks of a job whose Store has this port."""
    backend, environ = BACKENDS[name]
    start, children = time.monotonic(), []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.environ.update(environ)
                found = rank_of(rank, size, port, backend, counts)
                own = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))
                own.set(f"found {rank}", json.dumps(found))
                own.add("done", 1)
                while own.add("done", 0) < size:
                    time.sleep(0.05)
                status = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    if any(statuses):
        raise BenchError(f"a rank of {size} failed")
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))
    all_found: list[Figures] = [json.loads(store.get(f"found {rank}")) for rank in range(size)]
    return [{**times, "first_s": times.pop("reduced_at") - start} for times in all_found]


def measure(size: int, name: str, runs: int) -> dict[str, Figures]:
    """Seconds: of the slowest rank, the median of some runs. Counts: of rank 0, and the largest of the others'."""
    timed = [run(size, name, counts=False) for _ in range(runs)]
    seconds = ("first_s", "init_s", "group_s")
    slowest = {key: statistics.median(max(rank[key] for rank in found) for found in timed) for key in seconds}
    counted = run(size, name, counts=True)
    return {
        "seconds": slowest,
        "rank 0": {key: counted[0][key] for key in COUNTS},
        "others": {key: max(rank[key] for rank in counted[1:]) for key in COUNTS},
    }


def computed(sizes: Sequence[int], values: Sequence[float], far: int = FAR, *, bends: bool = True) -> float:
    """The value at `far` ranks, from three sizes: on their parabola if it `bends`, else on the line through the last
    two."""
    (a, b, c), (x, y, z) = sizes, values
    line = z + (z - y) / (c - b) * (far - c)
    bend = ((z - y) / (c - b) - (y - x) / (b - a)) / (c - a)
    return line + bend * (far - b) * (far - c) if bends and bend * c * c > BENT * abs(z) else line


def table(runs: Mapping[str, Mapping[str, Mapping[str, Figures]]]) -> str:
    """The runs of each backend, and the computed one, as Markdown."""
    lines = [
        "| backend | ranks | all-reduce, s | init, s | group, s | descriptors | requests | KB read | KB written |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, by_size in runs.items():
        sizes = sorted(map(int, by_size))
        for size in sizes:
            found = by_size[str(size)]
            seconds = [f"{found['seconds'][key]:.2f}" for key in ("first_s", "init_s", "group_s")]
            lines.append(
                f"| {name} | {size} | {' | '.join([*seconds, *counts_of(found['rank 0'], found['others'])])} |"
            )
        if len(sizes) >= 3:
            far: list[Figures] = []
            for who in ("rank 0", "others"):
                of = [by_size[str(size)][who] for size in sizes[-3:]]
                far.append({key: computed(sizes[-3:], [x[key] for x in of], bends=key in BENDING) for key in COUNTS})
            lines.append(f"| {name} | {FAR:,}, computed | | | | {' | '.join(counts_of(*far))} |")
    return "\n".join(lines)


def counts_of(first: Figures, others: Figures) -> list[str]:
    """The cells of the counts: of the other ranks, and of rank 0 where it has another one."""

    def cell(key: str, unit: float, digits: int) -> str:
        texts = [f"{rank[key] / unit:,.{digits}f}" for rank in (others, first)]
        return texts[0] if texts[0] == texts[1] else f"{texts[0]} (rank 0: {texts[1]})"

    return [
        cell("descriptors", 1, 0),
        cell("requests", 1, 0),
        cell("read_bytes", 1e3, 1),
        cell("written_bytes", 1e3, 1),
    ]


def reach() -> None:
    """The time of making groups in each rank of a job, with the trial of packets between the hosts, and without."""
    from commlayer.transport.reach import Reach

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    root = dist.TCPStore(address, port, size, rank == 0, TIMEOUT)
    spent: list[float] = []
    check = Reach.check

    def timed(self: Reach, exchange: Callable[[str, bytes], list[bytes]]) -> None:
        start = time.monotonic()
        check(self, exchange)
        spent.append(time.monotonic() - start)

    known, took = Reach.is_known, collections.defaultdict[str, list[float]](list)
    vars_of: Any = Reach
    vars_of.check = timed
    for number in range(2 * REACH_ROUNDS):
        way = ("with", "without")[number % 2]
        vars_of.is_known = known if way == "with" else lambda _: True
        store = dist.PrefixStore(f"job {number}", root)
        start = time.monotonic()
        dist.init_process_group("commlayer", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        took[way].append(time.monotonic() - start)
        dist.barrier()
        dist.destroy_process_group()
    if rank == 0:
        medians = {way: statistics.median(times) for way, times in took.items()}
        told = ", ".join(f"{way} the trial {1e3 * median:.1f} ms" for way, median in medians.items())
        print(f"init_process_group on {size} hosts, median of {REACH_ROUNDS}: {told}; ", end="")
        print(f"the trial itself {1e3 * statistics.median(spent):.1f} ms, at most {1e3 * max(spent):.1f} ms")


def tables(kept: Content) -> dict[str, str]:
    """The runs of each state of the code."""
    return {name: f"Commit {state['commit']}.\n\n{table(state['runs'])}" for name, state in kept["states"].items()}


BENCHMARK = Benchmark(RESULTS, PAGE, tables, {"schema": 2, "states": {}})


def main() -> int:
    parser = options(__doc__, rounds=3, table=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--backend", nargs="+", choices=list(BACKENDS), default=list(BACKENDS))
    parser.add_argument("--keep", metavar="STATE", help="keep the results as those of a state of the code")
    parser.add_argument("--reach", action="store_true")
    arguments = parser.parse_args()
    import commlayer  # noqa: F401  # registers the backend

    if arguments.reach:
        reach()
        return 0

    def add(kept: Content, state: str) -> None:
        git = ["git", "rev-parse", "--short=7", "HEAD"]
        commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        runs = {
            name: {str(size): measure(size, name, arguments.rounds) for size in arguments.ranks}
            for name in arguments.backend
        }
        kept["states"][state] = {"commit": commit, "cores": os.cpu_count(), "runs": runs}

    is_all = vars(arguments) == vars(parser.parse_args([]))
    arguments.quick = not (arguments.keep or arguments.table or is_all)
    return BENCHMARK.main(arguments, [arguments.keep or "after"], add)


if __name__ == "__main__":
    sys.exit(main())
