"""A small training job whose ranks are killed, leave and join by plan. By hand, with many seeds:

python -m tests.process.elastic_joins --seeds 100
python -m tests.process.elastic_joins --seeds 100 --rows
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import commlayer
from commlayer.frontend.elastic import averages
from commlayer.frontend.group import kept, transfer
from commlayer.frontend.group.parts import part_of
from tests import ranks

SIZE = 3
SAMPLES, BATCH, EPOCHS = 100, 24, 6
STEPS = EPOCHS * -(-SAMPLES // BATCH)
EXACT_SAMPLES = 96
"""Of which each batch is a whole one, also of a row of three."""


@dataclasses.dataclass
class Plan:
    """What happens. Processes from `first` on join; each has a number as in `members` only by chance."""

    seed: int = 0
    joins: tuple[int, ...] = ()
    """After how many steps each of them asks, or each of their rows."""
    first: int = SIZE
    """Processes at the start."""
    shards: int = 1
    """The ranks of a row, between which FSDP2 divides the model; 1: each process has all of it."""
    is_exact: bool = False
    """The steps need no rounding, so they do not depend on the members. For rows, without a codec."""
    kills: tuple[tuple[int, float], ...] = ()
    """The process, and seconds after its first step, or after it asks to join."""
    leaves: tuple[tuple[int, int], ...] = ()
    """The process, and the step of the job after which it wants to leave."""
    pause_s: float = 0.01
    """Longest computation of a step."""
    by_speed: bool = True
    piece_s: float = 0.0
    """Above 0: the state comes in pieces of 4 KiB, one in so many seconds."""
    clip_norm: float | None = None
    codec: str = "none"
    waits: bool = False
    """Steps are long while a process that has asked is no member: all that ask join, also on a busy machine."""
    kept: int = 0
    """Above 0: a process that joins keeps the averages of so many steps, and then makes the others wait."""

    @property
    def size(self) -> int:
        """All processes."""
        return self.first + self.shards * len(self.joins)

    def row(self, rank: int) -> range:
        """The processes that go, or join, with this one."""
        begin = rank - rank % self.shards
        return range(begin, begin + self.shards)

    def newcomers(self, step: int) -> list[int]:
        """Those that have asked after so many steps."""
        rows = [place for place, at in enumerate(self.joins) if at <= step]
        return [self.first + self.shards * row + place for row in rows for place in range(self.shards)]

    @property
    def samples(self) -> int:
        return EXACT_SAMPLES if self.is_exact or SAMPLES % self.shards else SAMPLES


@dataclasses.dataclass
class Report:
    """What a process that lived has seen."""

    digest: str
    """Of the parameters, and the states of the optimizer and the schedule."""
    number: int
    end: str
    """"done", "left", "lost" with its row, or why it could not join."""
    history: dict[int, list[int]]
    """The members that computed each step in which this process has made a step."""
    samples: dict[int, list[int]]
    """The samples of all ranks in those steps."""
    joined: int
    """The step at which it began to compute."""
    place: int = 0
    """In its row."""
    text: str = ""
    """The error of a process that was lost with its row."""
    weights: list[float] = dataclasses.field(default_factory=list)
    """Its part of those of `Exact`."""


class Exact(nn.Module):
    """Its gradient is that of a linear function of the samples: sums of whole numbers, which every share of the samples
    that occurs here divides."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5))

    def forward(self, samples: Sequence[int]) -> torch.Tensor:
        found: torch.Tensor = (self.weight * torch.arange(1.0, 6.0)).sum()
        return found * (sum(288.0 * (sample % 7) for sample in samples) / len(samples))


def exact(parameters: Any) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(parameters, lr=1.0, momentum=1.0)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    averages.BUCKET_BYTES = 0  # many buckets
    model = nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.BatchNorm1d(50), nn.Linear(50, 7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7)


