"""One rank's part of a bench run. The backends take turns; every iteration is timed and every round is checked."""

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
    """The figures of one backend at one size, of all ranks together. The same on every rank."""

    backend: Backend
    collective: Collective
    rounds: list[list[float]] = field(default_factory=list)
    """Iteration times per round in microseconds, each the slowest rank's."""
    wrong: int = 0
    """Wrong elements, over all ranks and checks."""
    began_s: list[list[float]] = field(default_factory=list)
    """Start of each iteration on this rank, by the machine's monotonic clock."""
    not_counted: float | None = None
    """Share of all contributions missing from the results; None if nothing may be lost."""
    packets: dict[str, int] = field(default_factory=dict)
    """Counters of the ranks' engines, warm-up and check included; empty if the backend has none."""
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
        """CPU seconds per GB of array, over all timed iterations; None if the collective moves no data."""
        moved_gb = self.collective.size_bytes * sum(map(len, self.rounds)) / 1e9
        return cpu_s / moved_gb if moved_gb else None


@dataclass
class _Stretch:
    """Consecutive iterations on this rank."""

    times_us: list[float]
    began_s: list[float]
    wrong: int
    cpu: CpuTime


class Bench:
    """Runs the measurements on this rank. `local_leader`: one rank per machine, which samples /proc/stat."""

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
        """Measures every size. Calls `on_size` with one measurement per backend when a size is complete."""
        results: list[Measurement] = []
        for size_bytes in self.spec.sizes if self.spec.collective != "barrier" else self.spec.sizes[:1]:
            measurements = self.measure_size(size_bytes)
            on_size(measurements)
            results += measurements
        return results

    def measure_size(self, size_bytes: int) -> list[Measurement]:
        """Interleaves the backends (A B, B A, A B, ...), so that drift and other processes affect all of them alike."""
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
        """Runs the warm-up, then the timed iterations, in stretches after which the result is still exact."""
        collective, backend = measurement.collective, measurement.backend
        # checks follow the first run of the round and every stretch, so also the last run
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
        """Runs a stretch. The times include only the runs."""
        collective.restore()
        dist.barrier(self.control)
        # Ranks leave the control group's barrier one after another. This all-reduce brings them closer together; the
        # remaining skew is the measured backend's.
        dist.all_reduce(torch.zeros(1), group=backend.group)
        times_us, began_s = [0.0] * iterations, [0.0] * iterations
        before = CpuTime.now()
        for index in range(iterations):
            if index and backend.beside is not None:
                backend.beside.top_up()
            if self.spec.apart_ms:
                time.sleep(self.spec.apart_ms / 1e3)
            if self.spec.barrier:
                dist.barrier(backend.group)
            start_ns = time.perf_counter_ns()
            collective.run(backend.group)
            times_us[index] = (time.perf_counter_ns() - start_ns) / 1e3
            began_s[index] = start_ns / 1e9
        cpu = CpuTime.now() - before
        return _Stretch(times_us, began_s, collective.wrong(), cpu)
