"""A small training job in `commlayer.elastic`, whose ranks are killed, or leave, by plan. By hand, with many seeds:

python -m tests.process.elastic_job --seeds 100
python -m tests.process.elastic_job --seeds 100 --rows
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.frontend.elastic import averages
from commlayer.frontend.group.parts import part_of
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
    size: int = SIZE
    shards: int = 1
    """The ranks of a row, between which FSDP2 divides the model; 1: DDP's model."""
    clip_norm: float | None = None
    codec: str = "none"

    def row(self, rank: int) -> range:
        """The ranks that go with this one."""
        first = rank - rank % self.shards
        return range(first, first + self.shards)


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
    place: int = 0
    """In its row."""
    lost: str = ""
    """The error that has ended it, because its row has lost another rank."""


def build(plan: Plan) -> nn.Module:
    net: Any = nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 7))
    if plan.shards == 1:
        return DistributedDataParallel(net)
    mesh = init_device_mesh("cpu", (plan.size // plan.shards, plan.shards), mesh_dim_names=("rows", "shards"))
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh["shards"])
    fully_shard(net, mesh=mesh["shards"])
    return net  # type: ignore[no-any-return]


def train(rank: int, size: int, plan: Plan) -> Report:
    ranks.init(rank, size, timeout=timedelta(seconds=20))
    torch.manual_seed(plan.seed)
    averages.BUCKET_BYTES = plan.seed % 3 * 200  # of 7.6 kB: many buckets, several or two
    model = build(plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    pauses = random.Random(f"{plan.seed} {rank}")
    store = ranks.store()
    history, times_s, lost = [], [], ""
    given: Any = {"min_size": plan.min_size, "clip_norm": plan.clip_norm, "codec": plan.codec}
    try:
        with commlayer.elastic(model, optimizer, **given) as job:
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
    except commlayer.PeerLostError as error:
        if not {who for who, _ in plan.kills}.intersection(plan.row(rank)) - {rank}:
            raise
        lost = str(error)
    state = [*model.state_dict().values(), *(value for of in optimizer.state.values() for value in of.values())]
    digest = hashlib.sha256(b"".join(part_of(tensor).numpy().tobytes() for tensor in state)).hexdigest()
    killed_s = {who: float(store.get(f"killed {who}")) for who, _ in plan.kills if store.check([f"killed {who}"])}
    if dist.is_initialized():
        dist.destroy_process_group()
    return Report(digest, history, times_s, killed_s, rank % plan.shards, lost)


def _die(store: Any, rank: int, after_s: float) -> None:
    time.sleep(after_s)
    store.set(f"killed {rank}", str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def reports(plan: Plan, **options: Any) -> list[Report | None]:
    """The reports of the ranks; None of a killed one. Raises RanksError for any other end."""
    return ranks.results(ranks.outcomes(train, plan.size, plan, **options), {rank for rank, _ in plan.kills})


def check(plan: Plan, **options: Any) -> list[float]:
    """Runs a plan of kills, and then one in which the same ranks leave at the same steps: both must have the same
    parameters, bit by bit. Returns the seconds from each kill to the end of the first step without that rank, on the
    last of the others."""
    ended = [report for report in reports(plan, **options) if report is not None]
    found = [report for report in ended if len(report.history) == STEPS and not report.lost]
    assert all(report.history == found[0].history[: len(report.history)] for report in ended), "two parties"
    texts = [report.lost for report in ended if report.lost]
    assert all("of its row" in text for text in texts), texts
    digests = {report.place: report.digest for report in found}
    assert {(report.place, report.digest) for report in found} == set(digests.items()), "two states"
    assert len(digests) == plan.shards
    history = found[0].history
    leaves = tuple(
        (plan.row(rank)[plan.seed % plan.shards], step)  # with one rank its row leaves
        for step, (members, after) in enumerate(itertools.pairwise(history))
        for rank in set(members) - set(after)
        if rank % plan.shards == 0
    )
    as_if = reports(dataclasses.replace(plan, kills=(), leaves=leaves, pause_s=0.0), **options)
    for rank in history[-1]:
        last = as_if[rank]
        assert last is not None
        assert last.history == history
        assert last.digest == digests[last.place], "not as if the ranks had left"
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


def random_rows(seed: int) -> Plan:
    """The same of two or three rows of two ranks, or two of three: one or two ranks of a row, of one or two rows.
    Another row may leave meanwhile."""
    draw = random.Random(seed)
    rows, shards = draw.choice([(2, 2), (3, 2), (3, 2), (2, 3)])
    order = draw.sample(range(rows), rows)
    hit = draw.randrange(1, rows)
    ranks_of = [range(shards * row, shards * row + shards) for row in range(rows)]
    victims = [rank for row in order[:hit] for rank in draw.sample(ranks_of[row], draw.choice([1, 1, 2]))]
    kills = tuple((victim, draw.uniform(0.0, 0.1)) for victim in victims)
    goes = [draw.choice(ranks_of[row]) for row in order[hit:-1] if draw.random() < 0.7]
    return Plan(
        seed,
        kills,
        tuple((rank, draw.randrange(STEPS)) for rank in goes),
        by_signal=draw.random() < 0.5,
        size=rows * shards,
        shards=shards,
        clip_norm=draw.choice([None, 0.1]),
        codec=draw.choice(["none", "bf16"]),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--rows", action="store_true", help="of rows of ranks, between which FSDP2 shards the model")
    given = parser.parse_args(arguments)
    waits: list[float] = []
    for seed in range(given.first, given.first + given.seeds):
        found = check(random_rows(seed) if given.rows else random_plan(seed))
        waits += found
        print(seed, " ".join(f"{time_s:.3f}" for time_s in found), flush=True)
    waits.sort()
    print(
        f"{given.seeds} seeds, {len(waits)} kills: next step after the kill, s: "
        f"median {waits[len(waits) // 2]:.3f}, 90 % {waits[9 * len(waits) // 10]:.3f}, longest {waits[-1]:.3f}"
    )


if __name__ == "__main__":
    main()
