"""`Split`: the most that communication could win in a step, and the most that each remedy could, from the trials.

    as it is     a    the job's own steps
    short        s    the same messages, of a few bytes each: latency and waiting for slow ranks remain
    left out     b    no communication; the slowest rank of each step counts, because the ranks meet in every step
    on commlayer c    the job's own steps on commlayer, where its backend is gloo

    all           a - b          or a - c, if that is more: what commlayer reached is possible
    compression   a - s          bytes, and losses among them
    latency       the rest       bytes + latency = all
    overlap       c - max(b + T / n, T)
                  T: time in which commlayer's n operations were in flight, on the last rank of a step. The one that the
                  next forward pass needs first cannot hide behind it
    transport     a - c          called loss where packets are lost
    stragglers    b less the mean step of the other ranks: no communication wins it, so it is not part of `all`

Each is the most that one remedy wins by itself; they overlap. For a job on commlayer there is no s: latency is then the
number of operations times the round trip.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..job.record import Record
from ..job.trial import Trial
from .straggler import Straggler, straggler
from .timing import Timing, phase_steps, share_interval, timing

LOSS_LEAST = 0.002
"""Share of lost packets from which the network counts as lossy."""


@dataclass(frozen=True)
class Engine:
    """The communication of the job on commlayer, per step of the mean rank."""

    step: Timing
    transfer_s: float
    """Time with an operation in flight, on the rank with the least of it: the others also wait for the last rank."""
    waited_s: float
    """Time with an operation in flight beyond that: waiting for the last rank."""
    operations: float
    nbytes: float
    loss: float
    """Share of the packets that were lost; those that arrived late were not."""
    round_trip_s: float
    """The round trip of the median path, without its queue; 0 without a network."""
    late_rank: int | None
    """The rank that the others waited for longest."""
    late_s: float
    """Time that the other ranks waited for it."""
    late_share: float
    """Its share of all time that ranks waited for the last one."""


@dataclass(frozen=True)
class Split:
    """The parts of a step, in seconds."""

    as_is: Timing
    short: Timing | None
    """None: not measured, on commlayer."""
    left_out: Timing
    straggler: Straggler
    engine: Engine | None
    """None: not measured."""
    tcp_loss: float
    """Share of TCP segments that were sent again while the job ran as it is."""

    @property
    def is_on_engine(self) -> bool:
        """Whether the job as it is runs on commlayer."""
        return self.engine is not None and self.engine.step == self.as_is

    @property
    def bound(self) -> Timing:
        """The shortest step that was seen: without communication, or on commlayer."""
        if self.engine is None or self.engine.step.median_s >= self.left_out.median_s:
            return self.left_out
        return self.engine.step

    @property
    def all_s(self) -> float:
        """The most that communication could win."""
        return max(0.0, self.as_is.median_s - self.bound.median_s)

    @property
    def share(self) -> float:
        """The same, as a share of the step."""
        return self.all_s / self.as_is.median_s

    @property
    def share_interval(self) -> tuple[float, float]:
        """Its 95 % interval."""
        low, high = share_interval(self.as_is, self.bound)
        return max(0.0, low), max(0.0, high)

    @property
    def bytes_s(self) -> float:
        """The most that compression could win."""
        return self.all_s - self.latency_s

    @property
    def latency_s(self) -> float:
        """The most that fewer or faster small messages could win."""
        if self.short is None:
            trips_s = 0.0 if self.engine is None else self.engine.operations * self.engine.round_trip_s
            return min(self.all_s, trips_s)
        return min(self.all_s, max(0.0, self.short.median_s - self.bound.median_s))

    @property
    def overlap_s(self) -> float | None:
        """The most that overlap with computation could win; None: not measured."""
        if self.engine is None:
            return None
        transfer_s = self.engine.transfer_s
        left_s = max(self.bound.median_s + transfer_s / self.engine.operations, transfer_s)
        return min(self.all_s, max(0.0, self.engine.step.median_s - left_s))

    @property
    def transport_s(self) -> float | None:
        """What commlayer wins as it is; negative where it is slower. None: not measured."""
        return None if self.engine is None or self.is_on_engine else self.as_is.median_s - self.engine.step.median_s

    @property
    def is_lossy(self) -> bool:
        """Whether the network loses packets."""
        return max(self.tcp_loss, 0.0 if self.engine is None else self.engine.loss) >= LOSS_LEAST

    @property
    def loss_s(self) -> float | None:
        """The most that other answers to lost packets could win: 0 without losses; None: not measured."""
        if not self.is_lossy:
            return 0.0
        return None if self.transport_s is None else min(self.all_s, max(0.0, self.transport_s))

    @property
    def stragglers_s(self) -> float:
        """Time that the other ranks wait for the computation of the slowest one, which may be another one in each
        step."""
        return self.straggler.slowest_s


def split(as_is: Trial, phases: Trial, on_engine: Trial | None) -> Split:
    """The parts, from the trial of the job as it is, the one with all phases (often the same), and that on commlayer.

    Raises ValueError if a phase has no steps.
    """
    found = timing(as_is.records, "real", statistics.fmean)
    short = timing(phases.records, "short", statistics.fmean) if phases is as_is else None
    left_out = timing(phases.records, "none", max)
    if found is None or left_out is None:
        raise ValueError("the job's communication could not be left out")
    ranks = sorted(phases.records, key=lambda record: record.rank)
    slowest = straggler([[step.seconds for step in phase_steps(rank, "none")] for rank in ranks])
    sent, resent = (sum(record.tcp.get(name, 0) for record in as_is.records) for name in ("sent", "resent"))
    engine = None if on_engine is None else engine_of(on_engine.records)
    return Split(found, short, left_out, slowest, engine, resent / sent if sent else 0.0)


def engine_of(records: Sequence[Record]) -> Engine | None:
    """The communication of a trial on commlayer; None if the engine carried none."""
    step = timing(records, "real", statistics.fmean)
    if step is None or not all(record.uses_engine for record in records):
        return None
    own = [phase_steps(record, "real") for record in records]
    steps = [step for steps_of in own for step in steps_of]
    if not any(step.collectives for step in steps):  # CUDA tensors of a hybrid backend
        return None
    names = ("packets_sent", "packets_lost", "packets_spurious")
    sent, lost, late = (sum(record.counters.get(name, 0) for record in records) for name in names)
    found = [path for record in records for path in record.paths if path["round_trip_us"]]
    trips_s = [max(0, path["round_trip_us"] - path["queue_us"]) / 1e6 for path in found]
    in_flight_s = [[rank.in_flight_s for rank in ranks] for ranks in zip(*own, strict=False)]
    waited_s = statistics.median(statistics.fmean(of_ranks) - min(of_ranks) for of_ranks in in_flight_s)
    late_rank, late_share = _latest(records)
    return Engine(
        step=step,
        transfer_s=statistics.median(map(min, in_flight_s)),
        waited_s=waited_s,
        operations=statistics.fmean(counted.collectives for counted in steps),
        nbytes=statistics.fmean(counted.nbytes for counted in steps),
        loss=(lost - late) / sent if sent else 0.0,
        round_trip_s=statistics.median(trips_s) if trips_s else 0.0,
        late_rank=late_rank,
        late_s=waited_s * late_share * len(records) / max(1, len(records) - 1),
        late_share=late_share,
    )


def _latest(records: Sequence[Record]) -> tuple[int | None, float]:
    """The rank that the others waited for longest, and its share of all waits."""
    waited_s: dict[int, float] = {}
    for record in records:
        for rank, lag_s in record.lags_s.items():
            waited_s[rank] = waited_s.get(rank, 0.0) + lag_s
    if not any(waited_s.values()):
        return None, 0.0
    rank = max(waited_s, key=lambda rank: waited_s[rank])
    return rank, waited_s[rank] / sum(waited_s.values())
