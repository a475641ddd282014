"""`measure`: the costs of a pipeline on the running job, for the planner and the model.

    costs = commlayer.pipeline.measure(schedule, step, dp_group=dp_group)
    for plan in commlayer.planner.search(costs, ranks=8, microbatches=16, memory_bytes=24 << 30): print(plan)
    costs.simulate(schedule, Reduction("deferred"), replicas=2).trace("out.json")

`Recorder` times the computations of a schedule's stages on this rank; also for a trace of the measured steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ...errors import ConfigError
from ...planner.costs import Costs, Layer, Link
from ...scheduler.actions import Action, Kind
from ...scheduler.measure import Line, Timed, action_seconds, line, stage_times
from .replaced import Replaced

SMALL_BYTES = 4096
LARGEST_BYTES = 64 << 20
"""The most bytes of a transfer that is timed."""
REPEATS = 3


def stages_of(schedule: Any) -> list[Any]:
    """The stages of a schedule of torch.distributed.pipelining on this rank. Raises ConfigError for anything else."""
    stages = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
    if None in stages:
        raise ConfigError(f"{type(schedule).__name__} is no schedule of torch.distributed.pipelining")
    return list(stages)


class Recorder:
    """Times each forward and backward of the schedule's stages on this rank, until `remove`.

    Times are of `time.monotonic()`, as `Work.times()`. With stages on a device, each computation is waited for.
    """

    def __init__(self, schedule: Any) -> None:
        self.records: list[Timed] = []
        self.output_bytes: dict[int, int] = {}
        """The bytes of one micro-batch's output, by stage."""
        self.activation_bytes: dict[int, int] = {}
        """The bytes kept from forward to backward, by stage, as seen in `watch_memory`."""
        self._watches = False
        self._replaced = Replaced()
        for stage in stages_of(schedule):
            backward, weights = stage.backward_one_chunk, stage.backward_weight_one_chunk
            timed = (
                ("forward_one_chunk", self._forward(stage, stage.forward_one_chunk)),
                ("backward_one_chunk", self._timed(stage, backward, _kind_of_backward)),
                ("backward_weight_one_chunk", self._timed(stage, weights, lambda _: "W")),
            )
            for name, method in timed:
                self._replaced.put(stage, name, method)

    def remove(self) -> None:
        """Leaves the stages as they were."""
        self._replaced.restore()

    @contextmanager
    def watch_memory(self) -> Iterator[None]:
        """A context in which the bytes that autograd keeps are counted; times are then too long."""
        self._watches = True
        try:
            yield
        finally:
            self._watches = False
            self.records.clear()

    def _timed(
        self, stage: Any, call: Callable[..., Any], kind: Callable[[dict[str, Any]], Kind]
    ) -> Callable[..., Any]:
        def timed(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            start_s = time.monotonic()
            result = call(microbatch, *args, **kwargs)
            _synchronize(stage.device)
            self.records.append(Timed(Action(kind(kwargs), stage.stage_index, microbatch), start_s, time.monotonic()))
            return result

        return timed

    def _forward(self, stage: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        timed = self._timed(stage, call, lambda _: "F")

        def forward(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            if not self._watches:
                return timed(microbatch, *args, **kwargs)
            kept: dict[tuple[int, int], int] = {}
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: _note(kept, tensor), lambda tensor: tensor):
                output = timed(microbatch, *args, **kwargs)
            own = {parameter.untyped_storage().data_ptr() for parameter in stage.submod.parameters()}
            sizes = (size for (storage, _), size in kept.items() if storage not in own)
            self.activation_bytes[stage.stage_index] = sum(sizes)
            outputs = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
            self.output_bytes[stage.stage_index] = sum(activation.nbytes for activation in outputs)
            return output

        return forward


def _kind_of_backward(kwargs: dict[str, Any]) -> Kind:
    return "B" if kwargs.get("full_backward", True) else "I"


def _note(kept: dict[tuple[int, int], int], tensor: Tensor) -> Tensor:
    """Notes a tensor that autograd keeps, by its memory: a micro-batch may be a view of the batch."""
    place = tensor.untyped_storage().data_ptr(), tensor.data_ptr()
    kept[place] = max(kept.get(place, 0), tensor.nbytes)
    return tensor


def _synchronize(device: Any) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


class _Updates:
    """Seconds of the optimizer's steps."""

    def __init__(self, optimizer: Optimizer | None) -> None:
        self.seconds: list[float] = []
        self._hooks: list[Any] = []
        self._start_s = 0.0
        if optimizer is not None:
            self._hooks = [
                optimizer.register_step_pre_hook(lambda *_: self._begin()),
                optimizer.register_step_post_hook(lambda *_: self.seconds.append(time.monotonic() - self._start_s)),
            ]

    def _begin(self) -> None:
        self._start_s = time.monotonic()

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def measure(
    schedule: Any,
    step: Callable[[], object],
    *,
    batches: int = 3,
    dp_group: dist.ProcessGroup | None = None,
    optimizer: Optimizer | None = None,
) -> Costs:
    """Measures the costs of a pipeline; each stage is a layer of the result. All ranks of the job call it.

    Runs `step` once to count memory, and `batches` times to take times; each call makes one training step, as in the
    loop: inputs, `schedule.step(...)`, `optimizer.step()`. Call it before `attach`: waits for gradients would count as
    computation. Then it times transfers: small messages between neighbours, and all-reduces of `dp_group`.

    All ranks return the same costs: medians over replicas, and the slowest link.

    Args:
        schedule: of torch.distributed.pipelining.
        step: runs one training step on this rank.
        batches: steps of which times are taken.
        dp_group: the ranks that hold the same stages; None: there are no replicas.
        optimizer: its steps are timed.

    Raises ConfigError for a schedule that is none of torch's, and fewer than one batch.
    """
    stages = stages_of(schedule)
    if batches < 1:
        raise ConfigError(f"measure(batches={batches}): use 1 or more")
    recorder, updates = Recorder(schedule), _Updates(optimizer)
    try:
        with recorder.watch_memory():
            step()
        updates.seconds.clear()
        for _ in range(batches):
            step()
    finally:
        recorder.remove()
        updates.remove()
    update_s = statistics.median(updates.seconds) if updates.seconds else 0.0
    own = _layers(stages, recorder, update_s)
    transfers = _transfers(stages, dp_group)
    shared: list[Any] = [(own, action_seconds(recorder.records), transfers)]
    for group in (stages[0].group or dist.group.WORLD, dp_group):
        shared = _everyones(shared, group)
    layers: dict[int, list[Layer]] = {}
    for of_rank, _, _ in shared:
        for stage, layer in of_rank.items():
            layers.setdefault(stage, []).append(layer)
    action_s = statistics.median(seconds for _, seconds, _ in shared)
    medians = [_median(layers[stage]) for stage in sorted(layers)]
    return Costs(medians, _slowest([timed for _, _, timed in shared]), action_s=action_s)


def _layers(stages: Sequence[Any], recorder: Recorder, update_s: float) -> dict[int, Layer]:
    sizes = {stage.stage_index: sum(parameter.nbytes for parameter in stage.submod.parameters()) for stage in stages}
    times, total = stage_times(recorder.records), max(sum(sizes.values()), 1)
    return {
        index: Layer(
            times[index].forward_s,
            times[index].backward_s,
            size,
            recorder.activation_bytes.get(index, 0),
            recorder.output_bytes.get(index, 0),
            update_s * size / total,
        )
        for index, size in sizes.items()
    }


def _median(layers: Sequence[Layer]) -> Layer:
    """The median costs of the replicas of a stage."""
    first = layers[0]
    return Layer(
        statistics.median(layer.forward_s for layer in layers),
        statistics.median(layer.backward_s for layer in layers),
        first.parameter_bytes,
        first.activation_bytes,
        first.output_bytes,
        statistics.median(layer.update_s for layer in layers),
    )


def _slowest(transfers: Sequence[tuple[Line | None, Line | None]]) -> Link:
    """The lowest rate of all ranks' reductions, or messages where nothing is reduced; the median latency."""
    messages = [message for message, _ in transfers if message is not None]
    reductions = [reduction for _, reduction in transfers if reduction is not None]
    slope = max((transfer.seconds_per_byte for transfer in reductions or messages), default=0.0)
    latency_s = (
        statistics.median(transfer.latency_s for transfer in messages or reductions) if messages or reductions else 0.0
    )
    return Link(8 / slope if slope else float("inf"), latency_s)


def _transfers(stages: Sequence[Any], dp_group: dist.ProcessGroup | None) -> tuple[Line | None, Line | None]:
    """Messages between neighbours, one way; and all-reduces between replicas, by the bytes that a rank sends."""
    device = torch.device(stages[0].device)
    most = max(sum(parameter.nbytes for parameter in stage.submod.parameters()) for stage in stages)
    group, messages = stages[0].group or dist.group.WORLD, dict[int, list[float]]()
    if dist.get_world_size(group) > 1:
        for size in (SMALL_BYTES, 16 * SMALL_BYTES):
            messages[size] = _pingpongs(torch.zeros(size, dtype=torch.uint8, device=device), group)
    reductions = dict[int, list[float]]()
    replicas = dist.get_world_size(dp_group) if dp_group is not None else 1
    if replicas > 1:
        large = int(min(max(_largest(most, group), 1 << 16), LARGEST_BYTES)) // 4 * 4
        for size in (large // 16 * 4, large):
            sent = int(2 * (replicas - 1) / replicas * size)
            reductions[sent] = [
                _reduction_s(torch.zeros(size // 4, device=device, dtype=torch.float32), dp_group)
                for _ in range(REPEATS)
            ]
    return (line(messages) if messages else None), (line(reductions) if reductions else None)


def _largest(size: int, group: Any) -> int:
    return max(int(number) for number in _everyones([size], group))


def _pingpongs(message: Tensor, group: Any) -> list[float]:
    """Seconds one way between neighbours (0 and 1, 2 and 3, ...); a last rank without one has no samples."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    other, seconds = rank ^ 1, list[float]()
    dist.barrier(group=group)
    if other >= world:
        return seconds
    peer = dist.get_process_group_ranks(group)[other]
    for _ in range(REPEATS + 1):
        start_s = time.monotonic()
        for sends in (rank < other, rank > other):
            if sends:
                dist.send(message, peer, group=group)
            else:
                dist.recv(message, peer, group=group)
        _synchronize(message.device)
        seconds.append((time.monotonic() - start_s) / 2)
    return seconds[1:]  # the first sets up connections


def _reduction_s(values: Tensor, group: Any) -> float:
    """Seconds of an all-reduce: of the engine, where the work knows them."""
    dist.barrier(group=group)
    start_s = time.monotonic()
    work = dist.all_reduce(values, group=group, async_op=True)
    work.wait()
    _synchronize(values.device)
    end_s = time.monotonic()
    times = work.times() if hasattr(work, "times") else None
    return end_s - start_s if times is None else times.ended_s - times.submitted_s


def _everyones(values: list[Any], group: Any) -> list[Any]:
    """The lists of all ranks of the group, one after the other."""
    if group is None or dist.get_world_size(group) == 1:
        return values
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, values, group=group)
    return [value for of_rank in gathered for value in of_rank]
