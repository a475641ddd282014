"""Trials made by hand."""

from collections.abc import Sequence
from typing import Any

from commlayer.tools.job.record import Record, Step
from commlayer.tools.job.spec import Phase
from commlayer.tools.job.trial import Trial

Blocks = Sequence[tuple[Phase, Sequence[float]]]


def blocks(*parts: tuple[Phase, Sequence[float]], **fields: float) -> tuple[Step, ...]:
    """Blocks of steps; each gets a first step of 99 s, which must not count."""
    return tuple(
        Step(phase, seconds, **fields)  # type: ignore[arg-type]
        for phase, times in parts
        for seconds in (99.0, *times)
    )


def trial(*records: Record) -> Trial:
    return Trial(records, 60.0)


def job(
    real: float = 1.0, short: float = 0.5, none: Sequence[float | Sequence[float]] = (0.3, 0.4), **fields: Any
) -> Trial:
    """A job of as many ranks as `none` has times; the steps of a phase are equal, unless `none` has each of them."""
    records = [
        Record(
            rank,
            blocks(
                ("real", [real] * 2),
                ("short", [short] * 4),
                ("none", [own] * 12 if isinstance(own, float) else own),
                ("real", [real] * 2),
            ),
            world=len(none),
            host=f"host{rank}",
            backend="gloo",
            is_complete=True,
            **fields,
        )
        for rank, own in enumerate(none)
    ]
    return trial(*records)


def on_engine(
    seconds: float = 0.8, in_flight_s: Sequence[float] = (0.5, 0.6), collectives: int = 3, **fields: Any
) -> Trial:
    """The job on commlayer, with operations in flight for these times on its ranks; `collectives` of them in a step."""
    given = {
        "counters": {"packets_sent": 10_000, "packets_lost": 0},
        "paths": ({"round_trip_us": 250, "queue_us": 50},),
        "lags_s": {},
        **fields,
    }
    records = []
    for rank, own_s in enumerate(in_flight_s):
        steps = blocks(("real", [seconds] * 4), collectives=collectives, nbytes=3000, in_flight_s=own_s)
        records.append(Record(rank, steps, world=len(in_flight_s), uses_engine=True, is_complete=True, **given))
    return trial(*records)
