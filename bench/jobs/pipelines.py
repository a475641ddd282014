"""One training job on a pipeline with replicas, on every rank: stages whose computation is a sleep, real collectives.

`bench/overlap_pipeline.py` runs it as `SYSTEMS`: orders of micro-batches, and when gradients are reduced.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleLoopedBFS

import commlayer
from bench.harness import turns
from bench.harness.turns import Log
from commlayer.frontend.pipelines.measure import Recorder, measure
from commlayer.planner.costs import Costs, Layer, Link
from commlayer.scheduler.actions import Action, Mode
from commlayer.scheduler.link import Discipline
from commlayer.scheduler.measure import Timed
from commlayer.scheduler.trace import Span
from commlayer.tools.bench.cpu import CpuTime
from commlayer.tools.emulate.scenario import Scenario

WIDTH = 16
"""Values of an activation: sends between stages take no time to speak of."""
WAIT_S = 0.002
"""A stage that computes later than this after its start has waited for gradients."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A pipeline with its replicas. Each rank is a host with a link of its own."""

    name: str
    ranks: int
    """The ranks of one pipeline, p."""
    replicas: int
    microbatches: int
    """Those of one pipeline in a step, M."""
    chunks: int
    """Stages per rank, v; 1F1B has them as one stage."""
    forward_s: float
    """The time of a chunk and micro-batch; its backward pass takes twice as long."""
    rate_bps: float
    share: float
    """The share of the reductions in the step of serial 1F1B."""

    @property
    def reduction_s(self) -> float:
        """Seconds that the reductions of a step occupy each rank's link."""
        compute_s = (self.microbatches + self.ranks - 1) * 3 * self.chunks * self.forward_s
        return compute_s * self.share / (1 - self.share)

    def values(self, scenario: Scenario) -> int:
        """Parameters of a chunk. An all-reduce sends 2 (d - 1) / d of their bytes."""
        rate, d = scenario.payload_gb_s, self.replicas
        assert rate is not None
        return int(self.reduction_s / self.chunks * rate * 1e9 * d / (2 * (d - 1)) / 4) // d * d


@dataclasses.dataclass(frozen=True)
class System:
    """An order of micro-batches, and when its gradients are reduced."""

    order: str
    """1F1B, interleaved or AIAO."""
    mode: Mode | None
    """The mode in the model (`commlayer.scheduler.Reduction`); None: nothing is reduced."""
    discipline: Discipline = "fifo"
    backend: str = "commlayer"
    tcp_cc: str | None = None
    """Congestion control of gloo's connections."""
    is_fsdp: bool = False
    is_ours: bool = False
    """`commlayer.pipeline.attach`."""
    timed_steps: int = 1
    """A first step of the deferred modes, without gradients in flight, is not timed."""


CONTROL, SERIAL, BUCKETS = "LoopedBFS, nothing reduced", "1F1B, serial", "1F1B, buckets from hooks"
FSDP_INTERLEAVED, FSDP_LOOPED = "Interleaved1F1B, FSDP2", "LoopedBFS, FSDP2"
FIFO_GLOO, FIFO = "LoopedBFS, asynchronous, gloo", "LoopedBFS, asynchronous, one class"
FIFO_CUBIC = "LoopedBFS, asynchronous, gloo on cubic"
UNDEFERRED, DEFERRED, STALE = "attach(defer=False)", "attach", "attach(staleness=1)"

SYSTEMS = {
    CONTROL: System("AIAO", None),
    SERIAL: System("1F1B", "serial"),
    BUCKETS: System("1F1B", "step"),
    FSDP_INTERLEAVED: System("interleaved", "blocking", is_fsdp=True),
    FSDP_LOOPED: System("AIAO", "blocking", is_fsdp=True),
    FIFO_GLOO: System("AIAO", "step", backend="gloo", tcp_cc="bbr"),
    FIFO_CUBIC: System("AIAO", "step", backend="gloo", tcp_cc="cubic"),
    FIFO: System("AIAO", "step"),
    UNDEFERRED: System("AIAO", "step", "class", is_ours=True),
    DEFERRED: System("AIAO", "deferred", "class", is_ours=True, timed_steps=2),
    STALE: System("AIAO", "stale", "class", is_ours=True, timed_steps=2),
}
COSTS = "costs"
"""The job that measures the model's input."""


