"""A small training job whose ranks are killed, leave and join by plan. By hand, with many seeds:

python -m tests.process.elastic_joins --seeds 100
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

import commlayer
from commlayer.frontend.elastic import averages, replica
from commlayer.frontend.group import transfer
from tests import ranks

SIZE = 3
SAMPLES, BATCH, EPOCHS = 100, 24, 6
STEPS = EPOCHS * -(-SAMPLES // BATCH)


@dataclasses.dataclass
class Plan:
    """What happens. Processes from SIZE on join; each has a number as in `members` only by chance."""

    seed: int = 0
    joins: tuple[int, ...] = ()
    """After how many steps each of them asks."""
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


@dataclasses.dataclass
class Report:
    """What a process that lived has seen."""

    digest: str
    """Of the parameters, and the states of the optimizer and the schedule."""
    number: int
    end: str
    """"done", "left", or why it could not join."""
    history: dict[int, list[int]]
    """The members that computed each step in which this process has made a step."""
    samples: dict[int, list[int]]
    """The samples of all ranks in those steps."""
    joined: int
    """The step at which it began to compute."""


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    averages.BUCKET_BYTES = 0  # many buckets
    model = nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.BatchNorm1d(50), nn.Linear(50, 7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7)


def loss_of(model: nn.Module, samples: Sequence[int]) -> torch.Tensor:
    noise = [torch.randn(37, generator=torch.Generator().manual_seed(sample)) for sample in samples]
    values = torch.stack(noise)
    model.eval()  # the loss of a batch is the mean of its samples'
    found: torch.Tensor = model(values[:, :30])
    return (found - values[:, 30:]).square().mean()


def digest_of(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any) -> str:
    state = [*model.state_dict().values(), *(each for of in optimizer.state.values() for each in of.values())]
    found = hashlib.sha256(b"".join(each.numpy().tobytes() for each in state))
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
    joins = rank >= SIZE
    if plan.piece_s:
        slow(plan.piece_s)
    if plan.kept:
        vars(replica).update(KEPT_BYTES=0, KEPT_LEAST=plan.kept)
    model, optimizer, schedule = build(plan.seed + 1000 * rank * joins)
    store: Any = ranks.store()
    pauses = random.Random(f"{plan.seed} {rank}")
    history: dict[int, list[int]] = {}
    number, joined, end = -1, 0, "done"
    if joins:
        store.set(f"started {rank}", "")
        store.wait([f"made {plan.joins[rank - SIZE]}"])
        _die_by(plan, rank)
    else:
        ranks.init(rank, SIZE, timeout=timedelta(seconds=20))
    given = store if joins else None
    job = commlayer.elastic(model, optimizer, schedule=schedule, join=given, clip_norm=plan.clip_norm, codec=plan.codec)
    try:
        with job:
            sampler = job.sampler(range(SAMPLES), BATCH, seed=plan.seed, by_speed=plan.by_speed)
            number, joined = job.number, job.steps
            while sampler.epoch < EPOCHS and not job.left:
                for share in sampler:
                    step, computing = job.steps, list(sampler.shares)
                    for newcomer in [SIZE + place for place, at in enumerate(plan.joins) if at == step]:
                        store.wait([f"started {newcomer}"])  # on a busy machine, later than all steps without this
                    store.set(f"share {step} {computing} {number}", json.dumps(share))
                    newcomers = sum(each >= SIZE for each in job.members)
                    is_awaited = plan.waits and newcomers < sum(at <= step for at in plan.joins)
                    time.sleep(0.5 if is_awaited else pauses.uniform(0, plan.pause_s))
                    loss_of(model, share).backward()
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
    samples = {
        step: [
            sample
            for each in computing
            if store.check([f"share {step} {computing} {each}"])
            for sample in json.loads(store.get(f"share {step} {computing} {each}"))
        ]
        for step, computing in history.items()
    }
    found = Report(digest_of(model, optimizer, schedule), number, end, history, samples, joined)
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
    """Runs a plan. All that live to the end have one state, and each epoch had each sample once."""
    ended = ranks.outcomes(train, SIZE + len(plan.joins), plan, **options)
    found = ranks.results(ended, {rank for rank, _ in plan.kills})
    reports: list[Report] = [each for each in found if each is not None]
    done = [each for each in reports if each.end == "done"]
    assert done, "nobody reached the end"
    assert len({each.digest for each in done}) == 1, "two states"
    history: dict[int, list[int]] = {}
    samples: dict[int, list[int]] = {}
    for each in reports:
        for step, computing in each.history.items():
            assert history.setdefault(step, computing) == computing, "two parties"
            samples[step] = each.samples[step]
    per_epoch = STEPS // EPOCHS
    for epoch in range(EPOCHS):
        steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        seen = Counter(sample for step in steps for sample in samples[step])
        assert seen == dict.fromkeys(range(SAMPLES), 1), f"epoch {epoch}: {seen - Counter(range(SAMPLES))}"
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
        tuple((each, draw.uniform(0.0, 0.6)) for each in kills),
        tuple((each, draw.randrange(STEPS)) for each in gone if each not in kills),
        pause_s=draw.choice([0.0, 0.01, 0.04]),
        by_speed=draw.random() < 0.5,
        piece_s=draw.choice([0.0, 0.0, 0.02]),
        kept=draw.choice([0, 2]),
        clip_norm=draw.choice([None, 0.1]),
        codec=draw.choice(["none", "bf16"]),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args(arguments)
    found: Counter[str] = Counter()
    for seed in range(given.first, given.first + given.seeds):
        plan = random_plan(seed)
        reports = check(plan)
        joined = sum(each.number >= SIZE for each in reports)
        found += Counter(kills=len(plan.kills), leaves=len(plan.leaves), joins=len(plan.joins), joined=joined)
        print(seed, plan, [each.end for each in reports], flush=True)
    print(f"{given.seeds} seeds: {dict(found)}")


if __name__ == "__main__":
    main()
