"""A small training job in `commlayer.elastic`, whose ranks are killed, or leave, by plan. By hand, with many seeds:

python -m tests.process.elastic_job --seeds 100
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.frontend.elastic import averages
from tests import ranks

SIZE = 4
STEPS = 12


@dataclasses.dataclass
class Plan:
    """What happens to the ranks. `kills`: the rank, and seconds after the first step. `leaves`: by step."""

    seed: int = 0
    kills: tuple[tuple[int, float], ...] = ()
    leaves: tuple[tuple[int, int], ...] = ()
    min_size: int = 1
    pause_s: float = 0.004
    """Longest computation of a step."""
    by_signal: bool = False


@dataclasses.dataclass
class Report:
    """What a rank that lived has seen."""

    digest: str
    """The digest of its parameters and the optimizer's state."""
    history: list[tuple[int, ...]]
    """The members that contributed to each step."""
    times_s: list[float]
    """The time of day at which each step was made."""
    killed_s: dict[int, float]


def train(rank: int, size: int, plan: Plan) -> Report:
    ranks.init(rank, size, timeout=timedelta(seconds=20))
    torch.manual_seed(plan.seed)
    averages.BUCKET_BYTES = plan.seed % 3 * 200  # of 7.6 kB: many buckets, several or two
    model = DistributedDataParallel(nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 7)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    pauses = random.Random(f"{plan.seed} {rank}")
    store = ranks.store()
    history, times_s = [], []
    with commlayer.elastic(model, optimizer, min_size=plan.min_size) as job:
        for batch in job.batches(range(STEPS)):
            if batch in [step for who, step in plan.leaves if who == rank]:
                os.kill(os.getpid(), signal.SIGTERM) if plan.by_signal else job.leave()
            members = tuple(job.members)
            time.sleep(pauses.uniform(0, plan.pause_s))
            noise = torch.Generator().manual_seed(1000 * batch + rank)
            inputs, targets = torch.randn(8, 30, generator=noise), torch.randn(8, 7, generator=noise)
            (model(inputs) - targets).square().mean().backward()
            if job.step():
                history.append(members)
                times_s.append(time.time())
            if batch == 0:
                for _, after_s in [kill for kill in plan.kills if kill[0] == rank]:
                    threading.Thread(target=_die, args=(store, rank, after_s), daemon=True).start()
    state = [*model.state_dict().values(), *(value for of in optimizer.state.values() for value in of.values())]
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in state)).hexdigest()
    killed_s = {who: float(store.get(f"killed {who}")) for who, _ in plan.kills if store.check([f"killed {who}"])}
    if dist.is_initialized():
        dist.destroy_process_group()
    return Report(digest, history, times_s, killed_s)


def _die(store: Any, rank: int, after_s: float) -> None:
    time.sleep(after_s)
    store.set(f"killed {rank}", str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def reports(plan: Plan, **options: Any) -> list[Report | None]:
    """The reports of the ranks; None of a killed one. Raises RanksError for any other end."""
    return ranks.results(ranks.outcomes(train, SIZE, plan, **options), {rank for rank, _ in plan.kills})


def check(plan: Plan, **options: Any) -> list[float]:
    """Runs a plan of kills, and then one in which the same ranks leave at the same steps: both must have the same
    parameters, bit by bit. Returns the seconds from each kill to the end of the first step without that rank, on the
    last of the others."""
    found = [report for report in reports(plan, **options) if report is not None]
    assert len({report.digest for report in found}) == 1, "two states"
    assert all(report.history == found[0].history for report in found)
    history = found[0].history
    assert len(history) == STEPS
    leaves = tuple(
        (rank, step)
        for step, (members, after) in enumerate(itertools.pairwise(history))
        for rank in set(members) - set(after)
    )
    as_if = reports(Plan(plan.seed, leaves=leaves, pause_s=0.0), **options)
    last = as_if[history[-1][0]]
    assert last is not None
    assert last.history == history
    assert last.digest == found[0].digest, "not as if the ranks had left"
    return [
        max(report.times_s[step] for report in found) - killed
        for rank, killed in found[0].killed_s.items()
        if (step := next((step for step, members in enumerate(history) if rank not in members), None)) is not None
    ]


def random_plan(seed: int) -> Plan:
    """Kills one to three of the ranks while the job trains."""
    draw = random.Random(seed)
    victims = draw.sample(range(SIZE), draw.choice([1, 1, 1, 2, 2, 3]))
    at_once = draw.random() < 0.3
    first = draw.uniform(0.0, 0.05)
    return Plan(seed, tuple((victim, first if at_once else draw.uniform(0.0, 0.05)) for victim in victims))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args(arguments)
    waits: list[float] = []
    for seed in range(given.first, given.first + given.seeds):
        found = check(random_plan(seed))
        waits += found
        print(seed, " ".join(f"{time_s:.3f}" for time_s in found), flush=True)
    waits.sort()
    print(
        f"{given.seeds} seeds, {len(waits)} kills: next step after the kill, s: "
        f"median {waits[len(waits) // 2]:.3f}, 90 % {waits[9 * len(waits) // 10]:.3f}, longest {waits[-1]:.3f}"
    )


if __name__ == "__main__":
    main()
