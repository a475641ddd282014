"""Plans of trainings with `LocalSteps` whose sites are killed, stop, are late, or join: given ones, and random ones."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from commlayer.frontend.local.arguments import CODECS

SIZE = 4


@dataclasses.dataclass(frozen=True)
class Plan:
    """A training, and what happens to its sites. Processes are numbered by site."""

    seed: int = 0
    sites: int = SIZE
    """Those at the start."""
    layout: str = ""
    """What connects the ranks of a site: "DDP", "FSDP2", or "HSDP", two replicas; empty: a site is one rank."""
    width: int = 1
    """Ranks per site."""
    backend: str = "commlayer"
    """Of WORLD."""
    every: int = 4
    fragments: int = 2
    delay: int = 2
    codec: str = "none"
    weights: tuple[int, ...] | None = None
    """Samples per step of each process."""
    steps: int = 20
    min_sites: int = 1
    kills: tuple[tuple[int, int, float], ...] = ()
    """Process, the turn of a sync, and the seconds from its start to the process's death."""
    stops: tuple[tuple[int, int], ...] = ()
    """Process, and the step before which it raises an exception."""
    deaf: tuple[tuple[int, int], ...] = ()
    """Process, and the turn of a sync of which it does not hear the end."""
    late: tuple[int, ...] = ()
    """Processes that are killed after the last sync."""
    early: tuple[tuple[int, int], ...] = ()
    """Process, and the number of its steps after which its loop ends, however many the others make."""
    has_buffers: bool = False
    is_uneven: bool = False
    """Then `steps` is the number of steps that the sites make in the mean."""
    pauses_s: tuple[float, ...] = (0.002,) * (3 * SIZE)
    """The longest computation of a step, by process."""
    joins: tuple[int, ...] = ()
    """The turns at which further sites ask to join. Their numbers follow the order in which they ask."""
    outer: tuple[float, float] = (1.0, 0.0)
    meeting: int | None = None
    """A process that dies when the sites meet in a new group."""
    last_piece: tuple[int, int] | None = None
    """A process that dies when it has given or got so many pieces of a state."""
    hosts: tuple[int, ...] | None = None
    """The host of each site, by number, as its group sees it; None: as it is."""
    is_slow: bool = False
    """Whether states travel in small pieces, one at a time."""
    kept: int = 8
    """A site that joins keeps at least so many outcomes; then it may make the others wait."""
    quorum: int | None = None
    away: tuple[tuple[int, int], ...] = ()
    """Process, and the turn of a sync which its loop does not begin: it waits until that has begun without it."""
    is_paced: bool = False
    """Whether H changes as training goes on, as with `every="auto"`."""
    waits: bool = False
    """Whether steps are long while a site that has asked does not train: so all join, also on a busy machine."""

    @property
    def size(self) -> int:
        """The processes at the start."""
        return self.sites * self.width

    def mates(self, process: int) -> range:
        """The processes of its site."""
        first = process // self.width * self.width
        return range(first, first + self.width)

    def turn(self, process: int) -> int:
        """The turn at which a process asks to join."""
        return self.joins[(process - self.size) // self.width]


def random_plan(seed: int) -> Plan:
    """Up to two of the sites go, and up to two others join, while the others train."""
    draw = random.Random(seed)
    fragments = draw.randint(1, 3)
    every = draw.randint(fragments, 8)
    count = draw.choice([0, 1, 1, 2])
    steps = draw.randint(3 * every, 40) if count else draw.randint(every, 24)
    joins = tuple(sorted(draw.randrange(steps * fragments // every // 2 + 1) for _ in range(count)))
    size = SIZE + len(joins)
    victims = draw.sample(range(SIZE), draw.choice([0, 1, 2] if joins else [1, 1, 2]))
    victims += [process for process in range(SIZE, size) if draw.random() < 0.25]
    syncs = steps * fragments // every + fragments
    kills, stops = list[tuple[int, int, float]](), list[tuple[int, int]]()
    for victim in victims:
        first = 0 if victim < SIZE else joins[victim - SIZE]
        if draw.random() < 0.75:
            kills.append((victim, draw.randrange(first, syncs), draw.choice([0.0, draw.uniform(0.0, 0.004)])))
        else:
            stops.append((victim, draw.randrange(steps)))
    weights = tuple(draw.randint(0, 4) for _ in range(size)) if draw.random() < 0.3 else None
    is_uneven = draw.random() < 0.3
    return Plan(
        seed,
        **form_of(draw, every, fragments, weights, size, is_uneven=is_uneven),
        steps=steps,
        kills=tuple(kills),
        stops=tuple(stops),
        joins=joins,
        outer=draw.choice([(1.0, 0.0), (1.0, 0.0), (0.7, 0.6)]),
        is_slow=draw.random() < 0.5,
        kept=draw.choice([2, 8]),
        waits=draw.random() < 0.8,
        early=early_of(seed, SIZE, steps),
        is_paced=not is_uneven and random.Random(f"{seed} paced").random() < 1 / 3,
    )


def early_of(seed: int, size: int, steps: int) -> tuple[tuple[int, int], ...]:
    """A loop that ends early, in a third of the plans."""
    draw = random.Random(f"{seed} early")
    return ((draw.randrange(size), draw.randrange(steps)),) if draw.random() < 1 / 3 else ()


def form_of(
    draw: random.Random, every: int, fragments: int, weights: tuple[int, ...] | None, size: int, *, is_uneven: bool
) -> dict[str, Any]:
    """How random sites exchange their fragments."""
    return {
        "every": every,
        "fragments": fragments,
        "delay": draw.randint(0, -(-every // fragments)),
        "codec": draw.choice(CODECS) if weights is None and not is_uneven else "none",
        "weights": weights,
        "has_buffers": draw.random() < 0.5,
        "is_uneven": is_uneven,
        "pauses_s": tuple(draw.uniform(0.0, 0.008 if is_uneven else 0.002) for _ in range(size)),
    }


def random_site_plan(seed: int) -> Plan:
    """Sites of several ranks, of which up to two lose a rank or more, and another one may join."""
    draw = random.Random(seed)
    width = draw.choice([2, 2, 3])
    sites = draw.choice([3, 4]) if width == 2 else 3
    fragments = draw.randint(1, 3)
    every = draw.randint(fragments, 6)
    joins = draw.random() < 0.4
    steps = draw.randint(3 * every, 28) if joins else draw.randint(every, 24)
    syncs = steps * fragments // every + fragments
    asks = draw.randrange(steps * fragments // every // 2 + 1)
    kills, stops = list[tuple[int, int, float]](), list[tuple[int, int]]()
    for site in draw.sample(range(sites), draw.choice([1, 1, 2])):
        for victim in draw.sample(range(site * width, (site + 1) * width), draw.choice([1, 1, 2])):
            if draw.random() < 0.75:
                kills.append((victim, draw.randrange(syncs), draw.choice([0.0, draw.uniform(0.0, 0.01)])))
            else:
                stops.append((victim, draw.randrange(steps)))
    size = (sites + joins) * width
    if joins and draw.random() < 0.25:
        kills.append((draw.randrange(sites * width, size), draw.randrange(asks, syncs), draw.uniform(0.0, 0.01)))
    weights = tuple(draw.randint(0, 4) for _ in range(size)) if draw.random() < 0.3 else None
    is_uneven = draw.random() < 0.3
    return Plan(
        seed,
        sites,
        draw.choice(["DDP", "FSDP2"]),
        width,
        **form_of(draw, every, fragments, weights, size, is_uneven=is_uneven),
        steps=steps,
        kills=tuple(kills),
        stops=tuple(stops),
        joins=(asks,) * joins,
        is_slow=draw.random() < 0.5,
        waits=draw.random() < 0.8,
        outer=draw.choice([(1.0, 0.0), (1.0, 0.0), (0.7, 0.6)]),
        early=early_of(seed, sites * width, steps),
        is_paced=not is_uneven and random.Random(f"{seed} paced").random() < 1 / 3,
    )


def late(plan: Plan) -> Plan:
    """The same, and loops that are away for a turn or more."""
    draw = random.Random(f"{plan.seed} away")
    turns = range(1, plan.steps * plan.fragments // plan.every)
    size = plan.size + plan.width * len(plan.joins)
    away = tuple((process, turn) for process in range(size) for turn in turns if draw.random() < 0.08)
    return dataclasses.replace(plan, quorum=draw.choice([1, 2]), away=away, is_paced=False)
