"""Rows of an embedding, fetched before they are needed: `commlayer.embedding.Remote` with a cache and without one.

    python -m bench.embedding                everything (about 4 minutes; the links need root)
    python -m bench.embedding --rounds 5     more rounds
    python -m bench.embedding --quick        one round of few steps; keeps nothing
    python -m bench.embedding --table        only the table of the kept results

Four hosts of one rank, links of 100 Mbit/s. The rows of the table are divided over the hosts' main memory; the cache is
that of a rank, also in main memory, so it saves the link, and not the way to a GPU. The computation is a sleep.

Traces: rows drawn by Zipf's law of exponent 1.05; and the words of the sources of Python's standard library, in their
order, of which each is a row. One rank trains, and the others hold rows; then all train, on batches of one law.

Hits are shares of the rows that a batch uses, each counted once. Beside them: those of Belady's choice, which knows all
batches and keeps the rows that are used next, with as many rows. Both systems must end with the same rows, bit by bit.

Writes bench/results/embedding.json and a table of docs/embedding.md.
"""

from __future__ import annotations

import functools
import re
import statistics
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

import commlayer
from bench.harness import turns
from bench.harness.driver import BenchError, Benchmark
from bench.harness.page import markdown, measured_on
from bench.harness.results import today
from bench.harness.turns import ROOT, Log, in_turns, spread
from commlayer.tools.bench import machine
from commlayer.tools.bench.cpu import CpuTime
from commlayer.tools.emulate.link import Link
from commlayer.tools.emulate.scenario import Scenario

RESULTS, PAGE = ROOT / "bench/results/embedding.json", ROOT / "docs/embedding.md"
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")

HOSTS, RATE_BPS = 4, 100e6
ROWS, WIDTH, ACCESSES = 100_000, 64, 128
CACHE, LOOKAHEAD = 0.015, 100
WARM_UP_STEPS, STEPS, QUICK_STEPS, ROUNDS = 100, 300, 100, 3
COMPUTE_S = 0.02

ZIPF, WORDS, ALL = "Zipf 1.05", "words", "Zipf 1.05, all ranks train"
WITHOUT, WITH = "no cache", "cache"

Ids = NDArray[np.int64]


@functools.cache
def words() -> tuple[Ids, int]:
    """Places of words in Python's standard library, by the order of their first appearance, and their number."""
    found: dict[str, int] = {}
    places: list[int] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        places += [found.setdefault(word, len(found)) for word in re.findall(r"\w+", text)]
    return np.array(places), len(found)


def batches(trace: str, rank: int, steps: int) -> tuple[list[Ids], int]:
    """A rank's batches, and the rows of the table."""
    if rank and trace != ALL:
        return [np.zeros(0, np.int64)] * steps, words()[1] if trace == WORDS else ROWS
    if trace == WORDS:
        places, rows = words()
        return list(places[: steps * ACCESSES].reshape(steps, ACCESSES)), rows
    law = 1.0 / np.arange(1, ROWS + 1) ** 1.05
    named = np.random.default_rng(0).permutation(ROWS)  # which rows are popular
    random = np.random.default_rng([1, rank])
    return list(named[random.choice(ROWS, (steps, ACCESSES), p=law / law.sum())]), ROWS


def first(numbers: torch.Tensor) -> torch.Tensor:
    """The first values of rows: the same in all runs."""
    return torch.sin(numbers[:, None] + torch.arange(WIDTH)) / WIDTH


def belady(used: list[Ids], rows: int, room: int, first: int) -> float:
    """The share of hits, from step `first` on, of a cache that keeps the `room` rows that are used next."""
    never = len(used)
    following = [np.zeros(0, np.int64)] * never
    upcoming = np.full(rows, never)
    for step in range(never - 1, -1, -1):
        following[step] = upcoming[used[step]]
        upcoming[used[step]] = step
    kept, hits, count = np.zeros(0, np.int64), 0, 0
    for step, batch in enumerate(used):
        if step >= first:
            hits, count = hits + int(np.isin(batch, kept).sum()), count + len(batch)
        upcoming[batch] = following[step]
        candidates = np.union1d(kept, batch)
        kept = candidates[np.argsort(upcoming[candidates], kind="stable")[:room]]
    return hits / count