class Clock:
    """The pace of all chunks of this process, and when each computation began."""

    forward_s: ClassVar[float] = 0.0
    began_s: ClassVar[list[float]] = []
    """The times in ascending order."""


class Computation(torch.autograd.Function):
    """A chunk: time passes, and no core is busy. The gradient of its weights costs one addition per value."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor) -> Tensor:
        Clock.began_s.append(time.monotonic())
        ctx.size = weight.shape
        time.sleep(Clock.forward_s)
        return values * weight[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        time.sleep(2 * Clock.forward_s)
        return gradient.clone(), gradient.mean().expand(ctx.size)


class Chunk(nn.Module):
    def __init__(self, values: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(values))

    def forward(self, values: Tensor) -> Tensor:
        computed: Tensor = Computation.apply(values, self.weight)  # type: ignore[no-untyped-call]
        return computed


class Reducer:
    """The strongest free baseline: asynchronous all-reduces, for which the optimizer waits. One operation a chunk."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.replicas = group, dist.get_world_size(group)
        self.works: list[dist.Work] = []

    def start(self, module: nn.Module, scale: int) -> None:
        for parameter in module.parameters():
            self.start_one(scale, parameter)

    def start_one(self, scale: int, parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.div_(scale * self.replicas)
        work = dist.all_reduce(parameter.grad, group=self.group, async_op=True)
        assert work is not None
        self.works.append(work)

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works.clear()


class Pipeline:
    """The job of one rank."""

    def __init__(self, case: Case, system: System, values: int) -> None:
        self.case, self.system = case, system
        mesh = init_device_mesh("cpu", (case.replicas, case.ranks), mesh_dim_names=("dp", "pp"))
        self.rank, self.group, self.dp_group = mesh.get_local_rank("pp"), mesh.get_group("pp"), mesh.get_group("dp")
        self.finish: Callable[[], None] = lambda: None
        modules = self._modules(values, mesh)
        self.optimizer = torch.optim.SGD(
            [parameter for module in modules.values() for parameter in module.parameters()], lr=1e-3
        )
        total = case.ranks * (1 if system.order == "1F1B" else case.chunks)
        device = torch.device("cpu")
        self.stages = [PipelineStage(module, i, total, device, group=self.group) for i, module in modules.items()]
        self.schedule = self._schedule()
        self.reducer = Reducer(self.dp_group)
        self._attach()
        self.inputs = torch.ones(case.microbatches, WIDTH)

    def _modules(self, values: int, mesh: DeviceMesh) -> dict[int, nn.Module]:
        chunks = [Chunk(values) for _ in range(self.case.chunks)]
        if self.system.order == "1F1B":
            return {self.rank: nn.Sequential(*chunks)}
        if self.system.is_fsdp:
            for chunk in chunks:
                fully_shard(chunk, mesh=mesh["dp"], reshard_after_forward=False)
        return {self.rank + self.case.ranks * k: chunk for k, chunk in enumerate(chunks)}

    def _schedule(self) -> Any:
        if self.system.order == "1F1B":
            return Schedule1F1B(self.stages[0], self.case.microbatches, loss_fn=_loss)
        kind = ScheduleLoopedBFS if self.system.order == "AIAO" else ScheduleInterleaved1F1B
        return kind(list(self.stages), self.case.microbatches, loss_fn=_loss)

    def _attach(self) -> None:
        mode = self.system.mode
        if self.system.is_ours:
            self.finish = commlayer.pipeline.attach(
                self.schedule, self.optimizer, self.dp_group, defer=mode != "step", staleness=int(mode == "stale")
            ).finish
        elif self.system.order == "1F1B" and mode == "step":
            for parameter in self.stages[0].submod.parameters():
                parameter.register_post_accumulate_grad_hook(_Countdown(self.case.microbatches, self.reducer))
            self.stages[0].perform_reduce_grad = lambda _: None  # type: ignore[method-assign, assignment]
        elif mode is not None and not self.system.is_fsdp:
            for stage in self.stages:
                start = functools.partial(self.reducer.start, stage.submod)
                stage.perform_reduce_grad = start  # type: ignore[method-assign]

    def step(self) -> None:
        """One step of training."""
        is_first, is_last = self.rank == 0, self.rank == self.case.ranks - 1
        given = (self.inputs,) if is_first else ()
        target = {"target": self.inputs} if is_last else {}
        self.schedule.step(*given, **target, return_outputs=False)
        self.reducer.wait()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class _Countdown:
    """Starts the reduction of a parameter with its last micro-batch."""

    def __init__(self, microbatches: int, reducer: Reducer) -> None:
        self.microbatches, self.reducer, self.left = microbatches, reducer, microbatches

    def __call__(self, parameter: Tensor) -> None:
        self.left -= 1
        if self.left == 0:
            self.left = self.microbatches
            self.reducer.start_one(self.microbatches, parameter)


def train(job: Log, content: Log) -> Log:
    """The log of one job on this rank: seconds of each step and the CPU's busy share, or measured costs."""
    case, values = Case(**content["case"]), content["values"]
    if job["system"] == COSTS:
        return _costs(case, values)
    system = SYSTEMS[job["system"]]
    pipeline = Pipeline(case, system, values)
    Clock.forward_s = 0.0
    pipeline.step()  # learns shapes and orders
    Clock.forward_s = case.forward_s
    if system.timed_steps > 1:
        pipeline.step()
    recorder = Recorder(pipeline.schedule)
    # No barrier: it would wait behind gradients, which would arrive outside of the timed steps.
    start_cpu, moments = CpuTime.now(), [time.monotonic()]
    for _ in range(system.timed_steps):
        pipeline.step()
        moments.append(time.monotonic())
    cpu = CpuTime.now() - start_cpu
    recorder.remove()
    pipeline.finish()
    dist.barrier()
    step_s = [later - earlier for earlier, later in pairwise(moments)]
    log: Log = {"step_s": step_s, **turns.busy(cpu, moments[-1] - moments[0])}
    if job.get("trace"):
        log["spans"] = _spans([record for record in recorder.records if record.start_s >= moments[-2]])
    return log


def _costs(case: Case, values: int) -> Log:
    """Measures the model's input, with a job that reduces nothing."""
    pipeline = Pipeline(case, SYSTEMS[CONTROL], values)
    Clock.forward_s = case.forward_s
    costs = measure(
        pipeline.schedule, pipeline.step, batches=1, dp_group=pipeline.dp_group, optimizer=pipeline.optimizer
    )
    return {"step_s": [0.0], "busy": 0.0, "of_ranks": 0.0, "costs": dataclasses.asdict(costs)}


def costs_of(table: dict[str, Any]) -> Costs:
    """Inverse of `dataclasses.asdict`."""
    return Costs(tuple(Layer(**layer) for layer in table["layers"]), Link(**table["link"]), action_s=table["action_s"])


def with_waits(records: Sequence[Timed], began_s: Sequence[float]) -> list[Timed]:
    """The records; the time from the start of a forward to the start of its computation is a WAIT of its own."""
    found = []
    for record in records:
        place = bisect_left(began_s, record.start_s)
        if record.action.kind == "F" and place < len(began_s) and began_s[place] - record.start_s > WAIT_S:
            found.append(Timed(Action("WAIT", record.action.stage), record.start_s, began_s[place]))
            found.append(record._replace(start_s=began_s[place]))
        else:
            found.append(record)
    return found


def spans_of(rank: int, records: Iterable[Timed], *, zero_s: float) -> list[Span]:
    """The records as spans of a trace that begins at the moment `zero_s`."""
    return [Span(rank, "compute", str(action), start_s - zero_s, end_s - zero_s) for action, start_s, end_s in records]


def _spans(records: Sequence[Timed]) -> list[Span]:
    """The spans of all ranks, from the first action on."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, with_waits(records, Clock.began_s))
    zero_s = min(timed.start_s for own in everyones for timed in own)
    return [span for rank, own in enumerate(everyones) for span in spans_of(rank, own, zero_s=zero_s)]
