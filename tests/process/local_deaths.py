"""Training with `LocalSteps(min_sites=...)`, whose sites are killed, or stop by an exception. By hand, with many seeds:

python -m tests.process.local_deaths --seeds 100
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import commlayer
from commlayer.compress.fine import Fine
from commlayer.frontend.local.arguments import CODECS
from commlayer.frontend.local.fragment import fragments_of
from commlayer.frontend.local.rounds import Rounds
from commlayer.frontend.local.site import Site
from tests import ranks
from tests.process.test_local_steps import ERRORS, Given

SIZE = 4
RATE = 0.1


@dataclasses.dataclass(frozen=True)
class Plan:
    """A training, and what happens to its sites."""

    seed: int = 0
    every: int = 4
    fragments: int = 2
    delay: int = 2
    codec: str = "none"
    weights: tuple[int, ...] | None = None
    """Samples per step of each rank."""
    steps: int = 20
    min_sites: int = 1
    kills: tuple[tuple[int, int, float], ...] = ()
    """Rank, the turn of a sync, and the seconds from its start to the rank's death."""
    stops: tuple[tuple[int, int], ...] = ()
    """Rank, and the step before which it raises an exception."""
    deaf: tuple[tuple[int, int], ...] = ()
    """Rank, and the turn of a sync of which it does not hear the end."""
    late: tuple[int, ...] = ()
    """Ranks that are killed after the last sync."""
    has_buffers: bool = False
    is_uneven: bool = False
    """Then `steps` is the number of steps that the sites make in the mean."""
    pauses_s: tuple[float, ...] = (0.002,) * SIZE
    """The longest computation of a step, by rank."""


@dataclasses.dataclass
class Report:
    """What a rank that lived has seen."""

    values: list[float]
    """Parameters, then buffers."""
    syncs: list[tuple[tuple[int, ...], tuple[float, ...]]]
    """Who took part in each sync, and with how many samples."""
    steps: int
    taken: list[int]
    """The turns of the syncs whose outcome came from another site, after a death."""


class Stopped(Exception):  # noqa: N818  # an error of a job
    pass


class Watched(Rounds):
    """Writes down what is sent, and what has become of it."""

    plan: Plan
    folder: Path
    rank: int
    size: int

    def watch(self, rank: int, size: int, plan: Plan, folder: Path) -> None:
        self.rank, self.plan, self.folder = rank, plan, folder
        self.parties = {size: tuple(range(size))}
        self.ended: list[tuple[tuple[int, ...], tuple[float, ...]]] = []
        self.taken: list[int] = []

    def _begin(self, head: Any, difference: Tensor, *given: Any) -> None:
        writing = self.folder / f"{self.rank} {head.turn} half"  # it may be killed there
        torch.save(difference, writing)
        writing.rename(self.folder / f"{self.rank} {head.turn}")
        super()._begin(head, difference, *given)
        for rank, turn, after_s in self.plan.kills:
            if (rank, turn) == (self.rank, head.turn):
                threading.Thread(target=_die, args=(after_s,), daemon=True).start()

    def _ended(self, sync: Any) -> Any:
        if (self.rank, sync.head.turn) in self.plan.deaf:
            finish, sync.finish = sync.finish, lambda: _deaf(sync, finish)
        ended, outcome = super()._ended(sync)
        self.ended.append((self.parties[len(outcome.heads)], tuple(head.samples for head in outcome.heads)))
        return ended, outcome

    def _close(self) -> None:
        if self.rank in self.plan.late:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._close()

    def _meet(self, sync: Any) -> Any:
        members = self._living._party.members  # type: ignore[union-attr]
        self.parties[len(members)] = tuple(members)
        found = super()._meet(sync)
        if found is not None:
            self.taken.append(sync.head.turn)
        return found


def _deaf(sync: Any, finish: Any) -> None:
    """The sync has ended, but this rank learns of a death before it learns that."""
    sync.finish = finish
    finish()
    raise commlayer.PeerLostError("it did not hear the end")


def _die(after_s: float) -> None:
    time.sleep(after_s)
    os.kill(os.getpid(), signal.SIGKILL)


def train(rank: int, size: int, plan: Plan, folder: str) -> Report | None:
    ranks.init(rank, size, timeout=timedelta(seconds=20))
    model = Given()
    mean = torch.zeros(3 if plan.has_buffers else 0)
    model.register_buffer("mean", mean)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    samples = None if plan.weights is None else lambda: plan.weights[rank]  # type: ignore[index]
    local = commlayer.LocalSteps(
        model, optimizer, plan.every, plan.fragments, (1.0, 0.0), plan.codec, samples, delay=plan.delay,
        min_sites=plan.min_sites, buffers="average", uneven=plan.is_uneven,
    )  # fmt: skip
    pauses = random.Random(f"{plan.seed} {rank}")
    try:
        with local:
            rounds: Any = local._rounds
            rounds.__class__ = Watched
            rounds.watch(rank, size, plan, Path(folder))
            for step in range(plan.steps if not plan.is_uneven else 1000):
                if plan.is_uneven and local.trained >= size * plan.steps:
                    break
                if (rank, step) in plan.stops:
                    raise Stopped
                time.sleep(pauses.uniform(0, plan.pauses_s[rank]))
                model.step(optimizer, rank, step)
                mean += 1 + rank
    except Stopped:
        return None
    finally:
        dist.destroy_process_group()
    return Report([*model.values().tolist(), *mean.tolist()], rounds.ended, local.steps, rounds.taken)


