"""One rank's part of a bench run: the backends take turns, every iteration is timed, every round is checked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from .backends import Backend
from .collective import Collective
from .collectives import COLLECTIVES
from .cpu import CpuTime
from .samples import Summary, summarise
from .spec import Spec


@dataclass
class Measurement:
    """What all ranks together found out about one backend at one size. The same on every rank."""

    backend: Backend
    collective: Collective
    rounds: list[list[float]] = field(default_factory=list)
    """Iteration times per round in microseconds, each the slowest rank's."""
    wrong: int = 0
    """Elements that were not exact, over all ranks and checks."""
    began_s: list[list[float]] = field(default_factory=list)
    """When they began on this rank, by the machine's monotonic clock."""
    not_counted: float | None = None
    """Share of all contributions that were not in the results, where they need not be."""
    packets: dict[str, int] = field(default_factory=dict)
    """What the ranks' engines counted, warm-up and check included; empty where the backend does not count."""
    process_cpu_s: float = 0.0
    machine_cpu_s: float = 0.0
    softirq_cpu_s: float = 0.0

    @property
    def summary(self) -> Summary:
        return summarise(self.rounds)

    @property
    def algbw_gb_s(self) -> float:
        return self.collective.size_bytes / self.summary.time_us / 1e3

    @property
    def busbw_gb_s(self) -> float:
        return self.algbw_gb_s * self.collective.bus_factor

    def cpu_s_per_gb(self, cpu_s: float) -> float | None:
        """CPU seconds per GB of array, over all timed iterations; None when no data is moved."""
        moved_gb = self.collective.size_bytes * sum(map(len, self.rounds)) / 1e9
        return cpu_s / moved_gb if moved_gb else None


@dataclass
class _Stretch:
    """Some iterations in a row on this rank."""

    times_us: list[float]
    began_s: list[float]
    wrong: int
    cpu: CpuTime


class Bench:
    """Runs the measurements on this rank. `local_leader`: the one rank per machine that samples its /proc/stat."""

    def __init__(
        self, spec: Spec, backends: Sequence[Backend], control: dist.ProcessGroup, *, local_leader: bool
    ) -> None:
        self.spec = spec
        self.backends = backends
        self.control = control
        self.local_leader = local_leader
        self.rank = dist.get_rank(control)
        self.world = dist.get_world_size(control)

    def run(self, on_size: Callable[[list[Measurement]], None]) -> list[Measurement]:
        """Measures every size; calls `on_size` with one measurement per backend as soon as a size is complete."""
        results: list[Measurement] = []
        for size_bytes in self.spec.sizes if self.spec.collective != "barrier" else self.spec.sizes[:1]:
            measurements = self.measure_size(size_bytes)
            on_size(measurements)
            results += measurements
        return results

    def measure_size(self, size_bytes: int) -> list[Measurement]:
        """Interleaves the backends: A B, B A, A B, ... so that drift and neighbours hit all of them alike."""
        dtype = getattr(torch, self.spec.dtype)
        kind = COLLECTIVES[self.spec.collective]
        one = None if kind.per_backend else kind(size_bytes, dtype, self.spec.op, self.rank, self.world)
        measurements = [
            Measurement(backend, one or kind(size_bytes, dtype, self.spec.op, self.rank, self.world, backend.spec))
            for backend in self.backends
        ]
        for index in range(self.spec.rounds):
            for measurement in measurements if index % 2 == 0 else reversed(measurements):
                self.measure_round(measurement)
        return measurements

    def measure_round(self, measurement: Measurement) -> None:
        """Warm-up, then the timed iterations, in stretches short enough for the result to stay exact."""
        collective, backend = measurement.collective, measurement.backend
        # the first run of the round is checked by itself, then the end of every stretch, so the last run too
        warmups = [1, *self._stretches(self.spec.warmup - 1, collective.chain())]
        times_us: list[float] = []
        began_s: list[float] = []
        wrong = 0
        process_s = machine_s = softirq_s = 0.0
        packets = backend.counters()
        with nullcontext() if backend.beside is None else backend.beside:
            for iterations in warmups:
                wrong += self._stretch(backend, collective, iterations).wrong
            for iterations in self._stretches(self.spec.iters, collective.chain()):
                stretch = self._stretch(backend, collective, iterations)
                times_us += stretch.times_us
                began_s += stretch.began_s
                wrong += stretch.wrong
                process_s += stretch.cpu.process_s
                if self.local_leader:
                    machine_s += stretch.cpu.machine_s
                    softirq_s += stretch.cpu.softirq_s
        wrong += 0 if backend.beside is None else backend.beside.wrong
        packets = {name: count - packets[name] for name, count in backend.counters().items()}
        slowest_us = torch.tensor(times_us, dtype=torch.float64)
        not_counted = collective.not_counted or 0.0
        totals = torch.tensor([wrong, process_s, machine_s, softirq_s, not_counted, *packets.values()]).double()
        dist.all_reduce(slowest_us, dist.ReduceOp.MAX, self.control)
        dist.all_reduce(totals, dist.ReduceOp.SUM, self.control)
        measurement.rounds.append(slowest_us.tolist())
        measurement.began_s.append(began_s)
        measurement.wrong += int(totals[0])
        measurement.process_cpu_s += float(totals[1])
        measurement.machine_cpu_s += float(totals[2])
        measurement.softirq_cpu_s += float(totals[3])
        measurement.not_counted = None if collective.not_counted is None else float(totals[4]) / self.world
        for name, count in zip(packets, totals[5:].tolist(), strict=True):
            measurement.packets[name] = measurement.packets.get(name, 0) + int(count)

    @staticmethod
    def _stretches(iterations: int, longest: int) -> list[int]:
        return [min(longest, iterations - start) for start in range(0, iterations, longest)]

    def _stretch(self, backend: Backend, collective: Collective, iterations: int) -> _Stretch:
        """Only the runs are inside the clock."""
        collective.restore()
        dist.barrier(self.control)
        # ranks leave the control group's barrier one after the other; this brings them closer together, and any
        # skew that is left is the measured backend's own
        dist.all_reduce(torch.zeros(1), group=backend.group)
        times_us, began_s = [0.0] * iterations, [0.0] * iterations
        before = CpuTime.now()
        for index in range(iterations):
            if index and backend.beside is not None:
                backend.beside.top_up()
            start_ns = time.perf_counter_ns()
            collective.run(backend.group)
            times_us[index] = (time.perf_counter_ns() - start_ns) / 1e3
            began_s[index] = start_ns / 1e9
        cpu = CpuTime.now() - before
        return _Stretch(times_us, began_s, collective.wrong(), cpu)
