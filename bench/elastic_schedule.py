"""Schedulers of a cluster whose jobs grow and shrink: mean completion times, simulated, with measured pauses.

    python -m bench.elastic_schedule

64 GPUs on 16 hosts; jobs arrive at random. A job makes a number of steps with a batch that stays the same, on as many
GPUs as the scheduler gives it:

- fifo: as many as it asked for, in the order of arrival.
- shortest: the same, the shortest remaining time first. Others are stopped for it.
- equal: as many for each job.
- ones: that of ONES (Bian et al., SC'21, arXiv 2108.03645), without its growth of batches. Schedules evolve: each is a
  job per GPU; they are mutated, crossed, and packed by hosts. The best has the least sum of remaining time x GPUs.

Growing and shrinking costs what `commlayer.elastic` needs, or torchrun's restart (`python -m bench.elastic kill`). All
times are simulated. Nothing is kept.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from bench.harness.options import options

HOSTS, GPUS_PER_HOST = 16, 4
GPUS = HOSTS * GPUS_PER_HOST
RATE_BPS = 10e9
"""Of each host's link."""
TICK_S = 60.0
"""The longest time between two decisions of a scheduler."""

Allocation = dict[int, tuple[int, ...]]
"""The GPUs of each job."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What arrives. `compute_s` is a step on one GPU; a state is three times the gradients."""

    number: int
    arrives_s: float
    steps: float
    compute_s: float
    gradient_bytes: float
    asked: int

    @property
    def most(self) -> int:
        """The most GPUs that its batch can be divided into."""
        return min(4 * self.asked, GPUS)

    @property
    def state_s(self) -> float:
        """Seconds in which its state travels."""
        return 3 * 8 * self.gradient_bytes / RATE_BPS

    def step_s(self, gpus: Sequence[int]) -> float:
        """Of a step on these GPUs. A host sends the gradients of its GPUs together."""
        hosts = len({gpu // GPUS_PER_HOST for gpu in gpus})
        return self.compute_s / len(gpus) + 2 * (hosts - 1) / hosts * 8 * self.gradient_bytes / RATE_BPS


@dataclasses.dataclass(frozen=True)
class Pauses:
    """Of a change: until a process has started, and in which others wait. `restarts`: all processes start again."""

    start_s: float
    wait_s: float
    restarts: bool


PAUSES = {"elastic": Pauses(8.0, 0.13, restarts=False), "restart": Pauses(8.7, 0.0, restarts=True)}
"""By `python -m bench.elastic join` and `kill`: the pause of a join; torchrun's restart, nearly all of it the start of
processes."""


@dataclasses.dataclass
class Run:
    """A job in the cluster. It stands still until `stalled_s`, and has only the GPUs `kept` until `ready_s`."""

    job: Job
    left: float
    gpus: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    stalled_s: float = 0.0
    ready_s: float = 0.0

    def move(self, gpus: Sequence[int], now_s: float, pauses: Pauses) -> None:
        """Gives it other GPUs."""
        gpus = tuple(sorted(gpus))
        if gpus == self.gpus:
            return
        still = tuple(gpu for gpu in self.kept if gpu in gpus)
        if pauses.restarts or not still:
            state_s = self.job.state_s if self.left < self.job.steps else 0.0
            self.gpus, self.kept = gpus, gpus
            self.stalled_s = self.ready_s = now_s + pauses.start_s + state_s
            return
        joins = not set(gpus) <= set(self.gpus)
        changes = joins + (len(still) < len(self.kept))
        self.stalled_s = max(self.stalled_s, now_s) + pauses.wait_s * changes
        self.ready_s = now_s + pauses.start_s + self.job.state_s if joins else max(self.ready_s, now_s)
        self.gpus, self.kept = gpus, still if self.ready_s > now_s else gpus

    def end_s(self, now_s: float) -> float:
        """When it has made all its steps, if nothing changes."""
        if not self.gpus:
            return math.inf
        begin_s = max(now_s, self.stalled_s)
        if begin_s < self.ready_s:
            slow = (self.ready_s - begin_s) / self.job.step_s(self.kept)
            if slow >= self.left:
                return begin_s + self.left * self.job.step_s(self.kept)
            return self.ready_s + (self.left - slow) * self.job.step_s(self.gpus)
        return begin_s + self.left * self.job.step_s(self.gpus)

    def advance(self, now_s: float, to_s: float) -> None:
        """Makes its steps of that time."""
        if not self.gpus:
            return
        begin_s = max(now_s, self.stalled_s)
        slow_s = max(0.0, min(to_s, self.ready_s) - begin_s)
        fast_s = max(0.0, to_s - max(begin_s, self.ready_s))
        self.left -= slow_s / self.job.step_s(self.kept) + fast_s / self.job.step_s(self.gpus)
        if to_s >= self.ready_s:
            self.kept = self.gpus


Policy = Callable[[Mapping[int, Run], float, Pauses], Allocation]
"""Of the jobs that are there, by number, at a time."""


def placed(wanted: Mapping[int, int], runs: Mapping[int, Run]) -> Allocation:
    """GPUs for so many per job: those that it has, then whole hosts, then what is left."""
    found = {number: list(runs[number].gpus[:count]) for number, count in wanted.items()}
    free = set(range(GPUS)) - {gpu for gpus in found.values() for gpu in gpus}
    for number, count in sorted(wanted.items(), key=lambda wish: -wish[1]):
        while len(found[number]) < count:
            room = Counter(gpu // GPUS_PER_HOST for gpu in free)
            own = {gpu // GPUS_PER_HOST for gpu in found[number]}
            missing = count - len(found[number])
            host = max(
                room,
                key=lambda candidate: (candidate in own, min(room[candidate], missing), -room[candidate], -candidate),
            )
            found[number].append(min(gpu for gpu in free if gpu // GPUS_PER_HOST == host))
            free.remove(found[number][-1])
    return {number: tuple(gpus) for number, gpus in found.items()}


def fifo(runs: Mapping[int, Run], _now_s: float, _pauses: Pauses) -> Allocation:
    wanted = {number: run.job.asked for number, run in runs.items() if run.gpus}
    for number, run in sorted(runs.items()):
        if number not in wanted:
            if sum(wanted.values()) + run.job.asked > GPUS:
                break
            wanted[number] = run.job.asked
    return placed(wanted, runs)


def shortest(runs: Mapping[int, Run], _now_s: float, _pauses: Pauses) -> Allocation:
    wanted: dict[int, int] = {}
    for number, run in sorted(runs.items(), key=lambda run: run[1].left * run[1].job.step_s(range(run[1].job.asked))):
        if sum(wanted.values()) + run.job.asked <= GPUS:
            wanted[number] = run.job.asked
    return placed(wanted, runs)


def equal(runs: Mapping[int, Run], _now_s: float, _pauses: Pauses) -> Allocation:
    wanted = dict.fromkeys(sorted(runs)[:GPUS], 0)
    free = GPUS
    while free and (open_ := [number for number, count in wanted.items() if count < runs[number].job.most]):
        for number in open_[:free]:
            wanted[number] += 1
            free -= 1
    return placed(wanted, runs)


class Ones:
    """ONES' search. A schedule has a job, or None, for each GPU."""

    POPULATION, GENERATIONS = 12, 8

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._population: list[list[int | None]] = []

    def __call__(self, runs: Mapping[int, Run], now_s: float, pauses: Pauses) -> Allocation:
        if not runs:
            return {}
        owners = {gpu: number for number, run in runs.items() for gpu in run.gpus}
        begun = [[owners.get(gpu) for gpu in range(GPUS)], *self._population]
        self._population = [self._refresh(candidate, runs) for candidate in begun]
        for _ in range(self.GENERATIONS):
            children = []
            for _ in range(self.POPULATION):
                one, other = (self._draw.choice(self._population) for _ in range(2))
                child = [self._draw.choice(pair) for pair in zip(one, other, strict=True)]
                child = [None if self._draw.random() < 0.1 else gene for gene in child]
                child = self._refresh(child, runs)
                children += [child, sorted(child, key=list(dict.fromkeys(child)).index)]  # each job's side by side
            ranked = sorted(
                [*self._population, *children], key=lambda candidate: self._score(candidate, runs, now_s, pauses)
            )
            self._population = ranked[: self.POPULATION]
        return _allocation(self._population[0])

    def _refresh(self, genome: Sequence[int | None], runs: Mapping[int, Run]) -> list[int | None]:
        """Without jobs that have ended, or have too many GPUs; idle GPUs get jobs."""
        counts: Counter[int] = Counter()
        found: list[int | None] = []
        for number in genome:
            is_kept = number is not None and number in runs and counts[number] < runs[number].job.most
            found.append(number if is_kept else None)
            if number is not None and is_kept:
                counts[number] += 1
        open_ = [number for number, run in runs.items() if counts[number] < run.job.most]
        for gpu, number in enumerate(found):
            if number is None and open_:
                found[gpu] = chosen = self._draw.choice(open_)
                counts[chosen] += 1
                if counts[chosen] == runs[chosen].job.most:
                    open_.remove(chosen)
        return found

    def _score(self, genome: Sequence[int | None], runs: Mapping[int, Run], now_s: float, pauses: Pauses) -> float:
        """The sum of remaining time x GPUs (ONES' SRUF), the pauses of the change included."""
        total = 0.0
        for number, gpus in _allocation(genome).items():
            run = dataclasses.replace(runs[number])
            run.move(gpus, now_s, pauses)
            total += (run.end_s(now_s) - now_s) * len(gpus)
        return total


def _allocation(genome: Sequence[int | None]) -> Allocation:
    found: dict[int, list[int]] = {}
    for gpu, number in enumerate(genome):
        if number is not None:
            found.setdefault(number, []).append(gpu)
    return {number: tuple(gpus) for number, gpus in found.items()}


def simulate(jobs: Sequence[Job], policy: Policy, pauses: Pauses) -> list[float]:
    """The completion time of each job, from its arrival."""
    coming, runs = sorted(jobs, key=lambda job: -job.arrives_s), dict[int, Run]()
    found: dict[int, float] = {}
    now_s = 0.0
    while coming or runs:
        to_s = min([now_s + TICK_S if runs else math.inf, *(run.end_s(now_s) for run in runs.values())])
        to_s = min(to_s, coming[-1].arrives_s) if coming else to_s
        for run in runs.values():
            run.advance(now_s, to_s)
        now_s = to_s
        for number in [number for number, run in runs.items() if run.left < 1e-6]:
            found[number] = now_s - runs.pop(number).job.arrives_s
        while coming and coming[-1].arrives_s <= now_s:
            job = coming.pop()
            runs[job.number] = Run(job, job.steps)
        allocation = policy(runs, now_s, pauses)
        for number, run in runs.items():
            run.move(allocation.get(number, ()), now_s, pauses)
    return [found[job.number] for job in jobs]


def trace(seed: int, count: int, load: float) -> list[Job]:
    """Jobs of ten minutes to three hours on the GPUs that they ask for, which would use `load` of the cluster."""
    draw, jobs, now_s = random.Random(seed), list[Job](), 0.0
    for number in range(count):
        asked, step_s = draw.choice([1, 2, 4, 8, 16]), draw.uniform(0.3, 2.0)
        seconds = math.exp(draw.uniform(math.log(600), math.log(10800)))
        jobs.append(Job(number, now_s, seconds / step_s, step_s * asked, math.exp(draw.uniform(18.4, 21.8)), asked))
        now_s += draw.expovariate(1) * seconds * asked / (load * GPUS)
    return jobs


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__, seeds=5)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--load", type=float, default=0.8, help="of the cluster, if all jobs get what they ask for")
    given = parser.parse_args(arguments)
    print(f"simulated: {given.jobs} jobs, load {given.load:g}, {given.seeds} seeds")
    print("| scheduler | changes by | mean completion (s) | / fifo, median | of all seeds |\n|---|---|---|---|---|")
    base: list[float] = []
    kinds: dict[str, Callable[[int], Policy]] = {"shortest": lambda _: shortest, "equal": lambda _: equal, "ones": Ones}
    traces = [trace(seed, given.jobs, given.load) for seed in range(given.seeds)]
    for name, kind in [("fifo", "elastic"), *((name, kind) for kind in PAUSES for name in kinds)]:
        policies = [kinds[name](seed) if name in kinds else fifo for seed in range(given.seeds)]
        pairs = zip(traces, policies, strict=True)
        means = [statistics.fmean(simulate(jobs, policy, PAUSES[kind])) for jobs, policy in pairs]
        base = base or means
        ratios = [mean / first for mean, first in zip(means, base, strict=True)]
        row = (
            f"{statistics.median(means):.0f} | {statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f}"
        )
        print(f"| {name} | {'-' if name == 'fifo' else kind} | {row} |", flush=True)


if __name__ == "__main__":
    main()