def run_job(job: Log, _: Log) -> Log:
    """Steps of one system: their seconds, the bytes that all hosts have sent in one, and the hits of rank 0."""
    rank, steps = dist.get_rank(), WARM_UP_STEPS + job["steps"]
    ids, rows = batches(job["trace"], rank, steps)
    table = commlayer.embedding.Remote(
        "bench", rows, WIDTH, lr=0.01, cache=CACHE if job["system"] == WITH else 0.0, lookahead=LOOKAHEAD, init=first
    )
    seconds: list[float] = []
    marks: list[tuple[int, int, int, int]] = []
    begin, start_cpu = 0.0, CpuTime.now()
    for step, batch in enumerate(table.ahead(map(torch.from_numpy, ids), ids=lambda batch: batch)):
        if step >= WARM_UP_STEPS:
            seconds.append(time.perf_counter() - begin)
        if step in (WARM_UP_STEPS - 1, steps - 1):
            counts = table.counts
            marks.append((int(SENT.read_text()), counts.sent_bytes, counts.hits, counts.used))
            start_cpu = start_cpu if seconds else CpuTime.now()
        begin = time.perf_counter()
        table(batch).square().sum().backward()
        time.sleep(COMPUTE_S)
        table.step()
    cpu = CpuTime.now() - start_cpu
    on_wire, payload, hits, used = (end - start for start, end in zip(*marks, strict=True))
    sent = torch.tensor([on_wire, payload], dtype=torch.float64)
    dist.all_reduce(sent)
    digest = table.state_dict()["records"].view(torch.int32).to(torch.int64).sum().reshape(1)
    dist.all_reduce(digest)
    unique = [np.unique(batch) for batch in ids]
    return {
        "step_s": seconds,
        "wire_bytes": sent[0].item() / job["steps"],
        "sent_bytes": sent[1].item() / job["steps"],
        "hits": hits / used if used else 0.0,
        "belady": belady(unique, rows, int(CACHE * rows), WARM_UP_STEPS) if rank == 0 else 0.0,
        "unique": used / job["steps"],
        "rows": rows,
        "digest": int(digest),
        **turns.busy(cpu, sum(seconds)),
    }


def measure(rounds: int, slower: float, *, short: bool) -> dict[str, Any]:
    """All systems and traces, in turns. Raises BenchError if a rank failed, or rows differ."""
    scenario = Scenario(hosts=HOSTS, nics=(Link(rate_bps=RATE_BPS / slower),))
    about, steps = machine.facts(), QUICK_STEPS if short else STEPS
    jobs = [
        {"system": system, "trace": trace, "steps": steps} for trace in (ZIPF, WORDS, ALL) for system in (WITHOUT, WITH)
    ]
    runs = turns.measure(scenario, "bench.embedding", {"jobs": in_turns(jobs, rounds)}, "embedding")
    for trace in (ZIPF, WORDS, ALL):
        digests = {log["digest"] for log in runs if log["job"]["trace"] == trace}
        if len(digests) != 1:
            raise BenchError(f"{trace}: the rows differ between runs: {digests}")
    return {"schema": 1, "network": scenario.table, "runs": runs, "machine": about, "measured": today()}


def hits_of(log: Log, system: str) -> list[str]:
    """Hits, their share of Belady's, and how many fewer rows those would fetch."""
    if system == WITHOUT:
        return ["", "", ""]
    if log["job"]["trace"] == ALL:  # Belady's would be of a rank that trains alone
        return [f"{log['hits']:.1%}", "", ""]
    return [f"{log['hits']:.1%}", f"{log['hits'] / log['belady']:.3f}", f"{1 / (1 - log['belady']):.2f}x"]


def table(content: dict[str, Any]) -> str:
    runs: list[Log] = content["runs"]
    rows = []
    for trace in (ZIPF, WORDS, ALL):
        found = turns.by_system([log for log in runs if log["job"]["trace"] == trace])
        bytes_of = {system: statistics.median(log["sent_bytes"] for log in logs) for system, logs in found.items()}
        for system, logs in found.items():
            one, steps = logs[0], [turns.step_s(log) for log in logs]
            cells = [trace, f"{one['rows']:,}", f"{one['unique']:.0f}", system, *hits_of(one, system)]
            cells += [f"{bytes_of[system] / 1e3:.1f}", f"{bytes_of[WITHOUT] / bytes_of[system]:.2f}x"]
            cells.append(f"{statistics.median(log['wire_bytes'] for log in logs) / 1e3:.1f}")
            rows.append([*cells, spread(steps, 1e3, ".1f"), f"{max(log['busy'] for log in logs):.0%}"])
    columns = ["trace", "rows", "rows used by a batch", "system", "hits", "of Belady's", "limit"]
    columns += ["KB sent per step", "fewer", "with headers", "step (ms)", "CPU busy"]
    rounds = len({id(log) for log in runs if log["job"] == runs[0]["job"]})
    return markdown(columns, rows) + (
        f"\n\nRows of {WIDTH} float32, {ACCESSES} accesses per batch, {CACHE:.1%} of the rows in the cache, lookahead "
        f"{LOOKAHEAD}, {HOSTS} hosts with links of {RATE_BPS / 1e6:g} Mbit/s, a computation of {COMPUTE_S * 1e3:g} ms. "
        f"Bytes: of all hosts; rows, gradients, their numbers and orders. Limit: how many fewer rows Belady's choice "
        f"fetches. All runs of a trace end with the same rows, bit by bit. "
        f"{turns.about_rounds(rounds)} {measured_on(content, 'embedding')}"
    )


def main() -> int:
    """0; ends with 2 if a rank failed, or rows differ."""
    parsed = turns.parser(__doc__, ROUNDS).parse_args()
    return turns.main(parsed, Benchmark(RESULTS, PAGE, lambda found: {"embedding": table(found)}), measure, run_job)


if __name__ == "__main__":
    sys.exit(main())