def check(plan: Plan, **options: Any) -> dict[int, Report]:
    """Runs the plan. All that live must have the same weights, bit by bit; each sync has the same sites for all of
    them; and the shared weights are the sum of what these have sent, in which each step counts once.

    Returns the reports of the ranks that live.
    """
    with tempfile.TemporaryDirectory() as folder:
        killed = {rank for rank, *_ in plan.kills} | set(plan.late)
        found = ranks.results(ranks.outcomes(train, SIZE, plan, folder, **options), killed)
        lived = {rank: report for rank, report in enumerate(found) if report is not None}
        sent = {
            (rank, turn): torch.load(path).double()
            for path in Path(folder).iterdir()
            if "half" not in path.name
            for rank, turn in [map(int, path.name.split())]
        }
    first = next(iter(lived.values()))
    for report in lived.values():
        assert report.values == first.values, "two states"
        assert report.syncs == first.syncs, "a sync that not all have applied"
    shared = [values.double() for values in _fragments(Given().values(), plan)]
    counted = {rank: [torch.zeros_like(values) for values in shared] for rank in lived}
    for turn, (members, samples) in enumerate(first.syncs):
        at = turn % plan.fragments
        weights = samples if plan.weights is not None or plan.is_uneven else (1.0,) * len(members)
        for rank, weight in zip(members, weights, strict=True):
            shared[at] += sent[rank, turn] * weight / (sum(weights) or 1.0)
            if rank in counted and weight:
                counted[rank][at] += sent[rank, turn]
    limit = ERRORS[plan.codec] if plan.codec != "none" else 1e-5
    for ours, theirs in zip(_fragments(torch.tensor(first.values)[: len(Given().values())], plan), shared, strict=True):
        assert _apart(ours.double(), theirs) < limit, "the shared weights are not what the sites have sent"
    for rank, parts in counted.items():
        if plan.codec == "none" and (plan.weights is None or plan.weights[rank]):
            for ours, steps in zip(parts, _fragments(_made(rank, lived[rank].steps), plan), strict=True):
                assert _apart(ours, steps.double()) < 1e-4, f"a step of rank {rank} was lost, or counted twice"
    return lived


def _apart(values: Tensor, others: Tensor) -> float:
    return float((values - others).norm() / others.norm())


def _made(rank: int, steps: int) -> Tensor:
    """The sum of a rank's own steps."""
    model = Given()
    start = model.values()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(steps):
        model.step(optimizer, rank, step)
    return model.values() - start


def _fragments(values: Tensor, plan: Plan) -> list[Tensor]:
    """These values of a model, by fragment."""
    model = Given()
    torch.nn.utils.vector_to_parameters(values, model.parameters())
    return [found.shared for found in fragments_of(list(model.parameters()), plan.fragments, Fine(), Site())]


def random_plan(seed: int) -> Plan:
    """One or two of the sites go while the others train."""
    draw = random.Random(seed)
    fragments = draw.randint(1, 3)
    every = draw.randint(fragments, 8)
    steps = draw.randint(every, 24)
    victims = draw.sample(range(SIZE), draw.choice([1, 1, 2]))
    syncs = steps * fragments // every + fragments
    kills, stops = list[tuple[int, int, float]](), list[tuple[int, int]]()
    for victim in victims:
        if draw.random() < 0.75:
            kills.append((victim, draw.randrange(syncs), draw.choice([0.0, draw.uniform(0.0, 0.004)])))
        else:
            stops.append((victim, draw.randrange(steps)))
    weights = tuple(draw.randint(0, 4) for _ in range(SIZE)) if draw.random() < 0.3 else None
    is_uneven = draw.random() < 0.3
    return Plan(
        seed,
        every,
        fragments,
        draw.randint(0, -(-every // fragments)),
        draw.choice(CODECS) if weights is None and not is_uneven else "none",
        weights,
        steps,
        has_buffers=draw.random() < 0.5,
        is_uneven=is_uneven,
        pauses_s=tuple(draw.uniform(0.0, 0.008 if is_uneven else 0.002) for _ in range(SIZE)),
        kills=tuple(kills),
        stops=tuple(stops),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args(arguments)
    taken = 0
    for seed in range(given.first, given.first + given.seeds):
        plan = random_plan(seed)
        lived = check(plan, environ=ranks.UDP if seed % 2 else None)
        found = [turn for report in lived.values() for turn in report.taken]
        taken += len(found)
        print(seed, plan.kills, plan.stops, f"from another site: {found}" if found else "", flush=True)
    print(f"{given.seeds} seeds: all states equal, no sync lost; {taken} outcomes of syncs came from another site")


if __name__ == "__main__":
    main()