def build_row(plan: Plan, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """The same, divided over a row of this process's WORLD."""
    rows = dist.get_world_size() // plan.shards
    mesh = init_device_mesh("cpu", (rows, plan.shards), mesh_dim_names=("rows", "shards"))["shards"]
    model: Any = Exact() if plan.is_exact else build(seed)[0]
    for layer in model.children():
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if plan.is_exact:
        return model, *exact(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7)


def loss_of(model: nn.Module, samples: Sequence[int]) -> torch.Tensor:
    noise = [torch.randn(37, generator=torch.Generator().manual_seed(sample)) for sample in samples]
    values = torch.stack(noise)
    model.eval()  # the loss of a batch is the mean of its samples'
    found: torch.Tensor = model(values[:, :30])
    return (found - values[:, 30:]).square().mean()


def loss_in_row(model: Any, samples: Sequence[int]) -> torch.Tensor:
    return model(samples) if hasattr(model, "weight") else loss_of(model, samples)


def digest_of(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any) -> str:
    state = [*model.state_dict().values(), *(each for of in optimizer.state.values() for each in of.values())]
    found = hashlib.sha256(b"".join(part_of(each).numpy().tobytes() for each in state))
    found.update(json.dumps([schedule.last_epoch, optimizer.param_groups[0]["lr"]]).encode())
    return found.hexdigest()


def slow(piece_s: float) -> None:
    """States travel slowly from this process."""
    vars(transfer).update(PIECE_BYTES=4096, IN_FLIGHT=1)
    real, due_s = transfer.Sending.pump, time.monotonic()

    def pump(self: transfer.Sending) -> None:
        nonlocal due_s
        if time.monotonic() >= due_s:
            due_s = time.monotonic() + piece_s
            real(self)

    transfer.Sending.pump = pump  # type: ignore[method-assign]


def train(rank: int, size: int, plan: Plan) -> Report:
    joins, place = rank >= plan.first, rank % plan.shards
    if plan.piece_s:
        slow(plan.piece_s)
    if plan.kept:
        vars(kept).update(KEPT_BYTES=0, KEPT_LEAST=plan.kept)
    seed = plan.seed + 1000 * rank * joins
    store: Any = ranks.store()
    pauses = random.Random(f"{plan.seed} {rank}")
    history: dict[int, list[int]] = {}
    number, joined, end, text = -1, 0, "done", ""
    if not joins:
        ranks.init(rank, plan.first, timeout=timedelta(seconds=20))
    elif plan.shards > 1:
        own = dist.PrefixStore(f"row {plan.row(rank)}", store)
        ranks.init(place, plan.shards, store=own, timeout=timedelta(seconds=20))
    model, optimizer, schedule = build(seed) if plan.shards == 1 else build_row(plan, seed)
    if joins:
        store.set(f"started {rank}", "")
        store.wait([f"made {plan.joins[(rank - plan.first) // plan.shards]}"])
        _die_by(plan, rank)
    given = store if joins else None
    job = commlayer.elastic(model, optimizer, schedule=schedule, join=given, clip_norm=plan.clip_norm, codec=plan.codec)
    try:
        with job:
            sampler = job.sampler(range(plan.samples), BATCH, seed=plan.seed, by_speed=plan.by_speed)
            number, joined = job.number, job.steps
            while sampler.epoch < EPOCHS and not job.left:
                for share in sampler:
                    step, computing = job.steps, list(sampler.shares)
                    for newcomer in plan.newcomers(step):
                        store.wait([f"started {newcomer}"])  # on a busy machine, later than all steps without this
                    store.set(f"share {step} {computing} {number}", json.dumps(share))
                    newcomers = sum(each >= plan.first for each in job.members)
                    is_awaited = plan.waits and newcomers < len(plan.newcomers(step))
                    time.sleep(0.5 if is_awaited else pauses.uniform(0, plan.pause_s))
                    loss_in_row(model, share).backward()
                    if any(who == rank and step >= at for who, at in plan.leaves):
                        job.leave()
                    if job.step():
                        history[step] = computing
                        store.set(f"made {job.steps}", "")
                    if step == 0:
                        _die_by(plan, rank)
            if job.left:
                end = "left"
    except commlayer.ClosedError as error:
        if not joins:
            raise
        end = str(error)
    except commlayer.PeerLostError as error:
        if not {who for who, _ in plan.kills}.intersection(plan.row(rank)) - {rank}:
            raise
        end, text = "lost", str(error)
    samples = {
        step: [
            sample
            for each in computing
            if store.check([f"share {step} {computing} {each}"])
            for sample in json.loads(store.get(f"share {step} {computing} {each}"))
        ]
        for step, computing in history.items()
    }
    digest = digest_of(model, optimizer, schedule)
    weights = [each for part in model.parameters() for each in part_of(part).tolist()] if plan.is_exact else []
    found = Report(digest, number, end, history, samples, joined, place, text, weights)
    if dist.is_initialized():
        dist.destroy_process_group()
    return found


def _die_by(plan: Plan, rank: int) -> None:
    for _, after_s in [each for each in plan.kills if each[0] == rank]:
        threading.Thread(target=_die, args=(after_s,), daemon=True).start()


def _die(after_s: float) -> None:
    time.sleep(after_s)
    os.kill(os.getpid(), signal.SIGKILL)


def check(plan: Plan, **options: Any) -> list[Report]:
    """Runs a plan. All that live to the end have one state, and each epoch had each sample once. Where the steps need
    no rounding, the state has the bits of one process that trains alone."""
    ended = ranks.outcomes(train, plan.size, plan, **options)
    found = ranks.results(ended, {rank for rank, _ in plan.kills})
    reports: list[Report] = [each for each in found if each is not None]
    done = [each for each in reports if each.end == "done"]
    assert done, "nobody reached the end"
    assert len({(each.place, each.digest) for each in done}) == plan.shards, "two states"
    lost = [each.text for each in reports if each.end == "lost"]
    assert all("row" in text for text in lost), lost
    history: dict[int, list[int]] = {}
    samples: dict[int, list[int]] = {}
    for each in reports:
        for step, computing in each.history.items():
            assert history.setdefault(step, computing) == computing, "two parties"
            samples[step] = each.samples[step]
    per_epoch = -(-plan.samples // BATCH)
    assert sorted(history) == list(range(EPOCHS * per_epoch))
    for epoch in range(EPOCHS):
        steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        seen = Counter(sample for step in steps for sample in samples[step])
        assert seen == dict.fromkeys(range(plan.samples), 1), f"epoch {epoch}: {seen - Counter(range(plan.samples))}"
    if plan.is_exact:
        alone = Exact()
        optimizer, schedule = exact(alone.parameters())
        for step in sorted(history):
            alone(samples[step]).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        parts = [part.tolist() for part in alone.weight.detach().chunk(plan.shards)]
        assert all(each.weights == parts[each.place] for each in done), (parts, [each.weights for each in done])
    return reports


def random_plan(seed: int) -> Plan:
    """One to three processes join; some of those and of the first are killed or leave, but for one that stays."""
    draw = random.Random(seed)
    joins = tuple(sorted(draw.randrange(1, STEPS // 2) for _ in range(draw.choice([1, 1, 2, 3]))))
    everybody = list(range(1, SIZE + len(joins)))
    gone = draw.sample(everybody, draw.randrange(len(everybody)))
    kills = [each for each in gone if draw.random() < 0.6]
    return Plan(
        seed,
        joins,
        kills=tuple((each, draw.uniform(0.0, 0.6)) for each in kills),
        leaves=tuple((each, draw.randrange(STEPS)) for each in gone if each not in kills),
        pause_s=draw.choice([0.0, 0.01, 0.04]),
        by_speed=draw.random() < 0.5,
        piece_s=draw.choice([0.0, 0.0, 0.02]),
        kept=draw.choice([0, 2]),
        clip_norm=draw.choice([None, 0.1]),
        codec=draw.choice(["none", "bf16"]),
    )


def random_rows(seed: int) -> Plan:
    """Two rows of two ranks, or one of three... and one or two rows that join. Ranks of some of the rows are killed, or
    leave with their row; one row of the first stays."""
    draw = random.Random(seed)
    first, shards = draw.choice([(4, 2), (4, 2), (6, 3)])
    joins = tuple(sorted(draw.randrange(1, STEPS // 2) for _ in range(draw.choice([1, 1, 2]) if shards == 2 else 1)))
    rows = [range(begin, begin + shards) for begin in range(shards, first + shards * len(joins), shards)]
    gone = [row for row in rows if draw.random() < 0.5]
    killed = [row for row in gone if draw.random() < 0.7]
    victims = [rank for row in killed for rank in draw.sample(row, draw.choice([1, 1, 2]))]
    is_exact = shards == 2 and draw.random() < 0.5
    return Plan(
        seed,
        joins,
        first,
        shards,
        is_exact,
        kills=tuple((each, draw.uniform(0.0, 0.6)) for each in victims),
        leaves=tuple((draw.choice(row), draw.randrange(STEPS)) for row in gone if row not in killed),
        pause_s=draw.choice([0.0, 0.01, 0.04]),
        by_speed=not is_exact and draw.random() < 0.5,
        piece_s=draw.choice([0.0, 0.0, 0.02]),
        kept=draw.choice([0, 2]),
        clip_norm=None if is_exact else draw.choice([None, 0.1]),
        codec="none" if is_exact else draw.choice(["none", "bf16"]),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--rows", action="store_true", help="of rows of ranks, between which FSDP2 shards the model")
    given = parser.parse_args(arguments)
    found: Counter[str] = Counter()
    for seed in range(given.first, given.first + given.seeds):
        plan = random_rows(seed) if given.rows else random_plan(seed)
        reports = check(plan)
        joined = sum(each.number >= plan.first for each in reports)
        found += Counter(kills=len(plan.kills), leaves=len(plan.leaves), joins=len(plan.joins), joined=joined)
        print(seed, plan, [each.end for each in reports], flush=True)
    print(f"{given.seeds} seeds: {dict(found)}")


if __name__ == "__main__":
    main()
